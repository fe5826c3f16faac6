//! The outbox, and what `shared::outbox` says of it in SQL, stated once more. [`crate::reality`]
//! holds [`due`] against the original.

use chrono::{DateTime, Utc};

/// A row.
#[derive(Clone, Debug)]
pub struct Row {
    pub seq: i64,
    pub id: String,
    pub exchange: String,
    pub event_type: String,
    pub aggregate: (String, String),
    pub version: i64,
    pub payload: String,
    pub attempts: u32,
    pub next_attempt_at: DateTime<Utc>,
    pub published: bool,
    pub parked: bool,
}

/// The rows to publish next, oldest first: of each aggregate its oldest unpublished one, unless that
/// is parked or backs off.
pub fn due(rows: &[Row], now: DateTime<Utc>, limit: usize) -> Vec<&Row> {
    let is_due = |row: &&Row| {
        let older = |other: &Row| {
            !other.published && other.aggregate == row.aggregate && other.version < row.version
        };
        !row.published && !row.parked && row.next_attempt_at <= now && !rows.iter().any(older)
    };
    let mut due: Vec<&Row> = rows.iter().filter(is_due).collect();
    due.sort_by_key(|row| row.seq);
    due.truncate(limit);
    due
}
