//! One connected life of a consumer: connect, declare, check, consume; until something breaks.
//!
//! It consumes lanes: the queue and, where there are any, its shards, those of an earlier number
//! included. A lane begins *cautiously*, with one worker
//! and one message ahead. A process that died had a window of messages in its hands, and one of them
//! may be what it died of; all of them come again, and each time counts toward the limit after which
//! the broker parks a message. Taken one by one, the others are settled, and the one that kills is
//! alone in being counted. The lane widens after the first message that nobody has had before, when
//! none comes, or when one takes its time: waiting is not dying. After an outage it does not widen
//! before a message was handled.
//!
//! In an outage of the database ([`crate::outage`]) all lanes pause: connections stay, consumers
//! leave, and the lanes begin anew when the database is back.

use super::worker::Worker;
use super::{Connectors, Consumer, Handler};
use crate::backoff::Backoff;
use crate::connection;
use crate::management::IN_FORCE;
use crate::policies::{Mismatch, list, require_none};
use crate::topology::{DELIVERY_LIMIT, Lane};
use anyhow::ensure;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use lapin::Connection;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// A queue that has handed out nothing for this long has nothing ready.
const QUIET: Duration = Duration::from_millis(200);
/// A message that takes longer than this holds nobody else up.
const SLOW: Duration = Duration::from_secs(1);
/// The longest wait between probes of a database that answers them and fails messages all the same.
const LONGEST_PROBE_WAIT: Duration = Duration::from_secs(30);

/// What a session has to work with.
pub(super) struct Session {
    pub(super) consuming: Connection,
    pub(super) publishing: Connection,
    lanes: Vec<Lane>,
}

impl Session {
    fn ensure_connected(&self) -> anyhow::Result<()> {
        let connected = |connection: &Connection| connection.status().connected();
        let both = connected(&self.consuming) && connected(&self.publishing);
        ensure!(both, "the broker closed a connection");
        Ok(())
    }
}

impl<H: Handler> Consumer<H> {
    pub(super) async fn session(
        &self,
        brokers: &Connectors,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let Some(session) = shutdown.run_until_cancelled(self.set_up(brokers)).await else {
            return Ok(());
        };
        let session = session?;

        // Ends with the session: whatever fails first takes the rest along, after each worker has
        // finished what it has in hand.
        let stop = shutdown.child_token();
        let drift = async {
            let drift = self.watch_drift().await;
            stop.cancel();
            drift
        };
        let (consumed, drifted) =
            tokio::join!(self.consume(&session, &stop), stop.run_until_cancelled(drift));
        connection::close(&session.consuming).await;
        connection::close(&session.publishing).await;
        drifted.unwrap_or(Ok(())).and(consumed)
    }

    /// Connects, declares, sees that policies are in force, and only then binds: a process whose
    /// retries would go astray ends here before it has changed anything for the others.
    async fn set_up(&self, brokers: &Connectors) -> anyhow::Result<Session> {
        let consuming = brokers.consuming.connect().await?;
        let publishing = brokers.publishing.connect().await?;
        let channel = connection::bounded("declaring the topology", async {
            let channel = consuming.create_channel().await?;
            self.topology.declare(&channel).await?;
            Ok(channel)
        })
        .await?;
        self.refuse_drift().await?;
        let stray = self.management.stray_shards(&self.topology).await?;
        connection::bounded("binding the queues", self.topology.bind(&channel, &stray)).await?;
        let lanes = self.topology.lanes(self.args.consumer_workers.get(), &stray);
        Ok(Session { consuming, publishing, lanes })
    }

    /// Consumes, and pauses in outages, until `stop` or a failure.
    async fn consume(&self, session: &Session, stop: &CancellationToken) -> anyhow::Result<()> {
        let _stopped = stop.drop_guard_ref();
        while !stop.is_cancelled() {
            if self.outage.is_on() {
                self.sit_out(session, stop).await?;
                continue;
            }
            let pause = stop.child_token();
            let ready = Ready { lanes: session.lanes.len(), open: AtomicUsize::new(0) };
            let lanes: FuturesUnordered<_> =
                session.lanes.iter().map(|lane| self.lane(session, lane, &ready, &pause)).collect();
            all(lanes, &pause).await?;
        }
        Ok(())
    }

    /// One queue, until `pause`.
    async fn lane(
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
        let tag = format!("{}-cautious", lane.queue);
        let mut worker = Worker::open(self, session, &lane.queue, tag, 1).await?;
        if ready.open.fetch_add(1, Ordering::Relaxed) + 1 == ready.lanes {
            self.part.ok();
        }
        let mut left = u32::from(lane.workers) * u32::from(self.args.consumer_prefetch.get());
        let mut settled = Ok(());
        while left > 0 {
            let message = match worker.next_within(QUIET, pause).await {
                Ok(Some(message)) => message,
                // Nothing is ready: so nothing has shown yet that the database is really back.
                Ok(None) if self.outage.on_trial() && !pause.is_cancelled() => continue,
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

    /// Asks the database, and not with a message, until it answers.
    async fn sit_out(&self, session: &Session, stop: &CancellationToken) -> anyhow::Result<()> {
        self.part.fail("outage: the database does not answer; messages wait in their queue");
        warn!(queue = self.topology.names.queue, "outage: consuming is paused");
        self.metrics.outage(H::NAME, true);
        // Within one outage the wait stays as it is, so that its end is noticed soon.
        let min = self.args.outage_probe_interval;
        let interval = Backoff { min, max: LONGEST_PROBE_WAIT.max(min) };
        let mut said = false;
        while self.outage.is_on() {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = tokio::time::sleep(interval.jittered(self.outage.in_a_row())) => {}
            }
            session.ensure_connected()?;
            match self.probe_database().await {
                Ok(()) => self.outage.probed(),
                // Once: the others will say the same.
                Err(error) if !said => {
                    said = true;
                    warn!(error = %error, "the database takes no messages yet");
                }
                Err(_) => {}
            }
        }
        info!(queue = self.topology.names.queue, "the database answers again: consuming goes on");
        self.metrics.outage(H::NAME, false);
        Ok(())
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
}

/// How many lanes there are, and how many of them are consumed.
struct Ready {
    lanes: usize,
    open: AtomicUsize,
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
async fn all(
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
