//! How long to wait before trying again: doubling, bounded, jittered. One function for every
//! supervisor and for the outbox rows.

use std::time::Duration;

/// Bounds of a back-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The first delay.
    pub min: Duration,
    /// No delay is longer.
    pub max: Duration,
}

impl Backoff {
    /// What every supervisor uses towards a server that does not answer.
    pub const RECONNECT: Self =
        Self { min: Duration::from_millis(500), max: Duration::from_secs(30) };

    /// The delay after `failures` failures in a row (the first is 1). `jitter` in 0..1 spreads it
    /// over the upper half, so that those who failed together do not come back together.
    #[must_use]
    pub fn delay(&self, failures: u32, jitter: f64) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        let full = self.min.saturating_mul(1 << doublings).min(self.max);
        full.div_f64(2.0) + full.div_f64(2.0).mul_f64(jitter.clamp(0.0, 1.0))
    }

    /// [`Backoff::delay`] with a jitter of chance.
    #[must_use]
    pub fn jittered(&self, failures: u32) -> Duration {
        self.delay(failures, rand::random())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_delay_is_never_nothing_and_never_past_the_bound(failures: u32, jitter in 0.0..1.0f64) {
            let delay = Backoff::RECONNECT.delay(failures, jitter);
            prop_assert!(delay >= Backoff::RECONNECT.min / 2);
            prop_assert!(delay <= Backoff::RECONNECT.max);
        }

        #[test]
        fn more_failures_never_wait_less(failures in 1u32..1000, jitter in 0.0..1.0f64) {
            let backoff = Backoff::RECONNECT;
            prop_assert!(backoff.delay(failures + 1, jitter) >= backoff.delay(failures, jitter));
        }
    }
}
