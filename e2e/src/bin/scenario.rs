//! Plays one of the scenarios ([`e2e::scenario`]) against real servers of its own, and tells what
//! happens as it happens.

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use e2e::ledger::report::tally;
use e2e::scenario::{HEADLINE, Pace, Scenario, wrap};
use e2e::servers::require_fault_points;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

/// Breaks the path of a message on purpose, and shows who owned the message all the while
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The scenarios, with a sentence about each
    List,
    /// Plays one
    Run {
        /// Which, by its name
        name: String,
        /// With the delays of the real system, or with short ones
        #[arg(long, value_enum, default_value_t = Speed::Real)]
        pace: Speed,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Speed {
    /// Retries after 5 s, 30 s and 5 min
    Real,
    /// Retries within a second
    Short,
}

#[tokio::main]
async fn main() -> ExitCode {
    let ended = match Args::parse().command {
        Command::List => list(),
        Command::Run { name, pace } => run(&name, pace).await,
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nfailed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn list() -> Result<()> {
    let mut out = std::io::stdout().lock();
    for about in Scenario::ALL.map(Scenario::about) {
        writeln!(out, "{:<30}{}", about.name, about.sentence)?;
    }
    Ok(())
}

async fn run(name: &str, speed: Speed) -> Result<()> {
    let scenario = Scenario::named(name).with_context(|| {
        let names = Scenario::ALL.map(|scenario| scenario.about().name);
        format!("there is no scenario {name:?}; there are {}", names.join(", "))
    })?;
    require_fault_points()?;
    let pace = match speed {
        Speed::Real => Pace::Real,
        Speed::Short => Pace::Short,
    };
    let about = scenario.about();
    println!("{}: {}\n\n{HEADLINE}", about.name, about.sentence);
    let began = Instant::now();
    // Line by line, into a file or a pipe as well.
    let out = Box::new(|line: &str| {
        let mut out = std::io::stdout().lock();
        // Whoever does not want to read on may close the pipe; the play goes on to its end.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    });
    let played = scenario.run(pace, out).await?;
    println!("\nwhat this shows");
    for line in wrap(about.shows, 106) {
        println!("  {line}");
    }
    println!();
    print!("{}", played.ledger);
    println!("\n{}", tally(&[]));
    println!("({:.0} s, start and end of the servers included)", began.elapsed().as_secs_f64());
    Ok(())
}
