//! What becomes of a delivery once its message was handled: the effects of
//! [`crate::retry::decide`].

use super::{Consumer, Handler};
use crate::failure::Failure;
use crate::fault::{self, Point};
use crate::incoming::Incoming;
use crate::publisher::{BrokerTrouble, Outgoing, Publisher, Verdict};
use crate::republish::{park_copy, retry_copy};
use crate::retry::{Disposition, Facts, Outcome, decide};
use anyhow::Context;
use lapin::options::{BasicAckOptions, BasicRejectOptions};
use tracing::{error, info, warn};

impl<H: Handler> Consumer<H> {
    /// The step that the worker repeats. Returns once the delivery is settled.
    ///
    /// # Errors
    /// The delivery is *not* settled, and the session must end: the broker will deliver it again.
    pub(super) async fn handle_delivery(
        &self,
        message: Incoming,
        publisher: &mut Publisher,
    ) -> anyhow::Result<()> {
        let result = self.apply_bounded(&message).await;
        let class = result.as_ref().map(|outcome| *outcome).map_err(|failure| failure.class);
        let deadline = message.producer_deadline();
        let facts = Facts {
            attempts: class.err().map_or(1, |class| message.attempts_of(class)),
            age: message.age(),
            past_producer_deadline: deadline.is_some_and(|at| at <= message.received_at),
        };
        let disposition = decide(class, facts, &self.budget(), rand::random());

        match (result, disposition) {
            (Ok(outcome), _) => {
                ack(&message).await?;
                self.log_outcome(&message, outcome);
                Ok(())
            }
            (Err(failure), Disposition::Retry(delay)) => {
                let copy = retry_copy(&message, &self.topology, delay, &failure);
                hand_over(publisher, copy)
                    .await
                    .with_context(|| format!("a retry was not taken; it is for: {failure}"))?;
                fault::point(Point::ConsumerAfterRetryConfirm);
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
                ack(&message).await
            }
            (Err(failure), Disposition::Park(reason)) => {
                let copy = park_copy(&message, &self.topology, reason, &failure, H::NAME);
                if let Err(not_taken) = hand_over(publisher, copy).await {
                    return reject(&message, not_taken, &failure).await;
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
                self.metrics.parked(H::NAME, reason);
                ack(&message).await
            }
            // `decide` never acks a failure; if it did, ending the session loses nothing.
            (Err(failure), Disposition::Ack) => Err(unsettled(failure)),
        }
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
    #[error("{0} is full")]
    Full(String),
    #[error("{0} returned the copy: {1}")]
    Returned(String, String),
    #[error("the copy's fate is unknown: {0}")]
    Trouble(#[from] BrokerTrouble),
}

/// Publishes a copy and sees it confirmed, not returned.
async fn hand_over(publisher: &mut Publisher, copy: Outgoing) -> Result<(), NotTaken> {
    let to = format!("{}/{}", copy.exchange, copy.routing_key);
    match publisher.publish_one(copy).await? {
        Verdict::Confirmed => Ok(()),
        Verdict::Returned(why) => Err(NotTaken::Returned(to, why)),
        Verdict::Nacked => Err(NotTaken::Full(to)),
    }
}

async fn ack(message: &Incoming) -> anyhow::Result<()> {
    // An Ack has no answer. If it is lost with the connection, the message comes again and is a
    // duplicate.
    message.delivery.ack(BasicAckOptions::default()).await.context("cannot ack")?;
    Ok(())
}

/// Parking would not take the copy. Rejected without requeue, the original stays in the source
/// queue's at-least-once dead lettering, which tries parking again until it is back.
async fn reject(message: &Incoming, not_taken: NotTaken, failure: &Failure) -> anyhow::Result<()> {
    message
        .delivery
        .reject(BasicRejectOptions { requeue: false })
        .await
        .context("cannot reject")?;
    match not_taken {
        // Only room can help, and a new session makes none.
        NotTaken::Full(parking) => {
            error!(
                message_id = message.message_id(),
                class = failure.class.as_str(),
                error = %failure,
                parking,
                "parking is full; the source queue keeps the message"
            );
            Ok(())
        }
        // A new session declares what is missing, and has a sound channel.
        NotTaken::Returned(..) | NotTaken::Trouble(_) => {
            let what = format!("parking took no copy; the queue keeps the message, for: {failure}");
            Err(anyhow::Error::from(not_taken).context(what))
        }
    }
}

fn unsettled(failure: Failure) -> anyhow::Error {
    failure.source.context("a failure cannot be acked")
}
