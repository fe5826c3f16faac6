//! Who owns a message: a database, or the broker with the message in one or more places.

use crate::ledger::books::Side;
use std::fmt;

/// Where the broker keeps a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Ready in a consumer's queue.
    Queue,
    /// With a consumer, not acked.
    Unacked,
    /// In a retry queue: `retry.5s`.
    Retry(String),
    /// In parking.
    Parking,
    /// Rejected, in its queue's dead lettering, which found no taker yet.
    DeadLetters,
}

impl Place {
    /// Which kind of queue it is.
    #[must_use]
    pub fn of_queue(queue: &str) -> Self {
        match queue.split_once(".retry.") {
            Some((_, delay)) => Self::Retry(format!("retry.{delay}")),
            None if queue.ends_with(".parking") => Self::Parking,
            None => Self::Queue,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queue => "queue",
            Self::Unacked => "unacked",
            Self::Retry(queue) => queue,
            Self::Parking => "parking",
            Self::DeadLetters => "dead letters",
        })
    }
}

/// Who owns a message.
#[derive(Clone, Debug, Default)]
pub struct Owner {
    database: Option<Side>,
    copies: Vec<Place>,
}

impl Owner {
    /// A COMMIT has taken it.
    pub fn is_database(&mut self, side: Side) {
        self.database = Some(side);
    }

    /// The broker has taken it from whoever published it.
    pub fn is_at_broker(&mut self, place: Place) {
        self.database = None;
        self.copies.push(place);
    }

    /// There is one more of it.
    pub fn copied(&mut self, place: Place) {
        self.copies.push(place);
    }

    /// A consumer has it in hand. Says which retry queue it came back from, if it did.
    pub fn is_delivered(&mut self, redelivered: bool, retried: bool) -> Option<String> {
        if redelivered && self.leaves(&Place::Unacked) {
            self.copies.push(Place::Unacked);
            return None;
        }
        let retry = |place: &&Place| matches!(place, Place::Retry(_));
        let waited = self.copies.iter().find(retry).filter(|_| retried).cloned();
        self.leaves(waited.as_ref().unwrap_or(&Place::Queue));
        self.copies.push(Place::Unacked);
        waited.map(|place| place.to_string())
    }

    /// What a consumer had in hand is settled. Its effect is not the message's any more.
    pub fn is_acked(&mut self) {
        self.database = None;
        self.leaves(&Place::Unacked);
    }

    /// What a consumer had in hand is left to dead lettering.
    pub fn is_rejected(&mut self) {
        self.leaves(&Place::Unacked);
        self.copies.push(Place::DeadLetters);
    }

    /// The broker has moved it by itself.
    pub fn arrives(&mut self, place: Place) {
        self.leaves(&Place::DeadLetters);
        if !self.copies.contains(&place) {
            self.copies.push(place);
        }
    }

    /// It goes back to its queue.
    pub fn is_redriven(&mut self) {
        self.leaves(&Place::Parking);
        self.copies.push(Place::Queue);
    }

    fn leaves(&mut self, place: &Place) -> bool {
        let found = self.copies.iter().position(|copy| copy == place);
        found.map(|at| self.copies.remove(at)).is_some()
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copies: Vec<String> = self.copies.iter().map(ToString::to_string).collect();
        match self.database {
            Some(side) => write!(f, "{side} DB"),
            None if copies.is_empty() => f.write_str("–"),
            None => write!(f, "broker: {}", copies.join("+")),
        }
    }
}
