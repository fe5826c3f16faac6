//! One connected life of a consumer: connect, declare, check, work; until something breaks.

use super::{Connectors, Consumer, Handler};
use crate::connection;
use crate::incoming::Incoming;
use crate::management::IN_FORCE;
use crate::policies::{Mismatch, list, require_none};
use crate::publisher::Publisher;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

impl<H: Handler> Consumer<H> {
    pub(super) async fn session(
        &self,
        brokers: &Connectors,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let consuming = brokers.consuming.connect().await?;
        let publishing = brokers.publishing.connect().await?;
        connection::bounded("declaring the topology", async {
            self.topology.declare(&consuming.create_channel().await?).await
        })
        .await?;
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            sound = self.refuse_drift() => sound?,
        }

        // Ends with the session: the first worker that fails takes the others along, after each has
        // finished what it has in hand.
        let stop = shutdown.child_token();
        let ready = AtomicU16::new(0);
        let workers: FuturesUnordered<_> = (0..self.args.consumer_workers.get())
            .map(|number| self.worker(number, &consuming, &publishing, &ready, &stop))
            .collect();
        let drift = async {
            let drift = self.watch_drift().await;
            stop.cancel();
            drift
        };
        let (worked, drifted) = tokio::join!(all(workers, &stop), stop.run_until_cancelled(drift));
        connection::close(&consuming).await;
        connection::close(&publishing).await;
        drifted.unwrap_or(Ok(())).and(worked)
    }

    /// Does not let a session consume while a queue is not as it must be: a retry that entered a
    /// queue without its TTL would wait for ever.
    async fn refuse_drift(&self) -> anyhow::Result<()> {
        let look = |mismatches: &[Mismatch]| self.report(mismatches);
        let in_force = self.management.wait_in_force(&self.topology, IN_FORCE, look).await?;
        require_none(&in_force)
    }

    /// Looks again from time to time, and ends the session over drift that lasts: no retry may be
    /// published any more, and the next session does not begin before all is well.
    async fn watch_drift(&self) -> anyhow::Result<()> {
        loop {
            tokio::time::sleep(self.args.topology_check_interval).await;
            let look = |mismatches: &[Mismatch]| self.report(mismatches);
            match self.management.wait_in_force(&self.topology, IN_FORCE, look).await {
                Ok(mismatches) => require_none(&mismatches)?,
                // Not knowing is not drift: the last answer stands.
                Err(error) => warn!(error = format!("{error:#}"), "topology cannot be checked"),
            }
        }
    }

    fn report(&self, mismatches: &[Mismatch]) {
        if mismatches.is_empty() {
            self.topology_part.ok();
        } else {
            self.topology_part.fail(list(mismatches));
        }
    }

    /// One message at a time, in the order of delivery.
    async fn worker(
        &self,
        number: u16,
        consuming: &Connection,
        publishing: &Connection,
        ready: &AtomicU16,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let mut publisher = Publisher::open(publishing, self.confirm.confirm_timeout).await?;
        let tag = format!("{}-{number}", H::NAME);
        let (channel, mut deliveries) = connection::bounded("consuming", async {
            let channel = consuming.create_channel().await?;
            // Per consumer (global: false): quorum queues take no other.
            let prefetch = self.args.consumer_prefetch.get();
            channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
            let (queue, tag) = (self.topology.names.queue.into(), tag.as_str().into());
            let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
            let deliveries = channel.basic_consume(queue, tag, options, arguments).await?;
            Ok((channel, deliveries))
        })
        .await?;
        let workers = self.args.consumer_workers.get();
        if ready.fetch_add(1, Ordering::Relaxed) + 1 == workers {
            let prefetch = self.args.consumer_prefetch.get();
            info!(queue = self.topology.names.queue, workers, prefetch, "consuming");
            self.part.ok();
        }
        let result = loop {
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => break Ok(()),
                next = deliveries.next() => next,
            };
            // A queue deleted under the consumer ends the stream in silence and leaves the channel
            // open. Outside shutdown the end of a stream is always a failure.
            let settled = match next {
                None => Err(anyhow::anyhow!("the broker cancelled the consumer")),
                Some(Err(error)) => Err(error.into()),
                Some(Ok(delivery)) => {
                    self.handle_delivery(Incoming::new(delivery), &mut publisher).await
                }
            };
            if settled.is_err() {
                break settled;
            }
        };
        leave(&channel, &tag).await;
        result
    }
}

/// Waits for all workers; the first failure stops the rest and is the result.
async fn all(
    mut workers: FuturesUnordered<impl Future<Output = anyhow::Result<()>>>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut result = Ok(());
    while let Some(ended) = workers.next().await {
        stop.cancel();
        result = result.and(ended);
    }
    result
}

/// Stops the flow and gives back what was prefetched. A nack says that the messages were not tried,
/// and from RabbitMQ 4 on does not count toward their delivery limit, as closing the channel under
/// them would. Failing is harmless: the connection is closed next, which returns them as well.
async fn leave(channel: &Channel, tag: &str) {
    let goodbye = async {
        channel.basic_cancel(tag.into(), BasicCancelOptions::default()).await?;
        let everything = BasicNackOptions { multiple: true, requeue: true };
        channel.basic_nack(0, everything).await?;
        channel.close(200, "bye".into()).await
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), goodbye).await;
}
