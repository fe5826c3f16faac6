//! Hops 2 and 3: outbox row → exchange, confirmed → row marked.
//!
//! One relay is active for a database: it holds a session-level advisory lock, on the very
//! connection that it reads and marks with. A relay that lost its session has lost the lock and can
//! no longer mark; a standby takes over. No transaction is open while publishing, so a slow broker
//! holds neither locks nor a snapshot.
//!
//! What a crash does here:
//!
//! | crash | then |
//! |---|---|
//! | before the publish | the row is still due; the next relay sends it |
//! | after the publish, before the mark | the row is still due; it is sent again with the same id, and the receiver's inbox absorbs it |
//! | after the mark | nothing is left to do |
//!
//! Whose fault a failure is decides what it costs. Trouble of the broker as a whole (connection,
//! channel, time-out) counts against no row: the session ends, and its successor sends the rows
//! again. Trouble of one row (returned, nacked, not publishable) counts against that row alone: it
//! backs off and, its budget spent, is parked in the table. Rows of other aggregates pass it by.

mod step;

pub use step::{Progress, Step};

use crate::config::{BrokerArgs, ConfirmArgs, DatabaseArgs, RelayArgs};
use crate::connection::{self, BLOCKED, Connector, wait_unblocked};
use crate::db;
use crate::health::Part;
use crate::metrics::Metrics;
use crate::publisher::Publisher;
use crate::topology::declare_topic;
use sqlx::{Connection as _, PgConnection};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// The advisory lock's key: any number, as long as all relays agree. Locks are per database.
const LOCK_KEY: i64 = 0x6f75_7462_6f78;

/// Rings when a transaction has committed outbox rows. A hint that saves the wait for the next
/// poll, nothing more: the table is the truth.
#[derive(Clone, Default)]
pub struct WakeUp(Arc<Notify>);

impl WakeUp {
    /// To be called after the COMMIT.
    pub fn ring(&self) {
        self.0.notify_one();
    }
}

/// A relay, ready to be run.
pub struct Relay {
    /// Whose outbox.
    pub database: DatabaseArgs,
    /// Where to.
    pub broker: BrokerArgs,
    /// The exchange that this service publishes to, declared by each session.
    pub exchange: &'static str,
    /// Batches, waits, budgets.
    pub args: RelayArgs,
    /// How long a batch waits for its confirms.
    pub confirm: ConfirmArgs,
    /// Rung by whoever commits outbox rows in this process.
    pub wake_up: WakeUp,
    /// This relay's place in `/health/ready`.
    pub part: Part,
    /// Counters.
    pub metrics: Metrics,
}

impl Relay {
    /// Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let broker = Connector::new(self.broker.clone(), "relay");
        // Outlives a session: the search for a row may cost the connection.
        let one_by_one = AtomicBool::new(false);
        let session = || self.session(&broker, &one_by_one, &shutdown);
        connection::supervise(self.part.clone(), shutdown.clone(), session).await;
    }

    /// Standby → active → until something breaks or `shutdown`.
    async fn session(
        &self,
        broker: &Connector,
        one_by_one: &AtomicBool,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let mut db = db::connect_for_one(&self.database, self.args.relay_lease).await?;
        if !self.wait_for_the_lock(&mut db, shutdown).await? {
            return Ok(());
        }
        let broker = broker.connect().await?;
        connection::bounded("declaring the exchange", async {
            declare_topic(&broker.create_channel().await?, self.exchange).await
        })
        .await?;
        let mut step = Step {
            publisher: Publisher::open(&broker, self.confirm.confirm_timeout).await?,
            args: self.args.clone(),
            metrics: self.metrics.clone(),
            one_by_one: one_by_one.load(Ordering::Relaxed),
        };
        info!("relay is active");

        while !shutdown.is_cancelled() {
            anyhow::ensure!(broker.status().connected(), "the broker closed the connection");
            // On a blocked connection there is no opening a channel: the old one finds that out below.
            if step.publisher.is_spent() && !broker.status().blocked() {
                step.publisher = Publisher::open(&broker, self.confirm.confirm_timeout).await?;
            }
            let relayed = step.relay_once(&mut db).await;
            let suspicious =
                relayed.as_ref().err().is_some_and(|trouble| step.suspects_a_row(trouble));
            one_by_one.store(step.one_by_one, Ordering::Relaxed);
            match relayed {
                Ok(Progress { published: 0, .. }) => {}
                Ok(_) => {
                    self.part.ok();
                    continue;
                }
                Err(trouble) if suspicious => {
                    warn!(
                        error = format!("{trouble:#}"),
                        "the broker closed the channel over a message; sending one by one to find it"
                    );
                    step.publisher = Publisher::open(&broker, self.confirm.confirm_timeout).await?;
                    continue;
                }
                Err(_) if broker.status().blocked() => {
                    warn!("publishing is blocked by the broker; rows wait in the outbox");
                    self.part.fail(BLOCKED);
                    tokio::select! {
                        () = shutdown.cancelled() => break,
                        lost = keep_the_lead(&mut db) => return lost,
                        unblocked = wait_unblocked(&broker) => unblocked?,
                    }
                    step.publisher = Publisher::open(&broker, self.confirm.confirm_timeout).await?;
                    continue;
                }
                Err(trouble) => return Err(trouble),
            }
            self.part.ok();
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = self.wake_up.0.notified() => {}
                () = tokio::time::sleep(self.args.relay_poll) => {}
            }
        }
        connection::close(&broker).await;
        // The lock goes with the session; an orderly goodbye frees it at once for a standby.
        db::bounded(db.close()).await
    }

    async fn wait_for_the_lock(
        &self,
        db: &mut PgConnection,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<bool> {
        loop {
            if db::bounded(db::try_lock(db, LOCK_KEY)).await? {
                return Ok(true);
            }
            // A standby is a healthy relay: somebody else does the work.
            self.part.ok();
            tokio::select! {
                () = shutdown.cancelled() => return Ok(false),
                () = tokio::time::sleep(self.args.relay_standby_poll) => {}
            }
        }
    }
}

/// Speaks to the database while there is nothing to say: silence would cost the lead. Ends with the
/// session's failure.
async fn keep_the_lead(db: &mut PgConnection) -> anyhow::Result<()> {
    loop {
        db::bounded(db.ping()).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
