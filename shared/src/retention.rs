//! Forgetting: what has been dealt with and is old enough is deleted, so that tables do not grow for
//! ever.
//!
//! | table | a row may go | what goes with it |
//! |---|---|---|
//! | `outbox` | this long after it was published | nothing; people can no longer look at it |
//! | `processed_messages` | this long after its message took effect | the message, come again, is no longer a duplicate. It is stale then: its version has passed |
//! | `idempotency_keys` (orders) | this long after its order was placed | the key, come again, is a new one and makes a new order |
//!
//! What is unpublished or parked is never deleted, however old. The inbox must outlast everything
//! that can come back by itself or by an operator's hand; a configuration in which it does not is
//! refused at start.
//!
//! `stream_versions` is never pruned. It is the memory behind the inbox: with it, a message older
//! than its inbox row (a restored backup, a clock that was wrong) is stale and has no effect.
//! Without it, a genesis event that comes again would begin its stream anew, and any other would
//! wait for a predecessor that never comes. A row is a name and a number, one for each aggregate.
//!
//! Every process runs this, whatever its roles, and one of them prunes at a time: it holds an
//! advisory lock on the connection that deletes. The others find it taken and come again with the
//! next round. Nothing here is in a hurry, and nothing else waits for it: when it fails, that is
//! logged and counted, and the service stays ready.
//!
//! A crash ends the session, and with it the lock; a batch that had not been committed is rolled
//! back, and is the next round's. A process that freezes is silent, and loses its session, and the
//! lock, to the server after 30 s. Two that prune at once would do no harm: both delete the same
//! rows.

use crate::config::{DatabaseArgs, RetentionArgs};
use crate::metrics::Metrics;
use crate::{db, inbox, outbox};
use anyhow::Context;
use futures_util::future::BoxFuture;
use sqlx::{Connection as _, PgConnection};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// The advisory lock's key: any number but the relay's.
const LOCK_KEY: i64 = 0x7265_7465_6e74_696f;
/// A session that is silent for longer is ended by the server. Between two batches there is next to
/// nothing to do.
const LEASE: Duration = Duration::from_secs(30);
/// Rows of one batch, which is one transaction: short locks, and a vacuum that can follow.
const BATCH: u64 = 1000;

/// Deletes up to so many rows that have been dealt with for longer than this, the oldest first, in
/// one statement. Returns how many went.
///
/// The oldest are found along an index and deleted by their place (`ctid`, which holds for the length
/// of a statement). By their keys it would be a join, and some statistics make the planner read the
/// whole table for that.
pub type Prune =
    for<'a> fn(&'a mut PgConnection, Duration, u64) -> BoxFuture<'a, sqlx::Result<u64>>;

/// What is pruned of one table.
pub struct Job {
    /// The table, as logs and metrics call it.
    pub table: &'static str,
    /// How long its rows are kept.
    pub keep: Duration,
    /// How they go.
    pub prune: Prune,
}

/// What became of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// Nothing old is left, or the process is ending.
    Done,
    /// Another process of this service is at it.
    Elsewhere,
    /// The log says why.
    Failed,
}

impl Round {
    /// As it is written in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Elsewhere => "elsewhere",
            Self::Failed => "failed",
        }
    }
}

/// Retention, ready to be run.
pub struct Retention {
    database: DatabaseArgs,
    every: Duration,
    jobs: Vec<Job>,
    metrics: Metrics,
}

impl Retention {
    /// The jobs that both services have, and the service's own.
    #[must_use]
    pub fn new(
        database: DatabaseArgs,
        args: &RetentionArgs,
        own: Vec<Job>,
        metrics: Metrics,
    ) -> Self {
        let mut jobs = vec![
            Job {
                table: "outbox",
                keep: args.outbox_retention,
                prune: |db, keep, limit| Box::pin(outbox::prune(db, keep, limit)),
            },
            Job {
                table: "processed_messages",
                keep: args.inbox_retention,
                prune: |db, keep, limit| Box::pin(inbox::prune(db, keep, limit)),
            },
        ];
        jobs.extend(own);
        Self { database, every: args.retention_interval, jobs, metrics }
    }

    /// Runs until `shutdown`, which it heeds between two batches.
    pub async fn run(self, shutdown: CancellationToken) {
        while !shutdown.is_cancelled() {
            let round = self.round(&shutdown).await.unwrap_or_else(|error| {
                let error = format!("{error:#}");
                warn!(error, "old rows were not pruned; the next round tries again");
                Round::Failed
            });
            self.metrics.retention_round(round);
            shutdown.run_until_cancelled(tokio::time::sleep(self.every)).await;
        }
    }

    /// The step that the loop repeats: each table, if nobody else is at it.
    async fn round(&self, shutdown: &CancellationToken) -> anyhow::Result<Round> {
        let mut db = db::connect_for_one(&self.database, LEASE).await?;
        if !db::bounded(db::try_lock(&mut db, LOCK_KEY)).await? {
            db::bounded(db.close()).await?;
            return Ok(Round::Elsewhere);
        }
        let mut result = Ok(Round::Done);
        for job in &self.jobs {
            // One table's trouble is not to keep the others from being pruned.
            if let Err(error) = self.prune(&mut db, job, shutdown).await {
                result = result.and(Err(error.context(job.table)));
            }
        }
        // The lock goes with the session, however that ends. A goodbye frees it at once; after trouble
        // there may be nobody to say it to.
        if result.is_ok() {
            db::bounded(db.close()).await.context("closing the session")?;
        }
        result
    }

    async fn prune(
        &self,
        db: &mut PgConnection,
        job: &Job,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let mut pruned = 0;
        while !shutdown.is_cancelled() {
            let rows = db::bounded((job.prune)(db, job.keep, BATCH)).await?;
            self.metrics.pruned(job.table, rows);
            pruned += rows;
            if rows < BATCH {
                break;
            }
        }
        if pruned > 0 {
            info!(table = job.table, rows = pruned, "old rows pruned");
        }
        Ok(())
    }
}
