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

use crate::config::{Delay, TopologyArgs};
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, ExchangeKind};
use std::fmt;

/// Redeliveries after which the broker itself parks a message: the net for messages that kill the
/// process before it can decide anything.
pub const DELIVERY_LIMIT: u64 = 8;

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

    /// How a parked message gets back into Q and into no other queue: exchange and routing key.
    #[must_use]
    pub fn entrance(&self) -> (String, String) {
        (String::new(), self.names.queue.to_owned())
    }

    /// All queues: Q, its retry queues, its parking queue.
    #[must_use]
    pub fn queues(&self) -> Vec<String> {
        let mut queues = vec![self.names.queue.to_owned()];
        queues.extend(self.args.retry_delays.iter().map(|delay| self.retry_queue(*delay)));
        queues.push(self.parking_queue());
        queues
    }

    /// Declares all of it. Declaring what is there already, alike, changes nothing.
    ///
    /// # Errors
    /// 406 where something of that name is there with other properties; the connection's troubles.
    pub async fn declare(&self, channel: &Channel) -> lapin::Result<()> {
        declare_topic(channel, self.names.exchange).await?;
        declare_topic(channel, self.names.source).await?;
        for exchange in [self.retry_exchange(), self.dead_letter_exchange()] {
            declare_exchange(channel, &exchange, ExchangeKind::Direct).await?;
        }
        for queue in self.queues() {
            let options = QueueDeclareOptions { durable: true, ..Default::default() };
            channel.queue_declare(queue.into(), options, quorum()).await?;
        }
        for Binding { queue, exchange, key } in self.bindings() {
            channel
                .queue_bind(
                    queue.into(),
                    exchange.into(),
                    key.into(),
                    QueueBindOptions::default(),
                    FieldTable::default(),
                )
                .await?;
        }
        Ok(())
    }

    fn bindings(&self) -> Vec<Binding> {
        let names = self.names;
        let mut bindings = vec![
            Binding {
                queue: names.queue.into(),
                exchange: names.source.into(),
                key: names.binding.into(),
            },
            Binding {
                queue: self.parking_queue(),
                exchange: self.dead_letter_exchange(),
                key: self.dead_letter_key(),
            },
        ];
        bindings.extend(self.args.retry_delays.iter().map(|delay| Binding {
            queue: self.retry_queue(*delay),
            exchange: self.retry_exchange(),
            key: delay.to_string(),
        }));
        bindings
    }
}

struct Binding {
    queue: String,
    exchange: String,
    key: String,
}

/// Declares a topic exchange: what a relay publishes to.
///
/// # Errors
/// As [`Topology::declare`].
pub async fn declare_topic(channel: &Channel, name: &str) -> lapin::Result<()> {
    declare_exchange(channel, name, ExchangeKind::Topic).await
}

async fn declare_exchange(channel: &Channel, name: &str, kind: ExchangeKind) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await
}

fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "exchange {} (topic)", self.names.exchange)?;
        writeln!(f, "exchange {} (topic)", self.names.source)?;
        writeln!(f, "exchange {} (direct)", self.retry_exchange())?;
        writeln!(f, "exchange {} (direct)", self.dead_letter_exchange())?;
        for queue in self.queues() {
            writeln!(f, "queue {queue} (quorum, durable)")?;
        }
        for Binding { queue, exchange, key } in self.bindings() {
            writeln!(f, "binding {exchange} -{key}-> {queue}")?;
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
