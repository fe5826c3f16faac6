//! The test's own hand at the broker: publishing what no service would, looking into queues,
//! listening in.

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicGetOptions, BasicPublishOptions,
    ConfirmSelectOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer};
use std::collections::BTreeMap;

/// One connection and one channel in the test's virtual host.
pub struct Broker {
    connection: Connection,
    /// For whatever a test wants to do itself.
    pub channel: Channel,
}

/// A message as a test sees it.
#[derive(Debug)]
pub struct Seen {
    /// AMQP's message_id, empty where there is none.
    pub message_id: String,
    /// The key that it came with.
    pub routing_key: String,
    /// Its headers, as text.
    pub headers: BTreeMap<String, String>,
    /// Everything else.
    pub properties: BasicProperties,
    /// The body.
    pub body: Vec<u8>,
}

impl Broker {
    /// Connects.
    ///
    /// # Errors
    /// When the broker does not let it.
    pub async fn connect(amqp_url: &str) -> Result<Self> {
        let properties = ConnectionProperties::default().with_connection_name("test".into());
        let connection = Connection::connect(amqp_url, properties).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { connection, channel })
    }

    /// Publishes, and wants it routed and confirmed.
    ///
    /// # Errors
    /// When it is not.
    pub async fn publish(
        &self,
        exchange: &str,
        key: &str,
        properties: BasicProperties,
        body: &[u8],
    ) -> Result<()> {
        let mandatory = BasicPublishOptions { mandatory: true, ..Default::default() };
        let confirm = self
            .channel
            .basic_publish(exchange.into(), key.into(), mandatory, body, properties)
            .await?
            .await?;
        ensure!(confirm.is_ack(), "the broker nacked a publish to {exchange}/{key}");
        ensure!(confirm.take_message().is_none(), "{exchange}/{key} leads nowhere");
        Ok(())
    }

    /// Another channel, for what may close it.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn open_channel(&self) -> Result<Channel> {
        Ok(self.connection.create_channel().await?)
    }

    /// Messages that are ready in a queue. By passive declare: the management API lags by seconds.
    ///
    /// # Errors
    /// When there is no such queue.
    pub async fn depth(&self, queue: &str) -> Result<u32> {
        // A channel of its own: asking for a queue that is not there closes the channel.
        let channel = self.open_channel().await?;
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = channel
            .queue_declare(queue.into(), passive, FieldTable::default())
            .await
            .with_context(|| format!("looking at {queue}"))?;
        Ok(queue.message_count())
    }

    /// Takes the next message out of a queue, if there is one.
    ///
    /// # Errors
    /// When there is no such queue.
    pub async fn take(&self, queue: &str) -> Result<Option<Seen>> {
        let got = self.channel.basic_get(queue.into(), BasicGetOptions::default()).await?;
        let Some(got) = got else { return Ok(None) };
        got.delivery.ack(BasicAckOptions::default()).await?;
        Ok(Some(Seen::from(got.delivery)))
    }

    /// Looks at the messages that are ready in a queue, at most this many, and gives them all back.
    ///
    /// # Errors
    /// When there is no such queue, or it can only be consumed (single active consumer).
    pub async fn peek(&self, queue: &str) -> Result<Vec<Seen>> {
        const MOST: usize = 1000;
        // A channel of its own: closing it gives everything back.
        let channel = self.open_channel().await?;
        let mut seen = Vec::new();
        while seen.len() < MOST
            && let Some(got) = channel.basic_get(queue.into(), BasicGetOptions::default()).await?
        {
            seen.push(Seen::from(got.delivery));
        }
        channel.close(200, "looked".into()).await?;
        Ok(seen)
    }

    /// Declares a queue of the test's own and binds it. It is a subscriber like another: with it, a
    /// message that would have been unroutable is not.
    ///
    /// # Errors
    /// When the exchange does not exist.
    pub async fn bind_queue(&self, queue: &str, exchange: &str, key: &str) -> Result<()> {
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        self.channel.queue_declare(queue.into(), durable, FieldTable::default()).await?;
        self.channel
            .queue_bind(
                queue.into(),
                exchange.into(),
                key.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await?;
        Ok(())
    }

    /// Deletes a queue and its bindings.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn delete_queue(&self, queue: &str) -> Result<()> {
        self.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        Ok(())
    }

    /// Listens in on exchanges: everything published to them from now on.
    ///
    /// # Errors
    /// When an exchange does not exist.
    pub async fn tap(&self, exchanges: &[&str]) -> Result<Tap> {
        for exchange in exchanges {
            self.bind_queue("tap", exchange, "#").await?;
        }
        let channel = self.open_channel().await?;
        let consumer = channel
            .basic_consume(
                "tap".into(),
                "tap".into(),
                BasicConsumeOptions { no_ack: true, ..Default::default() },
                FieldTable::default(),
            )
            .await?;
        Ok(Tap(consumer))
    }
}

/// See [`Broker::tap`].
pub struct Tap(Consumer);

impl Tap {
    /// The next message.
    ///
    /// # Errors
    /// When none comes.
    pub async fn next(&mut self) -> Result<Seen> {
        let next = tokio::time::timeout(crate::wait::DEADLINE, self.0.next()).await;
        let delivery = next.context("nothing was published")?.context("the tap was closed")??;
        Ok(Seen::from(delivery))
    }
}

impl From<Delivery> for Seen {
    fn from(delivery: Delivery) -> Self {
        let headers = delivery.properties.headers().clone().unwrap_or_default();
        let text = |value: &AMQPValue| match value {
            AMQPValue::LongString(text) => text.to_string(),
            AMQPValue::LongLongInt(n) => n.to_string(),
            other => format!("{other:?}"),
        };
        let id = delivery.properties.message_id().as_ref();
        Self {
            message_id: id.map(ToString::to_string).unwrap_or_default(),
            routing_key: delivery.routing_key.to_string(),
            headers: headers
                .inner()
                .iter()
                .map(|(name, value)| (name.to_string(), text(value)))
                .collect(),
            properties: delivery.properties,
            body: delivery.data,
        }
    }
}
