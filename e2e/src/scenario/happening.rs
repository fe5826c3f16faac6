//! What can happen to a message, as one of the witnesses saw it.

use crate::ledger::books::Side;
use chrono::{DateTime, Utc};

/// Something that happened.
#[derive(Clone, Debug)]
pub struct Happening {
    /// When.
    pub at: DateTime<Utc>,
    /// The id of the message that it happened to; none, if it happened to all.
    pub message: Option<String>,
    /// What the message says, for people: `created v1`. Not every witness knows.
    pub name: Option<String>,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum What {
    /// The scenario itself did something.
    Direction(String),
    /// An outbox row was committed, with what it tells of.
    Written {
        /// Whose.
        by: Side,
    },
    /// The broker got a message, and routed it to these queues; to none, and it was returned.
    Published {
        /// To this exchange.
        exchange: String,
        /// With this key.
        key: String,
        /// Into these.
        queues: Vec<String>,
        /// The failed attempts that it has behind it.
        attempts: u64,
    },
    /// The outbox row is marked published.
    Marked {
        /// Whose.
        by: Side,
    },
    /// The broker refused an outbox row.
    Refused {
        /// How often by now.
        refusals: u64,
        /// The wait until it is tried again.
        retry_in_ms: u64,
        /// Why.
        error: String,
    },
    /// The broker handed a message to whoever consumes the queue.
    Delivered {
        /// From this one.
        queue: String,
        /// It had done so before, and was not told the end of it.
        redelivered: bool,
        /// The failed attempts that the message has behind it.
        attempts: u64,
    },
    /// The inbox row was committed, with the effect and what follows from it.
    Committed {
        /// By whom.
        by: Side,
    },
    /// A message was settled and acked.
    Handled {
        /// By whom.
        by: Side,
        /// `applied`, `rejected`; `duplicate`, `stale`.
        outcome: String,
    },
    /// A message failed, and its copy waits in a retry queue: that is confirmed.
    Retried {
        /// `transient`, `not_yet`, `unknown`.
        class: String,
        /// How long it is to wait.
        delay: String,
        /// Why.
        error: String,
    },
    /// A message's copy is in parking: that is confirmed.
    Parked {
        /// `permanent`, `attempts-exhausted` and so on.
        reason: String,
        /// Why.
        error: String,
    },
    /// A message is in a queue without any witness to its way: the broker moved it by itself.
    Arrived {
        /// In this one.
        queue: String,
    },
    /// A service's session with a server ended.
    SessionFailed {
        /// Whose.
        by: Side,
        /// `relay`, `consumer`.
        part: String,
        /// The wait until the next.
        retry_in_ms: u64,
        /// Why.
        error: String,
    },
    /// A service was killed without warning.
    Died {
        /// Which.
        by: Side,
    },
    /// A part of a service works again.
    Active {
        /// Whose.
        by: Side,
        /// `relay`, `consumer`.
        part: String,
    },
}

impl Happening {
    /// Something that the scenario does, now.
    #[must_use]
    pub fn direction(text: &str) -> Self {
        Self::now(None, What::Direction(text.to_owned()))
    }

    /// Something that happens now.
    #[must_use]
    pub fn now(message: Option<String>, what: What) -> Self {
        Self { at: Utc::now(), message, name: None, what }
    }
}

/// What people call an event: `created v1`.
#[must_use]
pub fn name(event_type: &str, version: i64) -> String {
    let short = event_type.rsplit('.').next().unwrap_or(event_type);
    format!("{short} v{version}")
}
