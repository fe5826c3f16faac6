//! One worker: a channel to consume on, another to publish on, one message in hand at a time.
//! A crash leaves what it holds unacked: it is delivered again, and that counts as a delivery.
//!
//! A worker that has heard nothing for long subscribes anew. Measured on RabbitMQ 3.10.8: where a
//! quorum queue is deleted and at once declared again, its consumers are not told, and would wait for
//! ever at a queue that is no more.

use super::session::Session;
use super::{Consumer, Handler};
use crate::connection;
use crate::incoming::Incoming;
use crate::publisher::Publisher;
use anyhow::Context;
use futures_util::StreamExt;
use lapin::Channel;
use lapin::options::{BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::FieldTable;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

pub(super) struct Worker<'a, H> {
    pub(super) consumer: &'a Consumer<H>,
    pub(super) session: &'a Session,
    pub(super) publisher: Option<Publisher>,
    channel: Channel,
    deliveries: lapin::Consumer,
    tag: String,
}

impl<'a, H: Handler> Worker<'a, H> {
    pub(super) async fn open(
        consumer: &'a Consumer<H>,
        session: &'a Session,
        queue: &str,
        tag: String,
        prefetch: u16,
    ) -> anyhow::Result<Self> {
        let (channel, deliveries) = connection::bounded("consuming", async {
            let channel = session.consuming.create_channel().await?;
            // Per consumer (global: false): quorum queues take no other.
            channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
            let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
            let (queue, name) = (queue.into(), tag.as_str().into());
            let deliveries = channel.basic_consume(queue, name, options, arguments).await?;
            Ok((channel, deliveries))
        })
        .await?;
        Ok(Self { consumer, session, publisher: None, channel, deliveries, tag })
    }

    /// One message after the other, in the order of delivery, until `pause`, or until none has come
    /// for `idle`. From `pause` on no more are delivered; what was is still held.
    ///
    /// # Errors
    /// Whatever keeps a delivery from being settled; the session must end.
    pub(super) async fn run(
        &mut self,
        idle: Duration,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        while let Some(message) = self.next_within(idle, pause).await? {
            self.settle_heeding(message, pause).await?;
        }
        Ok(())
    }

    /// The next delivery; none if a pause begins, or none comes for this long. One that has come is
    /// never lost here: it is held until the worker leaves.
    ///
    /// # Errors
    /// When there will be no more: outside shutdown the end of a stream is always a failure. A queue
    /// deleted under the consumer ends it in silence and leaves the channel open.
    pub(super) async fn next_within(
        &mut self,
        limit: Duration,
        pause: &CancellationToken,
    ) -> anyhow::Result<Option<Incoming>> {
        let next = tokio::select! {
            biased;
            () = pause.cancelled() => return Ok(None),
            next = tokio::time::timeout(limit, self.deliveries.next()) => next,
        };
        let Ok(next) = next else { return Ok(None) };
        let delivery = next.context("the broker cancelled the consumer")??;
        Ok(Some(Incoming::new(delivery, self.consumer.topology.args.retry_backend)))
    }

    /// Settles a message, and stops the flow of others as soon as a pause begins meanwhile.
    pub(super) async fn settle_heeding(
        &mut self,
        message: Incoming,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        let (channel, tag) = (self.channel.clone(), self.tag.clone());
        let heed = async {
            pause.cancelled().await;
            stop_delivery(&channel, &tag).await;
            std::future::pending().await
        };
        tokio::select! {
            settled = self.settle(message, pause) => settled,
            () = heed => Ok(()), // which it never does
        }
    }

    /// Stops the flow; what was delivered is still held. Saying so again does no harm.
    pub(super) async fn stop_delivery(&self) {
        stop_delivery(&self.channel, &self.tag).await;
    }

    /// Stops the flow and gives back what is not settled. A nack says that the messages were not
    /// tried, and from RabbitMQ 4 on does not count toward their delivery limit, as closing the
    /// channel under them would. Failing is harmless: the connection is closed next, or lost
    /// already, which returns them as well.
    pub(super) async fn leave(self) {
        self.stop_delivery().await;
        let goodbye = async {
            let everything = BasicNackOptions { multiple: true, requeue: true };
            self.channel.basic_nack(0, everything).await?;
            self.channel.close(200, "bye".into()).await
        };
        let _ = tokio::time::timeout(GOODBYE, goodbye).await;
    }
}

/// How long a goodbye may take: nothing depends on it.
const GOODBYE: Duration = Duration::from_secs(1);

async fn stop_delivery(channel: &Channel, tag: &str) {
    let cancel = channel.basic_cancel(tag.into(), BasicCancelOptions::default());
    let _ = tokio::time::timeout(GOODBYE, cancel).await;
}
