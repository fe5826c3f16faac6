//! orders-service: takes orders, tells of them, and learns what became of them.
//!
//! The message path and how the parts are put together are in `shared` ([`shared::roles`]); what is
//! the orders' own is in [`place_order`], [`cancel_order`] and [`apply_reservation`].

mod api;
mod config;

// What an order is.
mod orders_table;
use orders_service::order;

// What happens to it, in this order.
mod place_order;

mod apply_reservation;

mod cancel_order;

use clap::Parser;
use config::{Cli, Command, MIGRATIONS, NAMES};
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
    }
}
