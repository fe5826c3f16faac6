//! Logs, to standard output.
//!
//! Nothing is exported over OTLP. The message path carries W3C trace context end to end
//! ([`crate::trace_context`]) and counts through the OpenTelemetry API ([`crate::metrics`]); an
//! exporter of spans would be one more layer on the subscriber below.

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
