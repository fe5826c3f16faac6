//! The table `parking_audit`: who moved what, when, and how far it came; all of its SQL.
//!
//! The row is there before the first message moves. A crash leaves it without an end, and its count a
//! little behind: it is written every hundred messages or every second, whichever comes first.

use super::plan::Rate;
use super::task::Task;
use crate::pool::Pool;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;
use sqlx::types::Json;
use std::time::{Duration, Instant};

/// The count in the row is at most this many messages behind,
const MESSAGES_BEHIND: i32 = 100;
/// and at most this long.
const TIME_BEHIND: Duration = Duration::from_secs(1);

/// The row of a run that is under way.
pub struct Entry {
    pool: Pool,
    /// The row's id, and the run's.
    pub id: i64,
    /// How many messages have left the parking.
    pub done: i32,
    written: i32,
    written_at: Instant,
}

/// A row, for people.
#[derive(Debug, Serialize)]
pub struct Run {
    /// The run.
    pub id: i64,
    /// `redrive` or `discard`.
    pub action: String,
    /// On whose behalf.
    pub who: String,
    /// Which messages were asked for.
    pub filter: Value,
    /// How many at most.
    pub max: Option<i32>,
    /// How many a second at most.
    pub rate: Option<f64>,
    /// How many messages the filter meant, once that is known.
    pub matched: Option<i32>,
    /// How many have left the parking.
    pub done: i32,
    /// When it began.
    pub started_at: DateTime<Utc>,
    /// When it ended; absent while it runs, and after a crash.
    pub finished_at: Option<DateTime<Utc>>,
    /// `finished`, `interrupted`, or `failed: …`.
    pub outcome: Option<String>,
}

impl Entry {
    /// Writes the row that a run begins with.
    ///
    /// # Errors
    /// Whatever PostgreSQL says. Nothing may be moved then.
    pub async fn begin(pool: &Pool, task: &Task) -> sqlx::Result<Self> {
        let mut db = pool.borrow().await?;
        let id = sqlx::query_scalar!(
            "INSERT INTO parking_audit (action, who, filter, max, rate)
             VALUES ($1, $2, $3, $4, $5) RETURNING id",
            task.action.as_str(),
            task.who,
            Json(&task.filter) as _,
            task.max.map(|max| i32::try_from(max.get()).unwrap_or(i32::MAX)),
            task.rate.map(Rate::per_second)
        )
        .fetch_one(&mut *db)
        .await?;
        db.give_back();
        Ok(Self { pool: pool.clone(), id, done: 0, written: 0, written_at: Instant::now() })
    }

    /// Notes how many messages are meant.
    ///
    /// # Errors
    /// Whatever PostgreSQL says. The run must end then.
    pub async fn matched(&mut self, matched: u32) -> sqlx::Result<()> {
        let matched = i32::try_from(matched).unwrap_or(i32::MAX);
        let mut db = self.pool.borrow().await?;
        sqlx::query!("UPDATE parking_audit SET matched = $2 WHERE id = $1", self.id, matched)
            .execute(&mut *db)
            .await?;
        db.give_back();
        Ok(())
    }

    /// Counts a message that has left, and writes the count down now and then.
    ///
    /// # Errors
    /// Whatever PostgreSQL says. The run must end then.
    pub async fn count(&mut self) -> sqlx::Result<()> {
        self.done = self.done.saturating_add(1);
        let behind = self.done - self.written;
        if behind < MESSAGES_BEHIND && self.written_at.elapsed() < TIME_BEHIND {
            return Ok(());
        }
        let mut db = self.pool.borrow().await?;
        sqlx::query!("UPDATE parking_audit SET done = $2 WHERE id = $1", self.id, self.done)
            .execute(&mut *db)
            .await?;
        db.give_back();
        (self.written, self.written_at) = (self.done, Instant::now());
        Ok(())
    }

    /// Writes the end.
    ///
    /// # Errors
    /// Whatever PostgreSQL says. The row looks like that of a run that crashed then.
    pub async fn finish(self, outcome: &str) -> sqlx::Result<()> {
        let mut db = self.pool.borrow().await?;
        sqlx::query!(
            "UPDATE parking_audit SET done = $2, finished_at = now(), outcome = $3 WHERE id = $1",
            self.id,
            self.done,
            outcome
        )
        .execute(&mut *db)
        .await?;
        db.give_back();
        Ok(())
    }
}

/// One run.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn run(db: &mut PgConnection, id: i64) -> sqlx::Result<Option<Run>> {
    sqlx::query_as!(
        Run,
        "SELECT id, action, who, filter, max, rate, matched, done, started_at, finished_at, outcome
         FROM parking_audit WHERE id = $1",
        id
    )
    .fetch_optional(db)
    .await
}

/// The latest runs, latest first.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn runs(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<Run>> {
    sqlx::query_as!(
        Run,
        "SELECT id, action, who, filter, max, rate, matched, done, started_at, finished_at, outcome
         FROM parking_audit ORDER BY id DESC LIMIT $1",
        limit
    )
    .fetch_all(db)
    .await
}
