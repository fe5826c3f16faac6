//! Shards: what is in which, and what becomes of messages when their number changes.

use crate::support::{logged, order_event, publish, wait_logged, with_id};
use anyhow::{Context, Result};
use e2e::oracle::Expect;
use e2e::service::Service;
use e2e::system::{Options, System};
use e2e::wait::{until, until_true};
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
async fn shards_that_nobody_would_consume_are_named_and_nothing_is_consumed_before_they_are_gone()
-> Result<()> {
    let mut system = sharded().await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    system.inventory_env.insert("ORDERING".into(), "shards=1".into());
    system.inventory = Some(Service::start("inventory-service", &system.inventory_env).await?);
    let said = until("the drift to be named", async || {
        let (ready, answer) = system.inventory()?.readiness().await?;
        let said = answer["parts"]["topology"].as_str().unwrap_or_default().to_owned();
        Ok((!ready && said.contains("shard.2")).then_some(said))
    })
    .await?;
    let stray = "inventory.orders.shard.1: queue must be consumed (with --ordering shards=1: \
                 deleted, once it is empty), is declared";
    assert!(said.contains(stray), "{said}");
    assert!(!said.contains("shard.0"), "{said}");
    assert_eq!(logged(&system.inventory()?.child, "consuming"), Vec::<Value>::new());
    for shard in &SHARDS[1..] {
        system.broker.delete_queue(shard).await?;
    }
    wait_logged(&system.inventory()?.child, "consuming").await?;
    system.inventory()?.wait_ready().await?;
    // The oracle looks at as many shards as orders-service has.
    publish(&system, &event(1, 1)).await?;
    system.wait_inbox("e1-v1").await?;
    system.inventory()?.stop().await?;
    system.inventory = None;
    system.inventory_env.insert(SHARDED.0.into(), SHARDED.1.into());
    system.start_services().await?;
    finish(system, 1, vec!["e1-v1".into()]).await
}
