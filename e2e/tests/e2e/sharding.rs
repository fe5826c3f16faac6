//! Shards: what is in which, and what becomes of messages when their number changes.

use crate::support::{logged, mend, order_event, publish, sabotage, wait_logged, with_id};
use anyhow::{Context, Result};
use e2e::ledger::Expect;
use e2e::service::Service;
use e2e::system::{Options, System};
use e2e::wait::until_true;
use futures_util::StreamExt;
use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const SHARDED: (&str, &str) = ("ORDERING", "shards=3");
const SHARDS: [&str; 3] =
    ["inventory.orders.shard.0", "inventory.orders.shard.1", "inventory.orders.shard.2"];
const AGGREGATES: usize = 30;

async fn sharded() -> Result<System> {
    System::start(Options { env: vec![SHARDED], ..Options::default() }).await
}

fn event(number: usize, version: i64) -> Value {
    let (event_type, schema, data) = match version {
        1 => ("order.created", 3, json!({"lines": [{"sku": "nothing", "count": 1}]})),
        _ => ("order.confirmed", 1, json!({})),
    };
    let mut event = order_event(&format!("e{number}-v{version}"), event_type, schema, data);
    event["aggregate"] = json!({"type": "order", "id": format!("o{number}"), "version": version});
    event
}

/// Which messages wait in a queue with a single active consumer, from which the broker lets nobody
/// get one by one. They are back when this returns.
async fn waiting(system: &System, queue: &str) -> Result<Vec<String>> {
    let depth = system.broker.depth(queue).await?;
    let channel = system.broker.open_channel().await?;
    let (options, none) = (BasicConsumeOptions::default(), FieldTable::default());
    let deliveries = channel.basic_consume(queue.into(), "look".into(), options, none).await?;
    let mut ids = Vec::new();
    let mut deliveries = deliveries.take(depth as usize);
    while let Some(delivery) = deliveries.next().await {
        let properties = delivery?.properties;
        ids.push(properties.message_id().as_ref().context("an id")?.to_string());
    }
    channel.close(200, "bye".into()).await?;
    until_true("all to be back", async || Ok(system.broker.depth(queue).await? == depth)).await?;
    Ok(ids)
}

/// The answers are about orders that orders-service never had.
async fn finish(system: System, answers: usize, injected: Vec<String>) -> Result<()> {
    for _ in 0..answers {
        system.take_parked("orders.inventory").await?;
    }
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    system.finish_expecting(Expect { injected, ..Expect::default() }).await
}

#[tokio::test]
async fn all_events_of_an_aggregate_are_in_one_shard_and_aggregates_are_spread() -> Result<()> {
    let mut system = sharded().await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    let mut injected = Vec::new();
    for version in [1, 2] {
        for number in 0..AGGREGATES {
            publish(&system, &event(number, version)).await?;
            injected.push(format!("e{number}-v{version}"));
        }
    }
    let mut shard_of: BTreeMap<String, &str> = BTreeMap::new();
    let mut filled = 0;
    for shard in SHARDS {
        let ids = waiting(&system, shard).await?;
        filled += usize::from(!ids.is_empty());
        for id in ids {
            let aggregate = id.split('-').next().unwrap_or_default().to_owned();
            let first = *shard_of.entry(aggregate).or_insert(shard);
            assert_eq!(first, shard, "{id}");
        }
    }
    assert_eq!(shard_of.len(), AGGREGATES);
    assert!(filled > 1, "all are in one shard");

    system.start_services().await?;
    for id in &injected {
        system.wait_inbox(id).await?;
    }
    let retries = logged(&system.inventory()?.child, "message will be retried");
    assert_eq!(retries, Vec::<Value>::new(), "none came before its predecessor");
    finish(system, AGGREGATES, injected).await
}

#[tokio::test]
async fn a_message_that_names_no_aggregate_has_a_shard_too() -> Result<()> {
    let system = sharded().await?;
    system.broker.publish("orders", "order.created", with_id("broken"), b"{not-json}").await?;
    assert_eq!(system.take_parked("inventory.orders").await?.message_id, "broken");
    system.finish().await
}

#[tokio::test]
async fn what_waits_in_the_queue_when_shards_are_introduced_is_not_left_behind() -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    publish(&system, &event(1, 1)).await?;

    system.inventory_env.insert(SHARDED.0.into(), SHARDED.1.into());
    let apply = ["topology", "apply"];
    Service::command_ok("inventory-service", &apply, &system.inventory_env).await?;
    publish(&system, &event(1, 2)).await?;
    assert_eq!(system.broker.depth("inventory.orders").await?, 1, "bound no more");
    system.start_services().await?;
    system.wait_inbox("e1-v2").await?;
    finish(system, 1, vec!["e1-v1".into(), "e1-v2".into()]).await
}

#[tokio::test]
async fn shards_of_an_earlier_number_are_emptied_and_get_nothing_new() -> Result<()> {
    let mut system = sharded().await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    let mut injected = Vec::new();
    for number in 0..AGGREGATES {
        publish(&system, &event(number, 1)).await?;
        injected.push(format!("e{number}-v1"));
    }
    let depths = async || -> Result<u32> {
        Ok(system.broker.depth(SHARDS[1]).await? + system.broker.depth(SHARDS[2]).await?)
    };
    let left_behind = depths().await?;
    assert!(left_behind > 0, "all are in the shard that stays");
    let mut fewer = system.inventory_env.clone();
    fewer.insert("ORDERING".into(), "shards=1".into());
    Service::command_ok("inventory-service", &["topology", "apply"], &fewer).await?;
    for number in 0..AGGREGATES {
        publish(&system, &event(number, 2)).await?;
        injected.push(format!("e{number}-v2"));
    }
    assert_eq!(depths().await?, left_behind, "nothing new");
    system.inventory = Some(Service::start("inventory-service", &fewer).await?);
    for id in &injected {
        system.wait_inbox(id).await?;
    }
    finish(system, AGGREGATES, injected).await
}

#[tokio::test]
async fn what_fails_in_place_is_parked_after_its_attempts_and_its_shard_goes_on() -> Result<()> {
    let system =
        System::start(Options { env: vec![("ORDERING", "shards=1")], ..Options::default() })
            .await?;
    sabotage(&system, "40001").await?;
    publish(&system, &event(1, 1)).await?;
    publish(&system, &event(2, 1)).await?;
    let parked = system.take_parked("inventory.orders").await?;
    assert_eq!(parked.message_id, "e1-v1");
    assert_eq!(parked.headers["x-park-reason"], "attempts-exhausted");
    assert_eq!(parked.headers["x-retry-attempt"], "4");
    mend(&system).await?;
    system.wait_inbox("e2-v1").await?;
    finish(system, 1, vec!["e2-v1".into()]).await
}

#[tokio::test]
async fn sigterm_while_a_message_waits_in_place_gives_it_back_and_ends_in_order() -> Result<()> {
    let mut system = System::start(Options {
        env: vec![("ORDERING", "shards=1"), ("RETRY_DELAYS", "10s,20s")],
        ..Options::default()
    })
    .await?;
    sabotage(&system, "40001").await?;
    publish(&system, &event(1, 1)).await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    wait_logged(&inventory.child, "message will be retried").await?;
    inventory.stop().await?;
    mend(&system).await?;
    system.start_services().await?;
    system.wait_inbox("e1-v1").await?;
    finish(system, 1, vec!["e1-v1".into()]).await
}
