//! The parking queue, looked at: each message is taken in turn without an ack and held, so that the
//! next one comes; at the end all are given back.
//!
//! A crash here gives them back too, as the broker sees the connection end. Neither can lose a
//! message: a look ends with a nack, which RabbitMQ 4 does not count toward a delivery limit,
//! and the parking queue's policy has none anyway (before 4.0 none is the default).
//!
//! While somebody looks, nobody else sees what is held: a second look finds less, or nothing.

use super::filter::Filter;
use super::parked::Parked;
use super::plan::{MOST_HELD_BYTES, was_there};
use crate::config::RetryBackend;
use crate::connection::{self, Connector, bounded};
use crate::incoming::Incoming;
use chrono::{DateTime, Utc};
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicNackOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection};
use std::time::Instant;
use tokio_util::sync::CancellationToken;

/// The parking queue, and what of it is held.
pub struct Lot {
    connection: Connection,
    channel: Channel,
    queue: String,
    /// How many messages were ready when it was opened: nobody looks at more.
    ready: u32,
    opened_at: DateTime<Utc>,
}

/// What to look for, and how long.
pub struct Search<'a> {
    /// Which messages are meant.
    pub filter: &'a Filter,
    /// How many of them to keep. The others are counted.
    pub keep: usize,
    /// Whether what was parked after the beginning is left out.
    pub snapshot: bool,
    /// When to stop looking, whatever is left.
    pub until: Option<Instant>,
    /// Stops it too.
    pub stop: &'a CancellationToken,
}

/// What a look has found.
pub struct Found {
    /// The first of those that are meant, in the order of parking.
    pub messages: Vec<Parked>,
    /// How many are meant.
    pub matched: u32,
    /// How many were looked at.
    pub looked_at: u32,
    /// How many were there at the beginning, those that somebody else holds excepted.
    pub ready: u32,
}

impl Lot {
    /// Connects, and counts what is there.
    ///
    /// # Errors
    /// When the broker is not reached, or the queue is not there.
    pub async fn open(connector: &Connector, queue: String) -> anyhow::Result<Self> {
        let connection = connector.connect().await?;
        let opened = bounded("looking for the parking queue (`topology apply` makes it)", async {
            let channel = connection.create_channel().await?;
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            let declared =
                channel.queue_declare(queue.as_str().into(), passive, FieldTable::default());
            let ready = declared.await?.message_count();
            Ok((channel, ready))
        });
        match opened.await {
            Ok((channel, ready)) => {
                Ok(Self { connection, channel, queue, ready, opened_at: Utc::now() })
            }
            Err(error) => {
                connection::close(&connection).await;
                Err(error)
            }
        }
    }

    /// Looks at every message once, and holds it.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn look(&mut self, search: Search<'_>) -> anyhow::Result<Found> {
        let mut found = Found { messages: Vec::new(), matched: 0, looked_at: 0, ready: self.ready };
        let mut bytes = 0;
        let late = || search.until.is_some_and(|until| Instant::now() >= until);
        while found.looked_at < self.ready && !search.stop.is_cancelled() && !late() {
            let options = BasicGetOptions { no_ack: false };
            let get = self.channel.basic_get(self.queue.as_str().into(), options);
            // Somebody else may have taken some of them in the meantime.
            let Some(got) = bounded("looking at a parked message", get).await? else { break };
            found.looked_at += 1;
            // Its attempts are in the headers, wherever it waited between them.
            let parked = Parked::read(Incoming::new(got.delivery, RetryBackend::Buckets));
            let about = &parked.about;
            let there = !search.snapshot || was_there(about.parked_at, self.opened_at);
            if there && search.filter.fits(about) {
                found.matched += 1;
                // Held at the broker either way; kept here as far as there is room.
                if found.messages.len() < search.keep && bytes < MOST_HELD_BYTES {
                    bytes += about.bytes;
                    found.messages.push(parked);
                }
            }
        }
        Ok(found)
    }

    /// Lets the broker forget a message that has another owner now, or shall have none.
    ///
    /// # Errors
    /// When the channel is gone: the message is parked as before.
    pub async fn let_go(&self, parked: &Parked) -> anyhow::Result<()> {
        // By the channel and not by the delivery, whose own `ack` says nothing of a closed channel.
        let tag = parked.message.delivery.delivery_tag;
        bounded("acking", self.channel.basic_ack(tag, BasicAckOptions::default())).await
    }

    /// Gives back all that is held.
    ///
    /// # Errors
    /// When the broker does not say goodbye: it is not sure then that it has heard everything said
    /// before, acks above all. What is held comes back to the queue all the same.
    pub async fn close(self) -> anyhow::Result<()> {
        let everything = BasicNackOptions { multiple: true, requeue: true };
        let closed = bounded("giving back what was held", async {
            self.channel.basic_nack(0, everything).await?;
            self.channel.close(200, "bye".into()).await
        });
        let closed = closed.await;
        connection::close(&self.connection).await;
        closed
    }
}
