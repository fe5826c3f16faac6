//! Logs now; spans in their place here once they are exported.
//!
//! The message path already carries W3C trace context end to end ([`crate::trace_context`]), and
//! counts through the OpenTelemetry API ([`crate::metrics`]). An exporter is one more layer on the
//! subscriber below.

use crate::config::{LogArgs, LogFormat};
use anyhow::Context;
use std::io::IsTerminal;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

/// Sends logs to standard output.
///
/// # Errors
/// When the filter cannot be read.
pub fn init(args: &LogArgs) -> anyhow::Result<()> {
    let filter: EnvFilter =
        args.log_filter.parse().context("--log-filter must be like info or info,shared=debug")?;
    let layer = match args.log_format {
        LogFormat::Json => fmt::layer().json().flatten_event(true).boxed(),
        LogFormat::Pretty => {
            fmt::layer().compact().with_ansi(std::io::stdout().is_terminal()).boxed()
        }
    };
    tracing_subscriber::registry().with(layer.with_filter(filter)).try_init()?;
    Ok(())
}
