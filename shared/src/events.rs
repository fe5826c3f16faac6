//! The events: which types there are, which versions of each are understood, and what they carry.
//!
//! `contract/` next to this crate says the same in JSON Schema and AsyncAPI; the end-to-end tests
//! hold every message that is really published against it.
//!
//! An old version is lifted to the newest on the way in, here and nowhere else, so that handlers
//! know one shape. A version that nobody understands cannot be guessed at: the message is parked
//! with the version named, and redriven once a consumer that knows it is deployed.

use crate::envelope::{ContractError, Envelope, MAX_ID_BYTES};
use crate::lines::{Lines, RawLine, Sku};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What orders-service says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrderEvent {
    /// `order.created`, the genesis of an order.
    Created(OrderCreated),
    /// `order.cancelled`.
    Cancelled,
    /// `order.confirmed`.
    Confirmed,
    /// `order.rejected`.
    Rejected(Refusal),
}

/// What inventory-service says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InventoryEvent {
    /// `inventory.reserved`, a genesis of a reservation.
    Reserved {
        /// For which order.
        order_id: String,
    },
    /// `inventory.reservation_rejected`, the other genesis.
    ReservationRejected {
        /// For which order.
        order_id: String,
        /// Why.
        refusal: Refusal,
    },
    /// `inventory.released`.
    Released {
        /// For which order.
        order_id: String,
    },
}

/// Data of `order.created` version 3.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OrderCreated {
    /// What was ordered.
    pub lines: Lines,
}

/// Why an order cannot be had. A business outcome: nobody retries it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What kind of no.
    pub reason: RefusalReason,
    /// The first sku, in order, that it is about.
    pub sku: Sku,
}

/// The kinds of no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalReason {
    /// There is not enough of it.
    OutOfStock,
    /// There never was such a thing.
    UnknownSku,
}

impl RefusalReason {
    /// As it is written in events and in the database.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OutOfStock => "out_of_stock",
            Self::UnknownSku => "unknown_sku",
        }
    }
}

/// Data of `inventory.reserved` and `inventory.released`.
#[derive(Clone, Debug, Serialize)]
pub struct Reservation<'a> {
    /// For which order.
    pub order_id: &'a str,
    /// What is held, or was.
    pub lines: &'a [crate::lines::Line],
}

/// Data of `inventory.reservation_rejected`.
#[derive(Clone, Debug, Serialize)]
pub struct ReservationRejected<'a> {
    /// For which order.
    pub order_id: &'a str,
    /// Why.
    #[serde(flatten)]
    pub refusal: &'a Refusal,
}

impl OrderEvent {
    /// Reads an event of orders-service.
    ///
    /// # Errors
    /// [`ContractError`] where type, version or data are not understood. Never worth a retry.
    pub fn decode(envelope: &Envelope) -> Result<Self, ContractError> {
        /// Version 2: one sku, one count.
        #[derive(Deserialize)]
        struct CreatedV2 {
            sku: String,
            count: i64,
        }
        #[derive(Deserialize)]
        struct CreatedV3 {
            lines: Vec<RawLineOfTomorrow>,
        }
        /// Like [`RawLine`], but a field that it does not know is ignored: producers may add some.
        #[derive(Deserialize)]
        struct RawLineOfTomorrow {
            sku: String,
            count: i64,
        }

        let created = |lines: Vec<RawLine>| {
            Lines::try_from(lines)
                .map(|lines| Self::Created(OrderCreated { lines }))
                .map_err(|broken| ContractError::Rule(broken.to_string()))
        };
        match (envelope.event_type.as_str(), envelope.schema_version) {
            ("order.created", 3) => {
                let data: CreatedV3 = data(envelope)?;
                let line = |line: RawLineOfTomorrow| RawLine { sku: line.sku, count: line.count };
                created(data.lines.into_iter().map(line).collect())
            }
            ("order.created", 2) => {
                let CreatedV2 { sku, count } = data(envelope)?;
                created(vec![RawLine { sku, count }])
            }
            ("order.created", _) => Err(unknown_version(envelope, "3 and 2 (1 is retired)")),
            ("order.cancelled", 1) => Ok(Self::Cancelled),
            ("order.confirmed", 1) => Ok(Self::Confirmed),
            ("order.rejected", 1) => Ok(Self::Rejected(data(envelope)?)),
            ("order.cancelled" | "order.confirmed" | "order.rejected", _) => {
                Err(unknown_version(envelope, "1"))
            }
            _ => Err(ContractError::UnknownType(envelope.event_type.clone())),
        }
    }
}

impl InventoryEvent {
    /// Reads an event of inventory-service.
    ///
    /// # Errors
    /// [`ContractError`] where type, version or data are not understood. Never worth a retry.
    pub fn decode(envelope: &Envelope) -> Result<Self, ContractError> {
        #[derive(Deserialize)]
        struct About {
            order_id: String,
        }
        let about = || {
            let About { order_id } = data(envelope)?;
            if order_id.is_empty() || order_id.len() > MAX_ID_BYTES {
                return Err(ContractError::Rule("data.order_id is empty or too long".into()));
            }
            Ok(order_id)
        };
        match (envelope.event_type.as_str(), envelope.schema_version) {
            ("inventory.reserved", 1) => Ok(Self::Reserved { order_id: about()? }),
            ("inventory.reservation_rejected", 1) => {
                Ok(Self::ReservationRejected { order_id: about()?, refusal: data(envelope)? })
            }
            ("inventory.released", 1) => Ok(Self::Released { order_id: about()? }),
            ("inventory.reserved" | "inventory.reservation_rejected" | "inventory.released", _) => {
                Err(unknown_version(envelope, "1"))
            }
            _ => Err(ContractError::UnknownType(envelope.event_type.clone())),
        }
    }
}

/// Whether a stream may begin with this type. An aggregate's first event can have any version (the
/// consumer may be younger than the producer), but it must be one that begins a life.
#[must_use]
pub fn is_genesis(event_type: &str) -> bool {
    matches!(event_type, "order.created" | "inventory.reserved" | "inventory.reservation_rejected")
}

/// The version that is published of each type.
#[must_use]
pub fn current_version(event_type: &str) -> u32 {
    if event_type == "order.created" { 3 } else { 1 }
}

fn data<D: DeserializeOwned>(envelope: &Envelope) -> Result<D, ContractError> {
    D::deserialize(&envelope.data).map_err(|source| ContractError::Data {
        event_type: envelope.event_type.clone(),
        version: envelope.schema_version,
        source,
    })
}

fn unknown_version(envelope: &Envelope, understood: &'static str) -> ContractError {
    ContractError::UnknownVersion {
        event_type: envelope.event_type.clone(),
        version: envelope.schema_version,
        understood,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::{Aggregate, now};
    use serde_json::{Value, json};

    fn envelope(event_type: &str, schema_version: u32, data: Value) -> Envelope {
        Envelope {
            id: "01K0".into(),
            event_type: event_type.into(),
            schema_version,
            occurred_at: now(),
            producer: "orders".into(),
            correlation_id: "c".into(),
            causation_id: "d".into(),
            aggregate: Aggregate { kind: "order".into(), id: "42".into(), version: 7 },
            data,
        }
    }

    #[test]
    fn version_2_of_order_created_is_lifted_to_3() {
        let v2 = envelope("order.created", 2, json!({"sku": "book-17", "count": 1}));
        let v3 = envelope("order.created", 3, json!({"lines": [{"sku": "book-17", "count": 1}]}));
        let (v2, v3) = (OrderEvent::decode(&v2), OrderEvent::decode(&v3));
        assert_eq!(v2.expect("version 2"), v3.expect("version 3"));
    }

    #[test]
    fn a_field_of_tomorrow_is_ignored_at_every_level() {
        let data = json!({"lines": [{"sku": "a", "count": 1, "gift": true}], "voucher": 7});
        assert!(OrderEvent::decode(&envelope("order.created", 3, data)).is_ok());
    }

    #[test]
    fn an_unknown_version_is_named_and_so_are_those_understood() {
        for (event_type, version) in
            [("order.created", 1), ("order.created", 99), ("order.cancelled", 2)]
        {
            let error = OrderEvent::decode(&envelope(event_type, version, json!({})))
                .expect_err("an unknown version");
            let text = error.to_string();
            assert!(text.contains(event_type) && text.contains(&version.to_string()), "{text}");
        }
    }

    #[test]
    fn unknown_types_and_broken_data_are_contract_errors() {
        for (event_type, version, bad) in [
            ("order.exploded", 1, json!({})),
            ("order.created", 3, json!({"lines": []})),
            ("order.created", 3, json!({"lines": [{"sku": "a b", "count": 1}]})),
            ("order.created", 3, json!({"lines": [{"sku": "a", "count": 1.5}]})),
            ("order.created", 3, json!({"lines": [{"sku": "a"}]})),
            ("order.created", 2, json!({"sku": "a", "count": 0})),
            ("order.created", 2, json!(null)),
            ("order.rejected", 1, json!({"reason": "a whim", "sku": "a"})),
        ] {
            assert!(
                OrderEvent::decode(&envelope(event_type, version, bad.clone())).is_err(),
                "{event_type} {version} {bad}"
            );
        }
    }
}
