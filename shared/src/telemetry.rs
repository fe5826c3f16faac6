//! Logs: a service's to standard output, those of a command to standard error, as its standard output
//! is what was asked for.
//!
//! Nothing is exported over OTLP. The message path carries W3C trace context end to end
//! ([`crate::trace_context`]) and counts through the OpenTelemetry API ([`crate::metrics`]); an
//! exporter of spans would be one more layer on the subscriber below.

use crate::config::{LogArgs, LogFormat};
use anyhow::Context;
use std::io::{self, IsTerminal};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

/// Where logs go.
#[derive(Clone, Copy)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Sends logs there from now on.
///
/// # Errors
/// When the filter cannot be read.
pub fn init(args: &LogArgs, stream: Stream) -> anyhow::Result<()> {
    let filter: EnvFilter =
        args.log_filter.parse().context("--log-filter must be like info or info,shared=debug")?;
    let (writer, terminal) = match stream {
        Stream::Out => (BoxMakeWriter::new(io::stdout), io::stdout().is_terminal()),
        Stream::Err => (BoxMakeWriter::new(io::stderr), io::stderr().is_terminal()),
    };
    let layer = fmt::layer().with_writer(writer);
    let layer = match args.log_format {
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
        LogFormat::Pretty => layer.compact().with_ansi(terminal).boxed(),
    };
    tracing_subscriber::registry().with(layer.with_filter(filter)).try_init()?;
    Ok(())
}
