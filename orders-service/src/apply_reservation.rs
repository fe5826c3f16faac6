//! Hop 9, the end of it: the inventory's answer becomes the order's status, and the order's own
//! event, in one COMMIT. Inbox row and gate are in the transaction already.

use crate::order::{Status, Transition, aggregate};
use crate::orders_table::{Locked, lock_order, move_order};
use serde_json::{Value, json};
use shared::consumer::{Handler, Message};
use shared::envelope::{ContractError, Envelope};
use shared::events::{InventoryEvent, Refusal};
use shared::failure::Failure;
use shared::outbox;
use shared::relay::WakeUp;
use shared::retry::Outcome;
use sqlx::PgConnection;
use uuid::Uuid;

/// The consumer of `inventory.*`.
pub struct InventoryAnswers {
    /// Rung once the order's event is committed.
    pub wake_up: WakeUp,
}

impl Handler for InventoryAnswers {
    const NAME: &'static str = "orders.inventory";

    type Event = InventoryEvent;

    fn decode(envelope: &Envelope) -> Result<InventoryEvent, ContractError> {
        InventoryEvent::decode(envelope)
    }

    async fn handle(
        &self,
        message: Message<'_, InventoryEvent>,
        tx: &mut PgConnection,
    ) -> Result<Outcome, Failure> {
        match &message.event {
            InventoryEvent::Reserved { order_id } => {
                settle(tx, &message, order_id, Status::Confirmed, None).await
            }
            InventoryEvent::ReservationRejected { order_id, refusal } => {
                settle(tx, &message, order_id, Status::Rejected, Some(refusal)).await
            }
            // The order was cancelled, by us. The event moves the reservation's version on.
            InventoryEvent::Released { .. } => Ok(Outcome::Applied),
        }
    }

    fn committed(&self) {
        self.wake_up.ring();
    }
}

async fn settle(
    tx: &mut PgConnection,
    message: &Message<'_, InventoryEvent>,
    order_id: &str,
    to: Status,
    refusal: Option<&Refusal>,
) -> Result<Outcome, Failure> {
    let order_id: Uuid = order_id.parse().map_err(|_| {
        Failure::permanent(anyhow::anyhow!("data.order_id {order_id:?} is not an order's id"))
    })?;
    // An order is committed before its first event is published: one that is not here never was.
    let Locked { status, version } = lock_order(tx, order_id)
        .await?
        .ok_or_else(|| Failure::permanent(anyhow::anyhow!("there is no order {order_id}")))?;
    match status.transition(to) {
        Transition::Change => {}
        Transition::AlreadyThere | Transition::TooLate => return Ok(Outcome::Stale),
        Transition::Forbidden => {
            return Err(Failure::permanent(anyhow::anyhow!(
                "order {order_id} is {}, it cannot become {}",
                status.as_str(),
                to.as_str()
            )));
        }
    }
    move_order(tx, order_id, version + 1, to, refusal).await?;

    let (what, event_type, data) = match refusal {
        None => ("order-confirmed", "order.confirmed", json!({})),
        Some(refusal) => ("order-rejected", "order.rejected", data(refusal)?),
    };
    let aggregate = aggregate(order_id, version + 1);
    let answer = Envelope::following(message.envelope, what, "orders", event_type, aggregate, data);
    outbox::append(tx, "orders", &answer, &message.trace).await?;
    Ok(if refusal.is_some() { Outcome::Rejected } else { Outcome::Applied })
}

fn data(refusal: &Refusal) -> Result<Value, Failure> {
    serde_json::to_value(refusal).map_err(Failure::permanent)
}
