//! Commands that both services have beside `run`.

use crate::backoff::Backoff;
use crate::config::{BrokerArgs, DatabaseArgs, ManagementArgs, TopologyArgs};
use crate::connection::{self, Connector};
use crate::management::{IN_FORCE, Management};
use crate::parking::command::ParkingCommand;
use crate::policies::{BrokerVersion, Policy, TooOld, policies, require_none};
use crate::topology::{Names, Topology};
use crate::{db, outbox};
use clap::{Args, Subcommand};
use sqlx::migrate::Migrator;
use std::ffi::OsString;
use tracing::warn;

/// What both services can do beside `run`.
#[derive(Subcommand)]
pub enum CommonCommand {
    /// Bring the database schema up to date
    Migrate(DatabaseArgs),
    /// Show, set up or check exchanges, queues and policies
    #[command(subcommand)]
    Topology(TopologyCommand),
    /// Look at events that are not published, and give parked ones another chance
    #[command(subcommand)]
    Outbox(OutboxCommand),
    /// Look at messages that could not be handled, send them back to their queue, or discard them
    #[command(subcommand)]
    Parking(ParkingCommand),
}

impl CommonCommand {
    /// Does it, for the service with these names and this schema.
    ///
    /// # Errors
    /// What keeps the command from being done.
    pub async fn run(self, names: Names, migrations: &Migrator) -> anyhow::Result<()> {
        match self {
            Self::Migrate(database) => db::migrate(&database, migrations).await,
            Self::Topology(command) => command.run(names).await,
            Self::Outbox(command) => command.run().await,
            Self::Parking(command) => command.run(names).await,
        }
    }
}

/// `topology …`
#[derive(Subcommand)]
pub enum TopologyCommand {
    /// Show exchanges, queues, bindings and policies, without asking any server
    Print {
        #[command(flatten)]
        #[allow(missing_docs)]
        topology: TopologyArgs,
    },
    /// Set the policies, declare everything, wait until it is in force: the job before the services
    Apply(TopologyTarget),
    /// Compare the effective policies with what they must be; exit code 1 if they differ
    Check(TopologyTarget),
}

/// Which topology, and where.
#[derive(Args)]
pub struct TopologyTarget {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub broker: BrokerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub management: ManagementArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub topology: TopologyArgs,
}

impl TopologyCommand {
    async fn run(self, names: Names) -> anyhow::Result<()> {
        match self {
            Self::Print { topology } => {
                let topology = Topology::new(names, topology)?;
                print!("{topology}");
                for policy in policies(&topology, BrokerVersion::NATIVE_RETRY)? {
                    let definition = serde_json::to_string(&policy.definition)?;
                    println!("policy {} {definition}", policy.queue.name);
                }
            }
            Self::Apply(target) => {
                let topology = Topology::new(names, target.topology)?;
                let management =
                    Management::new(&target.management.management_url, &target.broker.amqp_url)?;
                let broker = Connector::new(target.broker, "topology apply");
                for policy in apply_patiently(&topology, &management, &broker).await? {
                    println!("policy {}", policy.queue.name);
                }
                require_none(&management.wait_in_force(&topology, IN_FORCE, |_| {}).await?)?;
                print!("{topology}");
            }
            Self::Check(target) => {
                let topology = Topology::new(names, target.topology)?;
                let management =
                    Management::new(&target.management.management_url, &target.broker.amqp_url)?;
                let mismatches = management.check(&topology).await?;
                for mismatch in &mismatches {
                    println!("{mismatch}");
                }
                anyhow::ensure!(mismatches.is_empty(), "{} differences", mismatches.len());
                println!("all {} queues are as they must be", topology.queues().len());
            }
        }
        Ok(())
    }
}

/// Policies first: a queue that exists without its policy can swallow a message. A broker that has just
/// started, or is under load, may fail to form a quorum queue (541) or answer late; all of it can be
/// said again, so a job that everything waits for does not give up at once.
async fn apply_patiently(
    topology: &Topology,
    management: &Management,
    broker: &Connector,
) -> anyhow::Result<Vec<Policy>> {
    const ATTEMPTS: u32 = 4;
    let apply = async || {
        let policies = management.apply(topology).await?;
        let connection = broker.connect().await?;
        let stray = management.stray_shards(topology).await?;
        let declared = connection::bounded("declaring the topology", async {
            let channel = connection.create_channel().await?;
            topology.declare(&channel).await?;
            topology.bind(&channel, &stray).await
        });
        let declared = declared.await;
        connection::close(&connection).await;
        declared.map(|()| policies)
    };
    let mut failures = 0;
    loop {
        match apply().await {
            Err(error) if failures + 1 < ATTEMPTS && !error.is::<TooOld>() => {
                failures += 1;
                warn!(error = format!("{error:#}"), failures, "topology cannot be applied yet");
                tokio::time::sleep(Backoff::RECONNECT.jittered(failures)).await;
            }
            applied => return applied,
        }
    }
}

/// `outbox …`
#[derive(Subcommand)]
pub enum OutboxCommand {
    /// Show rows that are not published, oldest first, one JSON object a line
    List {
        #[command(flatten)]
        #[allow(missing_docs)]
        database: DatabaseArgs,
        /// Only those that wait for an operator
        #[arg(long)]
        parked: bool,
        /// Most rows to show
        #[arg(long, default_value_t = 100)]
        limit: u32,
    },
    /// Give parked rows a new budget: one by its id, or all
    Retry {
        #[command(flatten)]
        #[allow(missing_docs)]
        database: DatabaseArgs,
        #[command(flatten)]
        #[allow(missing_docs)]
        which: Which,
    },
}

/// Which rows.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub struct Which {
    /// The event id of one row
    pub id: Option<String>,
    /// All parked rows
    #[arg(long)]
    pub all: bool,
}

impl OutboxCommand {
    async fn run(self) -> anyhow::Result<()> {
        match self {
            Self::List { database, parked, limit } => {
                let mut db = db::connect_once(&database).await?;
                for row in outbox::list(&mut db, parked, i64::from(limit)).await? {
                    println!("{}", serde_json::to_string(&row)?);
                }
            }
            Self::Retry { database, which } => {
                let mut db = db::connect_once(&database).await?;
                let rows = outbox::retry_parked(&mut db, which.id.as_deref()).await?;
                if let Some(id) = which.id {
                    anyhow::ensure!(rows == 1, "no parked row has the id {id}");
                }
                println!("{rows} rows will be tried again");
            }
        }
        Ok(())
    }
}

/// The command line, with `run` put in where no command is named: `orders-service --roles http` is
/// `orders-service run --roles http`.
#[must_use]
pub fn with_default_command(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let first = arguments.get(1).map(|argument| argument.to_string_lossy().into_owned());
    let names_a_command = first.is_some_and(|first| {
        !first.starts_with('-') || matches!(first.as_str(), "-h" | "--help" | "-V" | "--version")
    });
    if !names_a_command {
        arguments.insert(1.min(arguments.len()), "run".into());
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_is_the_default_command() {
        let full = |line: &str| -> Vec<String> {
            with_default_command(line.split(' ').map(OsString::from))
                .iter()
                .map(|argument| argument.to_string_lossy().into_owned())
                .collect()
        };
        assert_eq!(full("svc"), ["svc", "run"]);
        assert_eq!(full("svc --roles http"), ["svc", "run", "--roles", "http"]);
        assert_eq!(full("svc migrate"), ["svc", "migrate"]);
        assert_eq!(full("svc --help"), ["svc", "--help"]);
    }
}
