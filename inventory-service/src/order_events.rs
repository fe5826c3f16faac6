//! What each event of an order means to the inventory.
//!
//! The transaction that comes in holds the inbox row and the moved version already; the answer joins
//! it through the outbox. All of it commits together or not at all.

use crate::release_stock::release_stock;
use crate::reserve_stock::{Reserved, reserve_stock};
use serde::Serialize;
use shared::consumer::{Handler, Message};
use shared::envelope::{Aggregate, ContractError, Envelope};
use shared::events::{OrderCreated, OrderEvent, Reservation, ReservationRejected};
use shared::failure::Failure;
use shared::outbox;
use shared::relay::WakeUp;
use shared::retry::Outcome;
use shared::trace_context::TraceContext;
use sqlx::PgConnection;

/// The consumer of `order.*`.
pub struct OrderEvents {
    /// Rung once answers are committed.
    pub wake_up: WakeUp,
}

impl Handler for OrderEvents {
    const NAME: &'static str = "inventory.orders";

    type Event = OrderEvent;

    fn decode(envelope: &Envelope) -> Result<OrderEvent, ContractError> {
        OrderEvent::decode(envelope)
    }

    async fn handle(
        &self,
        message: Message<'_, OrderEvent>,
        tx: &mut PgConnection,
    ) -> Result<Outcome, Failure> {
        let Message { event, envelope: order, trace } = message;
        match event {
            OrderEvent::Created(created) => reserve(order, &trace, &created, tx).await,
            OrderEvent::Cancelled => release(order, &trace, tx).await,
            // Our own answers, come back as the order's history. They move its version on.
            OrderEvent::Confirmed | OrderEvent::Rejected(_) => Ok(Outcome::Applied),
        }
    }

    fn committed(&self) {
        self.wake_up.ring();
    }
}

/// The versions of a reservation, as its stream tells them: it begins with a yes or a no, and a yes
/// may be taken back.
const DECIDED: i64 = 1;
const RELEASED: i64 = 2;

async fn reserve(
    order: &Envelope,
    trace: &TraceContext,
    created: &OrderCreated,
    tx: &mut PgConnection,
) -> Result<Outcome, Failure> {
    let order_id = &order.aggregate.id;
    match reserve_stock(tx, order_id, &created.lines).await? {
        Reserved::Yes => {
            let data = Reservation { order_id, lines: created.lines.as_slice() };
            answer(tx, order, trace, "reserved", "inventory.reserved", DECIDED, data).await?;
            Ok(Outcome::Applied)
        }
        Reserved::No(refusal) => {
            let data = ReservationRejected { order_id, refusal: &refusal };
            let event_type = "inventory.reservation_rejected";
            answer(tx, order, trace, "reservation-rejected", event_type, DECIDED, data).await?;
            Ok(Outcome::Rejected)
        }
        Reserved::DecidedBefore => Ok(Outcome::Duplicate),
    }
}

async fn release(
    order: &Envelope,
    trace: &TraceContext,
    tx: &mut PgConnection,
) -> Result<Outcome, Failure> {
    let order_id = &order.aggregate.id;
    let lines = release_stock(tx, order_id).await?;
    // A rejected order holds nothing; its reservation's stream ended with the no.
    if !lines.is_empty() {
        let data = Reservation { order_id, lines: &lines };
        answer(tx, order, trace, "released", "inventory.released", RELEASED, data).await?;
    }
    Ok(Outcome::Applied)
}

async fn answer<D: Serialize>(
    tx: &mut PgConnection,
    order: &Envelope,
    trace: &TraceContext,
    what: &str,
    event_type: &str,
    version: i64,
    data: D,
) -> Result<(), Failure> {
    let aggregate =
        Aggregate { kind: "reservation".into(), id: order.aggregate.id.clone(), version };
    let event = Envelope::following(order, what, "inventory", event_type, aggregate, data);
    outbox::append(tx, "inventory", &event, trace).await?;
    Ok(())
}
