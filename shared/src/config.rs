//! Configuration: flags, each with an environment variable behind it. Every field says its unit and
//! what it is for; the defaults are safe to run with. What has no safe default (addresses, secrets)
//! has none. Values that are each all right and do not work together are refused at start
//! (`config/checks.rs`).
//!
//! Values that carry a password are never printed: no `Debug`, and `--help` hides them.

mod checks;
mod values;

pub use values::{Delay, Ordering, duration};

use crate::backoff::Backoff;
use crate::retry::Budget;
use clap::{Args, ValueEnum};
use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;
use values::{share, ttl};

/// Where PostgreSQL is.
#[derive(Args, Clone)]
pub struct DatabaseArgs {
    /// This service's own database: `postgres://user:password@host:port/database`
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    pub database_url: String,
    /// Most connections in the pool that HTTP handlers and consumers share. The relay has one more
    /// of its own, and so has retention while it prunes
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
    /// Where a failed message waits: in queues of this service's own, or in its queue itself, which
    /// needs RabbitMQ 4.3. There the wait grows by the first of the delays with each attempt, up to the
    /// last of them
    #[arg(long, env = "RETRY_BACKEND", default_value = "buckets")]
    pub retry_backend: RetryBackend,
    /// What keeps the events of one aggregate in order: `gate`, where a later one waits for an earlier
    /// one by its version; or `shards=N`, where N queues with one active consumer each share the
    /// aggregates among them, and a failing message holds up its shard
    #[arg(long, env = "ORDERING", default_value = "gate")]
    pub ordering: Ordering,
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
    /// Workers, each with a channel of its own and one message in hand. A shard has one
    #[arg(long, env = "CONSUMER_WORKERS", default_value = "4")]
    pub consumer_workers: NonZeroU16,
    /// Messages that the broker hands to a worker ahead of time. 0 would mean "all of them", and is
    /// refused
    #[arg(long, env = "CONSUMER_PREFETCH", default_value = "16")]
    pub consumer_prefetch: NonZeroU16,
    /// Bound on handling one message, COMMIT included
    #[arg(long, env = "CONSUMER_HANDLE_TIMEOUT", default_value = "10s", value_parser = duration)]
    pub consumer_handle_timeout: Duration,
    /// Messages in a row that fail because the database is away, before messages are left alone until
    /// it is back
    #[arg(long, env = "OUTAGE_AFTER", default_value = "5")]
    pub outage_after: NonZeroU32,
    /// How often the database is asked in an outage whether it is back
    #[arg(long, env = "OUTAGE_PROBE_INTERVAL", default_value = "1s", value_parser = duration)]
    pub outage_probe_interval: Duration,
    /// How often the queues' effective policies are checked again, and how long a worker hears nothing
    /// before it subscribes anew
    #[arg(long, env = "TOPOLOGY_CHECK_INTERVAL", default_value = "30s", value_parser = duration)]
    pub topology_check_interval: Duration,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub budget: BudgetArgs,
}

impl ConsumerArgs {
    /// Failures in a row that begin an outage. In a shard they may all be one message's, which must
    /// not have used up its attempts before.
    #[must_use]
    pub fn outage_after(&self, topology: &TopologyArgs) -> u32 {
        let after = self.outage_after.get();
        match topology.ordering {
            Ordering::Gate => after,
            Ordering::Shards(_) => {
                after.min(self.budget.retry_attempts_transient.get().saturating_sub(1)).max(1)
            }
        }
    }

    /// What a failing message gets.
    #[must_use]
    pub fn budget(&self, topology: &TopologyArgs) -> Budget {
        Budget {
            limits: self.budget.clone(),
            delays: topology.retry_delays.clone(),
            backend: topology.retry_backend,
        }
    }
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
}

impl RelayArgs {
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

/// How long what is dealt with is remembered: see [`crate::retention`].
#[derive(Args, Clone)]
pub struct RetentionArgs {
    /// How often what is too old is looked for
    #[arg(long, env = "RETENTION_INTERVAL", default_value = "1m", value_parser = duration)]
    pub retention_interval: Duration,
    /// How long published events stay in the outbox, for people to look at
    #[arg(long, env = "OUTBOX_RETENTION", default_value = "7d", value_parser = duration)]
    pub outbox_retention: Duration,
    /// How long the inbox remembers a message: at least as long as the message can come back, which
    /// is RETRY_MAX_AGE + PARKING_RETENTION + REDRIVE_HORIZON
    #[arg(long, env = "INBOX_RETENTION", default_value = "30d", value_parser = duration)]
    pub inbox_retention: Duration,
    /// How long after a message was parked again people may still want to redrive it. Not enforced; it
    /// counts for INBOX_RETENTION
    #[arg(long, env = "REDRIVE_HORIZON", default_value = "14d", value_parser = duration)]
    pub redrive_horizon: Duration,
}

/// The operations port: health, metrics, and what only an operator may do.
#[derive(Args, Clone)]
pub struct OpsArgs {
    /// Bearer token for operations that change something or show messages. Without one they are
    /// refused
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
    /// After SIGTERM: how long what is in hand may take to finish. Longer than one message, one request
    /// or connecting to the broker may take
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

/// Where failed messages wait for their next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RetryBackend {
    /// In retry queues, one for each delay.
    Buckets,
    /// In the queue that they came from, RabbitMQ 4.3 and later.
    Native,
}
