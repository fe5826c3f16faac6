//! Waiting for a condition: polled, bounded, and explained when it does not come.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

const INTERVAL: Duration = Duration::from_millis(25);

/// A deadline that knows what it waits for.
///
/// ```no_run
/// # async fn example() -> anyhow::Result<()> {
/// # let the_order_is_reserved = || true;
/// use e2e::child::Patience;
/// let patience = Patience::new(std::time::Duration::from_secs(5), "the order to be reserved");
/// while !the_order_is_reserved() {
///     patience.pause().await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Patience {
    what: String,
    limit: Duration,
    until: Instant,
}

impl Patience {
    /// Starts the clock. `what` completes the sentence "waited 5 s for …".
    pub fn new(limit: Duration, what: impl Into<String>) -> Self {
        Self { what: what.into(), limit, until: Instant::now() + limit }
    }

    /// One poll interval; an error once the time is up.
    pub async fn pause(&self) -> Result<()> {
        self.check()?;
        tokio::time::sleep(INTERVAL).await;
        Ok(())
    }

    /// [`pause`](Self::pause) for code outside of a runtime, and for waits of some milliseconds.
    #[allow(clippy::disallowed_methods, reason = "it is what the name says, with a deadline")]
    pub fn pause_blocking(&self) -> Result<()> {
        self.check()?;
        thread::sleep(INTERVAL / 10);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        ensure!(Instant::now() < self.until, "waited {:?} in vain for {}", self.limit, self.what);
        Ok(())
    }
}
