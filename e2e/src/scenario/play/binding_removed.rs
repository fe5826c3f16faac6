//! The binding between the orders' exchange and the inventory's queue is removed.

use super::About;
use super::unbound::unbind;
use crate::ledger::Expect;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use crate::service::Service;
use anyhow::Result;

pub(super) const ABOUT: About = About {
    name: "binding-removed",
    sentence: "the exchange of the orders leads to no queue until the binding is back",
    shows: "The broker acked each publish and returned the message: an ack alone does not say that a queue has \
            it. A row counts as published only on an ack without a return, so it stayed in the outbox, was \
            tried ever less often, and left with the id that it was written with.",
};

pub(super) async fn play(stage: &mut Stage) -> Result<Expect> {
    let soon = stage.pace.patience(0);
    stage.open(10).await?;
    unbind(stage, "inventory.orders", "orders", "order.*").await?;
    let order = stage.order().await?;
    stage
        .sees_times(3, "three refusals", soon, |what| matches!(what, What::Refused { .. }))
        .await?;

    stage.say("$ inventory-service topology apply    (which brings the binding back)");
    let apply = ["topology", "apply"];
    Service::command_ok("inventory-service", &apply, &stage.system.inventory_env).await?;
    stage
        .sees("its outbox row to be marked", soon, |what| matches!(what, What::Marked { .. }))
        .await?;
    stage.settled(&order, "confirmed").await?;
    stage.reserved(1).await?;
    Ok(Expect::default())
}
