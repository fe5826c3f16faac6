//! How fast a scenario is played: with the delays of the real system, or with short ones.

use crate::wait::DEADLINE;
use std::time::Duration;

/// The delays; everything else is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// The services' defaults: retries after 5 s, 30 s, 5 min; dead letters tried again after 3 min.
    Real,
    /// Sized for tests.
    Short,
}

impl Pace {
    /// The delays of the retry queues, as those are called.
    #[must_use]
    pub fn delays(self) -> [&'static str; 3] {
        match self {
            Self::Real => ["5s", "30s", "5m"],
            Self::Short => ["300ms", "600ms", "900ms"],
        }
    }

    /// Environment of both services.
    #[must_use]
    pub fn env(self) -> Vec<(&'static str, &'static str)> {
        match self {
            // What the harness shortens for everybody, back to the defaults.
            Self::Real => vec![
                ("RETRY_DELAYS", "5s,30s,5m"),
                ("RELAY_POLL", "500ms"),
                ("RELAY_STANDBY_POLL", "1s"),
            ],
            Self::Short => {
                vec![("DATABASE_ACQUIRE_TIMEOUT", "300ms"), ("RELAY_ROW_BACKOFF_MIN", "200ms")]
            }
        }
    }

    /// How long to wait, at most, for something that has to wait for the first so many retry queues.
    #[must_use]
    pub fn patience(self, delays: usize) -> Duration {
        let waits = match self {
            Self::Real => [5_000, 30_000, 300_000],
            Self::Short => [300, 600, 900],
        };
        DEADLINE + Duration::from_millis(waits.iter().take(delays).sum())
    }

    /// How long to wait, at most, until the broker tries its dead letters again.
    #[must_use]
    pub fn dead_letter_patience(self) -> Duration {
        match self {
            // Measured: when its publisher-confirm timeout passes, 180 s by default.
            Self::Real => Duration::from_secs(2 * 180),
            Self::Short => DEADLINE,
        }
    }
}
