//! Somebody publishes what is no JSON.

use super::About;
use crate::ledger::Expect;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use anyhow::{Result, ensure};

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
    let published =
        |what: &What| matches!(what, What::Published { exchange, .. } if exchange == "orders");
    stage.sees("the order's event to be published", soon, published).await?;
    stage.publish_garbage("not-json-1").await?;
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
