//! Configuration: flags, each with an environment variable behind it. Every field says its unit and
//! what it is for; the defaults are safe to run with. What has no safe default (addresses, secrets)
//! has none.
//!
//! Values that carry a password are never printed: no `Debug`, and `--help` hides them.

use crate::backoff::Backoff;
use clap::{Args, ValueEnum};
use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::str::FromStr;
use std::time::Duration;

/// A duration. Nothing here means anything at zero: a wait of zero is a hot loop, a bound of zero
/// forbids everything.
fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write 300ms, 5s, 5m or 7d"))?;
    if duration.is_zero() { Err("must be longer than 0".into()) } else { Ok(duration) }
}

/// A duration that RabbitMQ takes as a message-ttl: whole milliseconds, fewer than 2^32 of them.
fn ttl(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    let whole_millis = duration.subsec_nanos().is_multiple_of(1_000_000);
    if whole_millis && duration.as_millis() <= u128::from(u32::MAX) {
        Ok(duration)
    } else {
        Err("must be whole milliseconds, and at most 49 days".into())
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1".into()),
    }
}

/// Where PostgreSQL is.
#[derive(Args, Clone)]
pub struct DatabaseArgs {
    /// This service's own database: `postgres://user:password@host:port/database`
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    pub database_url: String,
    /// Most connections in the pool that HTTP handlers and consumers share. The relay has one more
    /// of its own
    #[arg(long, env = "DATABASE_POOL_SIZE", default_value = "12")]
    pub database_pool_size: NonZeroU32,
    /// How long a request or a message waits for a connection before it fails as "try again later"
    #[arg(long, env = "DATABASE_ACQUIRE_TIMEOUT", default_value = "3s", value_parser = duration)]
    pub database_acquire_timeout: Duration,
}

/// Where RabbitMQ speaks AMQP.
#[derive(Args, Clone)]
pub struct BrokerArgs {
    /// `amqp://user:password@host:port/vhost`
    #[arg(long, env = "AMQP_URL", hide_env_values = true)]
    pub amqp_url: String,
    /// Bound on connecting, logging in included: a frozen broker accepts connections and then says
    /// nothing
    #[arg(long, env = "AMQP_CONNECT_TIMEOUT", default_value = "5s", value_parser = duration)]
    pub amqp_connect_timeout: Duration,
    /// A broker that is silent for two of these is taken for dead
    #[arg(long, env = "AMQP_HEARTBEAT", default_value = "10s", value_parser = duration)]
    pub amqp_heartbeat: Duration,
}

/// Where RabbitMQ's management API is: policies are read, and by `topology apply` set, there.
#[derive(Args, Clone)]
pub struct ManagementArgs {
    /// `http://user:password@host:port`
    #[arg(long, env = "RABBITMQ_MANAGEMENT_URL", hide_env_values = true)]
    pub management_url: String,
}

/// The shape of the retry and parking queues around the consumer's queue.
#[derive(Args, Clone)]
pub struct TopologyArgs {
    /// The delays between attempts. Each has a queue of its own, named after it; to change a delay
    /// is to use another queue
    #[arg(long, env = "RETRY_DELAYS", default_value = "5s,30s,5m", value_delimiter = ',')]
    pub retry_delays: Vec<Delay>,
    /// Most messages in the consumer's queue and in each retry queue; beyond it publishes are
    /// refused and the messages stay with whoever owns them
    #[arg(long, env = "QUEUE_MAX_LENGTH", default_value = "1000000")]
    pub queue_max_length: NonZeroU32,
    /// How long a parked message waits for somebody to look at it before the broker drops it
    #[arg(long, env = "PARKING_RETENTION", default_value = "14d", value_parser = ttl)]
    pub parking_retention: Duration,
}

/// How the consumer works.
#[derive(Args, Clone)]
pub struct ConsumerArgs {
    /// Workers, each with a channel of its own and one message in hand
    #[arg(long, env = "CONSUMER_WORKERS", default_value = "4")]
    pub consumer_workers: NonZeroU16,
    /// Messages that the broker hands to a worker ahead of time. 0 would mean "all of them", and is
    /// refused
    #[arg(long, env = "CONSUMER_PREFETCH", default_value = "16")]
    pub consumer_prefetch: NonZeroU16,
    /// Bound on handling one message, COMMIT included
    #[arg(long, env = "CONSUMER_HANDLE_TIMEOUT", default_value = "10s", value_parser = duration)]
    pub consumer_handle_timeout: Duration,
    /// How often the queues' effective policies are checked again
    #[arg(long, env = "TOPOLOGY_CHECK_INTERVAL", default_value = "30s", value_parser = duration)]
    pub topology_check_interval: Duration,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub budget: BudgetArgs,
}

/// How long a failing message is worth trying: see [`crate::retry`].
#[derive(Args, Clone)]
pub struct BudgetArgs {
    /// Attempts for a failure that time may mend, the first one included
    #[arg(long, env = "RETRY_ATTEMPTS_TRANSIENT", default_value = "4")]
    pub retry_attempts_transient: NonZeroU32,
    /// Attempts for a failure of unknown kind, the first one included
    #[arg(long, env = "RETRY_ATTEMPTS_UNKNOWN", default_value = "2")]
    pub retry_attempts_unknown: NonZeroU32,
    /// How long after `occurred_at` a missing predecessor may still arrive
    #[arg(long, env = "RETRY_NOT_YET_DEADLINE", default_value = "15m", value_parser = duration)]
    pub retry_not_yet_deadline: Duration,
    /// A failing message older than this (from `occurred_at`) is not retried any more
    #[arg(long, env = "RETRY_MAX_AGE", default_value = "1d", value_parser = duration)]
    pub retry_max_age: Duration,
    /// Share of the retries (0 to 1) that take a neighbouring delay, so that what failed together
    /// does not come back together
    #[arg(long, env = "RETRY_JITTER_SHARE", default_value = "0.1", value_parser = share)]
    pub retry_jitter_share: f64,
}

/// How the relay works.
#[derive(Args, Clone)]
pub struct RelayArgs {
    /// Most rows of one pipelined batch, and so most publishes in flight
    #[arg(long, env = "RELAY_BATCH", default_value = "500")]
    pub relay_batch: NonZeroU16,
    /// How often the outbox is looked at when nobody wakes the relay
    #[arg(long, env = "RELAY_POLL", default_value = "500ms", value_parser = duration)]
    pub relay_poll: Duration,
    /// How often a standby relay asks whether the active one is gone
    #[arg(long, env = "RELAY_STANDBY_POLL", default_value = "1s", value_parser = duration)]
    pub relay_standby_poll: Duration,
    /// A relay that has been silent towards the database for this long has lost its lead to a
    /// standby: it is frozen, or cut off
    #[arg(long, env = "RELAY_LEASE", default_value = "30s", value_parser = duration)]
    pub relay_lease: Duration,
    /// Refusals of one row (returned, nacked) before it is parked in the table
    #[arg(long, env = "RELAY_ROW_ATTEMPTS", default_value = "12")]
    pub relay_row_attempts: NonZeroU32,
    /// The first wait of a refused row; it doubles from here, jittered
    #[arg(long, env = "RELAY_ROW_BACKOFF_MIN", default_value = "1s", value_parser = duration)]
    pub relay_row_backoff_min: Duration,
    /// The longest wait of a refused row
    #[arg(long, env = "RELAY_ROW_BACKOFF_MAX", default_value = "5m", value_parser = duration)]
    pub relay_row_backoff_max: Duration,
    /// How long published rows are kept for people to look at
    #[arg(long, env = "OUTBOX_RETENTION", default_value = "7d", value_parser = duration)]
    pub outbox_retention: Duration,
}

impl RelayArgs {
    /// Checks what no field can alone: that a healthy relay is never silent for its whole lease.
    ///
    /// # Errors
    /// When polls or confirms may take longer.
    pub fn check(&self, confirm: &ConfirmArgs) -> anyhow::Result<()> {
        let silent = self.relay_poll.max(self.relay_standby_poll).max(confirm.confirm_timeout);
        anyhow::ensure!(
            silent < self.relay_lease,
            "--relay-lease must be longer than --relay-poll, --relay-standby-poll and \
             --confirm-timeout: a relay is silent for as long as the longest of them, {silent:?}"
        );
        Ok(())
    }

    /// The wait of a refused row.
    #[must_use]
    pub fn row_backoff(&self) -> Backoff {
        Backoff { min: self.relay_row_backoff_min, max: self.relay_row_backoff_max }
    }
}

/// Confirms: for the relay, and for what the consumer publishes.
#[derive(Args, Clone)]
pub struct ConfirmArgs {
    /// How long a publish waits for the broker's word before the channel is given up
    #[arg(long, env = "CONFIRM_TIMEOUT", default_value = "5s", value_parser = duration)]
    pub confirm_timeout: Duration,
}

/// The operations port: health, metrics, and what only an operator may do.
#[derive(Args, Clone)]
pub struct OpsArgs {
    /// Bearer token for operations that change something. Without one they are refused
    #[arg(long, env = "OPERATIONS_TOKEN", hide_env_values = true)]
    pub operations_token: Option<String>,
    /// Readiness fails once the oldest unpublished event is older than this
    #[arg(long, env = "READY_RELAY_LAG", default_value = "1m", value_parser = duration)]
    pub ready_relay_lag: Duration,
}

/// How the process as a whole behaves.
#[derive(Args, Clone)]
pub struct ProcessArgs {
    /// Which parts of the service this process runs, so that they scale apart
    #[arg(long, env = "ROLES", default_value = "http,relay,consumer", value_delimiter = ',')]
    pub roles: Vec<Role>,
    /// After SIGTERM: how long what is in hand may take to finish
    #[arg(long, env = "SHUTDOWN_DEADLINE", default_value = "25s", value_parser = duration)]
    pub shutdown_deadline: Duration,
}

/// A part of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// The API.
    Http,
    /// Outbox → broker.
    Relay,
    /// Queue → database.
    Consumer,
}

/// How logs are written: in one of two forms.
#[derive(Args, Clone)]
pub struct LogArgs {
    /// One JSON object a line for machines, or text for people
    #[arg(long, env = "LOG_FORMAT", default_value = "pretty", global = true)]
    pub log_format: LogFormat,
    /// What is logged, in the syntax of tracing-subscriber's `EnvFilter`. The AMQP client is silent:
    /// what it would say is logged where it is handled
    #[arg(
        long,
        env = "LOG_FILTER",
        default_value = "info,lapin=off,sqlx::postgres::notice=warn",
        global = true
    )]
    pub log_filter: String,
}

/// The two forms of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Pretty,
}

/// A retry delay. Its text is part of a queue's name: `5s`, `30s`, `5m`, `300ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay(Duration);

impl Delay {
    /// How long.
    #[must_use]
    pub fn duration(self) -> Duration {
        self.0
    }

    /// How long, as a policy says it: whole milliseconds.
    #[must_use]
    pub fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        ttl(text.trim()).map(Self)
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&humantime::format_duration(self.0).to_string().replace(' ', ""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_written_as_it_is_read() {
        for text in ["5s", "30s", "5m", "300ms", "1m30s"] {
            let delay: Delay = text.parse().expect("a delay");
            assert_eq!(delay.to_string(), text);
        }
        for bad in ["0s", "5", "soon", "1us", "60d", ""] {
            assert!(bad.parse::<Delay>().is_err(), "{bad:?}");
        }
    }
}
