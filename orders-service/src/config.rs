//! The command line, and what makes this service the orders'.

use crate::api;
use crate::apply_reservation::InventoryAnswers;
use crate::place_order;
use axum::Router;
use clap::{Args, Parser, Subcommand};
use shared::cli::CommonCommand;
use shared::config::{LogArgs, duration};
use shared::retention::Job;
use shared::roles::{Blueprint, ServiceArgs};
use shared::topology::Names;
use sqlx::migrate::Migrator;
use std::net::SocketAddr;
use std::time::Duration;

/// Names that are contracts.
pub const NAMES: Names = Names {
    exchange: "orders",
    source: "inventory",
    binding: "inventory.*",
    queue: "orders.inventory",
};

pub static MIGRATIONS: Migrator = sqlx::migrate!("../migrations/orders");

/// Takes orders and learns what became of them
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
}

#[derive(Args)]
pub struct RunArgs {
    /// Where the API listens; port 0 takes a free one
    #[arg(long, env = "HTTP_LISTEN", default_value = "127.0.0.1:8080")]
    http_listen: SocketAddr,
    /// Where operations (health, metrics) listen
    #[arg(long, env = "OPS_LISTEN", default_value = "127.0.0.1:9080")]
    ops_listen: SocketAddr,
    /// How long after its order was placed an Idempotency-Key is kept. A client that never heard of
    /// its order can repeat the request for so long; later the key is a new one and makes a new order
    #[arg(long, env = "IDEMPOTENCY_RETENTION", default_value = "7d", value_parser = duration)]
    idempotency_retention: Duration,
    #[command(flatten)]
    service: ServiceArgs,
}

/// Runs the service until SIGTERM.
pub async fn run(args: RunArgs) -> anyhow::Result<()> {
    let orders = Blueprint {
        names: NAMES,
        migrations: &MIGRATIONS,
        http_listen: args.http_listen,
        ops_listen: args.ops_listen,
        api: api::router,
        // Orders are changed through the API alone.
        admin: |_pool| Router::new(),
        handler: |wake_up| InventoryAnswers { wake_up },
        retention: vec![Job {
            table: "idempotency_keys",
            keep: args.idempotency_retention,
            prune: |db, keep, limit| Box::pin(place_order::prune_keys(db, keep, limit)),
        }],
    };
    shared::roles::run(orders, args.service).await
}
