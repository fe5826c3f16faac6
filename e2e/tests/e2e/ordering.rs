//! The order of an aggregate's events, end to end: by the version gate and by shards, and wherever a
//! failed message waits. What is promised is the same each way; the tests are too.

use crate::modes::{Mode, tests_in};
use crate::support::{logged, mend, order_event, publish, sabotage};
use anyhow::Result;
use e2e::ledger::Expect;
use e2e::service::Service;
use e2e::system::{Options, System};
use e2e::wait::{until, until_true};
use serde_json::{Value, json};

tests_in!(
    gate("gate", "buckets"),
    shards("shards=3", "buckets"),
    gate_with_native_retries("gate", "native"),
    shards_with_native_retries("shards=3", "native");
    {
        a_later_event_waits_for_an_earlier_one_and_both_apply_in_order,
        while_the_first_event_fails_the_second_waits_and_both_apply_in_order,
        stale_and_duplicate_events_are_acked_without_effect,
        a_gap_that_never_closes_is_parked_at_its_deadline_and_named_so,
        a_parked_first_event_holds_up_its_own_aggregate_alone_and_redriven_all_apply_in_order,
    }
);

/// The event of an order that orders-service never had.
fn event(order: &str, version: i64, event_type: &str) -> Value {
    let (schema, data) = match event_type {
        "order.created" => (3, json!({"lines": [{"sku": "a", "count": 1}]})),
        _ => (1, json!({})),
    };
    let mut event = order_event(&format!("{order}-v{version}"), event_type, schema, data);
    event["aggregate"] = json!({"type": "order", "id": order, "version": version});
    event
}

fn retries(system: &System, class: &str) -> Result<Vec<Value>> {
    let mut retries = logged(&system.inventory()?.child, "message will be retried");
    retries.retain(|retry| retry["class"] == class);
    Ok(retries)
}

/// What the inventory took in, oldest first.
async fn inbox(system: &System) -> Result<Vec<String>> {
    let query = "SELECT message_id FROM processed_messages ORDER BY processed_at";
    Ok(sqlx::query_scalar(query).fetch_all(&system.inventory_db).await?)
}

/// The inventory answers orders that orders-service never had. The answers are parked there, or are
/// not wanted at all: they go, and the ledger hears of what was injected.
async fn finish(system: System, injected: &[&str]) -> Result<()> {
    let answers: i64 =
        sqlx::query_scalar("SELECT count(*) FROM outbox").fetch_one(&system.inventory_db).await?;
    for _ in 0..answers {
        system.take_parked("orders.inventory").await?;
    }
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    let injected = injected.iter().map(|id| (*id).to_owned()).collect();
    system.finish_expecting(Expect { injected, ..Expect::default() }).await
}

async fn a_later_event_waits_for_an_earlier_one_and_both_apply_in_order(mode: Mode) -> Result<()> {
    let Some(system) = mode.start(Options::default()).await? else { return Ok(()) };
    publish(&system, &event("o", 2, "order.cancelled")).await?;
    until_true("the gap to be noticed", async || Ok(!retries(&system, "not_yet")?.is_empty()))
        .await?;
    publish(&system, &event("o", 1, "order.created")).await?;
    system.wait_inbox("o-v2").await?;
    assert_eq!(inbox(&system).await?, ["o-v1", "o-v2"]);
    finish(system, &["o-v1", "o-v2"]).await
}

async fn while_the_first_event_fails_the_second_waits_and_both_apply_in_order(
    mode: Mode,
) -> Result<()> {
    let more = [("RETRY_ATTEMPTS_TRANSIENT", "20")];
    let Some(system) = mode.start(Options { env: more.to_vec(), ..Options::default() }).await?
    else {
        return Ok(());
    };
    sabotage(&system, "40001").await?;
    publish(&system, &event("o", 1, "order.created")).await?;
    until_true("the first event to fail", async || Ok(!retries(&system, "transient")?.is_empty()))
        .await?;
    publish(&system, &event("o", 2, "order.cancelled")).await?;
    if mode.in_shards() {
        // It is held up in its shard, behind the first one: it does not even learn of a gap.
        until_true("the first event to fail again and again", async || {
            Ok(retries(&system, "transient")?.len() >= 3)
        })
        .await?;
        assert_eq!(retries(&system, "not_yet")?, Vec::<Value>::new());
    } else {
        until_true("the second event to wait", async || {
            Ok(!retries(&system, "not_yet")?.is_empty())
        })
        .await?;
    }
    assert_eq!(inbox(&system).await?, Vec::<String>::new());
    mend(&system).await?;
    system.wait_inbox("o-v2").await?;
    assert_eq!(inbox(&system).await?, ["o-v1", "o-v2"]);
    assert_eq!(retries(&system, "not_yet")?.is_empty(), mode.in_shards());
    finish(system, &["o-v1", "o-v2"]).await
}

async fn stale_and_duplicate_events_are_acked_without_effect(mode: Mode) -> Result<()> {
    let Some(system) = mode.start(Options::default()).await? else { return Ok(()) };
    system.set_stock("a", 10).await?;
    publish(&system, &event("o", 7, "order.created")).await?;
    system.wait_inbox("o-v7").await?;
    // The same again; an older version; the same version under another id.
    publish(&system, &event("o", 7, "order.created")).await?;
    publish(&system, &event("o", 6, "order.cancelled")).await?;
    let mut other = event("o", 7, "order.created");
    other["id"] = json!("other-v7");
    publish(&system, &other).await?;
    let outcomes = until("all to be handled", async || {
        let handled = logged(&system.inventory()?.child, "message handled");
        let mut outcomes: Vec<String> =
            handled.iter().map(|event| event["outcome"].to_string()).collect();
        outcomes.sort();
        Ok((outcomes.len() == 4).then_some(outcomes))
    })
    .await?;
    assert_eq!(outcomes, ["\"applied\"", "\"duplicate\"", "\"stale\"", "\"stale\""]);
    assert_eq!(system.stock("a").await?, (10, 1));
    finish(system, &["o-v7", "o-v6", "other-v7"]).await
}

async fn a_gap_that_never_closes_is_parked_at_its_deadline_and_named_so(mode: Mode) -> Result<()> {
    let more = [("RETRY_NOT_YET_DEADLINE", "1s")];
    let Some(system) = mode.start(Options { env: more.to_vec(), ..Options::default() }).await?
    else {
        return Ok(());
    };
    publish(&system, &event("o", 2, "order.cancelled")).await?;
    let parked = system.take_parked("inventory.orders").await?;
    assert_eq!(parked.message_id, "o-v2");
    assert_eq!(parked.headers["x-park-reason"], "gap-deadline");
    let error = &parked.headers["x-last-error"];
    assert!(error.contains("this is version 2 of order o, applied so far: none"), "{error}");
    finish(system, &[]).await
}

async fn a_parked_first_event_holds_up_its_own_aggregate_alone_and_redriven_all_apply_in_order(
    mode: Mode,
) -> Result<()> {
    let more = [("RETRY_NOT_YET_DEADLINE", "1s")];
    let Some(system) = mode.start(Options { env: more.to_vec(), ..Options::default() }).await?
    else {
        return Ok(());
    };
    sabotage(&system, "23514").await?;
    publish(&system, &event("o", 1, "order.created")).await?;
    until_true("the first event to be parked", async || {
        Ok(system.broker.depth("inventory.orders.parking").await? == 1)
    })
    .await?;
    mend(&system).await?;
    publish(&system, &event("o", 3, "order.cancelled")).await?;
    publish(&system, &event("o", 2, "order.confirmed")).await?;
    publish(&system, &event("p", 1, "order.created")).await?;
    system.wait_inbox("p-v1").await?;
    until_true("the others to be parked as well", async || {
        Ok(system.broker.depth("inventory.orders.parking").await? == 3)
    })
    .await?;
    assert_eq!(inbox(&system).await?, ["p-v1"]);

    let redrive = ["parking", "redrive"];
    Service::command_ok("inventory-service", &redrive, &system.inventory_env).await?;
    system.wait_inbox("o-v3").await?;
    assert_eq!(inbox(&system).await?, ["p-v1", "o-v1", "o-v2", "o-v3"]);
    finish(system, &["o-v1", "o-v2", "o-v3", "p-v1"]).await
}
