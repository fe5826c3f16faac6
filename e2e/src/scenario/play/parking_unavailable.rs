//! Parking takes nothing: its binding is gone.

use super::About;
use super::unbound::Unbound;
use crate::ledger::Expect;
use crate::scenario::happening::{Happening, What};
use crate::scenario::stage::Stage;
use crate::service::Service;
use anyhow::{Result, ensure};

const PARKING: &str = "inventory.orders.parking";

pub(super) const ABOUT: About = About {
    name: "parking-unavailable",
    sentence: "a message is to be parked, and the binding of parking is gone",
    shows: "Parking took no copy, so the message was rejected, and its queue's at-least-once dead \
            lettering kept it: not ready for anybody (the management API counts it as \
            messages_dlx), and not lost. Once the binding was back the broker brought it by \
            itself. Good messages were handled all the while.",
};

pub(super) async fn play(stage: &mut Stage) -> Result<Expect> {
    let soon = stage.pace.patience(0);
    stage.open(10).await?;
    stage.say(&format!("the binding of {PARKING} is removed, again and again"));
    let (exchange, key) = ("inventory.orders.dlx", "inventory.orders.failed");
    let unbound = Unbound::keep(&stage.system, PARKING, exchange, key).await?;
    stage.publish_garbage("not-json-1").await?;
    stage
        .sees("the copy to be refused", soon, |what| {
            matches!(what, What::SessionFailed { part, error, .. }
                 if part == "consumer" && error.contains("parking took no copy"))
        })
        .await?;
    let order = stage.order().await?;
    stage.settled(&order, "confirmed").await?;
    stage.holds("inventory.orders", 0, soon).await?;
    ensure!(stage.system.broker.depth(PARKING).await? == 0, "{PARKING} holds it");

    unbound.end().await?;
    stage.say("the binding is left alone: the next session, or `topology apply`, brings it back");
    let apply = ["topology", "apply"];
    Service::command_ok("inventory-service", &apply, &stage.system.inventory_env).await?;
    stage.say("the broker tries its dead letters again when its time for a confirm is over: 3 min by default");
    stage.holds(PARKING, 1, stage.pace.dead_letter_patience()).await?;
    let arrived = What::Arrived { queue: PARKING.to_owned() };
    let arrived = Happening::now(Some("not-json-1".to_owned()), arrived);
    let parked = stage.system.broker.peek(PARKING).await?;
    // A copy of the consumer's says why it is parked; the broker's own says that it died.
    let by_the_broker = parked.iter().all(|one| {
        one.message_id == "not-json-1"
            && one.headers.contains_key("x-first-death-reason")
            && !one.headers.contains_key("x-park-reason")
    });
    ensure!(by_the_broker, "{PARKING} holds what the broker did not bring: {parked:?}");
    stage.report(arrived);
    Ok(Expect { parked: 1, ..Expect::default() })
}
