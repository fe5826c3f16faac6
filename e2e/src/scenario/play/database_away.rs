//! PostgreSQL is away: for longer than a message's retries last, or not so long.

use super::About;
use crate::ledger::Expect;
use crate::scenario::happening::What;
use crate::scenario::stage::Stage;
use crate::service::Service;
use anyhow::Result;

pub(super) const TOO_LONG: About = About {
    name: "database-away-too-long",
    sentence: "PostgreSQL is down longer than all retries last; then parking, and a redrive",
    shows: "One message, four attempts, each followed by a longer wait in a queue of its own, and not one \
            more: nothing loops. Its budget spent it is parked, which is no loss: whoever is on call starts \
            PostgreSQL, says `parking redrive`, and it takes effect as if nothing had been.",
};

pub(super) const BACK_IN_TIME: About = About {
    name: "database-back-in-time",
    sentence: "PostgreSQL is down, and back before the retries end",
    shows: "The message waited in the broker for as long as PostgreSQL was away, and was handled by its next \
            attempt. Nobody had to do anything, and the client's order was taken all the while.",
};

pub(super) async fn too_long(stage: &mut Stage) -> Result<Expect> {
    let order = order_without_database(stage).await?;
    for (n, delay) in stage.pace.delays().into_iter().enumerate() {
        retried(stage, n, delay).await?;
    }
    let spent = stage.pace.patience(3);
    stage
        .sees(
            "the message to be parked",
            spent,
            |what| matches!(what, What::Parked { reason, .. } if reason == "attempts-exhausted"),
        )
        .await?;
    stage.holds("inventory.orders.parking", 1, stage.pace.patience(0)).await?;

    database_returns(stage).await?;
    stage.say("$ inventory-service parking redrive");
    let redrive = ["parking", "redrive"];
    let said =
        Service::command_ok("inventory-service", &redrive, &stage.system.inventory_env).await?;
    stage.say(said.trim());
    stage.settled(&order, "confirmed").await?;
    stage.reserved(1).await?;
    Ok(Expect::default())
}

pub(super) async fn back_in_time(stage: &mut Stage) -> Result<Expect> {
    let order = order_without_database(stage).await?;
    for (n, delay) in stage.pace.delays().into_iter().take(2).enumerate() {
        retried(stage, n, delay).await?;
    }
    database_returns(stage).await?;
    stage
        .sees(
            "the next attempt to succeed",
            stage.pace.patience(2),
            |what| matches!(what, What::Handled { outcome, .. } if outcome == "applied"),
        )
        .await?;
    stage.settled(&order, "confirmed").await?;
    stage.reserved(1).await?;
    Ok(Expect::default())
}

async fn order_without_database(stage: &mut Stage) -> Result<String> {
    stage.open(10).await?;
    stage.say("the inventory's PostgreSQL is stopped");
    stage.system.inventory_postgres.stop().await?;
    stage.order().await
}

/// Sees it enter the retry queue after so many others.
async fn retried(stage: &Stage, others: usize, into: &str) -> Result<()> {
    let what = format!("the message to wait in retry.{into}");
    stage
        .sees(
            &what,
            stage.pace.patience(others),
            |what| matches!(what, What::Retried { delay, .. } if delay == into),
        )
        .await?;
    Ok(())
}

async fn database_returns(stage: &Stage) -> Result<()> {
    stage.say("the inventory's PostgreSQL is started again");
    stage.system.inventory_postgres.start_again().await?;
    stage.system.inventory()?.wait_ready().await
}
