//! Hop 5, the first half: may this message take effect?
//!
//! Two questions, asked inside the transaction of the effect itself:
//!
//! - *Was it here before?* The inbox row `(consumer, message id)` is inserted `ON CONFLICT DO
//!   NOTHING`; whether a row came back is the verdict. Nobody looks first and inserts after. A
//!   second delivery that runs at the same time waits on the key for the first one's COMMIT.
//! - *Is it its turn?* The version gate moves an aggregate's version by exactly one, or not at all.
//!
//! A crash before the COMMIT undoes the answers together with the effect; a crash after it leaves
//! both. There is no in between, which is the whole point.

use crate::envelope::{Aggregate, Envelope};
use crate::events::is_genesis;
use sqlx::{Connection, PgConnection};
use std::time::Duration;

/// Whether a message may take effect now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is new and it is its turn. Inbox row and version are written.
    Admitted,
    /// It took effect before.
    Duplicate,
    /// A later version took effect before, or this very one under another message id.
    Stale,
    /// A predecessor is missing; it may still arrive. `last` is the version applied so far.
    Gap {
        /// The last applied version, if the stream has begun.
        last: Option<i64>,
    },
    /// The id was used before, by a message with another content: this one never took effect.
    ReusedId,
}

/// Asks both questions. What is written is part of the caller's transaction, which must roll back
/// on [`Admission::Gap`] and [`Admission::ReusedId`].
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn admit(
    tx: &mut PgConnection,
    consumer: &str,
    envelope: &Envelope,
) -> sqlx::Result<Admission> {
    let aggregate = &envelope.aggregate;
    if !claim(tx, consumer, &envelope.id).await? {
        // A true duplicate's version has been passed. If it has not, then some other message had
        // this id, and acking this one as a duplicate would lose it.
        let last = last_version(tx, consumer, aggregate).await?;
        let passed = last.is_some_and(|last| aggregate.version <= last);
        return Ok(if passed { Admission::Duplicate } else { Admission::ReusedId });
    }
    if advance(tx, consumer, aggregate, is_genesis(&envelope.event_type)).await? {
        return Ok(Admission::Admitted);
    }
    let last = last_version(tx, consumer, aggregate).await?;
    let passed = last.is_some_and(|last| aggregate.version <= last);
    Ok(if passed { Admission::Stale } else { Admission::Gap { last } })
}

/// Whether the database takes an inbox row, which is what every message needs first: a standby, or a
/// full disk, answers a question and refuses this. Nothing is left of it.
///
/// # Errors
/// Why it does not.
pub async fn probe(db: &mut PgConnection, consumer: &str) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    claim(&mut tx, consumer, "probe").await?;
    tx.rollback().await
}

/// Takes the message for this consumer. `false`: it was taken before.
async fn claim(tx: &mut PgConnection, consumer: &str, message_id: &str) -> sqlx::Result<bool> {
    let row = sqlx::query!(
        "INSERT INTO processed_messages (consumer_name, message_id) VALUES ($1, $2)
         ON CONFLICT DO NOTHING",
        consumer,
        message_id
    )
    .execute(tx)
    .await?;
    Ok(row.rows_affected() == 1)
}

/// Moves the aggregate's version from `version - 1` to `version`; a genesis event may also begin the
/// stream, at any version. `false`: neither was possible.
async fn advance(
    tx: &mut PgConnection,
    consumer: &str,
    aggregate: &Aggregate,
    genesis: bool,
) -> sqlx::Result<bool> {
    let moved = if genesis {
        sqlx::query!(
            "INSERT INTO stream_versions AS stream
                 (consumer_name, aggregate_type, aggregate_id, version)
             VALUES ($1, $2, $3, $4)
             ON CONFLICT (consumer_name, aggregate_type, aggregate_id)
             DO UPDATE SET version = excluded.version WHERE stream.version = excluded.version - 1",
            consumer,
            aggregate.kind,
            aggregate.id,
            aggregate.version
        )
        .execute(tx)
        .await?
    } else {
        sqlx::query!(
            "UPDATE stream_versions SET version = $4
             WHERE consumer_name = $1 AND aggregate_type = $2 AND aggregate_id = $3
               AND version + 1 = $4",
            consumer,
            aggregate.kind,
            aggregate.id,
            aggregate.version
        )
        .execute(tx)
        .await?
    };
    Ok(moved.rows_affected() == 1)
}

async fn last_version(
    tx: &mut PgConnection,
    consumer: &str,
    aggregate: &Aggregate,
) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar!(
        "SELECT version FROM stream_versions
         WHERE consumer_name = $1 AND aggregate_type = $2 AND aggregate_id = $3",
        consumer,
        aggregate.kind,
        aggregate.id
    )
    .fetch_optional(tx)
    .await
}

/// Forgets up to `limit` messages that took effect longer than `keep` ago, oldest first. Returns how
/// many. The gate still knows their versions: one that comes again is stale.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn prune(db: &mut PgConnection, keep: Duration, limit: u64) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "DELETE FROM processed_messages WHERE ctid = ANY (ARRAY(
             SELECT ctid FROM processed_messages
             WHERE processed_at < now() - make_interval(secs => $1)
             ORDER BY processed_at LIMIT $2))",
        keep.as_secs_f64(),
        i64::try_from(limit).unwrap_or(i64::MAX)
    )
    .execute(db)
    .await?;
    Ok(done.rows_affected())
}
