//! The command line, and what makes this service the inventory.

use crate::operations::Seed;
use crate::order_events::OrderEvents;
use crate::{api, operations};
use clap::{Args, Parser, Subcommand};
use shared::cli::CommonCommand;
use shared::config::{DatabaseArgs, LogArgs};
use shared::roles::{Blueprint, ServiceArgs};
use shared::topology::Names;
use sqlx::migrate::Migrator;
use std::net::SocketAddr;

/// Names that are contracts.
pub const NAMES: Names = Names {
    exchange: "inventory",
    source: "orders",
    binding: "order.*",
    queue: "inventory.orders",
};

pub static MIGRATIONS: Migrator = sqlx::migrate!("../migrations/inventory");

/// Holds stock and promises it to orders
#[derive(Parser)]
#[command(version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub log: LogArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run the service (the default)
    Run(Box<RunArgs>),
    #[command(flatten)]
    Common(CommonCommand),
    /// Set up stock
    #[command(subcommand)]
    Stock(StockCommand),
}

#[derive(Subcommand)]
pub enum StockCommand {
    /// Put skus into stock that are not there yet; those that are stay as they are
    Seed {
        #[command(flatten)]
        database: DatabaseArgs,
        /// What to put there, as `sku=count`
        #[arg(required = true)]
        stock: Vec<Seed>,
    },
}

#[derive(Args)]
pub struct RunArgs {
    /// Where the API listens; port 0 takes a free one
    #[arg(long, env = "HTTP_LISTEN", default_value = "127.0.0.1:8081")]
    http_listen: SocketAddr,
    /// Where operations (health, metrics, stock changes) listen
    #[arg(long, env = "OPS_LISTEN", default_value = "127.0.0.1:9081")]
    ops_listen: SocketAddr,
    #[command(flatten)]
    service: ServiceArgs,
}

/// Runs the service until SIGTERM.
pub async fn run(args: RunArgs) -> anyhow::Result<()> {
    let inventory = Blueprint {
        names: NAMES,
        migrations: &MIGRATIONS,
        http_listen: args.http_listen,
        ops_listen: args.ops_listen,
        // Nothing that the API does makes an event.
        api: |pool, _wake_up| api::router(pool),
        admin: operations::router,
        handler: |wake_up| OrderEvents { wake_up },
        // Stock and reservations are kept for ever.
        retention: Vec::new(),
    };
    shared::roles::run(inventory, args.service).await
}
