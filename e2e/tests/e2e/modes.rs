//! The ways to run a consumer, which all keep the same promises: what keeps the order, and where failed
//! messages wait.

use anyhow::Result;
use e2e::servers::Servers;
use e2e::service::Service;
use e2e::system::{Options, System};

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
            let system = System::start(Options { stopped: true, ..Options::default() }).await?;
            let mut inventory_env = system.inventory_env.clone();
            inventory_env.extend(env.iter().map(|(name, value)| ((*name).into(), (*value).into())));
            let apply = ["topology", "apply"];
            let refused = Service::command("inventory-service", &apply, &inventory_env).await?;
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success());
            assert!(said.contains("native needs RabbitMQ 4.3 or newer"), "{said}");
            return Ok(None);
        }
        Ok(Some(System::start(Options { env, ..options }).await?))
    }

    /// Whether a failing message holds up its shard.
    pub fn in_shards(self) -> bool {
        self.ordering != "gate"
    }
}
