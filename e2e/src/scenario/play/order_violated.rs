//! A later event comes while an earlier one of the same order waits in a retry queue.

use super::About;
use crate::ledger::Expect;
use crate::scenario::Line;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use crate::system::System;
use anyhow::Result;

pub(super) const ABOUT: About = About {
    name: "order-violated",
    sentence: "order.created waits for a retry, order.cancelled is right behind it",
    shows: "A retry changes the order: version 2 was at hand, version 1 in a retry queue. \
            Handled as they came, the cancelling would have found nothing to release, and then a \
            book would have been reserved for a cancelled order, for ever. The version gate let \
            version 2 wait beside version 1, holding up no other order, and both took effect in \
            order.",
};

pub(super) async fn play(stage: &mut Stage) -> Result<Expect> {
    let soon = stage.pace.patience(0);
    let [first, second, _] = stage.pace.delays();
    stage.open(10).await?;
    stage.reserving_fails().await?;
    let order = stage.order().await?;
    stage.sees("v1 to wait", soon, retried("transient", first)).await?;
    stage.say("POST /orders/…/cancel");
    stage.system.cancel(&order).await?;
    stage.sees("v2 to wait for v1", soon, retried("not_yet", first)).await?;
    stage.sees("v1 to fail again", stage.pace.patience(1), retried("transient", second)).await?;
    stage.sees("v2 to wait again", stage.pace.patience(1), retried("not_yet", second)).await?;

    stage.reserving_works().await?;
    stage.say("another order, which has nothing to do with it");
    let other = stage.order().await?;
    stage.settled(&other, "confirmed").await?;
    let waited = stage.pace.patience(3);
    let took_effect = async |version| -> Result<Line> {
        let id = message_id(&stage.system, &order, version).await?;
        let what = format!("v{version} to take effect");
        stage.sees_of(&id, &what, waited, |what| matches!(what, What::Committed { .. })).await
    };
    took_effect(1).await?;
    took_effect(2).await?;
    stage.settled(&order, "cancelled").await?;
    stage.reserved(1).await?;
    Ok(Expect::default())
}

fn retried(of_class: &str, into: &str) -> impl Fn(&What) -> bool {
    move |what| matches!(what, What::Retried { class, delay, .. } if class == of_class && delay == into)
}

async fn message_id(system: &System, order: &str, version: i64) -> Result<String> {
    let query = "SELECT id FROM outbox WHERE aggregate_id = $1 AND aggregate_version = $2";
    let id = sqlx::query_scalar(query).bind(order).bind(version);
    Ok(id.fetch_one(&system.orders_db).await?)
}
