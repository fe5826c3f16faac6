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

use crate::config::{BrokerArgs, ConfirmArgs, DatabaseArgs, RelayArgs};
use crate::envelope::Envelope;
use crate::fault::{self, Point};
use crate::health::Part;
use crate::metrics::Metrics;
use crate::outbox::{self, DueRow, RefusedRow};
use crate::publisher::{BrokerTrouble, Outgoing, Publisher, Verdict};
use crate::topology::{declare_topic, short_string};
use crate::trace_context::TraceContext;
use crate::{connection, db};
use anyhow::Context;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use sqlx::{Connection as _, PgConnection};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

/// The advisory lock's key: any number, as long as all relays agree. Locks are per database.
const LOCK_KEY: i64 = 0x6f75_7462_6f78;
/// A statement of the relay that takes longer means that the database is in trouble.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(10);
const PRUNE_EVERY: Duration = Duration::from_secs(60);
const PRUNE_BATCH: i64 = 1000;

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

/// What one step has done.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Rows that the broker has taken and the table knows of.
    pub published: usize,
    /// Rows that the broker refused.
    pub refused: usize,
}

impl Relay {
    /// Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let session = || self.session(&shutdown);
        connection::supervise(self.part.clone(), shutdown.clone(), session).await;
    }

    /// Standby → active → until something breaks or `shutdown`.
    async fn session(&self, shutdown: &CancellationToken) -> anyhow::Result<()> {
        let mut db = db::connect_relay(&self.database).await?;
        if !self.wait_for_the_lock(&mut db, shutdown).await? {
            return Ok(());
        }
        let broker = connection::connect(&self.broker, "relay").await?;
        let channel = broker.create_channel().await?;
        declare_topic(&channel, self.exchange).await?;
        let mut step = Step {
            publisher: Publisher::open(&broker, self.confirm.confirm_timeout).await?,
            args: self.args.clone(),
            metrics: self.metrics.clone(),
            one_by_one: false,
        };
        info!("relay is active");

        let mut last_prune = Instant::now();
        while !shutdown.is_cancelled() {
            anyhow::ensure!(broker.status().connected(), "the broker closed the connection");
            match step.relay_once(&mut db).await {
                Ok(Progress { published: 0, .. }) => {}
                Ok(_) => {
                    self.part.ok();
                    continue;
                }
                Err(trouble) if step.suspects_a_row(&trouble) => {
                    warn!(
                        error = format!("{trouble:#}"),
                        "the broker closed the channel over a message; sending one by one to find it"
                    );
                    step.publisher = Publisher::open(&broker, self.confirm.confirm_timeout).await?;
                    continue;
                }
                Err(trouble) => return Err(trouble),
            }
            self.part.ok();
            if last_prune.elapsed() > PRUNE_EVERY {
                self.prune(&mut db).await?;
                last_prune = Instant::now();
            }
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = self.wake_up.0.notified() => {}
                () = tokio::time::sleep(self.args.relay_poll) => {}
            }
        }
        connection::close(&broker).await;
        // The lock goes with the session; an orderly goodbye frees it at once for a standby.
        within_database_bound(db.close()).await
    }

    async fn wait_for_the_lock(
        &self,
        db: &mut PgConnection,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<bool> {
        loop {
            if within_database_bound(try_lock(db)).await? {
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

    async fn prune(&self, db: &mut PgConnection) -> anyhow::Result<()> {
        let pruned =
            within_database_bound(outbox::prune(db, self.args.outbox_retention, PRUNE_BATCH))
                .await?;
        if pruned > 0 {
            info!(rows = pruned, "pruned published outbox rows");
        }
        Ok(())
    }
}

/// Tries to become the one active relay of this database, for as long as this session lives.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn try_lock(db: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar!(r#"SELECT pg_try_advisory_lock($1) AS "locked!""#, LOCK_KEY)
        .fetch_one(db)
        .await
}

/// The step that the loop repeats: claim, publish, await, mark.
pub struct Step {
    /// Owns the publishing channel.
    pub publisher: Publisher,
    /// Batches, waits, budgets.
    pub args: RelayArgs,
    /// Counters.
    pub metrics: Metrics,
    /// After the broker closed the channel over some message of a batch: send single rows until
    /// the one is found.
    pub one_by_one: bool,
}

impl Step {
    /// Publishes the rows that are due, one batch of them, and marks what became of each.
    ///
    /// # Errors
    /// Trouble of the broker or the database as a whole. Rows that were sent but not marked are
    /// sent again.
    pub async fn relay_once(&mut self, db: &mut PgConnection) -> anyhow::Result<Progress> {
        let limit = if self.one_by_one { 1 } else { i64::from(self.args.relay_batch.get()) };
        let rows = within_database_bound(outbox::due(db, limit)).await?;
        if rows.is_empty() {
            self.one_by_one = false;
            return Ok(Progress::default());
        }
        fault::point(Point::RelayAfterClaim);

        let mut refused = Vec::new();
        let mut batch = Vec::with_capacity(rows.len());
        let mut batched = Vec::with_capacity(rows.len());
        for row in rows {
            match to_message(&row) {
                Ok(message) => {
                    batch.push(message);
                    batched.push(row);
                }
                Err(why) => refused.push(self.refuse(&row, format!("not publishable: {why}"))),
            }
        }

        let began = Instant::now();
        let verdicts = match self.publisher.publish_all(&batch).await {
            Err(trouble) if self.one_by_one && trouble.blames_the_message() => {
                // The batch was this one row, and this row is what the broker will not have.
                if let Some(row) = batched.first() {
                    let refusal = self.refuse(row, format!("the broker refused it: {trouble}"));
                    within_database_bound(outbox::mark_refused(db, &[refusal])).await?;
                }
                return Err(trouble).context("publishing");
            }
            outcome => outcome.context("publishing")?,
        };
        fault::point(Point::RelayBeforeMark);

        let mut published = Vec::with_capacity(batched.len());
        for (row, verdict) in batched.iter().zip(verdicts) {
            match verdict {
                Verdict::Confirmed => published.push(row.seq),
                Verdict::Returned(why) => {
                    refused.push(self.refuse(row, format!("returned as unroutable: {why}")));
                }
                Verdict::Nacked => refused.push(self.refuse(row, "nacked, a queue is full".into())),
            }
        }
        if !published.is_empty() {
            within_database_bound(outbox::mark_published(db, &published)).await?;
            self.metrics.published(published.len(), began.elapsed());
        }
        if !refused.is_empty() {
            within_database_bound(outbox::mark_refused(db, &refused)).await?;
        }
        fault::point(Point::RelayAfterMark);
        Ok(Progress { published: published.len(), refused: refused.len() })
    }

    /// Whether the failure may be one row's doing, so that it is worth looking for it. Switches to
    /// sending one by one, and back once the search has ended.
    pub fn suspects_a_row(&mut self, trouble: &anyhow::Error) -> bool {
        let blamed =
            trouble.downcast_ref::<BrokerTrouble>().is_some_and(BrokerTrouble::blames_the_message);
        let found = self.one_by_one;
        self.one_by_one = blamed && !found;
        blamed
    }

    fn refuse(&self, row: &DueRow, error: String) -> RefusedRow {
        let refusals = u32::try_from(row.attempts).unwrap_or(0).saturating_add(1);
        let retry_in = (refusals < self.args.relay_row_attempts.get())
            .then(|| self.args.row_backoff().jittered(refusals));
        match retry_in {
            Some(wait) => warn!(
                message_id = row.id,
                error,
                refusals,
                retry_in_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                "outbox row refused"
            ),
            None => error!(
                message_id = row.id,
                error, refusals, "outbox row parked: its budget is spent"
            ),
        }
        self.metrics.outbox_refused(retry_in.is_none());
        RefusedRow { seq: row.seq, error, retry_in }
    }
}

/// Builds the AMQP message of a row. Everything in it comes from the envelope, so that body and
/// properties cannot disagree.
fn to_message(row: &DueRow) -> Result<Outgoing, String> {
    let envelope = Envelope::parse(row.payload.as_bytes()).map_err(|error| error.to_string())?;
    envelope.check_message_id(Some(&row.id)).map_err(|error| error.to_string())?;

    let mut headers = FieldTable::default();
    headers.insert(
        "x-schema-version".into(),
        AMQPValue::LongLongInt(i64::from(envelope.schema_version)),
    );
    headers.insert(
        "x-aggregate-id".into(),
        AMQPValue::LongString(envelope.aggregate.id.as_str().into()),
    );
    let trace =
        TraceContext::extract(|name| row.headers.get(name).and_then(|value| value.as_str()));
    for (name, value) in trace.headers() {
        headers.insert(name.into(), AMQPValue::LongString(value.into()));
    }

    let seconds = u64::try_from(envelope.occurred_at.timestamp())
        .map_err(|_| "occurred_at is before 1970".to_owned())?;
    let properties = BasicProperties::default()
        .with_message_id(short_string("id", &row.id)?)
        .with_type(short_string("type", &envelope.event_type)?)
        .with_app_id(short_string("producer", &envelope.producer)?)
        .with_correlation_id(short_string("correlation_id", &envelope.correlation_id)?)
        .with_timestamp(seconds)
        .with_content_type("application/json".into())
        .with_delivery_mode(2) // persistent
        .with_headers(headers);
    Ok(Outgoing {
        message_id: row.id.clone(),
        exchange: short_string("exchange", &row.exchange)?,
        routing_key: short_string("routing_key", &row.routing_key)?,
        properties,
        body: row.payload.as_bytes().to_vec(),
    })
}

async fn within_database_bound<T>(
    statement: impl Future<Output = sqlx::Result<T>>,
) -> anyhow::Result<T> {
    tokio::time::timeout(DATABASE_TIMEOUT, statement)
        .await
        .with_context(|| format!("the database did not answer within {DATABASE_TIMEOUT:?}"))?
        .context("the outbox cannot be read or marked")
}
