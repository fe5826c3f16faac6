//! Hops 7 and 8: the copy of a message that goes to a retry queue or to parking, and the one that
//! comes back from parking ([`crate::parking`]).
//!
//! The copy is the same fact: same `message_id`, same body, same properties. It is confirmed before
//! the original is acked, so a crash in between leaves two copies, which the inbox makes one effect;
//! the other order would leave none.

use crate::config::Delay;
use crate::failure::Failure;
use crate::incoming::{
    ATTEMPT, CLASS, CLASS_ATTEMPT, CONSUMER, CONSUMER_VERSION, FIRST_FAILED_AT, Incoming,
    LAST_ERROR, ORIGINAL_EXCHANGE, ORIGINAL_ROUTING_KEY, PARK_REASON, PARKED_AT, PRODUCER,
    PRODUCER_DEADLINE, REDRIVE_COUNT, REDRIVEN_AT,
};
use crate::publisher::Outgoing;
use crate::retry::ParkReason;
use crate::topology::Topology;
use chrono::{DateTime, SecondsFormat, Utc};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};

/// Headers share a frame with the properties; an error text may be as long as its message.
const MAX_ERROR_CHARS: usize = 512;

/// Headers that route: they would send the copy to where the original already went.
const ROUTING: &[&str] = &["CC", "BCC"];
/// Beginnings of the headers in which the broker keeps its own account. A republished copy would
/// falsify it; older brokers even drop messages over it.
const BROKERS_OWN: &[&str] =
    &["x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count"];
/// What a message has been through since it was published. A redriven one begins anew, with all its
/// attempts; where it came from, its deadline and how often it was redriven stay with it.
const HISTORY: &[&str] = &[
    ATTEMPT,
    CLASS,
    CLASS_ATTEMPT,
    FIRST_FAILED_AT,
    LAST_ERROR,
    PARK_REASON,
    PARKED_AT,
    CONSUMER,
    CONSUMER_VERSION,
    PRODUCER,
];

/// The copy that waits in the queue of `delay` and comes back.
#[must_use]
pub fn retry_copy(
    message: &Incoming,
    topology: &Topology,
    delay: Delay,
    failure: &Failure,
) -> Outgoing {
    let headers = marked(message, failure);
    copy(message, headers, topology.retry_exchange(), delay.to_string())
}

/// The copy that waits for a person, with what that person needs to know.
#[must_use]
pub fn park_copy(
    message: &Incoming,
    topology: &Topology,
    reason: ParkReason,
    failure: &Failure,
    consumer: &str,
) -> Outgoing {
    let mut headers = marked(message, failure);
    let mut set = |name: &str, text: &str| {
        headers.insert(name.into(), AMQPValue::LongString(text.into()));
    };
    set(PARK_REASON, reason.as_str());
    set(PARKED_AT, &written(Utc::now()));
    set(CONSUMER, consumer);
    set(CONSUMER_VERSION, env!("CARGO_PKG_VERSION"));
    if let Ok(envelope) = &message.envelope {
        set(PRODUCER, &envelope.producer);
        // The relay sets this one; a message by another hand may lack it.
        headers.insert(
            "x-schema-version".into(),
            AMQPValue::LongLongInt(i64::from(envelope.schema_version)),
        );
    } else if let Some(producer) = message.delivery.properties.app_id() {
        set(PRODUCER, producer.as_str());
    }
    copy(message, headers, topology.dead_letter_exchange(), topology.dead_letter_key())
}

/// The copy that goes from parking back to its queue, with a new life before it. `origin` is where
/// it was first published, as far as that is known.
#[must_use]
pub fn redrive_copy(
    message: &Incoming,
    topology: &Topology,
    origin: Option<(String, String)>,
    now: DateTime<Utc>,
) -> Outgoing {
    let mut headers = FieldTable::default();
    for (name, value) in own_headers(message).inner() {
        if !HISTORY.contains(&name.as_str()) {
            headers.insert(name.clone(), value.clone());
        }
    }
    let mut set = |name: &str, text: String| {
        headers.insert(name.into(), AMQPValue::LongString(text.into()));
    };
    if let Some((exchange, routing_key)) = origin {
        set(ORIGINAL_EXCHANGE, exchange);
        set(ORIGINAL_ROUTING_KEY, routing_key);
    }
    if let Some(deadline) = message.producer_deadline() {
        set(PRODUCER_DEADLINE, written(deadline));
    }
    set(REDRIVEN_AT, written(now));
    let redrives = i64::from(message.redrives()) + 1;
    headers.insert(REDRIVE_COUNT.into(), AMQPValue::LongLongInt(redrives));
    let (exchange, routing_key) = topology.entrance();
    copy(message, headers, exchange, routing_key)
}

/// The headers that may travel on: neither those that route nor the broker's account.
fn own_headers(message: &Incoming) -> FieldTable {
    let mut headers = FieldTable::default();
    for (name, value) in message.headers().inner() {
        let routes = ROUTING.contains(&name.as_str());
        let account = BROKERS_OWN.iter().any(|prefix| name.as_str().starts_with(prefix));
        if !routes && !account {
            headers.insert(name.clone(), value.clone());
        }
    }
    headers
}

fn written(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// The headers of a copy that failed: the message's own, and its history.
fn marked(message: &Incoming, failure: &Failure) -> FieldTable {
    let mut headers = own_headers(message);
    let mut set = |name: &str, text: String| {
        headers.insert(name.into(), AMQPValue::LongString(text.into()));
    };
    let (exchange, routing_key) = message.origin();
    set(ORIGINAL_EXCHANGE, exchange);
    set(ORIGINAL_ROUTING_KEY, routing_key);
    let first = message.first_failed_at().unwrap_or(message.received_at);
    set(FIRST_FAILED_AT, written(first));
    if let Some(deadline) = message.producer_deadline() {
        set(PRODUCER_DEADLINE, written(deadline));
    }
    set(LAST_ERROR, failure.to_string().chars().take(MAX_ERROR_CHARS).collect());
    set(CLASS, failure.class.as_str().to_owned());
    for (name, count) in
        [(ATTEMPT, message.attempts()), (CLASS_ATTEMPT, message.attempts_of(failure.class))]
    {
        headers.insert(name.into(), AMQPValue::LongLongInt(i64::from(count)));
    }
    headers
}

fn copy(
    message: &Incoming,
    headers: FieldTable,
    exchange: String,
    routing_key: String,
) -> Outgoing {
    let original = &message.delivery.properties;
    // Named one by one: what is not here (user_id, expiration, cluster_id) must not travel on.
    let mut properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
    macro_rules! keep {
        ($($get:ident => $with:ident),* $(,)?) => {
            $(if let Some(value) = original.$get().clone() {
                properties = properties.$with(value);
            })*
        };
    }
    keep!(
        message_id => with_message_id,
        kind => with_type,
        app_id => with_app_id,
        correlation_id => with_correlation_id,
        reply_to => with_reply_to,
        timestamp => with_timestamp,
        content_type => with_content_type,
        content_encoding => with_content_encoding,
        priority => with_priority,
    );
    Outgoing {
        // A return names the property; a message that never had an id is the only one in its batch.
        message_id: message.message_id().unwrap_or_default().to_owned(),
        exchange: exchange.into(),
        routing_key: routing_key.into(),
        properties,
        body: message.delivery.data.clone(),
    }
}
