//! One connected life of a consumer: connect, declare, check, work; until something breaks.

use super::{Consumer, Handler};
use crate::connection;
use crate::incoming::Incoming;
use crate::management::IN_FORCE;
use crate::policies::{Mismatch, list};
use crate::publisher::Publisher;
use anyhow::Context;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicCancelOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

impl<H: Handler> Consumer<H> {
    pub(super) async fn session(&self, shutdown: &CancellationToken) -> anyhow::Result<()> {
        let consuming = connection::connect(&self.broker, "consumer").await?;
        let publishing = connection::connect(&self.broker, "consumer (retries, parking)").await?;
        let channel = consuming.create_channel().await?;
        self.topology.declare(&channel).await.context("cannot declare the topology")?;
        self.refuse_drift(shutdown).await?;

        // Ends with the session: the first worker that fails takes the others along, after each has
        // finished what it has in hand.
        let stop = shutdown.child_token();
        let workers: FuturesUnordered<_> = (0..self.args.consumer_workers.get())
            .map(|number| self.worker(number, &consuming, &publishing, &stop))
            .collect();
        info!(
            queue = self.topology.names.queue,
            workers = self.args.consumer_workers.get(),
            prefetch = self.args.consumer_prefetch.get(),
            "consuming"
        );
        self.part.ok();
        let result = tokio::select! {
            result = all(workers, &stop) => result,
            never = self.watch_drift() => match never {},
        };
        connection::close(&consuming).await;
        connection::close(&publishing).await;
        result
    }

    /// Does not let a session consume while a queue is not as it must be: a retry that entered a
    /// queue without its TTL would wait for ever.
    async fn refuse_drift(&self, shutdown: &CancellationToken) -> anyhow::Result<()> {
        let look = |mismatches: &[Mismatch]| self.report(mismatches);
        tokio::select! {
            () = shutdown.cancelled() => Ok(()),
            in_force = self.management.wait_in_force(&self.topology, IN_FORCE, look) => in_force,
        }
    }

    /// Looks again from time to time. Drift makes the service not ready and is said once, in full;
    /// consuming goes on, since stopping would not mend it.
    async fn watch_drift(&self) -> std::convert::Infallible {
        let mut known = Vec::new();
        loop {
            tokio::time::sleep(self.args.topology_check_interval).await;
            match self.management.check(&self.topology).await {
                Ok(mismatches) => {
                    self.report(&mismatches);
                    if mismatches != known {
                        error!(mismatches = list(&mismatches), "topology drift");
                        known = mismatches;
                    }
                }
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
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let channel = consuming.create_channel().await?;
        // Per consumer (global: false): quorum queues take no other.
        channel.basic_qos(self.args.consumer_prefetch.get(), BasicQosOptions::default()).await?;
        let mut publisher = Publisher::open(publishing, self.confirm.confirm_timeout).await?;
        let tag = format!("{}-{number}", H::NAME);
        let mut deliveries = channel
            .basic_consume(
                self.topology.names.queue.into(),
                tag.as_str().into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            )
            .await
            .context("cannot consume")?;
        loop {
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                next = deliveries.next() => next,
            };
            // A queue deleted under the consumer ends the stream in silence and leaves the channel
            // open. Outside shutdown the end of a stream is always a failure.
            let delivery = next.context("the broker cancelled the consumer")??;
            self.handle_delivery(Incoming::new(delivery), &mut publisher).await?;
        }
        leave(&channel, &tag).await;
        Ok(())
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

/// Stops the flow and gives back what was prefetched. Failing is harmless: the connection is closed
/// next, which returns everything unacked as well.
async fn leave(channel: &Channel, tag: &str) {
    let _ = channel.basic_cancel(tag.into(), BasicCancelOptions::default()).await;
    let _ = channel.close(200, "bye".into()).await;
}
