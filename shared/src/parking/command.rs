//! `parking …` on the command line.
//!
//! SIGINT and SIGTERM stop a command in an orderly way: after the message in hand, with all that is
//! held given back, and with a failure as the exit code.

use super::audit::Entry;
use super::filter::Filter;
use super::plan::{MOST_HELD, Rate};
use super::run::{Event, Parking};
use super::screen::{self, Progress};
use super::task::{Action, Task, name};
use crate::config::{BrokerArgs, ConfirmArgs, DatabaseArgs, TopologyArgs};
use crate::db;
use crate::topology::{Names, Topology};
use anyhow::Context;
use clap::{Args, Subcommand};
use std::io::{self, ErrorKind};
use std::num::NonZeroU32;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A note for the audit that takes longer to get a connection ends the run.
const DATABASE_BOUND: Duration = Duration::from_secs(5);

/// `parking …`
#[derive(Subcommand)]
pub enum ParkingCommand {
    /// Show what is parked, in the order of parking
    List(Box<ListArgs>),
    /// Show all of one message: headers, body and what is known of it
    Show(Box<ShowArgs>),
    /// Send messages back to their queue, with all their attempts, once their cause is mended
    Redrive(Box<RedriveArgs>),
    /// Throw messages away for good
    Discard(Box<DiscardArgs>),
}

/// Whose parking, and where.
#[derive(Args)]
#[allow(missing_docs)]
pub struct Place {
    #[command(flatten)]
    pub broker: BrokerArgs,
    #[command(flatten)]
    pub topology: TopologyArgs,
    #[command(flatten)]
    pub confirm: ConfirmArgs,
}

/// `parking list`
#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub filter: Filter,
    /// Most messages to show
    #[arg(long, default_value = "100")]
    pub limit: NonZeroU32,
    /// One JSON object a line instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub place: Place,
}

/// `parking show`
#[derive(Args)]
pub struct ShowArgs {
    /// Its message id. There may be two copies, of which each is shown
    pub id: String,
    /// A JSON object, with all that it takes to publish the message again
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub place: Place,
}

/// What `redrive` and `discard` have in common.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub filter: Filter,
    /// Most messages to move
    #[arg(long)]
    pub max: Option<NonZeroU32>,
    /// Show what would be moved, in its order, and move nothing
    #[arg(long)]
    pub dry_run: bool,
    /// On whose behalf, for the audit; the user of this shell if not given
    #[arg(long, value_parser = name)]
    pub by: Option<String>,
    /// One JSON object a line for each message
    #[arg(long)]
    pub json: bool,
    /// This service's own database, where who moves what is noted:
    /// `postgres://user:password@host:port/database`. A dry run needs none
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, required_unless_present = "dry_run")]
    pub database_url: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub place: Place,
}

/// `parking redrive`
#[derive(Args)]
pub struct RedriveArgs {
    /// Most messages a second; as fast as the broker confirms if not given
    #[arg(long)]
    pub rate: Option<Rate>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub run: RunArgs,
}

/// `parking discard`
#[derive(Args)]
pub struct DiscardArgs {
    /// Yes, for good
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub run: RunArgs,
}

impl ParkingCommand {
    /// Does it, for the service with these names.
    ///
    /// # Errors
    /// What keeps the command from being done, or stopped it in the middle.
    pub async fn run(self, names: Names) -> anyhow::Result<()> {
        let stop = stop_on_signals()?;
        match self {
            Self::List(args) => {
                let keep = usize::try_from(args.limit.get()).unwrap_or(MOST_HELD);
                let (parking, queue) = args.place.parking(names)?;
                let found = parking.look(&args.filter, keep, None, &stop).await?;
                anyhow::ensure!(!stop.is_cancelled(), "interrupted");
                unless_closed(screen::found(&found, &queue, args.json))
            }
            Self::Show(args) => {
                let (parking, queue) = args.place.parking(names)?;
                let filter = Filter::of(args.id.clone());
                let found = parking.look(&filter, MOST_HELD, None, &stop).await?;
                anyhow::ensure!(!stop.is_cancelled(), "interrupted");
                anyhow::ensure!(
                    !found.messages.is_empty(),
                    "none of the {} messages in {queue} has the id {:?}",
                    found.looked_at,
                    args.id
                );
                unless_closed(found.messages.iter().try_for_each(|parked| {
                    if args.json {
                        screen::json_line(&parked.in_full())
                    } else {
                        screen::details(parked)
                    }
                }))
            }
            Self::Redrive(args) => args.run.run(Action::Redrive, args.rate, names, &stop).await,
            Self::Discard(args) => {
                args.run.filter.refuse_all()?;
                anyhow::ensure!(
                    args.yes || args.run.dry_run,
                    "what is discarded is gone for good: look at it with --dry-run, then say --yes"
                );
                args.run.run(Action::Discard, None, names, &stop).await
            }
        }
    }
}

impl Place {
    fn parking(self, names: Names) -> anyhow::Result<(Parking, String)> {
        let topology = Topology::new(names, self.topology)?;
        let queue = topology.parking_queue();
        Ok((Parking::new(&self.broker, topology, self.confirm), queue))
    }
}

impl RunArgs {
    async fn run(
        self,
        action: Action,
        rate: Option<Rate>,
        names: Names,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let (parking, queue) = self.place.parking(names)?;
        let who = self.by.unwrap_or_else(user);
        let task = Task { action, filter: self.filter, max: self.max, rate, who };
        let json = self.json;
        if self.dry_run {
            let plan = parking.plan(&task, None, stop).await?;
            anyhow::ensure!(!stop.is_cancelled(), "interrupted; nothing was moved");
            return unless_closed(screen::plan(&plan, action, &queue, json));
        }
        let pool = db::pool(&DatabaseArgs {
            // Without a dry run there is one.
            database_url: self.database_url.unwrap_or_default(),
            database_pool_size: NonZeroU32::MIN,
            database_acquire_timeout: DATABASE_BOUND,
        })?;
        let entry = Entry::begin(&pool, &task)
            .await
            .context("the audit cannot be written, so nothing is moved")?;
        let run = entry.id;
        let mut progress = None;
        let watch = |event: Event<'_>| {
            match event {
                Event::Planned(plan) => {
                    progress = Some(Progress::new(action, plan.messages.len()));
                }
                Event::Leaving(parked) => {
                    let Some(progress) = &mut progress else { return Ok(()) };
                    progress.advance();
                    if json {
                        // Of what is discarded this may be the last trace.
                        let line = match action {
                            Action::Redrive => serde_json::to_value(&parked.about)?,
                            Action::Discard => parked.in_full(),
                        };
                        progress.aside(|| screen::json_line(&line))?;
                    }
                }
            }
            Ok(())
        };
        let ended = parking.run(&task, entry, stop, watch).await;
        drop(progress);
        let report = ended?;
        screen::report(&report, run, action, &queue, json)?;
        anyhow::ensure!(!report.interrupted, "interrupted; the same command goes on from here");
        Ok(())
    }
}

/// A reader that has seen enough, like `head`, is no failure where nothing was moved.
fn unless_closed(printed: io::Result<()>) -> anyhow::Result<()> {
    match printed {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        printed => printed.context("cannot print"),
    }
}

/// Cancelled by the first SIGINT or SIGTERM.
fn stop_on_signals() -> anyhow::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen to SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen to SIGINT")?;
    let token = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        eprintln!("stopping after the message in hand");
        token.cancel();
    });
    Ok(stop)
}

/// Who runs this command, as far as the system knows.
fn user() -> String {
    let login = ["USER", "LOGNAME"].into_iter().filter_map(|name| std::env::var(name).ok());
    login
        .filter_map(|login| name(&login).ok())
        .next()
        .unwrap_or_else(|| format!("uid {}", nix::unistd::geteuid()))
}
