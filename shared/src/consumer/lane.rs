//! One queue and its workers, from the first careful message to the last goodbye.
//!
//! A lane begins *cautiously*, with one worker and one message ahead. A process that died had a window
//! of messages in its hands, and one of them may be what it died of; all of them come again, and each
//! time counts toward the limit after which the broker parks a message. Taken one by one, the others
//! are settled, and the one that kills is alone in being counted. The lane widens after the first
//! message that nobody has had before, when none comes, or when one takes its time: waiting is not
//! dying. After an outage it does not widen before a message was handled.
//!
//! A crash leaves what is held unacked, and the next session begins cautiously with it.

use super::session::Session;
use super::worker::Worker;
use super::{Consumer, Handler};
use crate::topology::{DELIVERY_LIMIT, Lane};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::info;

/// A queue that has handed out nothing for this long has nothing ready.
const QUIET: Duration = Duration::from_millis(200);
/// A message that takes longer than this holds nobody else up.
const SLOW: Duration = Duration::from_secs(1);
impl<H: Handler> Consumer<H> {
    /// One queue, until `pause`.
    pub(super) async fn lane(
        &self,
        session: &Session,
        lane: &Lane,
        ready: &Ready,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        let widen = CancellationToken::new();
        let departing = Departing::default();
        let cautious = async {
            let consumed =
                self.consume_cautiously(session, lane, ready, &departing, &widen, pause).await;
            if consumed.is_err() {
                pause.cancel();
            }
            widen.cancel();
            consumed
        };
        let wide = async {
            widen.cancelled().await;
            self.consume_wide(session, lane, &departing, pause).await
        };
        let (cautious, wide) = tokio::join!(cautious, wide);
        departing.leave().await;
        cautious.and(wide)
    }

    /// One message at a time, as long as what comes has been in other hands before, and for no longer
    /// than a window of messages.
    async fn consume_cautiously<'a>(
        &'a self,
        session: &'a Session,
        lane: &Lane,
        ready: &Ready,
        departing: &Departing<'a, H>,
        widen: &CancellationToken,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        let open = async || {
            let tag = format!("{}-cautious", lane.queue);
            Worker::open(self, session, &lane.queue, tag, 1).await
        };
        let mut worker = open().await?;
        if ready.open.fetch_add(1, Ordering::Relaxed) + 1 == ready.lanes {
            self.part.ok();
        }
        let mut left = u32::from(lane.workers) * u32::from(self.args.consumer_prefetch.get());
        let mut settled = Ok(());
        while left > 0 {
            let idle =
                if self.outage.on_trial() { self.args.topology_check_interval } else { QUIET };
            let message = match worker.next_within(idle, pause).await {
                Ok(Some(message)) => message,
                // Nothing comes: so nothing has shown yet that the database is really back. As any idle
                // worker, this one subscribes anew before it waits on.
                Ok(None) if self.outage.on_trial() && !pause.is_cancelled() => {
                    worker.leave().await;
                    worker = open().await?;
                    continue;
                }
                Ok(None) => break,
                Err(error) => {
                    settled = Err(error);
                    break;
                }
            };
            left -= 1;
            let deliveries = u64::from(message.redeliveries());
            // In a shard there is nobody beside it. And one that has died often may just die slowly.
            let may_widen = lane.workers > 1 && deliveries < DELIVERY_LIMIT / 2;
            let mut settling = std::pin::pin!(worker.settle_heeding(message, pause));
            settled = tokio::select! {
                settled = &mut settling => settled,
                () = tokio::time::sleep(SLOW), if may_widen && !self.outage.on_trial() => {
                    widen.cancel();
                    settling.await
                }
            };
            let enough = (deliveries == 0 && !self.outage.on_trial()) || widen.is_cancelled();
            if settled.is_err() || enough {
                break;
            }
        }
        if settled.is_err() || pause.is_cancelled() {
            worker.stop_delivery().await;
            departing.push(worker);
        } else {
            worker.leave().await;
        }
        settled
    }

    async fn consume_wide<'a>(
        &'a self,
        session: &'a Session,
        lane: &Lane,
        departing: &Departing<'a, H>,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        let prefetch = self.args.consumer_prefetch.get();
        let idle = self.args.topology_check_interval;
        let worker = async |number| {
            while !pause.is_cancelled() {
                let tag = format!("{}-{number}", lane.queue);
                let mut worker = Worker::open(self, session, &lane.queue, tag, prefetch).await?;
                let worked = worker.run(idle, pause).await;
                if worked.is_err() || pause.is_cancelled() {
                    worker.stop_delivery().await;
                    departing.push(worker);
                    return worked;
                }
                worker.leave().await;
            }
            Ok(())
        };
        let workers: FuturesUnordered<_> = (0..lane.workers).map(worker).collect();
        if !pause.is_cancelled() {
            info!(queue = lane.queue, workers = lane.workers, prefetch, "consuming");
        }
        all(workers, pause).await
    }
}

/// How many lanes there are, and how many of them are consumed.
pub(super) struct Ready {
    pub(super) lanes: usize,
    pub(super) open: AtomicUsize,
}

/// Workers of a lane that have stopped and still hold what was delivered to them. What one gives back
/// while another still takes would be delivered once more, and counted once more: so all stop first.
struct Departing<'a, H>(Mutex<Vec<Worker<'a, H>>>);

impl<H> Default for Departing<'_, H> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<'a, H: Handler> Departing<'a, H> {
    fn push(&self, worker: Worker<'a, H>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
    }

    async fn leave(self) {
        let workers = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        join_all(workers.into_iter().map(Worker::leave)).await;
    }
}

/// Waits for all of them; the first that ends stops the rest, and the first failure is the result.
pub(super) async fn all(
    mut running: FuturesUnordered<impl Future<Output = anyhow::Result<()>>>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let mut result = Ok(());
    while let Some(ended) = running.next().await {
        stop.cancel();
        result = result.and(ended);
    }
    result
}
