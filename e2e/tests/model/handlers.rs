//! Hop 5, the second half, and hop 9: what the events mean, in the transaction that holds their inbox
//! rows. As `order_events`, `reserve_stock`, `release_stock` and `apply_reservation` have it, with
//! tables in memory.

use crate::outbox::Row;
use crate::rules::Side;
use crate::world::Database;
use anyhow::{Context, Result, anyhow, ensure};
use chrono::{DateTime, Utc};
use inventory_service::stock::decide;
use orders_service::order::{Status, Transition};
use serde_json::json;
use shared::envelope::{Aggregate, Envelope};
use shared::events::{InventoryEvent, OrderEvent};
use shared::failure::Failure;
use shared::lines::{Lines, RawLine};
use shared::retry::Outcome;
use std::collections::{BTreeMap, HashMap};

/// The table `orders`.
pub type Orders = BTreeMap<String, OrderRow>;

/// One order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderRow {
    pub status: Status,
    pub version: i64,
}

/// The tables `stock` and `reservations`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Warehouse {
    pub stock: BTreeMap<String, Stock>,
    pub reservations: BTreeMap<String, Reservation>,
}

/// A row of `stock`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stock {
    pub available: i64,
    pub reserved: i64,
}

/// The rows of `reservations` for one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub lines: Lines,
    pub state: State,
}

/// The column `status` of `reservations`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Reserved,
    Released,
    Rejected,
}

impl Warehouse {
    /// Two skus, of which there are not enough for everybody.
    pub fn stocked() -> Self {
        let stock = [("a", 5), ("b", 2)]
            .map(|(sku, available)| (sku.to_owned(), Stock { available, reserved: 0 }));
        Self { stock: BTreeMap::from(stock), reservations: BTreeMap::new() }
    }

    fn add(&mut self, lines: &Lines, sign: i64) {
        for line in lines.as_slice() {
            if let Some(stock) = self.stock.get_mut(line.sku.as_str()) {
                stock.reserved += sign * i64::from(line.count);
            }
        }
    }
}

/// `outbox::append`: an id or a version that was written before is an error.
pub fn append(database: &mut Database, seq: i64, exchange: &str, event: &Envelope) -> Result<()> {
    let aggregate = (event.aggregate.kind.clone(), event.aggregate.id.clone());
    let version = event.aggregate.version;
    let same = |row: &Row| row.aggregate == aggregate && row.version == version;
    let written = database.outbox.iter().any(|row| row.id == event.id || same(row));
    ensure!(!written, "an event like {} was written before", event.id);
    database.outbox.push(Row {
        seq,
        id: event.id.clone(),
        exchange: exchange.to_owned(),
        event_type: event.event_type.clone(),
        aggregate,
        version,
        payload: serde_json::to_string(event)?,
        attempts: 0,
        next_attempt_at: DateTime::UNIX_EPOCH,
        published: false,
        parked: false,
    });
    Ok(())
}

/// What a consumer has read from a body, before it asks the database anything.
pub enum Event {
    Order(OrderEvent),
    Inventory(InventoryEvent),
}

impl Event {
    pub fn decode(side: Side, envelope: &Envelope) -> Result<Self, Failure> {
        Ok(match side {
            Side::Inventory => Self::Order(OrderEvent::decode(envelope)?),
            Side::Orders => Self::Inventory(InventoryEvent::decode(envelope)?),
        })
    }

    /// `Handler::handle`.
    pub fn handle(
        self,
        cause: &Envelope,
        tx: &mut Database,
        now: DateTime<Utc>,
    ) -> Result<Outcome, Failure> {
        match self {
            Self::Order(OrderEvent::Created(created)) => reserve(tx, cause, created.lines, now),
            Self::Order(OrderEvent::Cancelled) => release(tx, cause, now),
            Self::Order(OrderEvent::Confirmed | OrderEvent::Rejected(_))
            | Self::Inventory(InventoryEvent::Released { .. }) => Ok(Outcome::Applied),
            Self::Inventory(InventoryEvent::Reserved { order_id }) => {
                settle(tx, cause, &order_id, Status::Confirmed, json!({}), now)
            }
            Self::Inventory(InventoryEvent::ReservationRejected { order_id, refusal }) => {
                let data = serde_json::to_value(refusal).map_err(Failure::permanent)?;
                settle(tx, cause, &order_id, Status::Rejected, data, now)
            }
        }
    }
}

fn reserve(
    tx: &mut Database,
    cause: &Envelope,
    lines: Lines,
    now: DateTime<Utc>,
) -> Result<Outcome, Failure> {
    let order = cause.aggregate.id.clone();
    let stock = tx.warehouse.stock.iter();
    let free: HashMap<String, i64> =
        stock.map(|(sku, stock)| (sku.clone(), stock.available - stock.reserved)).collect();
    let decision = decide(&lines, &free);
    // The business key.
    if tx.warehouse.reservations.contains_key(&order) {
        return Ok(Outcome::Duplicate);
    }
    let state = if decision.is_ok() { State::Reserved } else { State::Rejected };
    tx.warehouse.reservations.insert(order.clone(), Reservation { lines: lines.clone(), state });
    match decision {
        Ok(()) => {
            tx.warehouse.add(&lines, 1);
            let data = json!({"order_id": order, "lines": lines});
            answer(tx, cause, "reserved", "inventory.reserved", ("reservation", 1), data, now)?;
            Ok(Outcome::Applied)
        }
        Err(no) => {
            let data = json!({"order_id": order, "reason": no.reason, "sku": no.sku});
            let event_type = "inventory.reservation_rejected";
            let aggregate = ("reservation", 1);
            answer(tx, cause, "reservation-rejected", event_type, aggregate, data, now)?;
            Ok(Outcome::Rejected)
        }
    }
}

fn release(tx: &mut Database, cause: &Envelope, now: DateTime<Utc>) -> Result<Outcome, Failure> {
    let order = &cause.aggregate.id;
    let reservation = tx.warehouse.reservations.get_mut(order);
    if let Some(held) = reservation.filter(|held| held.state == State::Reserved) {
        held.state = State::Released;
        let lines = held.lines.clone();
        tx.warehouse.add(&lines, -1);
        let data = json!({"order_id": order, "lines": lines});
        answer(tx, cause, "released", "inventory.released", ("reservation", 2), data, now)?;
    }
    Ok(Outcome::Applied)
}

fn settle(
    tx: &mut Database,
    cause: &Envelope,
    order: &str,
    to: Status,
    data: serde_json::Value,
    now: DateTime<Utc>,
) -> Result<Outcome, Failure> {
    let missing = || Failure::permanent(anyhow!("there is no order {order}"));
    let row = tx.orders.get_mut(order).ok_or_else(missing)?;
    match row.status.transition(to) {
        Transition::Change => {}
        Transition::AlreadyThere | Transition::TooLate => return Ok(Outcome::Stale),
        Transition::Forbidden => {
            let from = row.status.as_str();
            return Err(Failure::permanent(anyhow!("{order} is {from}")));
        }
    }
    *row = OrderRow { status: to, version: row.version + 1 };
    let aggregate = ("order", row.version);
    let (what, event_type) = match to {
        Status::Confirmed => ("order-confirmed", "order.confirmed"),
        _ => ("order-rejected", "order.rejected"),
    };
    answer(tx, cause, what, event_type, aggregate, data, now)?;
    Ok(if to == Status::Rejected { Outcome::Rejected } else { Outcome::Applied })
}

fn answer(
    tx: &mut Database,
    cause: &Envelope,
    what: &str,
    event_type: &str,
    (kind, version): (&str, i64),
    data: serde_json::Value,
    now: DateTime<Utc>,
) -> Result<(), Failure> {
    let id = match cause.data.get("order_id").and_then(|id| id.as_str()) {
        Some(order) => order.to_owned(),
        None => cause.aggregate.id.clone(),
    };
    let aggregate = Aggregate { kind: kind.into(), id, version };
    let producer = if kind == "order" { "orders" } else { "inventory" };
    let event = Envelope::following(cause, what, producer, event_type, aggregate, data);
    let seq = tx.next_seq;
    tx.next_seq += 1;
    append(tx, seq, producer, &Envelope { occurred_at: now, ..event }).map_err(Failure::permanent)
}

/// The lines of an order, by the numbers that a strategy draws: of `a`, of `b`, or of what never was.
pub fn wanted(of: &[(usize, i64)]) -> Result<Lines> {
    let line = |(index, count): &(usize, i64)| {
        let sku = ["a", "b", "never-heard-of"].get(*index).context("a sku")?;
        Ok(RawLine { sku: (*sku).to_owned(), count: *count })
    };
    let lines: Vec<RawLine> = of.iter().map(line).collect::<Result<_>>()?;
    Ok(Lines::try_from(lines)?)
}
