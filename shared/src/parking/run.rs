//! A run: messages leave the parking, back to their queue or for good, one after the other.
//!
//! | crash | then |
//! |---|---|
//! | before the copy is confirmed | the message is parked as before; its copy may be in the queue or not |
//! | after the confirm, before the ack | it is in the queue, and parked as before; sent back once more it is a duplicate, which the inbox makes no effect |
//! | after the ack | it is in the queue alone |
//!
//! So a run that was killed is simply run again. Whatever else stops it, a queue that is full, a broker
//! or a database that does not answer, a signal, stops it between two messages, and the rest is given
//! back.

use super::audit::Entry;
use super::filter::Filter;
use super::lot::{Found, Lot, Search};
use super::parked::Parked;
use super::plan::{MOST_HELD, Place, in_order, most};
use super::task::{Action, Task};
use crate::config::{BrokerArgs, ConfirmArgs};
use crate::connection::{self, Connector};
use crate::fault::{self, Point};
use crate::publisher::{Publisher, Verdict};
use crate::republish::redrive_copy;
use crate::topology::Topology;
use anyhow::{Context, bail};
use chrono::Utc;
use std::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

/// What a run would move, in this order.
pub struct Plan {
    /// The messages.
    pub messages: Vec<Parked>,
    /// How many the filter means: more than these, where a limit keeps some for the next run.
    pub matched: u32,
    /// How many were looked at: fewer than were there, if the look was cut short.
    pub looked_at: u32,
    /// How many were there when it began.
    pub ready: u32,
}

/// What a run tells whoever watches it.
pub enum Event<'a> {
    /// This is to be moved.
    Planned(&'a Plan),
    /// This message has its new owner, or shall have none, and is let go next. An error keeps it.
    Leaving(&'a Parked),
}

/// How a run ended that did not fail.
pub struct Report {
    /// How many messages have left.
    pub done: i32,
    /// How many the filter meant.
    pub matched: u32,
    /// How many were there when it began.
    pub ready: u32,
    /// Whether it was asked to end early.
    pub interrupted: bool,
}

/// The parking of one consumer.
pub struct Parking {
    looking: Connector,
    /// A connection of its own, as the consumer's: a broker in distress blocks those that publish.
    publishing: Connector,
    topology: Topology,
    confirm: ConfirmArgs,
}

impl Parking {
    /// Connects when it is used.
    #[must_use]
    pub fn new(broker: &BrokerArgs, topology: Topology, confirm: ConfirmArgs) -> Self {
        Self {
            looking: Connector::new(broker.clone(), "parking"),
            publishing: Connector::new(broker.clone(), "parking (redrive)"),
            topology,
            confirm,
        }
    }

    /// Looks at everything and gives it back; keeps the first messages that are meant.
    ///
    /// # Errors
    /// When the broker is not reached or does not answer.
    pub async fn look(
        &self,
        filter: &Filter,
        keep: usize,
        until: Option<Instant>,
        stop: &CancellationToken,
    ) -> anyhow::Result<Found> {
        let mut lot = Lot::open(&self.looking, self.topology.parking_queue()).await?;
        let keep = keep.min(MOST_HELD);
        let found = lot.look(Search { filter, keep, snapshot: false, until, stop }).await;
        // Nothing was acked: however it ends, all comes back.
        let _ = lot.close().await;
        found
    }

    /// What a run would do at this moment. Moves nothing.
    ///
    /// # Errors
    /// When the broker is not reached or does not answer.
    pub async fn plan(
        &self,
        task: &Task,
        until: Option<Instant>,
        stop: &CancellationToken,
    ) -> anyhow::Result<Plan> {
        let mut lot = Lot::open(&self.looking, self.topology.parking_queue()).await?;
        let plan = plan(&mut lot, task, until, stop).await;
        // As above.
        let _ = lot.close().await;
        plan
    }

    /// Does it. The entry of the audit is there already, and has its end when this returns.
    ///
    /// # Errors
    /// What stopped it. What had left by then has left; the rest is parked as before.
    pub async fn run(
        &self,
        task: &Task,
        mut entry: Entry,
        stop: &CancellationToken,
        watch: impl FnMut(Event<'_>) -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<Report> {
        let ended = match Lot::open(&self.looking, self.topology.parking_queue()).await {
            Ok(mut lot) => {
                let ended = self.empty(&mut lot, task, &mut entry, stop, watch).await;
                let closed = lot.close().await.context(
                    "it is not sure that all acks have arrived; run it again, that does no harm",
                );
                ended.and_then(|report| closed.map(|()| report))
            }
            Err(error) => Err(error),
        };
        let outcome = match &ended {
            Ok(report) if report.interrupted => "interrupted".to_owned(),
            Ok(_) => "finished".to_owned(),
            Err(error) => format!("failed: {error:#}"),
        };
        let (id, done) = (entry.id, entry.done);
        let noted = entry.finish(&outcome).await;
        let report = ended.with_context(|| {
            let done_with = task.action.done();
            format!("run {id} ended early, {done} messages are {done_with}, the rest is as before")
        })?;
        noted.with_context(|| format!("the end of run {id} cannot be noted ({outcome})"))?;
        Ok(report)
    }

    async fn empty(
        &self,
        lot: &mut Lot,
        task: &Task,
        entry: &mut Entry,
        stop: &CancellationToken,
        mut watch: impl FnMut(Event<'_>) -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<Report> {
        const UNWRITTEN: &str = "the audit cannot be written";
        let plan = plan(lot, task, None, stop).await?;
        entry.matched(plan.matched).await.context(UNWRITTEN)?;
        watch(Event::Planned(&plan))?;
        let mut sender = match task.action {
            Action::Redrive if !plan.messages.is_empty() => Some(self.sender().await?),
            _ => None,
        };
        let mut pace = task.rate.map(|rate| {
            let mut pace = tokio::time::interval(rate.pause());
            pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
            pace
        });
        // In the middle of looking, perhaps.
        let mut interrupted = stop.is_cancelled();
        let mut stopped = Ok(());
        for parked in &plan.messages {
            if let Some(pace) = &mut pace {
                stop.run_until_cancelled(pace.tick()).await;
            }
            if stop.is_cancelled() {
                interrupted = true;
                break;
            }
            stopped = async {
                if let Some((_, publisher)) = &mut sender {
                    self.send_back(publisher, parked).await?;
                }
                watch(Event::Leaving(parked))?;
                lot.let_go(parked).await?;
                fault::point(Point::RedriveAfterAck);
                entry.count().await.context(UNWRITTEN)
            }
            .await
            .with_context(|| match &parked.about.message_id {
                Some(id) => format!("at message {id:?}"),
                None => "at a message without an id".to_owned(),
            });
            if stopped.is_err() {
                break;
            }
        }
        if let Some((connection, _)) = sender {
            connection::close(&connection).await;
        }
        stopped?;
        let Plan { matched, ready, .. } = plan;
        Ok(Report { done: entry.done, matched, ready, interrupted })
    }

    async fn sender(&self) -> anyhow::Result<(lapin::Connection, Publisher)> {
        let connection = self.publishing.connect().await?;
        let publisher = Publisher::open(&connection, self.confirm.confirm_timeout).await;
        Ok((connection, publisher.context("cannot publish")?))
    }

    /// Gives the message a new owner: its queue. Returns when that has it for sure.
    async fn send_back(&self, publisher: &mut Publisher, parked: &Parked) -> anyhow::Result<()> {
        let copy = redrive_copy(&parked.message, &self.topology, parked.origin(), Utc::now());
        let to = copy.routing_key.clone();
        fault::point(Point::RedriveBeforePublish);
        match publisher.publish_one(copy).await {
            Ok(Verdict::Confirmed) => {}
            Ok(Verdict::Nacked) => {
                bail!("{to} took no copy: it is full, or without a leader; wait until it takes one")
            }
            Ok(Verdict::Returned(why)) => {
                bail!("there is no queue {to} to take the copy ({why}); `topology apply` makes it")
            }
            Err(trouble) => {
                return Err(trouble).with_context(|| {
                    format!("it is not known whether {to} took the copy, and it does no harm there")
                });
            }
        }
        fault::point(Point::RedriveAfterConfirm);
        Ok(())
    }
}

async fn plan(
    lot: &mut Lot,
    task: &Task,
    until: Option<Instant>,
    stop: &CancellationToken,
) -> anyhow::Result<Plan> {
    let search = Search { filter: &task.filter, keep: MOST_HELD, snapshot: true, until, stop };
    let Found { messages, matched, looked_at, ready } = lot.look(search).await?;
    let places: Vec<Place<'_>> = messages.iter().map(place).collect();
    let order = in_order(&places);
    let mut messages: Vec<Option<Parked>> = messages.into_iter().map(Some).collect();
    let messages = order.into_iter().filter_map(|index| messages.get_mut(index)?.take());
    let messages = messages.take(most(task.max, task.rate)).collect();
    Ok(Plan { messages, matched, looked_at, ready })
}

fn place(parked: &Parked) -> Place<'_> {
    let about = &parked.about;
    Some((
        about.aggregate_type.as_deref()?,
        about.aggregate_id.as_deref()?,
        about.aggregate_version?,
    ))
}
