//! Somebody publishes what is no JSON.

use super::About;
use crate::ledger::Expect;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use anyhow::{Result, ensure};
use lapin::BasicProperties;

pub(super) const ABOUT: About = About {
    name: "malformed-json",
    sentence: "somebody publishes {not-json}, with good messages before and behind it",
    shows: "The same bytes fail the same way for ever, so no retry was spent on them: one \
            delivery, one copy, parked. The messages around it were not held up. It stays in \
            parking until a person has looked.",
};

pub(super) async fn play(stage: &mut Stage) -> Result<Expect> {
    let soon = stage.pace.patience(0);
    stage.open(10).await?;
    let before = stage.order().await?;
    stage.say("somebody publishes {not-json} to the exchange orders, as message not-json-1");
    let properties =
        BasicProperties::default().with_message_id("not-json-1".into()).with_delivery_mode(2);
    stage.system.broker.publish("orders", "order.created", properties, b"{not-json}").await?;
    let behind = stage.order().await?;

    stage
        .sees(
            "it to be parked",
            soon,
            |what| matches!(what, What::Parked { reason, .. } if reason == "permanent"),
        )
        .await?;
    stage.holds("inventory.orders.parking", 1, soon).await?;
    stage.settled(&before, "confirmed").await?;
    stage.settled(&behind, "confirmed").await?;
    stage.reserved(2).await?;
    let retries = stage.count(|what| matches!(what, What::Retried { .. }));
    ensure!(retries == 0, "{retries} retries were spent");
    Ok(Expect { parked: 1, ..Expect::default() })
}
