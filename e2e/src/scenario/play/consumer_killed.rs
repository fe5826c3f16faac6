//! The consumer is killed after its COMMIT, before its Ack.

use super::About;
use crate::ledger::Expect;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use anyhow::Result;
use shared::fault::Point;

pub(super) const ABOUT: About = About {
    name: "consumer-killed-after-commit",
    sentence: "inventory-service gets kill -9 between its COMMIT and its Ack",
    shows: "The book was reserved before the kill, and the broker could not know: it delivered the message \
            again. Its inbox row had been committed with the reservation, so the second delivery found it \
            and changed nothing. An Ack after the COMMIT costs a repetition, never a loss.",
};

pub(super) async fn play(stage: &mut Stage) -> Result<Expect> {
    let (soon, retried) = (stage.pace.patience(0), stage.pace.patience(1));
    stage.open_with_a_doomed_inventory(10, Point::ConsumerAfterCommit).await?;
    stage.say("inventory-service will kill -9 itself after its next COMMIT, before the Ack");
    let order = stage.order().await?;
    stage.inventory_dies().await?;
    stage.sees("the COMMIT", soon, |what| matches!(what, What::Committed { .. })).await?;

    stage.say("inventory-service is started again");
    stage.start_inventory().await?;
    stage
        .sees("the redelivery", soon, |what| {
            matches!(what, What::Delivered { redelivered: true, .. })
        })
        .await?;
    stage
        .sees(
            "the inbox to recognise it",
            retried,
            |what| matches!(what, What::Handled { outcome, .. } if outcome == "duplicate"),
        )
        .await?;
    stage.settled(&order, "confirmed").await?;
    stage.reserved(1).await?;
    Ok(Expect::default())
}
