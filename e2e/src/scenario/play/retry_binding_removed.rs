//! The binding between the retry exchange and its first queue is removed.

use super::About;
use super::unbound::Unbound;
use crate::ledger::Expect;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use anyhow::Result;

pub(super) const ABOUT: About = About {
    name: "retry-binding-removed",
    sentence: "the exchange of the retry queues leads to no queue: copies are returned",
    shows: "A copy that is returned is no new owner, so the original was not acked, and stayed with its queue. \
            The consumer gave its session up and began another, which declares what is missing; as that was \
            taken away at once, it waited longer each time instead of reconnecting in a loop.",
};

pub(super) async fn play(stage: &mut Stage) -> Result<Expect> {
    let (soon, retried) = (stage.pace.patience(0), stage.pace.patience(1));
    stage.open(10).await?;
    stage.reserving_fails().await?;
    let first = stage.pace.delays()[0];
    let queue = format!("inventory.orders.retry.{first}");
    stage.say(&format!("the binding of {queue} is removed, again and again"));
    let unbound = Unbound::keep(&stage.system, &queue, "inventory.orders.retry", first).await?;
    let order = stage.order().await?;
    stage
        .sees_times(
            3,
            "three sessions that fail",
            soon,
            |what| matches!(what, What::SessionFailed { part, .. } if part == "consumer"),
        )
        .await?;

    unbound.end().await?;
    stage.say("the binding is left alone: the next session declares it, and it stays");
    stage
        .sees("the copy in its retry queue", soon, |what| matches!(what, What::Retried { .. }))
        .await?;
    stage.reserving_works().await?;
    stage
        .sees(
            "its next attempt",
            retried,
            |what| matches!(what, What::Handled { outcome, .. } if outcome == "applied"),
        )
        .await?;
    stage.settled(&order, "confirmed").await?;
    stage.reserved(1).await?;
    Ok(Expect::default())
}
