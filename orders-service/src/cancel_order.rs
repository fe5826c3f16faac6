//! Cancelling: the order's status, its version and the event move in one COMMIT.
//!
//! It races with the inventory's answer, and both orders of events end well. Whoever locks the row
//! first decides; a cancelled order ignores a late answer, and the inventory releases what it holds
//! once `order.cancelled` reaches it, after `order.created` and never before: the version gate sees
//! to that.
//!
//! A crash before the COMMIT changes nothing, one after it loses the answer alone: cancelling a
//! cancelled order again is answered in the same way, and makes no second event.

use crate::list_orders::{Locked, lock_order, show_order};
use crate::order::{Order, Status, Transition};
use crate::place_order::aggregate;
use serde_json::json;
use shared::envelope::{self, Envelope};
use shared::events::current_version;
use shared::outbox;
use shared::pool::Pool;
use shared::trace_context::TraceContext;
use sqlx::{Connection, PgConnection};
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
    let mut lease = pool.lease().await?;
    let mut tx = lease.begin().await?;
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
    tx.commit().await?;
    lease.give_back();
    Ok(order.map_or(Cancelled::NoSuchOrder, Cancelled::Yes))
}

/// Writes an order's new status and version. The caller holds its row locked, and appends the event
/// of this version to the same transaction.
pub async fn move_order(
    tx: &mut PgConnection,
    order_id: Uuid,
    version: i64,
    status: Status,
    rejection: Option<&shared::events::Refusal>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "UPDATE orders SET status = $2, version = $3, rejection_reason = $4, rejected_sku = $5,
                           updated_at = now()
         WHERE id = $1",
        order_id,
        status.as_str(),
        version,
        rejection.map(|rejection| rejection.reason.as_str()),
        rejection.map(|rejection| rejection.sku.as_str())
    )
    .execute(tx)
    .await?;
    Ok(())
}
