//! The decision: Ack, Retry or Park. One pure function, [`decide`]; effects are in
//! [`crate::consumer`].
//!
//! Every retry has a delay, a limit and a final place. With retry queues the delays form a ladder; a
//! message climbs one rung an attempt and stays on the top one. Jitter moves a share of the messages
//! to a neighbouring rung: a random TTL for each message would make short ones wait behind long ones
//! in the same queue. Where the broker itself delays (`--retry-backend native`) the wait grows by the
//! first delay with each attempt, up to the last one, and there is no jitter.

use crate::config::{BudgetArgs, Delay, RetryBackend};
use crate::failure::Class;
use std::time::Duration;

/// What a handler achieved. All of these are acked, after the COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The effect is in the database.
    Applied,
    /// It was there before.
    Duplicate,
    /// The world has moved on; no effect.
    Stale,
    /// A business "no", which is an answer like any other.
    Rejected,
}

impl Outcome {
    /// As it is written in logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Duplicate => "duplicate",
            Self::Stale => "stale",
            Self::Rejected => "rejected",
        }
    }
}

/// What to do with a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Its effect is safe: ack.
    Ack,
    /// Try again after this delay. What waits is a copy in a retry queue, the message itself at the
    /// broker, or, in a shard, this consumer: see [`crate::consumer`].
    Retry(Delay),
    /// Publish a copy to the parking queue, then ack.
    Park(ParkReason),
}

/// Why a message waits for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParkReason {
    /// No retry could help.
    Permanent,
    /// Its attempts are used up.
    AttemptsExhausted,
    /// What it waits for did not come in time.
    GapDeadline,
    /// It is older than a failing message may get.
    TooOld,
    /// The deadline that its producer gave it has passed.
    ProducerDeadline,
}

impl ParkReason {
    /// As it is written in `x-park-reason`, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Permanent => "permanent",
            Self::AttemptsExhausted => "attempts-exhausted",
            Self::GapDeadline => "gap-deadline",
            Self::TooOld => "too-old",
            Self::ProducerDeadline => "producer-deadline",
        }
    }
}

/// What is known about a failing message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// Failures in a row of the class at hand, this one included; at least 1. A message that had to
    /// wait for its predecessor has all its attempts left for the database.
    pub attempts: u32,
    /// Time since it occurred, or since it first failed if that is longer ago.
    pub age: Duration,
    /// Whether the deadline that its producer gave it has passed.
    pub past_producer_deadline: bool,
}

/// Limits and delays.
#[derive(Clone)]
pub struct Budget {
    /// The limits.
    pub limits: BudgetArgs,
    /// The delays, shortest first.
    pub delays: Vec<Delay>,
    /// What they mean.
    pub backend: RetryBackend,
}

impl Budget {
    /// Retries after which a message has waited for each of the delays once, or, where the broker
    /// delays, for as long as all of them together.
    fn once_through(&self) -> u32 {
        match self.backend {
            RetryBackend::Buckets => u32::try_from(self.delays.len()).unwrap_or(u32::MAX),
            RetryBackend::Native => {
                self.retries_to_wait(self.delays.iter().map(|delay| delay.duration()).sum())
            }
        }
    }

    /// The delay after this many attempts, jitter aside.
    #[must_use]
    pub fn steady_delay(&self, attempts: u32) -> Duration {
        self.delay(attempts, 1.0).map(Delay::duration).unwrap_or_default()
    }

    /// Retries after which a message has waited this long.
    fn retries_to_wait(&self, total: Duration) -> u32 {
        const NO_END: u32 = 100_000;
        let mut waited = Duration::ZERO;
        (1..NO_END)
            .find(|attempts| {
                waited += self.steady_delay(*attempts);
                waited >= total
            })
            .unwrap_or(NO_END)
    }

    /// The most retries that a message can use up, of whatever class it fails. Where each retry is a
    /// redelivery, the queue's delivery limit must leave room for them.
    #[must_use]
    pub fn most_retries(&self) -> u32 {
        let limits = &self.limits;
        let attempts = limits.retry_attempts_transient.max(limits.retry_attempts_unknown).get();
        let until_the_deadline = self.retries_to_wait(limits.retry_not_yet_deadline);
        until_the_deadline.max(self.once_through()).max(attempts)
    }

    /// The delay after this many attempts. With retry queues, for the configured share of messages, a
    /// neighbour of it. `None`: there are no delays, and a retry without one is not to be had.
    fn delay(&self, attempts: u32, luck: f64) -> Option<Delay> {
        match self.backend {
            RetryBackend::Buckets => self.rung(attempts, luck),
            RetryBackend::Native => {
                let (first, last) = (self.delays.first()?, self.delays.last()?);
                Some(first.grown(attempts, *last))
            }
        }
    }

    fn rung(&self, attempts: u32, luck: f64) -> Option<Delay> {
        let top = self.delays.len().checked_sub(1)?;
        let rung = usize::try_from(attempts.saturating_sub(1)).unwrap_or(usize::MAX).min(top);
        let share = self.limits.retry_jitter_share;
        let rung = if luck >= share {
            rung
        } else if luck < share / 2.0 {
            rung.saturating_sub(1)
        } else {
            (rung + 1).min(top)
        };
        self.delays.get(rung).copied()
    }
}

/// Chooses. `luck` in 0..1 is the message's lot in the jitter; it is drawn by the caller, so that
/// the choice itself is a function.
#[must_use]
pub fn decide(
    result: Result<Outcome, Class>,
    facts: Facts,
    budget: &Budget,
    luck: f64,
) -> Disposition {
    let Err(class) = result else { return Disposition::Ack };
    let limits = &budget.limits;
    let exhausted = match class {
        Class::Permanent => Some(ParkReason::Permanent),
        Class::Transient if facts.attempts >= limits.retry_attempts_transient.get() => {
            Some(ParkReason::AttemptsExhausted)
        }
        Class::Unknown if facts.attempts >= limits.retry_attempts_unknown.get() => {
            Some(ParkReason::AttemptsExhausted)
        }
        // Not before it has waited for each delay once: after an outage everything is old, and what
        // it waits for may be right behind it.
        Class::NotYet
            if facts.age >= limits.retry_not_yet_deadline
                && facts.attempts > budget.once_through() =>
        {
            Some(ParkReason::GapDeadline)
        }
        _ if facts.past_producer_deadline => Some(ParkReason::ProducerDeadline),
        // The deadline above comes first, and has its own say about age.
        Class::NotYet => None,
        _ if facts.age >= limits.retry_max_age => Some(ParkReason::TooOld),
        _ => None,
    };
    match (exhausted, budget.delay(facts.attempts, luck)) {
        (Some(reason), _) => Disposition::Park(reason),
        (None, Some(delay)) => Disposition::Retry(delay),
        // No ladder, no delay: and a retry without one is not to be had.
        (None, None) => Disposition::Park(ParkReason::AttemptsExhausted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::num::NonZeroU32;

    fn budget(jitter: f64) -> Budget {
        let attempts = |n| NonZeroU32::new(n).expect("not zero");
        Budget {
            limits: BudgetArgs {
                retry_attempts_transient: attempts(4),
                retry_attempts_unknown: attempts(2),
                retry_not_yet_deadline: Duration::from_secs(900),
                retry_max_age: Duration::from_secs(86_400),
                retry_jitter_share: jitter,
            },
            delays: ["5s", "30s", "5m"].map(|text| text.parse().expect("a delay")).to_vec(),
            backend: RetryBackend::Buckets,
        }
    }

    fn native() -> Budget {
        Budget { backend: RetryBackend::Native, ..budget(1.0) }
    }

    fn young(attempts: u32) -> Facts {
        Facts { attempts, age: Duration::ZERO, past_producer_deadline: false }
    }

    fn shown(disposition: Disposition) -> String {
        match disposition {
            Disposition::Ack => "ack".into(),
            Disposition::Retry(delay) => delay.to_string(),
            Disposition::Park(reason) => reason.as_str().into(),
        }
    }

    #[test]
    fn a_transient_failure_climbs_the_ladder_and_is_parked_at_its_end() {
        let path: Vec<String> = (1..=4)
            .map(|n| shown(decide(Err(Class::Transient), young(n), &budget(0.0), 0.5)))
            .collect();
        assert_eq!(path, ["5s", "30s", "5m", "attempts-exhausted"]);
    }

    #[test]
    fn where_the_broker_delays_the_wait_grows_by_the_first_delay_up_to_the_last() {
        let path: Vec<String> = [1, 2, 3, 59, 60, 61, 1000]
            .map(|n| shown(decide(Err(Class::NotYet), young(n), &native(), 0.0)))
            .to_vec();
        assert_eq!(path, ["5s", "10s", "15s", "4m55s", "5m", "5m", "5m"]);
        // 5 + 10 + … + 60 s are no less than 5 + 30 + 300 s; 5 + 10 + … + 95 s are past 15 minutes.
        assert_eq!(native().once_through(), 12);
        assert_eq!(native().most_retries(), 19);
    }

    #[test]
    fn an_unknown_failure_gets_two_attempts() {
        let path: Vec<String> = (1..=2)
            .map(|n| shown(decide(Err(Class::Unknown), young(n), &budget(0.0), 0.5)))
            .collect();
        assert_eq!(path, ["5s", "attempts-exhausted"]);
    }

    #[test]
    fn a_gap_waits_as_long_as_its_deadline_allows_however_many_attempts_that_takes() {
        let mut facts = young(1000);
        assert_eq!(shown(decide(Err(Class::NotYet), facts, &budget(0.0), 0.5)), "5m");
        facts.age = Duration::from_secs(900);
        assert_eq!(shown(decide(Err(Class::NotYet), facts, &budget(0.0), 0.5)), "gap-deadline");
    }

    #[test]
    fn a_gap_in_an_old_backlog_walks_the_ladder_before_it_is_given_up() {
        let path: Vec<String> = (1..=4)
            .map(|n| Facts { age: Duration::from_secs(2 * 86_400), ..young(n) })
            .map(|facts| shown(decide(Err(Class::NotYet), facts, &budget(0.0), 0.5)))
            .collect();
        assert_eq!(path, ["5s", "30s", "5m", "gap-deadline"]);
    }

    #[test]
    fn age_and_the_producers_deadline_end_a_retry_early() {
        let old = Facts { age: Duration::from_secs(86_400), ..young(1) };
        assert_eq!(shown(decide(Err(Class::Transient), old, &budget(0.0), 0.5)), "too-old");
        let late = Facts { past_producer_deadline: true, ..young(1) };
        assert_eq!(
            shown(decide(Err(Class::Transient), late, &budget(0.0), 0.5)),
            "producer-deadline"
        );
    }

    fn any_class() -> impl Strategy<Value = Class> {
        prop_oneof![
            Just(Class::Transient),
            Just(Class::Permanent),
            Just(Class::NotYet),
            Just(Class::Unknown)
        ]
    }

    proptest! {
        #[test]
        fn what_took_effect_is_acked_whatever_its_history(attempts: u32, luck in 0.0..1.0f64) {
            for outcome in [Outcome::Applied, Outcome::Duplicate, Outcome::Stale, Outcome::Rejected] {
                prop_assert_eq!(
                    decide(Ok(outcome), young(attempts), &budget(1.0), luck),
                    Disposition::Ack
                );
            }
        }

        #[test]
        fn a_failure_is_never_acked_and_every_path_ends_in_parking(
            class in any_class(), age in 0u64..200_000, luck in 0.0..1.0f64, native: bool
        ) {
            let backend = if native { RetryBackend::Native } else { RetryBackend::Buckets };
            let budget = Budget { backend, ..budget(0.5) };
            let mut facts = Facts { age: Duration::from_secs(age), ..young(1) };
            let mut parked = false;
            // 86 400 s of retries that wait 5 s at least.
            for _ in 0..20_000 {
                match decide(Err(class), facts, &budget, luck) {
                    Disposition::Ack => prop_assert!(false, "a failure was acked"),
                    Disposition::Park(_) => { parked = true; break; }
                    Disposition::Retry(delay) => {
                        prop_assert!(!delay.duration().is_zero());
                        facts.attempts += 1;
                        facts.age += delay.duration();
                    }
                }
            }
            prop_assert!(parked, "retried without end");
        }

        #[test]
        fn jitter_takes_a_neighbouring_rung_and_never_more(attempts in 1u32..10, luck in 0.0..1.0f64) {
            let delays = budget(1.0).delays;
            let index = |b: &Budget| match decide(Err(Class::NotYet), young(attempts), b, luck) {
                Disposition::Retry(delay) => delays.iter().position(|d| *d == delay),
                _ => None,
            };
            let (steady, moved) = (index(&budget(0.0)), index(&budget(1.0)));
            prop_assert!(steady.zip(moved).is_some_and(|(a, b)| a.abs_diff(b) <= 1));
        }
    }
}
