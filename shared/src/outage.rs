//! Outage mode: while the database is away, messages are left alone.
//!
//! One message that fails because the database is away walks the retry delays like any other: a
//! short outage is over before it has used up its attempts. But in an outage that lasts, every
//! message of the backlog would fail, wait, fail again and be parked, although nothing is wrong with
//! any of them. So after a few such failures in a row the service stops taking messages and asks
//! the database itself, from time to time, whether it is back. The backlog waits in the queue, where
//! waiting costs no attempts.
//!
//! ```text
//!             `after` failures in a row               the probe succeeds
//!   consuming ────────────────────────► outage ──────────────────────────► on trial
//!       ▲                                  ▲                                  │
//!       │                                  └──────── the next one fails ──────┤
//!       └──────────────────────────────────────────── the next one succeeds ──┘
//! ```
//!
//! On trial, one more failure is enough: a database that answers a probe and still fails messages
//! costs one message one attempt after each wait, and the waits grow.
//!
//! A crash forgets the mode, and loses nothing: what was prefetched is delivered again, and the next
//! process finds the outage out by itself or, at its start, waits for the database to migrate it.

use std::sync::{Mutex, PoisonError};

/// Where the database stands, as its failures tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Consuming, with this many failures in a row.
    Consuming(u32),
    /// Not consuming.
    Out,
    /// Consuming again, after a probe succeeded and before a message has.
    OnTrial,
}

/// What was heard of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    /// A transaction got an answer, be it a refusal.
    Answer,
    /// The database was away.
    Nothing,
    /// The probe succeeded.
    Probe,
}

fn next(standing: Standing, heard: Heard, after: u32) -> Standing {
    match (standing, heard) {
        // Of a message that was in hand when the mode began.
        (Standing::Out, Heard::Answer | Heard::Nothing) | (Standing::OnTrial, Heard::Nothing) => {
            Standing::Out
        }
        (Standing::Out | Standing::OnTrial, Heard::Probe) => Standing::OnTrial,
        (Standing::Consuming(failures), Heard::Nothing) if failures + 1 >= after => Standing::Out,
        (Standing::Consuming(failures), Heard::Nothing) => Standing::Consuming(failures + 1),
        (Standing::Consuming(_), Heard::Probe) | (_, Heard::Answer) => Standing::Consuming(0),
    }
}

/// The state of one consumer, shared by its workers; it outlives their sessions.
pub struct Outage {
    after: u32,
    state: Mutex<State>,
}

struct State {
    standing: Standing,
    /// Outages since a message was last handled: a trial that fails begins another.
    in_a_row: u32,
}

impl Outage {
    /// Begins after this many failures in a row, at least 1.
    #[must_use]
    pub fn new(after: u32) -> Self {
        Self { after, state: Mutex::new(State { standing: Standing::Consuming(0), in_a_row: 0 }) }
    }

    /// A message was handled, or not, and not because the database is away.
    pub fn answered(&self) {
        self.hear(Heard::Answer);
    }

    /// A message failed because the database is away.
    pub fn failed(&self) {
        self.hear(Heard::Nothing);
    }

    /// The database answered a probe.
    pub fn probed(&self) {
        self.hear(Heard::Probe);
    }

    /// Whether messages are to be left alone.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.lock().standing == Standing::Out
    }

    /// Whether the database has answered a probe, and no message yet.
    #[must_use]
    pub fn on_trial(&self) -> bool {
        self.lock().standing == Standing::OnTrial
    }

    /// Outages since a message was last handled, the present one included: the longer the row, the
    /// longer the wait before the next probe.
    #[must_use]
    pub fn in_a_row(&self) -> u32 {
        self.lock().in_a_row
    }

    fn hear(&self, heard: Heard) {
        let mut state = self.lock();
        let before = state.standing;
        state.standing = next(before, heard, self.after);
        match state.standing {
            Standing::Out if before != Standing::Out => state.in_a_row += 1,
            Standing::Consuming(0) => state.in_a_row = 0,
            _ => {}
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn failures_in_a_row_begin_an_outage_and_a_success_in_between_does_not() {
        let outage = Outage::new(3);
        for _ in 0..5 {
            outage.failed();
            outage.failed();
            outage.answered();
        }
        assert!(!outage.is_on());
        for _ in 0..3 {
            assert!(!outage.is_on());
            outage.failed();
        }
        assert!(outage.is_on());
    }

    #[test]
    fn only_a_probe_ends_an_outage_and_the_first_failure_after_it_begins_the_next() {
        let outage = Outage::new(3);
        (0..3).for_each(|_| outage.failed());
        // The last of what was in hand.
        outage.answered();
        assert!(outage.is_on());
        outage.probed();
        assert!(!outage.is_on());
        outage.failed();
        assert!(outage.is_on());
        assert_eq!(outage.in_a_row(), 2);
        outage.probed();
        outage.answered();
        assert_eq!(outage.in_a_row(), 0);
        outage.failed();
        assert!(!outage.is_on(), "it has all its failures again");
    }

    fn heard() -> impl Strategy<Value = Heard> {
        prop_oneof![Just(Heard::Answer), Just(Heard::Nothing), Just(Heard::Probe)]
    }

    proptest! {
        #[test]
        fn as_many_failures_in_a_row_end_in_an_outage_whatever_came_before(
            before in prop::collection::vec(heard(), 0..50), after in 1u32..10
        ) {
            let mut standing = Standing::Consuming(0);
            for heard in before {
                standing = next(standing, heard, after);
            }
            for _ in 0..after {
                standing = next(standing, Heard::Nothing, after);
            }
            prop_assert_eq!(standing, Standing::Out);
        }

        #[test]
        fn without_failures_there_is_no_outage(
            events in prop::collection::vec(
                prop_oneof![Just(Heard::Answer), Just(Heard::Probe)], 0..50)
        ) {
            let end = events.into_iter()
                .fold(Standing::Consuming(0), |standing, heard| next(standing, heard, 1));
            prop_assert_eq!(end, Standing::Consuming(0));
        }
    }
}
