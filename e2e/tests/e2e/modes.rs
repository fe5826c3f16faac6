//! The ways to run a consumer, which all keep the same promises: what keeps the order, and where failed
//! messages wait.

use anyhow::{Result, ensure};
use e2e::servers::Servers;
use e2e::service::{Env, Service};
use e2e::system::{Options, System};
use tokio::sync::OnceCell;

/// Each of these tests, over each of these modes. Where the broker is too old for one, the test shows
/// that this is said.
macro_rules! tests_in {
    ($($mode:ident($ordering:literal, $backend:literal)),+; $tests:tt) => {
        $($crate::modes::tests_in!(@ $mode, $ordering, $backend, $tests);)+
    };
    (@ $mode:ident, $ordering:literal, $backend:literal, { $($name:ident),+ $(,)? }) => {
        mod $mode {
            $(#[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                let mode = $crate::modes::Mode { ordering: $ordering, backend: $backend };
                super::$name(mode).await
            })+
        }
    };
}
pub(crate) use tests_in;

/// One of them.
#[derive(Clone, Copy)]
pub struct Mode {
    /// `--ordering`
    pub ordering: &'static str,
    /// `--retry-backend`
    pub backend: &'static str,
}

impl Mode {
    /// A system that runs so; none, where the broker cannot, and that is said.
    pub async fn start(self, mut options: Options) -> Result<Option<System>> {
        let mut env = vec![("ORDERING", self.ordering), ("RETRY_BACKEND", self.backend)];
        if self.backend == "native" {
            // 0.3, 0.6, 0.9 s and so on, of which the delivery limit allows so many.
            env.push(("RETRY_NOT_YET_DEADLINE", "10s"));
        }
        env.append(&mut options.env);
        if self.backend == "native" && Servers::shared().await?.rabbitmq.version().await? < (4, 3) {
            static REFUSED: OnceCell<()> = OnceCell::const_new();
            REFUSED.get_or_try_init(native_is_refused).await?;
            return Ok(None);
        }
        Ok(Some(System::start(Options { env, ..options }).await?))
    }

    /// Whether a failing message holds up its shard.
    pub fn in_shards(self) -> bool {
        self.ordering != "gate"
    }
}

/// What an older broker makes of it; shown once, as it is the same for every test.
async fn native_is_refused() -> Result<()> {
    let rabbitmq = Servers::shared().await?.rabbitmq;
    rabbitmq.create_vhost("refused").await?;
    let env = Env::from(
        [
            ("AMQP_URL", rabbitmq.amqp_url("refused")),
            ("RABBITMQ_MANAGEMENT_URL", rabbitmq.management_url_with_login()),
            ("RETRY_BACKEND", "native".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    );
    let refused = Service::command("inventory-service", &["topology", "apply"], &env).await?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "it was not refused");
    ensure!(said.contains("native needs RabbitMQ 4.3 or newer"), "{said}");
    rabbitmq.delete_vhost("refused").await
}
