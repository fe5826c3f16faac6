//! What becomes of a delivery once its message was handled: the effects of
//! [`crate::retry::decide`].
//!
//! A failed message that is to be tried again waits, as configured, in one of three places:
//!
//! | where | by | a crash meanwhile |
//! |---|---|---|
//! | a retry queue | a confirmed copy, then an Ack | between the two: two copies, one effect |
//! | its own queue, at the broker (RabbitMQ 4.3) | a reject, which the broker counts and delays | nothing: the message never left |
//! | here, unacked, in its shard, if its failure is transient | waiting, with the shard behind it | the broker delivers it again, with its attempts forgotten; a pause does the same |
//!
//! On trial after an outage a failing message is not held here but goes where others wait: held, it
//! would begin with all its attempts after each pause, and block its shard for ever.

use super::worker::Worker;
use super::{Consumer, Handler};
use crate::config::{Delay, Ordering, RetryBackend};
use crate::connection::{BLOCKED, bounded, wait_unblocked};
use crate::failure::{Class, Failure};
use crate::fault::{self, Point};
use crate::incoming::Incoming;
use crate::publisher::{BrokerTrouble, Outgoing, Publisher, Verdict};
use crate::republish::{park_copy, retry_copy};
use crate::retry::{Disposition, Facts, Outcome, ParkReason, decide};
use lapin::options::{BasicAckOptions, BasicRejectOptions};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

impl<H: Handler> Worker<'_, H> {
    /// The step that the worker repeats. Returns once the delivery is settled; or, asked to pause
    /// while the message waits for another attempt or for the end of an alarm, without that: it is
    /// given back then.
    ///
    /// # Errors
    /// The delivery is *not* settled, and the session must end: the broker will deliver it again.
    pub(super) async fn settle(
        &mut self,
        mut message: Incoming,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        let consumer = self.consumer;
        loop {
            let result = consumer.apply_bounded(&message).await;
            consumer.hear(&result, pause);
            let failure = match result {
                Ok(outcome) => {
                    ack(&message).await?;
                    fault::point(Point::ConsumerAfterAck);
                    consumer.log_outcome(&message, outcome);
                    return Ok(());
                }
                Err(failure) => failure,
            };
            match consumer.decide(&message, failure.class) {
                Disposition::Retry(delay) if consumer.blocks(failure.class) => {
                    consumer.log_retry(&message, &failure, delay);
                    message.failed_in_place();
                    tokio::select! {
                        () = pause.cancelled() => return Ok(()),
                        () = tokio::time::sleep(delay.duration()) => message.tried_again(),
                    }
                }
                Disposition::Retry(delay) => {
                    return self.retry(&message, &failure, delay, pause).await;
                }
                Disposition::Park(reason) => {
                    return self.park(&message, &failure, reason, pause).await;
                }
                // `decide` never acks a failure; if it did, ending the session loses nothing.
                Disposition::Ack => {
                    return Err(failure.source.context("a failure cannot be acked"));
                }
            }
        }
    }

    async fn retry(
        &mut self,
        message: &Incoming,
        failure: &Failure,
        delay: Delay,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        let consumer = self.consumer;
        match consumer.topology.args.retry_backend {
            RetryBackend::Native => {
                reject(message, true).await?;
                consumer.log_retry(message, failure, delay);
                Ok(())
            }
            RetryBackend::Buckets => {
                fault::point(Point::ConsumerBeforeRetryPublish);
                let copy = retry_copy(message, &consumer.topology, delay, failure);
                match self.hand_over(copy, pause).await {
                    Ok(()) => {}
                    Err(NotTaken::Paused) => return Ok(()),
                    Err(not_taken) => {
                        let what = format!("a retry was not taken; it is for: {failure}");
                        return Err(anyhow::Error::from(not_taken).context(what));
                    }
                }
                fault::point(Point::ConsumerAfterRetryConfirm);
                consumer.log_retry(message, failure, delay);
                ack(message).await?;
                fault::point(Point::ConsumerAfterRetryAck);
                Ok(())
            }
        }
    }

    async fn park(
        &mut self,
        message: &Incoming,
        failure: &Failure,
        reason: ParkReason,
        pause: &CancellationToken,
    ) -> anyhow::Result<()> {
        let consumer = self.consumer;
        fault::point(Point::ConsumerBeforeParkPublish);
        let copy = park_copy(message, &consumer.topology, reason, failure, H::NAME);
        match self.hand_over(copy, pause).await {
            Ok(()) => {}
            Err(NotTaken::Paused) => return Ok(()),
            Err(not_taken) => return leave_to_dead_lettering(message, not_taken, failure).await,
        }
        fault::point(Point::ConsumerAfterParkConfirm);
        error!(
            message_id = message.message_id(),
            event_type = message.event_type(),
            class = failure.class.as_str(),
            error = %failure,
            attempt = message.attempts(),
            reason = reason.as_str(),
            "message is parked"
        );
        consumer.metrics.parked(H::NAME, reason);
        ack(message).await?;
        fault::point(Point::ConsumerAfterParkAck);
        Ok(())
    }

    /// Publishes a copy and sees it confirmed, not returned. While an alarm blocks the broker's
    /// publishers the message stays in hand, unacked, at no cost to its attempts; the other
    /// connection goes on to ack what needs no publishing.
    async fn hand_over(
        &mut self,
        copy: Outgoing,
        pause: &CancellationToken,
    ) -> Result<(), NotTaken> {
        let to = format!("{}/{}", copy.exchange, copy.routing_key);
        let connection = &self.session.publishing;
        loop {
            let trouble = match self.publish(copy.clone()).await {
                Ok(Verdict::Confirmed) => return Ok(()),
                Ok(Verdict::Returned(why)) => return Err(NotTaken::Returned(to, why)),
                Ok(Verdict::Nacked) => return Err(NotTaken::Nacked(to)),
                Err(trouble) => trouble,
            };
            if !connection.status().blocked() {
                return Err(trouble.into());
            }
            self.consumer.part.fail(BLOCKED);
            warn!(message_id = copy.message_id, "publishing is blocked by the broker");
            match pause.run_until_cancelled(wait_unblocked(connection)).await {
                Some(Ok(())) => self.consumer.part.ok(),
                Some(Err(_)) => return Err(trouble.into()),
                None => return Err(NotTaken::Paused),
            }
        }
    }

    /// On a channel of its own, opened when first needed: on a blocked connection there is no opening
    /// one. After trouble or a nack the next copy gets a new one: what the old one still has to say is not
    /// worth waiting for, as two copies make one effect.
    async fn publish(&mut self, copy: Outgoing) -> Result<Verdict, BrokerTrouble> {
        let mut publisher = match self.publisher.take() {
            Some(publisher) => publisher,
            None => {
                let timeout = self.consumer.confirm.confirm_timeout;
                Publisher::open(&self.session.publishing, timeout).await?
            }
        };
        let verdict = publisher.publish_one(copy).await?;
        self.publisher = (!publisher.is_spent()).then_some(publisher);
        Ok(verdict)
    }
}

impl<H: Handler> Consumer<H> {
    /// Tells the outage what the result says of the database, and pauses all workers if that is
    /// enough.
    fn hear(&self, result: &Result<Outcome, Failure>, pause: &CancellationToken) {
        match result {
            Err(failure) if failure.database_away => self.outage.failed(),
            // It took the database to know that.
            Ok(_) | Err(Failure { class: Class::NotYet, .. }) => self.outage.answered(),
            Err(_) => {}
        }
        if self.outage.is_on() {
            pause.cancel();
        }
    }

    fn decide(&self, message: &Incoming, class: Class) -> Disposition {
        let deadline = message.producer_deadline();
        let facts = Facts {
            attempts: message.attempts_of(class),
            age: message.age(),
            past_producer_deadline: deadline.is_some_and(|at| at <= message.received_at),
        };
        decide(Err(class), facts, &self.budget(), rand::random())
    }

    /// Whether a failure of this class holds up what is behind it. In a shard a transient one does:
    /// that is what shards are for. A missing predecessor does not, it may be right behind.
    fn blocks(&self, class: Class) -> bool {
        let in_shards = self.topology.args.ordering != Ordering::Gate;
        in_shards && class == Class::Transient && !self.outage.is_on()
    }

    fn log_retry(&self, message: &Incoming, failure: &Failure, delay: Delay) {
        warn!(
            message_id = message.message_id(),
            event_type = message.event_type(),
            class = failure.class.as_str(),
            error = %failure,
            attempt = message.attempts(),
            retry_in = %delay,
            "message will be retried"
        );
        self.metrics.retried(H::NAME, failure.class);
    }

    fn log_outcome(&self, message: &Incoming, outcome: Outcome) {
        self.metrics.handled(H::NAME, outcome);
        if let Ok(envelope) = &message.envelope {
            info!(
                message_id = envelope.id,
                event_type = envelope.event_type,
                aggregate_id = envelope.aggregate.id,
                aggregate_version = envelope.aggregate.version,
                correlation_id = envelope.correlation_id,
                outcome = outcome.as_str(),
                redelivered = message.delivery.redelivered,
                "message handled"
            );
        }
    }
}

/// Why a copy has no new owner.
#[derive(Debug, thiserror::Error)]
enum NotTaken {
    #[error("{0} took no copy: it is full, or without a leader")]
    Nacked(String),
    #[error("{0} returned the copy: {1}")]
    Returned(String, String),
    #[error("the copy's fate is unknown: {0}")]
    Trouble(#[from] BrokerTrouble),
    /// The message is given back, as any that is in hand without having been tried.
    #[error("publishing was blocked when a pause began")]
    Paused,
}

async fn ack(message: &Incoming) -> anyhow::Result<()> {
    // An Ack has no answer. If it is lost with the connection, the message comes again and is a
    // duplicate. Where the connection dies at this moment, lapin may never say so (seen with a process
    // that woke from a freeze): hence the bound.
    bounded("acking", message.delivery.ack(BasicAckOptions::default())).await?;
    Ok(())
}

/// Gives it up: to the broker's delay, or to its dead lettering.
async fn reject(message: &Incoming, requeue: bool) -> anyhow::Result<()> {
    bounded("rejecting", message.delivery.reject(BasicRejectOptions { requeue })).await?;
    Ok(())
}

/// Parking would not take the copy. Rejected without requeue, the original stays in the source
/// queue's at-least-once dead lettering, which tries parking again until it is back.
async fn leave_to_dead_lettering(
    message: &Incoming,
    not_taken: NotTaken,
    failure: &Failure,
) -> anyhow::Result<()> {
    reject(message, false).await?;
    match not_taken {
        // A new session makes no room, and the next copy gets a new channel anyway.
        NotTaken::Nacked(parking) => {
            error!(
                message_id = message.message_id(),
                class = failure.class.as_str(),
                error = %failure,
                parking,
                "parking took no copy; the source queue keeps the message"
            );
            Ok(())
        }
        // A new session declares what is missing, and has a sound channel.
        NotTaken::Returned(..) | NotTaken::Trouble(_) | NotTaken::Paused => {
            let what = format!("parking took no copy; the queue keeps the message, for: {failure}");
            Err(anyhow::Error::from(not_taken).context(what))
        }
    }
}
