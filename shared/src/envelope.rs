//! The envelope: what every message of this system looks like, whoever wrote it.
//!
//! It is written once, by the transaction that makes the fact true, and carried unchanged from then
//! on: through the outbox, the broker, retries, parking and back. `id` names the fact; deduplication goes
//! by it ([`crate::inbox`]).

use crate::events::current_version;
use chrono::{DateTime, SubsecRound, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longest event id in bytes, well within the 255 of an AMQP short string. Derived ids (see
/// [`derived_id`]) must keep it too, so an id from elsewhere that leaves no room for their suffixes
/// ends in parking. Ours have 26 bytes.
pub const MAX_ID_BYTES: usize = 200;

/// A message body. Unknown fields are ignored, so that a producer may add some.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope<D = Value> {
    /// Names the fact. Also AMQP's `message_id` and the inbox key.
    pub id: String,
    /// `order.created` and the like. Also the routing key.
    #[serde(rename = "type")]
    pub event_type: String,
    /// Which shape `data` has, counted for each type.
    pub schema_version: u32,
    /// When the fact became true, in UTC, in whole microseconds as PostgreSQL keeps them.
    pub occurred_at: DateTime<Utc>,
    /// The service that says so.
    pub producer: String,
    /// The same for all messages of one business process.
    pub correlation_id: String,
    /// The message or the command that led to this one.
    pub causation_id: String,
    /// Whose fact this is, and the how-many-eth.
    pub aggregate: Aggregate,
    /// What depends on the type: see [`crate::events`].
    pub data: D,
}

/// The thing that changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aggregate {
    /// `order` or `reservation`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The aggregate's own id.
    pub id: String,
    /// Counts the changes: each one publishes exactly one event, so the numbers have no holes.
    pub version: i64,
}

/// Why bytes are not a message of this system. Time does not mend any of these.
#[derive(Debug, thiserror::Error)]
pub enum ContractError {
    /// Not JSON, or not an envelope: a field is missing or of another type.
    #[error("the body is not an event envelope: {0}")]
    NotAnEnvelope(#[source] serde_json::Error),
    /// The envelope or its data breaks a rule; the text names the field and the rule.
    #[error("{0}")]
    Rule(String),
    /// AMQP's `message_id` is missing, or is not the id inside.
    #[error("{0}")]
    MessageId(String),
    /// `data` does not have the shape that its type and version promise.
    #[error("data of {event_type} version {version} is malformed: {source}")]
    Data {
        /// The event's type.
        event_type: String,
        /// The event's schema version.
        version: u32,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A type nobody here knows.
    #[error("unknown event type {0:?}")]
    UnknownType(String),
    /// A version nobody here knows (yet, or any more).
    #[error("{event_type} has schema version {version}; understood: {understood}")]
    UnknownVersion {
        /// The event's type.
        event_type: String,
        /// The version it came with.
        version: u32,
        /// The versions that would have been understood.
        understood: &'static str,
    },
}

impl Envelope {
    /// Reads a body and checks every rule that holds for all types.
    ///
    /// # Errors
    /// The first rule that is broken, by name.
    pub fn parse(body: &[u8]) -> Result<Self, ContractError> {
        let envelope: Self = serde_json::from_slice(body).map_err(ContractError::NotAnEnvelope)?;
        envelope.check()?;
        Ok(envelope)
    }

    fn check(&self) -> Result<(), ContractError> {
        let rule = |broken: bool, text: String| {
            if broken { Err(ContractError::Rule(text)) } else { Ok(()) }
        };
        for (field, value) in [
            ("id", &self.id),
            ("type", &self.event_type),
            ("producer", &self.producer),
            ("correlation_id", &self.correlation_id),
            ("causation_id", &self.causation_id),
            ("aggregate.type", &self.aggregate.kind),
            ("aggregate.id", &self.aggregate.id),
        ] {
            rule(value.is_empty(), format!("{field} is empty"))?;
            rule(
                value.len() > MAX_ID_BYTES,
                format!("{field} is {} bytes long, the most is {MAX_ID_BYTES}", value.len()),
            )?;
            // PostgreSQL's text cannot hold it, and would say so with a permanent error anyway.
            rule(value.contains('\0'), format!("{field} contains a NUL"))?;
        }
        rule(
            self.aggregate.version < 1,
            format!("aggregate.version is {}, the least is 1", self.aggregate.version),
        )
    }

    /// Reads AMQP's `message_id` against the body: they must be one and the same, or a duplicate
    /// could slip past the inbox.
    ///
    /// # Errors
    /// [`ContractError::MessageId`] where it is missing, empty, too long or different.
    pub fn check_message_id(&self, message_id: Option<&str>) -> Result<(), ContractError> {
        match message_id {
            None | Some("") => Err(ContractError::MessageId("message_id is missing".into())),
            Some(id) if id.len() > MAX_ID_BYTES => Err(ContractError::MessageId(format!(
                "message_id is {} bytes long, the most is {MAX_ID_BYTES}",
                id.len()
            ))),
            Some(id) if id != self.id => Err(ContractError::MessageId(format!(
                "message_id {id:?} is not the id in the body, {:?}",
                self.id
            ))),
            Some(_) => Ok(()),
        }
    }
}

impl<D> Envelope<D> {
    /// An event that follows from `cause`: its id is a function of the cause's, it belongs to the
    /// same business process, and it occurs now.
    pub fn following(
        cause: &Envelope,
        what: &str,
        producer: &str,
        event_type: &str,
        aggregate: Aggregate,
        data: D,
    ) -> Self {
        Self {
            id: derived_id(&cause.id, what),
            event_type: event_type.to_owned(),
            schema_version: current_version(event_type),
            occurred_at: now(),
            producer: producer.to_owned(),
            correlation_id: cause.correlation_id.clone(),
            causation_id: cause.id.clone(),
            aggregate,
            data,
        }
    }
}

/// The id of an event that follows from another one. It is a function of its cause, so handling the
/// cause twice cannot make two of it.
#[must_use]
pub fn derived_id(source_id: &str, what: &str) -> String {
    format!("{source_id}:{what}")
}

/// A fresh id for an event that a command, not a message, led to.
#[must_use]
pub fn new_id() -> String {
    ulid::Ulid::generate().to_string()
}

/// The time now, cut once to what both JSON and PostgreSQL keep, so that they agree for ever.
#[must_use]
pub fn now() -> DateTime<Utc> {
    Utc::now().trunc_subsecs(6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample() -> Value {
        json!({
            "id": "01K0", "type": "order.created", "schema_version": 3,
            "occurred_at": "2026-07-21T09:00:00Z", "producer": "orders",
            "correlation_id": "c", "causation_id": "d",
            "aggregate": {"type": "order", "id": "42", "version": 7}, "data": {}
        })
    }

    fn parse(value: &Value) -> Result<Envelope, ContractError> {
        Envelope::parse(&serde_json::to_vec(value).unwrap_or_default())
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let mut value = sample();
        value["a_field_of_tomorrow"] = json!(1);
        assert!(parse(&value).is_ok());
    }

    #[test]
    fn every_missing_field_is_refused_by_name() {
        for field in sample().as_object().into_iter().flat_map(|o| o.keys()) {
            let mut value = sample();
            value.as_object_mut().map(|o| o.remove(field));
            match parse(&value) {
                Err(ContractError::NotAnEnvelope(e)) => {
                    assert!(e.to_string().contains(field.as_str()))
                }
                other => panic!("{field}: {other:?}"),
            }
        }
    }

    #[test]
    fn broken_rules_are_refused() {
        for (pointer, bad) in [
            ("/id", json!("")),
            ("/id", json!("x".repeat(201))),
            ("/id", json!("a\u{0}b")),
            ("/aggregate/id", json!("")),
            ("/aggregate/version", json!(0)),
            ("/aggregate/version", json!(-1)),
            ("/schema_version", json!(-1)),
            ("/schema_version", json!("3")),
            ("/occurred_at", json!("yesterday")),
        ] {
            let mut value = sample();
            if let Some(slot) = value.pointer_mut(pointer) {
                *slot = bad.clone();
            }
            assert!(parse(&value).is_err(), "{pointer} = {bad}");
        }
    }

    #[test]
    fn the_message_id_must_be_the_id_in_the_body() {
        let envelope = parse(&sample()).expect("the sample is valid");
        assert!(envelope.check_message_id(Some("01K0")).is_ok());
        for bad in [None, Some(""), Some("other"), Some("x".repeat(201).as_str())] {
            assert!(envelope.check_message_id(bad).is_err(), "{bad:?}");
        }
    }
}
