//! `make soak`: minutes of random chaos, ending with a ledger that balances, or with what does not.

use anyhow::{Context, Result};
use clap::Parser;
use e2e::chaos;
use std::time::Duration;

/// Places orders while everything is killed, frozen and cut off at random; then the ledger must balance
#[derive(Parser)]
struct Args {
    /// For how long
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: u64,
    /// What is done to whom and when; drawn and printed if not given
    #[arg(long)]
    seed: Option<u64>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let seed = args.seed.unwrap_or_else(|| u64::from(rand::random::<u32>()));
    println!("seed {seed}; the same again: make soak MINUTES={} SEED={seed}", args.minutes);
    let length = Duration::from_secs(60 * args.minutes);
    let outcome = chaos::run(seed, length, &|line| println!("{line}")).await;
    let outcome = outcome.with_context(|| format!("with seed {seed}"))?;
    println!("\n{outcome}");
    Ok(())
}
