//! A parked message, read with suspicion like any delivery ([`crate::incoming`]).
//!
//! Two hands park. The consumer writes down why, in the headers of its copy. The broker does it
//! itself when a message has killed its consumer too often (delivery limit) or the parking would not
//! take the copy; then its own account, `x-death`, says why and when. The consumer's copies carry
//! none, so where there is one it is the later of the two.

use crate::envelope::Envelope;
use crate::failure::Class;
use crate::incoming::{
    ATTEMPT, CLASS, CONSUMER, Incoming, LAST_ERROR, PARK_REASON, PARKED_AT, PRODUCER, text,
};
use chrono::{DateTime, Utc};
use clap::ValueEnum;
use lapin::types::{AMQPValue, FieldTable};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// As [`About::parked_by`] names the broker.
const BROKER: &str = "broker";

/// A message that waits in parking.
pub struct Parked {
    /// What a person wants to know of it.
    pub about: About,
    /// The message.
    pub message: Incoming,
}

/// What is known of a parked message. All of it came from outside, and any of it may be missing.
#[derive(Clone, Debug, Default, Serialize)]
pub struct About {
    /// AMQP's `message_id`, or else the id in the body.
    pub message_id: Option<String>,
    /// Its type.
    pub event_type: Option<String>,
    /// Whose fact: the kind of thing.
    pub aggregate_type: Option<String>,
    /// Whose fact: its id.
    pub aggregate_id: Option<String>,
    /// The how-many-eth.
    pub aggregate_version: Option<i64>,
    /// Why it is here: one of [`crate::retry::ParkReason`], or the broker's word, `delivery_limit` or
    /// `rejected`.
    pub reason: Option<String>,
    /// The class of its last failure.
    pub class: Option<Class>,
    /// The last failure.
    pub error: Option<String>,
    /// How often it was tried, this life.
    pub attempts: u32,
    /// When it first failed, this life.
    pub first_failed_at: Option<DateTime<Utc>>,
    /// Since when it is here.
    pub parked_at: Option<DateTime<Utc>>,
    /// The consumer that parked it, or `broker`.
    pub parked_by: Option<String>,
    /// How often it was sent back from here before.
    pub redrives: u32,
    /// When last.
    pub redriven_at: Option<DateTime<Utc>>,
    /// Who published it.
    pub producer: Option<String>,
    /// The exchange that it was first published to.
    pub original_exchange: Option<String>,
    /// The key that it was first published with.
    pub original_routing_key: Option<String>,
    /// The length of its body.
    pub bytes: usize,
}

impl Parked {
    /// Reads a message.
    #[must_use]
    pub fn read(message: Incoming) -> Self {
        Self { about: About::new(&message), message }
    }

    /// Where it was first published, as far as that is known.
    #[must_use]
    pub fn origin(&self) -> Option<(String, String)> {
        self.about.original_exchange.clone().zip(self.about.original_routing_key.clone())
    }

    /// All of it, body and headers included: enough to publish it once more by hand.
    #[must_use]
    pub fn in_full(&self) -> Value {
        let delivery = &self.message.delivery;
        let mut full = json!({ "about": self.about, "properties": properties(&self.message) });
        let headers = self.message.headers();
        full["headers"] = table(&headers);
        // Bytes that are no text come in hexadecimal, which `xxd -r -p` reads.
        match std::str::from_utf8(&delivery.data) {
            Ok(body) => full["body"] = json!(body),
            Err(_) => full["body_hex"] = json!(hex(&delivery.data)),
        }
        full
    }
}

impl About {
    fn new(message: &Incoming) -> Self {
        let properties = &message.delivery.properties;
        // `message.envelope` also refuses a body whose id is not the property's, and what such a
        // message is about is worth knowing.
        let envelope = Envelope::parse(&message.delivery.data).ok();
        let envelope = envelope.as_ref();
        let header = |name| message.text(name).map(str::to_owned);
        let death = Death::last(message);
        let (reason, parked_at, parked_by) = match &death {
            Some(death) => (death.reason.clone(), death.at, Some(BROKER.to_owned())),
            None => (header(PARK_REASON), message.past(PARKED_AT), header(CONSUMER)),
        };
        let origin = message.noted_origin().or_else(|| death.and_then(|death| death.origin));
        let (original_exchange, original_routing_key) = origin.unzip();
        let id = message.message_id().filter(|id| !id.is_empty()).map(str::to_owned);
        let kind = properties.kind().as_ref().map(ToString::to_string);
        let app_id = properties.app_id().as_ref().map(ToString::to_string);
        Self {
            message_id: id.or_else(|| envelope.map(|envelope| envelope.id.clone())),
            event_type: envelope.map(|envelope| envelope.event_type.clone()).or(kind),
            aggregate_type: envelope.map(|envelope| envelope.aggregate.kind.clone()),
            aggregate_id: envelope
                .map(|envelope| envelope.aggregate.id.clone())
                .or_else(|| header("x-aggregate-id")),
            aggregate_version: envelope.map(|envelope| envelope.aggregate.version),
            reason,
            class: message.text(CLASS).and_then(|class| Class::from_str(class, false).ok()),
            error: header(LAST_ERROR),
            attempts: message.count(ATTEMPT),
            first_failed_at: message.first_failed_at(),
            parked_at,
            parked_by,
            redrives: message.redrives(),
            redriven_at: message.redriven_at(),
            producer: envelope
                .map(|envelope| envelope.producer.clone())
                .or_else(|| header(PRODUCER))
                .or(app_id),
            original_exchange,
            original_routing_key,
            bytes: message.delivery.data.len(),
        }
    }
}

/// The broker's account of the last time that it dead-lettered a message.
/// <https://www.rabbitmq.com/docs/dlx#effects>: `x-death` has the latest first.
struct Death {
    reason: Option<String>,
    at: Option<DateTime<Utc>>,
    origin: Option<(String, String)>,
}

impl Death {
    fn last(message: &Incoming) -> Option<Self> {
        let latest = match message.header("x-death")? {
            AMQPValue::FieldArray(deaths) => match deaths.as_slice().first() {
                Some(AMQPValue::FieldTable(latest)) => latest.inner().clone(),
                _ => Default::default(),
            },
            _ => Default::default(),
        };
        let word = |name: &str| latest.get(name).and_then(text).map(str::to_owned);
        let reason = word("reason")
            .or_else(|| message.text("x-last-death-reason").map(str::to_owned))
            .or_else(|| message.text("x-first-death-reason").map(str::to_owned));
        let at = match latest.get("time") {
            Some(AMQPValue::Timestamp(seconds)) => {
                i64::try_from(*seconds).ok().and_then(|at| DateTime::from_timestamp(at, 0))
            }
            _ => None,
        };
        let key = match latest.get("routing-keys") {
            Some(AMQPValue::FieldArray(keys)) => keys.as_slice().first().and_then(text),
            _ => None,
        };
        Some(Self {
            reason,
            at: at.filter(|at| *at <= message.received_at),
            origin: word("exchange").zip(key.map(str::to_owned)),
        })
    }
}

fn properties(message: &Incoming) -> Value {
    let properties = &message.delivery.properties;
    let mut shown = Map::new();
    macro_rules! show {
        ($($name:ident),* $(,)?) => {
            $(if let Some(value) = properties.$name() {
                shown.insert(stringify!($name).into(), json!(value.to_string()));
            })*
        };
    }
    // The client library's name for it is not AMQP's.
    if let Some(kind) = properties.kind() {
        shown.insert("type".into(), json!(kind.as_str()));
    }
    show!(
        message_id,
        app_id,
        correlation_id,
        reply_to,
        timestamp,
        content_type,
        content_encoding,
        priority,
        expiration,
        user_id,
    );
    Value::Object(shown)
}

fn table(table: &FieldTable) -> Value {
    let values = table.inner().iter();
    Value::Object(values.map(|(name, value)| (name.to_string(), shown(value))).collect())
}

/// A header's value in JSON: numbers and texts as such, the rest in the nearest form that says all.
fn shown(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::Boolean(value) => json!(value),
        AMQPValue::ShortShortInt(n) => json!(n),
        AMQPValue::ShortShortUInt(n) => json!(n),
        AMQPValue::ShortInt(n) => json!(n),
        AMQPValue::ShortUInt(n) => json!(n),
        AMQPValue::LongInt(n) => json!(n),
        AMQPValue::LongUInt(n) => json!(n),
        AMQPValue::LongLongInt(n) => json!(n),
        AMQPValue::Float(n) => json!(n),
        AMQPValue::Double(n) => json!(n),
        AMQPValue::Timestamp(seconds) => json!(seconds),
        AMQPValue::DecimalValue(n) => json!(format!("{n:?}")),
        AMQPValue::ShortString(text) => json!(text.as_str()),
        AMQPValue::LongString(text) => match std::str::from_utf8(text.as_bytes()) {
            Ok(text) => json!(text),
            Err(_) => json!({ "hex": hex(text.as_bytes()) }),
        },
        AMQPValue::ByteArray(bytes) => json!({ "hex": hex(bytes.as_slice()) }),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(shown).collect(),
        AMQPValue::FieldTable(values) => table(values),
        AMQPValue::Void => Value::Null,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
