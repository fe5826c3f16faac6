//! What a run moves, and in which order: pure functions.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer};
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

/// Most messages that a look keeps in hand at once: a lot of a million must not take the memory of the
/// service. Whoever wants the rest runs again.
pub const MOST_HELD: usize = 20_000;
/// And the most bytes of their bodies.
pub const MOST_HELD_BYTES: usize = 64 << 20;
/// Everything is held unacked while a run lasts, and the broker closes the channel of a client that
/// holds a message for 30 min (`consumer_timeout`, its default). A run that would take longer does as
/// much as it can in this time.
const LONGEST_HOLD: Duration = Duration::from_secs(20 * 60);

/// Messages a second, at most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate(f64);

impl Rate {
    /// # Errors
    /// When it is no number of messages, or so slow that a run could not move even one.
    pub fn new(per_second: f64) -> Result<Self, String> {
        let slowest = 1.0 / LONGEST_HOLD.as_secs_f64();
        if per_second.is_finite() && per_second >= slowest {
            Ok(Self(per_second))
        } else {
            Err("a rate is a number of messages a second: more than 0, like 50 or 0.5, and not \
                 slower than one in 20 minutes"
                .into())
        }
    }

    /// As it was given.
    #[must_use]
    pub fn per_second(self) -> f64 {
        self.0
    }

    /// The time between two messages.
    #[must_use]
    pub fn pause(self) -> Duration {
        Duration::from_secs_f64(self.0.recip()).max(Duration::from_nanos(1))
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::new(text.parse().unwrap_or(f64::NAN))
    }
}

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        Self::new(f64::deserialize(json)?).map_err(serde::de::Error::custom)
    }
}

/// How many messages a run moves at most: what was asked for, and what can be held for as long as it
/// takes.
#[must_use]
pub fn most(max: Option<NonZeroU32>, rate: Option<Rate>) -> usize {
    let asked = max.map_or(usize::MAX, |max| usize::try_from(max.get()).unwrap_or(usize::MAX));
    let held = rate.map_or(usize::MAX, |rate| {
        // The cast saturates, and a rate is neither negative nor not a number.
        ((rate.0 * LONGEST_HOLD.as_secs_f64()) as usize).max(1)
    });
    asked.min(held)
}

/// The snapshot: whether a run that began then may touch a message. What is parked later is the next
/// run's, or a message that keeps failing would keep a run going for ever. Where the time is not
/// known, the number of messages at the beginning is the bound.
#[must_use]
pub fn was_there(parked_at: Option<DateTime<Utc>>, began: DateTime<Utc>) -> bool {
    parked_at.is_none_or(|at| at <= began)
}

/// Which aggregate's event, and the how-many-eth.
pub type Place<'a> = Option<(&'a str, &'a str, i64)>;

/// The order of redriving, as indices into the order of parking: the places that the events of one
/// aggregate hold there are taken by its events from the oldest version to the newest, and all others
/// stay where they are. A later version that came first would find a gap and have to wait.
#[must_use]
pub fn in_order(places: &[Place<'_>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    let mut streams: HashMap<(&str, &str), Vec<(i64, usize)>> = HashMap::new();
    for (index, place) in places.iter().enumerate() {
        if let Some((kind, id, version)) = place {
            streams.entry((kind, id)).or_default().push((*version, index));
        }
    }
    for stream in streams.into_values() {
        let mut oldest_first = stream.clone();
        oldest_first.sort_unstable();
        for ((_, slot), (_, message)) in stream.into_iter().zip(oldest_first) {
            order[slot] = message;
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_oldest_version_of_an_aggregate_comes_first_and_the_others_keep_their_place() {
        let a = |version| Some(("order", "a", version));
        let b = |version| Some(("order", "b", version));
        assert_eq!(in_order(&[a(3), None, b(2), a(2), a(1), b(1)]), [4, 1, 5, 3, 0, 2]);
    }

    proptest! {
        #[test]
        fn every_message_has_one_place_and_versions_only_grow(
            places in prop::collection::vec(prop::option::of((0..3u8, 0..3u8, 1..6i64)), 0..40)
        ) {
            let names = ["x", "y", "z"];
            let places: Vec<Place<'_>> = places
                .iter()
                .map(|place| place.map(|(k, i, v)| (names[usize::from(k)], names[usize::from(i)], v)))
                .collect();
            let order = in_order(&places);

            let mut all = order.clone();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..places.len()), "not a permutation");
            for (slot, message) in order.iter().enumerate() {
                // The same aggregate holds the slot as before; what has none stays where it is.
                let holder = |index: usize| places[index].map(|(kind, id, _)| (kind, id));
                prop_assert_eq!(holder(slot), holder(*message));
                if places[slot].is_none() {
                    prop_assert_eq!(slot, *message);
                }
                // Later in the same stream: a higher version, or the same one parked later.
                for later in &order[slot + 1..] {
                    if holder(*message).is_some() && holder(*message) == holder(*later) {
                        let key = |index: usize| (places[index].map(|place| place.2), index);
                        prop_assert!(key(*message) < key(*later));
                    }
                }
            }
        }

        #[test]
        fn a_run_never_holds_longer_than_the_broker_lets_it(rate in 0.001..1e7f64, max in 1u32..) {
            let rate = Rate::new(rate).expect("a rate");
            let most = most(NonZeroU32::new(max), Some(rate));
            prop_assert!(most as f64 / rate.per_second() <= LONGEST_HOLD.as_secs_f64() + 1e-6);
            prop_assert!((1..=max as usize).contains(&most));
        }
    }

    #[test]
    fn a_rate_is_a_number_above_zero() {
        for bad in ["0", "-1", "nan", "inf", "-inf", "1e-9", "1e400", "", "fast", "1/s"] {
            assert!(bad.parse::<Rate>().is_err_and(|error| error.contains("like 50")), "{bad}");
        }
        for good in ["50", "0.5", "1e9", "1e300"] {
            assert!(good.parse::<Rate>().is_ok_and(|rate| !rate.pause().is_zero()), "{good}");
        }
    }

    #[test]
    fn what_was_parked_after_the_beginning_is_not_touched() {
        let began = Utc::now();
        let second = chrono::TimeDelta::seconds(1);
        assert!(was_there(Some(began - second), began));
        assert!(was_there(Some(began), began));
        assert!(!was_there(Some(began + second), began));
        assert!(was_there(None, began), "the count bounds it");
    }
}
