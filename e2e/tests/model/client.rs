//! Hop 1: a client wants an order, and asks until it has heard of it; later it may call it off.
//!
//! The client's `Idempotency-Key` is the order's name here. Before the COMMIT the client owns the
//! wish; a crash or a lost answer makes it ask again. The transaction is two steps, because the row's
//! `seq` is drawn before the COMMIT: a lower one may become visible after a higher one.

use crate::handlers::{OrderRow, append};
use crate::rules::Side;
use crate::world::World;
use anyhow::Result;
use orders_service::order::{Status, Transition};
use serde_json::json;
use shared::envelope::{Aggregate, Envelope};
use shared::events::{OrderCreated, current_version};
use shared::lines::Lines;

/// Somebody who wants one order.
pub struct Client {
    pub order: String,
    pub lines: Lines,
    pub wish: Wish,
}

/// How far the client is with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Not asked, or no answer.
    Open,
    /// In a transaction, which has drawn this `seq`.
    InTransaction(i64),
    /// Answered.
    Granted,
}

impl World {
    /// `POST /orders`, up to the INSERT.
    pub fn place(&mut self, pick: u8) -> Result<bool> {
        let orders = self.service_mut(Side::Orders);
        let seq = orders.database.next_seq;
        if !orders.database_up {
            return Ok(false);
        }
        let Some(client) = self.client(pick, |wish| wish == Wish::Open) else { return Ok(false) };
        let order = self.clients[client].order.clone();
        if self.service(Side::Orders).database.orders.contains_key(&order) {
            self.clients[client].wish = Wish::Granted;
            self.tell("client", format_args!("asks again for {order}, with its key, and gets it"));
        } else {
            self.service_mut(Side::Orders).database.next_seq += 1;
            self.clients[client].wish = Wish::InTransaction(seq);
            self.tell("client", format_args!("places {order}, whose transaction draws seq {seq}"));
        }
        Ok(true)
    }

    /// The COMMIT of key, order and outbox row; the answer arrives or not.
    pub fn commit_order(&mut self, pick: u8, answered: bool) -> Result<bool> {
        let in_transaction = |wish| matches!(wish, Wish::InTransaction(_));
        let Some(client) = self.client(pick, in_transaction) else { return Ok(false) };
        let Client { order, lines, wish } = &mut self.clients[client];
        let Wish::InTransaction(seq) = *wish else { return Ok(false) };
        *wish = if answered { Wish::Granted } else { Wish::Open };
        let (order, lines) = (order.clone(), lines.clone());

        let data = serde_json::to_value(OrderCreated { lines: lines.clone() })?;
        let event = self.of_an_order(&order, "created", 1, data);
        let database = &mut self.service_mut(Side::Orders).database;
        let row = OrderRow { status: Status::Created, version: 1 };
        database.orders.insert(order.clone(), row);
        append(database, seq, "orders", &event)?;
        self.ledger.committed(Side::Orders, &event);
        let answer = if answered { "" } else { "; the answer is lost" };
        self.tell(Side::Orders, format_args!("COMMIT of {}, seq {seq}{answer}", event.id));
        Ok(true)
    }

    /// `POST /orders/{id}/cancel`: row and event in one COMMIT, under the order's lock.
    pub fn cancel(&mut self, pick: u8) -> Result<bool> {
        let service = self.service(Side::Orders);
        let placed = service.database.orders.len().max(1);
        let order = service.database.orders.iter().nth(usize::from(pick) % placed);
        let Some((order, row)) = order.filter(|_| service.database_up) else { return Ok(false) };
        let (order, version) = (order.clone(), row.version + 1);
        match row.status.transition(Status::Cancelled) {
            Transition::Change => {
                let event = self.of_an_order(&order, "cancelled", version, json!({}));
                let database = &mut self.service_mut(Side::Orders).database;
                let row = OrderRow { status: Status::Cancelled, version };
                database.orders.insert(order.clone(), row);
                let seq = database.next_seq;
                database.next_seq += 1;
                append(database, seq, "orders", &event)?;
                self.ledger.committed(Side::Orders, &event);
                self.tell(Side::Orders, format_args!("COMMIT of {}, seq {seq}", event.id));
            }
            Transition::AlreadyThere => {
                self.tell("client", format_args!("cancels {order} again, which changes nothing"));
            }
            Transition::TooLate | Transition::Forbidden => return Ok(false),
        }
        Ok(true)
    }

    /// Open transactions of orders-service end without a COMMIT.
    pub fn roll_back_orders(&mut self) {
        for client in &mut self.clients {
            if matches!(client.wish, Wish::InTransaction(_)) {
                client.wish = Wish::Open;
            }
        }
    }

    fn client(&self, pick: u8, is: impl Fn(Wish) -> bool) -> Option<usize> {
        let fitting: Vec<usize> =
            (0..self.clients.len()).filter(|client| is(self.clients[*client].wish)).collect();
        fitting.get(usize::from(pick) % fitting.len().max(1)).copied()
    }

    fn of_an_order(
        &self,
        order: &str,
        what: &str,
        version: i64,
        data: serde_json::Value,
    ) -> Envelope {
        let event_type = format!("order.{what}");
        Envelope {
            id: format!("{order}.{what}"),
            schema_version: current_version(&event_type),
            event_type,
            occurred_at: self.clock,
            producer: "orders".into(),
            correlation_id: order.into(),
            causation_id: order.into(),
            aggregate: Aggregate { kind: "order".into(), id: order.into(), version },
            data,
        }
    }
}
