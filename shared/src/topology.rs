//! The queues and exchanges around one consumer, and their names.
//!
//! ```text
//!  source exchange (topic) ─binding─► Q ──reject, limit──► Q.dlx ──Q.failed──► Q.parking
//!                                     ▲
//!                                     └─ default exchange, key Q ◄─TTL─ Q.retry.5s … ◄─ Q.retry
//! ```
//!
//! Everything is durable, every queue a quorum queue, and declared again after every reconnect.
//! Time-to-live, limits and dead lettering are not arguments of the queues but policies
//! ([`crate::policies`]): they can be changed while messages are in the queues.
//!
//! An expired retry goes back to Q through the default exchange, not through the source exchange:
//! that would hand it to every other subscriber of the event again, under a key that may not be its
//! own.
//!
//! With `--ordering shards=N` an exchange of ours stands between the source and N queues. It hashes
//! the aggregate's id, so all events of an aggregate are in one queue, whose broker lets one consumer
//! at a time take from it:
//!
//! ```text
//!  source exchange ─binding─► Q.shards (x-consistent-hash) ─► Q.shard.0 … Q.shard.N-1
//!                                     ▲
//!                                     └─TTL─ Q.retry.5s … ◄─ Q.retry
//! ```
//!
//! When the ordering is changed, nothing is left behind: Q is still declared and consumed, bound to
//! nothing; and so are shards of another number, which the management API names.
//!
//! With `--retry-backend native` there are no retry queues: a failed message waits in the queue that
//! it came from, as that queue's policy says.

mod declare;

pub use declare::declare_topic;

use crate::config::{Delay, Ordering, RetryBackend, TopologyArgs};
use lapin::ExchangeKind;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use std::fmt;

/// Redeliveries after which the broker itself parks a message: the net for messages that kill the
/// process before it can decide anything.
pub const DELIVERY_LIMIT: u64 = 8;

/// The same net where every retry is a redelivery (`--retry-backend native`): it must be wider than any
/// failing message's budget.
pub const NATIVE_DELIVERY_LIMIT: u64 = 48;

/// The header that an aggregate's shard is chosen by. The relay sets it on every event.
pub const AGGREGATE_ID: &str = "x-aggregate-id";

/// The names that a service fixes.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// The exchange this service publishes to.
    pub exchange: &'static str,
    /// The exchange it listens to.
    pub source: &'static str,
    /// Which of the source's routing keys it takes.
    pub binding: &'static str,
    /// Its queue.
    pub queue: &'static str,
}

/// [`Names`] and what is configuration about them.
#[derive(Clone)]
pub struct Topology {
    /// The fixed names.
    pub names: Names,
    /// Delays, lengths, retention.
    pub args: TopologyArgs,
}

/// A queue that must be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Its name.
    pub name: String,
    /// Whether the broker lets only one consumer at a time take from it.
    pub single_active: bool,
}

/// A queue to consume from, and by how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Its name.
    pub queue: String,
    /// Workers on it.
    pub workers: u16,
}

impl Topology {
    /// Checks what clap cannot: that the delays are a ladder.
    ///
    /// # Errors
    /// When there is no delay, or they do not grow.
    pub fn new(names: Names, args: TopologyArgs) -> anyhow::Result<Self> {
        anyhow::ensure!(!args.retry_delays.is_empty(), "--retry-delays needs at least one delay");
        anyhow::ensure!(
            args.retry_delays.is_sorted_by(|a, b| a.duration() < b.duration()),
            "--retry-delays must grow from one to the next, like 5s,30s,5m"
        );
        Ok(Self { names, args })
    }

    /// The direct exchange in front of the retry queues; its keys are the delays.
    #[must_use]
    pub fn retry_exchange(&self) -> String {
        format!("{}.retry", self.names.queue)
    }

    /// The queue in which messages wait for `delay`.
    #[must_use]
    pub fn retry_queue(&self, delay: Delay) -> String {
        format!("{}.retry.{delay}", self.names.queue)
    }

    /// The direct exchange in front of the parking queue.
    #[must_use]
    pub fn dead_letter_exchange(&self) -> String {
        format!("{}.dlx", self.names.queue)
    }

    /// The one key of [`Topology::dead_letter_exchange`].
    #[must_use]
    pub fn dead_letter_key(&self) -> String {
        format!("{}.failed", self.names.queue)
    }

    /// Where messages wait for a person.
    #[must_use]
    pub fn parking_queue(&self) -> String {
        format!("{}.parking", self.names.queue)
    }

    /// The exchange that shares the aggregates among the shards.
    #[must_use]
    pub fn shard_exchange(&self) -> String {
        format!("{}.shards", self.names.queue)
    }

    /// What the names of all shards begin with, those of another number of shards included.
    #[must_use]
    pub fn shard_prefix(&self) -> String {
        format!("{}.shard.", self.names.queue)
    }

    /// Its shards, of which there are none where versions alone keep the order.
    #[must_use]
    pub fn shards(&self) -> Vec<String> {
        let shards = match self.args.ordering {
            Ordering::Gate => 0,
            Ordering::Shards(shards) => shards.get(),
        };
        (0..shards).map(|number| format!("{}{number}", self.shard_prefix())).collect()
    }

    /// By which exchange and key a message comes back to this consumer and to no other: from a retry
    /// queue, from parking.
    #[must_use]
    pub fn entrance(&self) -> (String, String) {
        let exchange = match self.args.ordering {
            Ordering::Gate => String::new(),
            Ordering::Shards(_) => self.shard_exchange(),
        };
        (exchange, self.names.queue.to_owned())
    }

    /// What to consume from: Q, by `workers` or, where shards have taken its place, by one; its
    /// shards, and `stray` ones of another number, by one each.
    #[must_use]
    pub fn lanes(&self, workers: u16, stray: &[String]) -> Vec<Lane> {
        let shards = self.shards();
        let on_queue = if shards.is_empty() { workers } else { 1 };
        let mut lanes = vec![Lane { queue: self.names.queue.to_owned(), workers: on_queue }];
        let shards = shards.into_iter().chain(stray.iter().cloned());
        lanes.extend(shards.map(|queue| Lane { queue, workers: 1 }));
        lanes
    }

    /// The delays that have a queue each.
    #[must_use]
    pub fn buckets(&self) -> &[Delay] {
        match self.args.retry_backend {
            RetryBackend::Buckets => &self.args.retry_delays,
            RetryBackend::Native => &[],
        }
    }

    /// All queues: Q, its shards, its retry queues, its parking queue.
    #[must_use]
    pub fn queues(&self) -> Vec<Queue> {
        let plain = |name| Queue { name, single_active: false };
        let mut queues = vec![plain(self.names.queue.to_owned())];
        queues.extend(self.shards().into_iter().map(|name| Queue { name, single_active: true }));
        queues.extend(self.buckets().iter().map(|delay| plain(self.retry_queue(*delay))));
        queues.push(plain(self.parking_queue()));
        queues
    }

    fn exchanges(&self) -> Vec<(String, ExchangeKind, FieldTable)> {
        let plain = |name, kind| (name, kind, FieldTable::default());
        let mut exchanges = vec![
            plain(self.names.exchange.to_owned(), ExchangeKind::Topic),
            plain(self.names.source.to_owned(), ExchangeKind::Topic),
            plain(self.dead_letter_exchange(), ExchangeKind::Direct),
        ];
        if !self.buckets().is_empty() {
            exchanges.push(plain(self.retry_exchange(), ExchangeKind::Direct));
        }
        if self.args.ordering != Ordering::Gate {
            // Not x-modulus-hash: that hashes the routing key, so the type of an event would choose
            // its shard, and the events of one order would be spread over several.
            let kind = ExchangeKind::Custom("x-consistent-hash".into());
            let mut arguments = FieldTable::default();
            arguments.insert("hash-header".into(), AMQPValue::LongString(AGGREGATE_ID.into()));
            exchanges.push((self.shard_exchange(), kind, arguments));
        }
        exchanges
    }

    fn bindings(&self) -> Vec<Binding> {
        let names = self.names;
        let bind = |to, exchange: String, key: String| Binding { to, exchange, key };
        let shards = self.shards();
        let entrance = match self.args.ordering {
            Ordering::Gate => To::Queue(names.queue.into()),
            Ordering::Shards(_) => To::Exchange(self.shard_exchange()),
        };
        let mut bindings = vec![
            bind(entrance, names.source.into(), names.binding.into()),
            bind(
                To::Queue(self.parking_queue()),
                self.dead_letter_exchange(),
                self.dead_letter_key(),
            ),
        ];
        bindings.extend(
            shards
                .into_iter()
                .map(|name| bind(To::Queue(name), self.shard_exchange(), WEIGHT.into())),
        );
        bindings.extend(self.buckets().iter().map(|delay| {
            let queue = To::Queue(self.retry_queue(*delay));
            bind(queue, self.retry_exchange(), delay.to_string())
        }));
        bindings
    }
}

enum To {
    Queue(String),
    Exchange(String),
}

struct Binding {
    to: To,
    exchange: String,
    key: String,
}

/// The key that a shard is bound with, which is its weight: all alike.
const WEIGHT: &str = "1";

/// The argument of a queue with one active consumer. An argument, because no policy can say it.
pub const SINGLE_ACTIVE: &str = "x-single-active-consumer";

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, kind, _) in self.exchanges() {
            let kind = match kind {
                ExchangeKind::Custom(kind) => kind,
                other => format!("{other:?}").to_lowercase(),
            };
            writeln!(f, "exchange {name} ({kind})")?;
        }
        for Queue { name, single_active } in self.queues() {
            let active = if single_active { ", single active consumer" } else { "" };
            writeln!(f, "queue {name} (quorum, durable{active})")?;
        }
        for Binding { to: To::Queue(to) | To::Exchange(to), exchange, key } in self.bindings() {
            writeln!(f, "binding {exchange} -{key}-> {to}")?;
        }
        Ok(())
    }
}

/// A short string out of text from outside; AMQP allows 255 bytes.
///
/// # Errors
/// Says which text was too long for what.
pub fn short_string(what: &str, text: &str) -> Result<ShortString, String> {
    ShortString::try_new(text)
        .map_err(|_| format!("{what} is {} bytes long, AMQP allows 255", text.len()))
}
