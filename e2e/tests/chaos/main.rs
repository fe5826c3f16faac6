//! A minute of random chaos. `make soak` has ten, and prints what it does.

use anyhow::{Context, Result};
use std::time::Duration;

#[tokio::test]
async fn random_chaos_loses_nothing_doubles_nothing_and_leaves_nothing_stuck() -> Result<()> {
    let seed = u64::from(rand::random::<u32>());
    // Shown when the test fails, and with --nocapture.
    println!("seed {seed}; the same plan again, and longer: make soak SEED={seed}");
    let outcome = e2e::chaos::run(seed, Duration::from_secs(60), &|line| println!("{line}")).await;
    let outcome = outcome.with_context(|| format!("with seed {seed}"))?;
    println!("{outcome}");
    Ok(())
}
