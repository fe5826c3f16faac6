//! The relay's step: one batch, from read to mark.

use crate::config::RelayArgs;
use crate::db::bounded;
use crate::envelope::Envelope;
use crate::fault::{self, Point};
use crate::metrics::Metrics;
use crate::outbox::{self, DueRow, RefusedRow};
use crate::publisher::{BrokerTrouble, Outgoing, Publisher, Verdict};
use crate::topology::{AGGREGATE_ID, short_string};
use crate::trace_context::TraceContext;
use anyhow::Context;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use sqlx::PgConnection;
use std::time::Instant;
use tracing::{error, warn};

/// What one step has done.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Rows that the broker has taken and the table knows of.
    pub published: usize,
    /// Rows that the broker refused.
    pub refused: usize,
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
        fault::point(Point::RelayBeforeClaim);
        let rows = bounded(outbox::due(db, limit)).await?;
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
            Err(trouble) if self.one_by_one && trouble.blames_a_message() => {
                // The batch was this one row, and this row is what the broker will not have.
                if let Some(row) = batched.first() {
                    let refusal = self.refuse(row, format!("the broker refused it: {trouble}"));
                    bounded(outbox::mark_refused(db, &[refusal])).await?;
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
                Verdict::Nacked => refused
                    .push(self.refuse(row, "nacked: a queue is full, or without a leader".into())),
            }
        }
        if !published.is_empty() {
            bounded(outbox::mark_published(db, &published)).await?;
            self.metrics.published(published.len(), began.elapsed());
        }
        if !refused.is_empty() {
            bounded(outbox::mark_refused(db, &refused)).await?;
        }
        fault::point(Point::RelayAfterMark);
        Ok(Progress { published: published.len(), refused: refused.len() })
    }

    /// Whether the failure may be one row's doing, so that it is worth looking for it. Switches to
    /// sending one by one, and back once the row is found.
    pub fn suspects_a_row(&mut self, trouble: &anyhow::Error) -> bool {
        let Some(trouble) = trouble.downcast_ref::<BrokerTrouble>() else { return false };
        let suspicious = trouble.blames_a_message();
        if suspicious {
            // One by one, the row that was sent is the one, and is found.
            self.one_by_one = !self.one_by_one;
        }
        suspicious
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
    headers
        .insert(AGGREGATE_ID.into(), AMQPValue::LongString(envelope.aggregate.id.as_str().into()));
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
