//! inventory-service: holds stock, promises it to orders, and says so.
//!
//! The message path and how the parts are put together are in `shared` ([`shared::roles`]); what is
//! the inventory's own is in [`order_events`], [`reserve_stock`] and [`release_stock`].

mod config;

// What messages do here.
mod order_events;
mod release_stock;
mod reserve_stock;
use inventory_service::stock;

// What people do here.
mod api;
mod operations;

use clap::Parser;
use config::{Cli, Command, MIGRATIONS, NAMES, StockCommand};
use shared::telemetry::Stream;
use shared::{cli, fault, telemetry};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let cli = Cli::parse_from(cli::with_default_command(std::env::args_os()));
    let runs = matches!(cli.command, Command::Run(_));
    telemetry::init(&cli.log, if runs { Stream::Out } else { Stream::Err })?;
    fault::check_environment()?;
    match cli.command {
        Command::Run(args) => config::run(*args).await,
        Command::Common(command) => command.run(NAMES, &MIGRATIONS).await,
        Command::Stock(StockCommand::Seed { database, stock }) => {
            operations::seed(&database, &stock).await
        }
    }
}
