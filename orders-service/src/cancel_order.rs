//! Cancelling: the order's status, its version and the event move in one COMMIT.
//!
//! It races with the inventory's answer, and both orders of events end well. Whoever locks the row
//! first decides; a cancelled order ignores a late answer, and the inventory releases what it holds
//! once `order.cancelled` reaches it, after `order.created` and never before: the version gate sees
//! to that.
//!
//! A crash before the COMMIT changes nothing, one after it loses the answer alone: cancelling a
//! cancelled order again is answered in the same way, and makes no second event.

use crate::order::{Order, Status, Transition, aggregate};
use crate::orders_table::{Locked, lock_order, move_order, show_order};
use serde_json::json;
use shared::envelope::{self, Envelope};
use shared::events::current_version;
use shared::fault::{self, Point};
use shared::outbox;
use shared::pool::Pool;
use shared::trace_context::TraceContext;
use sqlx::Connection;
use uuid::Uuid;

/// What became of the wish to cancel.
pub enum Cancelled {
    /// The order is cancelled, now or since before.
    Yes(Order),
    /// Its status does not allow that.
    No(Status),
    /// There is no such order.
    NoSuchOrder,
}

/// Cancels an order.
pub async fn cancel_order(
    pool: &Pool,
    order_id: Uuid,
    correlation_id: &str,
    trace: &TraceContext,
) -> sqlx::Result<Cancelled> {
    let mut loan = pool.borrow().await?;
    let mut tx = loan.begin().await?;
    let Some(Locked { status, version }) = lock_order(&mut tx, order_id).await? else {
        return Ok(Cancelled::NoSuchOrder);
    };
    match status.transition(Status::Cancelled) {
        Transition::Change => {
            move_order(&mut tx, order_id, version + 1, Status::Cancelled, None).await?;
            let event = Envelope {
                id: envelope::new_id(),
                event_type: "order.cancelled".into(),
                schema_version: current_version("order.cancelled"),
                occurred_at: envelope::now(),
                producer: "orders".into(),
                correlation_id: correlation_id.to_owned(),
                causation_id: correlation_id.to_owned(),
                aggregate: aggregate(order_id, version + 1),
                data: json!({}),
            };
            outbox::append(&mut tx, "orders", &event, trace).await?;
        }
        Transition::AlreadyThere => {}
        Transition::TooLate | Transition::Forbidden => return Ok(Cancelled::No(status)),
    }
    let order = show_order(&mut tx, order_id).await?;
    fault::point(Point::CancelOrderBeforeCommit);
    tx.commit().await?;
    loan.give_back();
    fault::point(Point::CancelOrderAfterCommit);
    Ok(order.map_or(Cancelled::NoSuchOrder, Cancelled::Yes))
}
