//! Telling the broker: declare, then bind. All of it can be said again.
//!
//! A crash half-way leaves a part declared or bound; whoever comes next does all of it again.

use super::{Binding, Queue, SINGLE_ACTIVE, To, Topology, WEIGHT};
use crate::config::Ordering;
use lapin::options::{
    ExchangeBindOptions, ExchangeDeclareOptions, ExchangeUnbindOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, ExchangeKind};

impl Topology {
    /// Declares exchanges and queues. Declaring what is there already, alike, changes nothing.
    ///
    /// # Errors
    /// 406 where something of that name is there with other properties; the connection's troubles.
    pub async fn declare(&self, channel: &Channel) -> lapin::Result<()> {
        for (name, kind, arguments) in self.exchanges() {
            declare_exchange(channel, &name, kind, arguments).await?;
        }
        for queue in self.queues() {
            let options = QueueDeclareOptions { durable: true, ..Default::default() };
            channel.queue_declare(queue.name.as_str().into(), options, arguments(&queue)).await?;
        }
        Ok(())
    }

    /// Binds them, and leaves what another ordering had bound without anything new: the queue, or the
    /// `stray` shards. To be called after the policies are known to be in force: a process that
    /// will not consume must not turn the bindings back.
    ///
    /// # Errors
    /// As [`Topology::declare`].
    pub async fn bind(&self, channel: &Channel, stray: &[String]) -> lapin::Result<()> {
        for Binding { to, exchange, key } in self.bindings() {
            let (exchange, key) = (exchange.into(), key.into());
            let none = FieldTable::default();
            match to {
                To::Queue(queue) => {
                    let options = QueueBindOptions::default();
                    channel.queue_bind(queue.into(), exchange, key, options, none).await?;
                }
                To::Exchange(name) => {
                    let options = ExchangeBindOptions::default();
                    channel.exchange_bind(name.into(), exchange, key, options, none).await?;
                }
            }
        }
        for shard in stray {
            let (queue, exchange) = (shard.as_str().into(), self.shard_exchange().into());
            channel.queue_unbind(queue, exchange, WEIGHT.into(), FieldTable::default()).await?;
        }
        self.unbind_the_other_ordering(channel).await
    }

    /// Bound first, unbound after: in between a message goes both ways, and the inbox makes that one
    /// effect. The other order would lose it.
    async fn unbind_the_other_ordering(&self, channel: &Channel) -> lapin::Result<()> {
        let (source, key) = (self.names.source.into(), self.names.binding.into());
        let none = FieldTable::default();
        match self.args.ordering {
            Ordering::Gate => {
                let options = ExchangeUnbindOptions::default();
                let shards = self.shard_exchange().into();
                channel.exchange_unbind(shards, source, key, options, none).await
            }
            Ordering::Shards(_) => {
                channel.queue_unbind(self.names.queue.into(), source, key, none).await
            }
        }
    }
}

/// Declares a topic exchange: what a relay publishes to.
///
/// # Errors
/// As [`Topology::declare`].
pub async fn declare_topic(channel: &Channel, name: &str) -> lapin::Result<()> {
    declare_exchange(channel, name, ExchangeKind::Topic, FieldTable::default()).await
}

async fn declare_exchange(
    channel: &Channel,
    name: &str,
    kind: ExchangeKind,
    arguments: FieldTable,
) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel.exchange_declare(name.into(), kind, options, arguments).await
}

fn arguments(queue: &Queue) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    if queue.single_active {
        arguments.insert(SINGLE_ACTIVE.into(), AMQPValue::Boolean(true));
    }
    arguments
}
