//! Single values: how they are read, what they may be, and how they are written.

use std::fmt::{self, Write as _};
use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

/// A century: nothing here is meant to take longer, and sums of it stay within what PostgreSQL can
/// subtract from today.
const LONGEST: Duration = Duration::from_secs(36_500 * 24 * 60 * 60);

/// A duration. Nothing here means anything at zero: a wait of zero is a hot loop, a bound of zero
/// forbids everything.
///
/// # Errors
/// What is wrong with the text.
pub fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write 300ms, 5s, 5m or 7d"))?;
    if duration.is_zero() {
        Err("must be longer than 0".into())
    } else if duration > LONGEST {
        Err(format!("must be at most {}", written(LONGEST)))
    } else {
        Ok(duration)
    }
}

/// A duration that RabbitMQ takes as a message-ttl: whole milliseconds, fewer than 2^32 of them.
pub(super) fn ttl(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    let whole_millis = duration.subsec_nanos().is_multiple_of(1_000_000);
    if whole_millis && duration.as_millis() <= u128::from(u32::MAX) {
        Ok(duration)
    } else {
        Err("must be whole milliseconds, and at most 49 days".into())
    }
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1".into()),
    }
}

/// A duration as configuration writes it: `1d`, `1m30s`, `300ms`. Letters and digits alone, and no
/// unit (a month, a year) whose length one has to know.
pub(super) fn written(duration: Duration) -> String {
    const UNITS: [(u128, &str); 7] = [
        (24 * 60 * 60 * 1_000_000_000, "d"),
        (60 * 60 * 1_000_000_000, "h"),
        (60 * 1_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "us"),
        (1, "ns"),
    ];
    let mut nanos = duration.as_nanos();
    let mut text = String::new();
    for (length, unit) in UNITS {
        if nanos >= length {
            // Writing to a String does not fail.
            let _ = write!(text, "{}{unit}", nanos / length);
            nanos %= length;
        }
    }
    text
}

/// What keeps the events of one aggregate in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Their versions alone.
    Gate,
    /// So many queues with a single active consumer each.
    Shards(NonZeroU16),
}

impl FromStr for Ordering {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const MOST: u16 = 128;
        if text == "gate" {
            return Ok(Self::Gate);
        }
        let shards = text.strip_prefix("shards=").and_then(|number| number.parse().ok());
        let shards = shards.filter(|shards: &NonZeroU16| shards.get() <= MOST);
        shards
            .map(Self::Shards)
            .ok_or_else(|| format!("write gate, or shards=N with N from 1 to {MOST}"))
    }
}

impl fmt::Display for Ordering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gate => f.write_str("gate"),
            Self::Shards(shards) => write!(f, "shards={shards}"),
        }
    }
}

/// A retry delay. Its text is part of a queue's name: `5s`, `30s`, `5m`, `300ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay(Duration);

impl Delay {
    /// How long.
    #[must_use]
    pub fn duration(self) -> Duration {
        self.0
    }

    /// So many times as long, and at most as long as `most`.
    #[must_use]
    pub fn grown(self, times: u32, most: Self) -> Self {
        Self(self.0.saturating_mul(times.max(1)).min(most.0))
    }

    /// How long, as a policy says it: whole milliseconds.
    #[must_use]
    pub fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        ttl(text.trim()).map(Self)
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&written(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_delay_is_written_as_it_is_read() {
        for text in ["5s", "30s", "5m", "300ms", "1m30s", "1h", "1d", "40d"] {
            let delay: Delay = text.parse().expect("a delay");
            assert_eq!(delay.to_string(), text);
        }
        for bad in ["0s", "5", "soon", "1us", "60d", ""] {
            assert!(bad.parse::<Delay>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_ordering_is_written_as_it_is_read() {
        for text in ["gate", "shards=1", "shards=128"] {
            let ordering: Ordering = text.parse().expect("an ordering");
            assert_eq!(ordering.to_string(), text);
        }
        for bad in ["", "shards", "shards=0", "shards=129", "shards=-1", "Gate"] {
            assert!(bad.parse::<Ordering>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_duration_is_neither_nothing_nor_more_than_a_database_can_subtract() {
        for bad in ["0s", "0ms", "101y", "40000d", "1000000y", "", "-1s", "7"] {
            assert!(duration(bad).is_err(), "{bad:?}");
        }
        assert_eq!(duration("36500d"), Ok(LONGEST));
    }

    proptest! {
        #[test]
        fn every_delay_names_a_queue_of_its_own(millis in 1..=u32::MAX) {
            let delay = Delay(Duration::from_millis(millis.into()));
            let text = delay.to_string();
            prop_assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{}", text);
            prop_assert_eq!(text.parse(), Ok(delay));
        }
    }
}
