//! Hop 1 and its bookkeeping: the outbox table, all of its SQL.
//!
//! [`append`] runs inside the transaction of the business change. Before the COMMIT there is neither
//! a change nor a message; after it there are both, and this database owns the message until the
//! broker has confirmed it ([`crate::relay`]).
//!
//! A crash between publish and [`mark_published`] leaves the row as it was: it is published again
//! with the same id, and the receiver's inbox absorbs it.

use crate::envelope::{Envelope, MAX_ID_BYTES};
use crate::trace_context::TraceContext;
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::PgConnection;
use sqlx::types::Json;
use std::time::Duration;

/// A row that is due to be published.
#[derive(Debug)]
pub struct DueRow {
    /// Identity of the row.
    pub seq: i64,
    /// Event id, to be AMQP's `message_id`.
    pub id: String,
    /// Where to publish.
    pub exchange: String,
    /// With which key.
    pub routing_key: String,
    /// The body, byte for byte.
    pub payload: String,
    /// Trace context as an object of strings; whatever else it is, it holds nothing back.
    pub headers: serde_json::Value,
    /// How often the broker refused this row.
    pub attempts: i32,
}

/// A row the broker would not take, and what becomes of it.
#[derive(Debug)]
pub struct RefusedRow {
    /// Identity of the row.
    pub seq: i64,
    /// Why, in a few words.
    pub error: String,
    /// Wait this long and try again, or give up (`None`) and park the row.
    pub retry_in: Option<Duration>,
}

/// What a parked or waiting row looks like to the operator.
#[derive(Debug, Serialize)]
pub struct RowSummary {
    /// Event id.
    pub id: String,
    /// Event type.
    pub event_type: String,
    /// Whose fact: the kind of thing.
    pub aggregate_type: String,
    /// Whose fact: its id.
    pub aggregate_id: String,
    /// The how-many-eth.
    pub aggregate_version: i64,
    /// When it was written.
    pub created_at: DateTime<Utc>,
    /// How often it was refused.
    pub attempts: i32,
    /// Not before then.
    pub next_attempt_at: DateTime<Utc>,
    /// The last refusal.
    pub last_error: Option<String>,
    /// When its budget ran out.
    pub parked_at: Option<DateTime<Utc>>,
}

/// Writes an event into the transaction that makes it true.
///
/// # Errors
/// Whatever PostgreSQL says: a second event for one version of an aggregate is a unique violation.
/// An id that was written before is an error too: the inbox and the business keys have kept the
/// echo of a message from coming this far, so it is not one.
pub async fn append<D: Serialize>(
    tx: &mut PgConnection,
    exchange: &str,
    envelope: &Envelope<D>,
    trace: &TraceContext,
) -> sqlx::Result<()> {
    if envelope.id.len() > MAX_ID_BYTES {
        let text = format!("the event id {:?} is longer than {MAX_ID_BYTES} bytes", envelope.id);
        return Err(sqlx::Error::InvalidArgument(text));
    }
    let payload =
        serde_json::to_string(envelope).map_err(|error| sqlx::Error::Encode(error.into()))?;
    let done = sqlx::query!(
        "INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type,
                             exchange, routing_key, payload, headers)
         VALUES ($1, $2, $3, $4, $5, $6, $5, $7::text::json, $8)
         ON CONFLICT (id) DO NOTHING",
        envelope.id,
        envelope.aggregate.kind,
        envelope.aggregate.id,
        envelope.aggregate.version,
        envelope.event_type,
        exchange,
        payload,
        Json(trace) as _,
    )
    .execute(tx)
    .await?;
    if done.rows_affected() == 0 {
        let text = format!("an event with the id {:?} was written before", envelope.id);
        return Err(sqlx::Error::InvalidArgument(text));
    }
    Ok(())
}

/// The next rows to publish, oldest first, at most one of an aggregate.
///
/// Every unpublished row is looked at each time, never those "past a cursor": a lower `seq` can
/// commit after a higher one. Only the oldest unpublished event of an aggregate is due, a parked one
/// included, so events of one aggregate leave in order and a stuck one holds back its own alone.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn due(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<DueRow>> {
    sqlx::query_as!(
        DueRow,
        r#"SELECT seq, id, exchange, routing_key, payload::text AS "payload!", headers, attempts
           FROM outbox AS this
           WHERE published_at IS NULL AND parked_at IS NULL AND next_attempt_at <= now()
             AND NOT EXISTS (
                 SELECT FROM outbox AS older
                 WHERE older.published_at IS NULL
                   AND older.aggregate_type = this.aggregate_type
                   AND older.aggregate_id = this.aggregate_id
                   AND older.aggregate_version < this.aggregate_version
                 -- Keeps the planner from turning this into a join. Its statistics say that next
                 -- to nothing is unpublished, true until an outage, and then a join over the
                 -- backlog takes longer than the statement may.
                 OFFSET 0)
           ORDER BY seq
           LIMIT $1"#,
        limit
    )
    .fetch_all(db)
    .await
}

/// Marks rows that the broker has taken.
///
/// # Errors
/// Whatever PostgreSQL says. Nothing is lost then: the rows go out again.
pub async fn mark_published(db: &mut PgConnection, seqs: &[i64]) -> sqlx::Result<()> {
    sqlx::query!(
        "UPDATE outbox SET published_at = now(), last_error = NULL WHERE seq = ANY($1)",
        seqs
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Counts a refusal against each of these rows, and either backs it off or parks it.
///
/// # Errors
/// Whatever PostgreSQL says. The refusal goes uncounted then.
pub async fn mark_refused(db: &mut PgConnection, rows: &[RefusedRow]) -> sqlx::Result<()> {
    let seqs: Vec<i64> = rows.iter().map(|row| row.seq).collect();
    let errors: Vec<String> = rows.iter().map(|row| row.error.clone()).collect();
    let waits: Vec<Option<f64>> =
        rows.iter().map(|row| row.retry_in.map(|wait| wait.as_secs_f64())).collect();
    sqlx::query!(
        "UPDATE outbox
         SET attempts = attempts + 1,
             last_error = refused.error,
             next_attempt_at = now() + make_interval(secs => coalesce(refused.wait, 0)),
             parked_at = CASE WHEN refused.wait IS NULL THEN now() END
         FROM unnest($1::bigint[], $2::text[], $3::float8[]) AS refused (seq, error, wait)
         WHERE outbox.seq = refused.seq",
        &seqs,
        &errors,
        &waits as &[Option<f64>],
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Rows that are not published, oldest first: all of them, or the parked ones only.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn list(
    db: &mut PgConnection,
    only_parked: bool,
    limit: i64,
) -> sqlx::Result<Vec<RowSummary>> {
    sqlx::query_as!(
        RowSummary,
        "SELECT id, event_type, aggregate_type, aggregate_id, aggregate_version, created_at,
                attempts, next_attempt_at, last_error, parked_at
         FROM outbox
         WHERE published_at IS NULL AND (parked_at IS NOT NULL OR NOT $1)
         ORDER BY seq LIMIT $2",
        only_parked,
        limit
    )
    .fetch_all(db)
    .await
}

/// Gives parked rows (one by its id, or all) a new budget. Returns how many.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn retry_parked(db: &mut PgConnection, id: Option<&str>) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "UPDATE outbox SET parked_at = NULL, attempts = 0, next_attempt_at = now()
         WHERE parked_at IS NOT NULL AND ($1::text IS NULL OR id = $1)",
        id
    )
    .execute(db)
    .await?;
    Ok(done.rows_affected())
}

/// Age in seconds of the oldest row that waits to be published, if one does. Parked rows wait for an
/// operator and do not count.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn oldest_waiting_seconds(db: &mut PgConnection) -> sqlx::Result<Option<f64>> {
    sqlx::query_scalar!(
        r#"SELECT extract(epoch FROM now() - created_at)::float8 AS "seconds!" FROM outbox
           WHERE published_at IS NULL AND parked_at IS NULL ORDER BY seq LIMIT 1"#
    )
    .fetch_optional(db)
    .await
}

/// Deletes up to `limit` rows that were published longer than `keep` ago, oldest first. Returns how
/// many went. One that is not published stays, however old.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn prune(db: &mut PgConnection, keep: Duration, limit: u64) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "DELETE FROM outbox WHERE ctid = ANY (ARRAY(
             SELECT ctid FROM outbox
             WHERE published_at < now() - make_interval(secs => $1)
             ORDER BY published_at LIMIT $2))",
        keep.as_secs_f64(),
        i64::try_from(limit).unwrap_or(i64::MAX)
    )
    .execute(db)
    .await?;
    Ok(done.rows_affected())
}
