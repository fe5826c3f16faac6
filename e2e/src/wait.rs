//! Waiting for a condition: often, not long, and with the reason at hand when it does not come.

use crate::child::Patience;
use anyhow::{Context, Result};
use std::time::Duration;

/// Long past everything that a healthy system does; only a failing test waits for it.
pub const DEADLINE: Duration = Duration::from_secs(45);

/// Calls `probe` until it returns a value. `what` completes "waited in vain for …".
///
/// # Errors
/// When it does not come in time; the last error of `probe`, if it had one, says why.
pub async fn until<T, F>(what: &str, probe: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<Option<T>>>,
{
    until_by(DEADLINE, what, probe).await
}

/// [`until`], for what may take another time than most.
///
/// # Errors
/// As [`until`].
pub async fn until_by<T, F>(limit: Duration, what: &str, mut probe: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<Option<T>>>,
{
    let patience = Patience::new(limit, what);
    loop {
        let last = match probe().await {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => String::new(),
            Err(error) => format!("{error:#}"),
        };
        patience.pause().await.context(last)?;
    }
}

/// Calls `probe` until it says yes.
///
/// # Errors
/// As [`until`].
pub async fn until_true<F>(what: &str, mut probe: impl FnMut() -> F) -> Result<()>
where
    F: Future<Output = Result<bool>>,
{
    until(what, || {
        let answer = probe();
        async { Ok(answer.await?.then_some(())) }
    })
    .await
}
