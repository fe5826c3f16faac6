//! One connected life of a consumer: connect, declare, check, consume; until something breaks.
//!
//! It consumes lanes ([`super::lane`]): the queue and, where there are any, its shards, those of an
//! earlier number included. In an outage of the database ([`crate::outage`]) all lanes pause:
//! connections stay, consumers leave, and the lanes begin anew when the database is back.

use super::lane::{Ready, all};
use super::{Connectors, Consumer, Handler};
use crate::backoff::Backoff;
use crate::connection;
use crate::management::IN_FORCE;
use crate::policies::{Mismatch, list, require_none};
use crate::topology::Lane;
use anyhow::ensure;
use futures_util::stream::FuturesUnordered;
use lapin::Connection;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

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
