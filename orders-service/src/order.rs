//! An order: its states, the transitions between them, and how it is shown. No I/O.
//!
//! ```text
//!            ┌─► rejected
//!  created ──┼─► confirmed ──┐
//!            └───────────────┴─► cancelled
//! ```

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use shared::envelope::Aggregate;
use shared::lines::{Line, Lines};
use utoipa::ToSchema;
use uuid::Uuid;

/// Where an order is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Taken; the inventory has not answered yet.
    Created,
    /// Its stock is held.
    Confirmed,
    /// Its stock cannot be had.
    Rejected,
    /// Called off by the client.
    Cancelled,
}

impl Status {
    /// As it is written in the table.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Confirmed => "confirmed",
            Self::Rejected => "rejected",
            Self::Cancelled => "cancelled",
        }
    }

    /// As the table's CHECK allows it.
    ///
    /// # Errors
    /// When the text is no status.
    pub fn from_column(text: &str) -> sqlx::Result<Self> {
        match text {
            "created" => Ok(Self::Created),
            "confirmed" => Ok(Self::Confirmed),
            "rejected" => Ok(Self::Rejected),
            "cancelled" => Ok(Self::Cancelled),
            other => Err(sqlx::Error::Decode(format!("unknown order status {other:?}").into())),
        }
    }

    /// What asking for `to` means in this state.
    #[must_use]
    pub fn transition(self, to: Self) -> Transition {
        use Status as S;
        match (self, to) {
            (S::Created, S::Confirmed | S::Rejected) => Transition::Change,
            (S::Created | S::Confirmed, S::Cancelled) => Transition::Change,
            (from, to) if from == to => Transition::AlreadyThere,
            // The inventory answered while the client called the order off. It will hear of that
            // and release what it holds.
            (S::Cancelled, S::Confirmed | S::Rejected) => Transition::TooLate,
            _ => Transition::Forbidden,
        }
    }
}

/// Whether a status may follow another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// It does.
    Change,
    /// It is there; asking again changes nothing.
    AlreadyThere,
    /// It came too late to matter.
    TooLate,
    /// It must not.
    Forbidden,
}

/// An order as the API shows it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Order {
    /// Its name, chosen when it was placed
    pub id: Uuid,
    /// Where it is in its life
    pub status: Status,
    /// Counts the changes of status; also the version of the event that tells of the last one
    pub version: i64,
    /// Whose it is, as the client told
    #[serde(skip_serializing_if = "Option::is_none")]
    pub customer_id: Option<String>,
    /// One line for each sku, by sku
    pub lines: Vec<OrderLine>,
    /// Why it was rejected
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejection: Option<Rejection>,
    /// When it was placed
    pub created_at: DateTime<Utc>,
    /// When its status changed last
    pub updated_at: DateTime<Utc>,
}

/// One thing of an order.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct OrderLine {
    /// What
    #[schema(example = "book-17")]
    pub sku: String,
    /// How many
    #[schema(example = 1)]
    pub count: i32,
}

/// Why an order cannot be had.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Rejection {
    /// `out_of_stock` or `unknown_sku`
    #[schema(example = "out_of_stock")]
    pub reason: String,
    /// The first sku that could not be had
    #[schema(example = "book-17")]
    pub sku: String,
}

impl Order {
    /// A new order, as it is before anybody has heard of it.
    #[must_use]
    pub fn new(id: Uuid, customer_id: Option<String>, lines: &Lines, now: DateTime<Utc>) -> Self {
        let line = |line: &Line| OrderLine { sku: line.sku.to_string(), count: line.count };
        Self {
            id,
            status: Status::Created,
            version: 1,
            customer_id,
            lines: lines.as_slice().iter().map(line).collect(),
            rejection: None,
            created_at: now,
            updated_at: now,
        }
    }
}

/// The order, as events name it.
#[must_use]
pub fn aggregate(order_id: Uuid, version: i64) -> Aggregate {
    Aggregate { kind: "order".into(), id: order_id.to_string(), version }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_moves_only_as_drawn_above() {
        use Status as S;
        use Transition as T;
        let all = [S::Created, S::Confirmed, S::Rejected, S::Cancelled];
        for from in all {
            for to in all {
                let expected = match (from, to) {
                    (S::Created, S::Confirmed | S::Rejected | S::Cancelled) => T::Change,
                    (S::Confirmed, S::Cancelled) => T::Change,
                    (S::Cancelled, S::Confirmed | S::Rejected) => T::TooLate,
                    (a, b) if a == b => T::AlreadyThere,
                    _ => T::Forbidden,
                };
                assert_eq!(from.transition(to), expected, "{from:?} → {to:?}");
            }
        }
    }

    #[test]
    fn a_status_survives_the_database() {
        for status in [Status::Created, Status::Confirmed, Status::Rejected, Status::Cancelled] {
            assert_eq!(Status::from_column(status.as_str()).expect("a status"), status);
        }
    }
}
