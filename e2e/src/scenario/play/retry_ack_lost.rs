//! The consumer is killed when its copy is in the retry queue and the original not acked.

use super::About;
use crate::ledger::Expect;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use anyhow::Result;
use shared::fault::Point;

pub(super) const ABOUT: About = About {
    name: "retry-ack-lost",
    sentence: "kill -9 when a retry copy is confirmed and the original not acked",
    shows: "Copy first, Ack second: killed in between, there were two of the message, and there never was a \
            moment with none. The original took effect; the copy came back from its retry queue with the \
            same id, and the inbox made it a no-op.",
};

pub(super) async fn play(stage: &mut Stage) -> Result<Expect> {
    let (soon, retried) = (stage.pace.patience(0), stage.pace.patience(1));
    stage.open_with_a_doomed_inventory(10, Point::ConsumerAfterRetryConfirm).await?;
    stage.say(
        "inventory-service will kill -9 itself when a retry copy is confirmed, before the Ack",
    );
    stage.reserving_fails().await?;
    let order = stage.order().await?;
    stage.inventory_dies().await?;
    stage.sees("the copy", soon, |what| {
        matches!(what, What::Published { exchange, .. } if exchange == "inventory.orders.retry")
    }).await?;

    stage.reserving_works().await?;
    stage.say("inventory-service is started again");
    stage.start_inventory().await?;
    stage
        .sees("the original again", soon, |what| {
            matches!(what, What::Delivered { redelivered: true, attempts: 0, .. })
        })
        .await?;
    stage
        .sees("the copy back", retried, |what| matches!(what, What::Delivered { attempts: 1, .. }))
        .await?;
    stage
        .sees(
            "one of them to be recognised",
            soon,
            |what| matches!(what, What::Handled { outcome, .. } if outcome == "duplicate"),
        )
        .await?;
    stage.settled(&order, "confirmed").await?;
    stage.reserved(1).await?;
    Ok(Expect::default())
}
