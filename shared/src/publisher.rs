//! Hop 2: a publish that is known to have arrived.
//!
//! The broker has taken a message when it acked the publish *and* did not return the message: an
//! unroutable message is returned first and acked after. Everything is published `mandatory`, on a
//! channel in confirm mode that has exactly one owner.
//!
//! Two properties of the client library shape this module (lapin 4.12):
//!
//! - Several tasks on clones of one channel swap delivery tags, and one's nack is reported as
//!   another's ack. Hence `&mut self`, and no `Clone`.
//! - A returned message is attached to whichever confirmation completes next, not to its own. So a
//!   batch is awaited whole, the returns are collected, and paired by `message_id`.
//!
//! A crash, a time-out or a broken channel leaves the outcome of a batch unknown. The caller then
//! publishes the same ids again; receivers absorb what arrives twice.

use crate::fault::{self, Point};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ErrorKind};
use std::collections::HashMap;
use std::time::Duration;

/// A message to publish. `properties` must carry `message_id`, and no two messages of a batch the
/// same one: it is what a return is recognised by.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// The event id, also in `properties`.
    pub message_id: String,
    /// Where to.
    pub exchange: ShortString,
    /// With which key.
    pub routing_key: ShortString,
    /// Everything else AMQP carries.
    pub properties: BasicProperties,
    /// The body.
    pub body: Vec<u8>,
}

/// What the broker said to one message of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Taken: every queue that it was routed to has it on disk (a quorum queue: a majority has).
    Confirmed,
    /// No queue is bound for it. The broker has forgotten it.
    Returned(String),
    /// A queue would not have it: it is full (`overflow: reject-publish`), or this channel does not find
    /// its leader; see [`Publisher::is_spent`].
    Nacked,
}

/// The batch as a whole came to nothing that we know of. The publisher is of no further use: open
/// another one, on another channel.
#[derive(Debug, thiserror::Error)]
pub enum BrokerTrouble {
    /// Not all confirms came in time.
    #[error("no confirm within {0:?}")]
    Timeout(Duration),
    /// The channel or the connection failed.
    #[error(transparent)]
    Client(#[from] lapin::Error),
    /// The channel is not in confirm mode, or an earlier batch broke it.
    #[error("the publishing channel is unusable: {0}")]
    Unusable(&'static str),
}

impl BrokerTrouble {
    /// Whether the broker closed the channel because of what some message of the batch is (too large,
    /// say; 406), rather than because of itself or of what this service may do. Going on to send on a
    /// channel that the broker has just closed takes the connection down (504), be it the rest of the
    /// batch or the rest of that very message. In a batch of one, that message is to blame.
    #[must_use]
    pub fn blames_a_message(&self) -> bool {
        let Self::Client(error) = self else { return false };
        let ErrorKind::ProtocolError(error) = error.kind() else { return false };
        matches!(
            error.kind(),
            AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED)
                | AMQPErrorKind::Hard(AMQPHardError::CHANNELERROR)
        )
    }
}

/// The one owner of a publishing channel.
#[derive(Debug)]
pub struct Publisher {
    channel: Channel,
    confirm_timeout: Duration,
    broken: bool,
    nacked: bool,
}

impl Publisher {
    /// Opens a channel of its own in confirm mode.
    ///
    /// # Errors
    /// When the broker does not give one within `confirm_timeout`.
    pub async fn open(
        connection: &Connection,
        confirm_timeout: Duration,
    ) -> Result<Self, BrokerTrouble> {
        let open = async {
            let channel = connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok(Self { channel, confirm_timeout, broken: false, nacked: false })
        };
        within(confirm_timeout, open).await
    }

    /// Publishes a batch pipelined and waits until every message of it has a verdict, in order.
    ///
    /// # Errors
    /// [`BrokerTrouble`] when the outcome is unknown for the whole batch.
    pub async fn publish_all(&mut self, batch: &[Outgoing]) -> Result<Vec<Verdict>, BrokerTrouble> {
        if self.broken {
            return Err(BrokerTrouble::Unusable("an earlier batch failed"));
        }
        // Set first: a caller that drops this future half-way leaves confirms behind that would be
        // counted for the next batch.
        self.broken = true;
        let verdicts = within(self.confirm_timeout, self.publish_and_await(batch)).await?;
        self.broken = false;
        self.nacked |= verdicts.contains(&Verdict::Nacked);
        Ok(verdicts)
    }

    /// Whether another one should be opened before the next batch, as a nack came over this one's
    /// channel. The broker keeps for each channel which node leads a queue. On 3.10, a channel that
    /// first publishes while the leader has just died asks the dead node for as long as it is dead, and
    /// nacks everything; a new channel asks the new leader.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.nacked
    }

    /// [`Publisher::publish_all`] for one message.
    ///
    /// # Errors
    /// As there.
    pub async fn publish_one(&mut self, message: Outgoing) -> Result<Verdict, BrokerTrouble> {
        let verdicts = self.publish_all(&[message]).await?;
        verdicts.into_iter().next().ok_or(BrokerTrouble::Unusable("no verdict"))
    }

    async fn publish_and_await(&self, batch: &[Outgoing]) -> Result<Vec<Verdict>, BrokerTrouble> {
        fault::point(Point::PublisherBeforePublish);
        let mandatory = BasicPublishOptions { mandatory: true, ..Default::default() };
        let mut pending = Vec::with_capacity(batch.len());
        for message in batch {
            let published = self
                .channel
                .basic_publish(
                    message.exchange.clone(),
                    message.routing_key.clone(),
                    mandatory,
                    &message.body,
                    message.properties.clone(),
                )
                .await;
            match published {
                Ok(confirm) => pending.push(confirm),
                // The channel was closed while we were still publishing. Why, is told to those that
                // wait for a confirm; this error says only that it is closed.
                Err(closed) => {
                    for confirm in pending {
                        confirm.await?;
                    }
                    return Err(closed.into());
                }
            }
        }
        fault::point(Point::PublisherBeforeConfirm);

        let mut acked = Vec::with_capacity(batch.len());
        let mut returned = HashMap::new();
        for confirm in pending {
            let (ack, message) = match confirm.await? {
                Confirmation::Ack(message) => (true, message),
                Confirmation::Nack(message) => (false, message),
                Confirmation::NotRequested => {
                    return Err(BrokerTrouble::Unusable("not in confirm mode"));
                }
            };
            acked.push(ack);
            if let Some(message) = message {
                let id = message.delivery.properties.message_id().as_ref().map(ToString::to_string);
                let why = format!("{} {}", message.reply_code, message.reply_text);
                returned.insert(id.unwrap_or_default(), why);
            }
        }
        fault::point(Point::PublisherAfterConfirm);
        Ok(pair(batch.iter().map(|message| message.message_id.as_str()), &acked, &returned))
    }
}

/// Gives each message its verdict: a return of its own id decides, then its own ack.
fn pair<'a>(
    ids: impl Iterator<Item = &'a str>,
    acked: &[bool],
    returned: &HashMap<String, String>,
) -> Vec<Verdict> {
    ids.zip(acked)
        .map(|(id, acked)| match (returned.get(id), acked) {
            (Some(why), _) => Verdict::Returned(why.clone()),
            (None, true) => Verdict::Confirmed,
            (None, false) => Verdict::Nacked,
        })
        .collect()
}

async fn within<T>(
    limit: Duration,
    step: impl Future<Output = Result<T, BrokerTrouble>>,
) -> Result<T, BrokerTrouble> {
    tokio::time::timeout(limit, step).await.unwrap_or(Err(BrokerTrouble::Timeout(limit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_return_counts_for_the_message_it_names_and_for_no_other() {
        let returned = HashMap::from([("m5".to_owned(), "312 NO_ROUTE".to_owned())]);
        let ids = ["m1", "m5", "m6"];
        let verdicts = pair(ids.into_iter(), &[true, true, false], &returned);
        assert_eq!(
            verdicts,
            [Verdict::Confirmed, Verdict::Returned("312 NO_ROUTE".into()), Verdict::Nacked]
        );
    }
}
