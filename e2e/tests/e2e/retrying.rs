//! Hops 7 and 8: what is retried, how often, and what is parked at once.

use crate::modes::{Mode, tests_in};
use crate::support::{logged, mend, order_event, sabotage, text, with_id};
use anyhow::{Error, Result};
use chrono::{DateTime, Utc};
use e2e::broker::Seen;
use e2e::system::{Options, System};
use e2e::wait::until_true;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Value, json};
use shared::config::Delay;
use std::collections::BTreeMap;

tests_in!(
    buckets("gate", "buckets"),
    native("gate", "native");
    {
        malformed_json_is_parked_at_once_with_its_metadata,
        whatever_breaks_the_contract_is_parked_at_once_and_named,
        a_database_outage_walks_the_retry_delays_and_is_survived_without_a_hot_loop,
        an_outage_longer_than_the_budget_parks_the_message_and_publishing_it_again_settles_it,
        a_crash_between_the_parking_copy_and_the_ack_parks_two_copies_and_loses_none,
        a_parking_that_takes_nothing_leaves_the_message_with_its_queue_until_it_does,
        many_that_fail_together_wait_for_each_delay_in_turn_and_take_effect_once,
    }
);

fn retries(system: &System) -> Vec<Value> {
    system
        .inventory
        .as_ref()
        .map_or_else(Vec::new, |inventory| logged(&inventory.child, "message will be retried"))
}

async fn malformed_json_is_parked_at_once_with_its_metadata(mode: Mode) -> Result<()> {
    let Some(system) = mode.start(Options::default()).await? else { return Ok(()) };
    let mut headers = FieldTable::default();
    headers.insert("traceparent".into(), AMQPValue::LongString("00-aa-bb-01".into()));
    let properties = with_id("broken-1")
        .with_app_id("somebody".into())
        .with_correlation_id("correlation-1".into())
        .with_headers(headers);
    system.broker.publish("orders", "order.created", properties, b"{not-json}").await?;

    let parked = system.take_parked("inventory.orders").await?;
    assert_eq!(parked.message_id, "broken-1");
    assert_eq!(parked.body, b"{not-json}");
    for (header, value) in [
        ("x-park-reason", "permanent"),
        ("x-failure-class", "permanent"),
        ("x-retry-attempt", "1"),
        ("x-original-exchange", "orders"),
        ("x-original-routing-key", "order.created"),
        ("x-consumer", "inventory.orders"),
        ("x-producer", "somebody"),
        ("traceparent", "00-aa-bb-01"),
    ] {
        assert_eq!(parked.headers.get(header).map(String::as_str), Some(value), "{header}");
    }
    for header in ["x-last-error", "x-first-failed-at", "x-consumer-version"] {
        assert!(parked.headers.contains_key(header), "{header}");
    }
    let correlation = parked.properties.correlation_id().as_ref().map(ToString::to_string);
    assert_eq!(correlation.as_deref(), Some("correlation-1"));
    assert!(retries(&system).is_empty(), "no retry was spent on it");
    system.finish().await
}

async fn whatever_breaks_the_contract_is_parked_at_once_and_named(mode: Mode) -> Result<()> {
    let Some(system) = mode.start(Options::default()).await? else { return Ok(()) };
    let good = order_event("id", "order.created", 3, json!({"lines": [{"sku": "a", "count": 1}]}));
    let event = |pointer: &str, value: Value| {
        let mut event = good.clone();
        if let Some(slot) = event.pointer_mut(pointer) {
            *slot = value;
        }
        event
    };
    let no_id = BasicProperties::default();
    let long = "x".repeat(201);
    for (properties, event, says) in [
        (with_id("id"), event("/schema_version", json!(99)), "schema version 99"),
        (with_id("id"), event("/schema_version", json!(1)), "1 is retired"),
        (with_id("id"), event("/type", json!("order.exploded")), "order.exploded"),
        (with_id("id"), event("/data/lines/0/count", json!(0)), "count of a is 0"),
        (with_id("id"), event("/data/lines/0/sku", json!("a b")), "is not a sku"),
        (with_id("id"), event("/data/lines/0/sku", json!("x".repeat(150_000))), "is not a sku"),
        (with_id("id"), event("/data/lines", json!([])), "1 to 100 lines"),
        (with_id("id"), event("/aggregate/version", json!(0)), "aggregate.version"),
        (no_id, good.clone(), "message_id is missing"),
        (with_id(""), good.clone(), "message_id is missing"),
        (with_id("other"), good.clone(), "is not the id in the body"),
        (with_id(&long), event("/id", json!(long)), "201 bytes"),
    ] {
        let body = serde_json::to_vec(&event)?;
        system.broker.publish("orders", "order.created", properties, &body).await?;
        let Seen { headers, .. } = system.take_parked("inventory.orders").await?;
        assert_eq!(headers["x-park-reason"], "permanent");
        let error = &headers["x-last-error"];
        assert!(error.contains(says), "{error:?} does not say {says:?}");
        assert!(error.chars().count() <= 512, "{} characters", error.chars().count());
    }
    assert!(retries(&system).is_empty(), "no retry was spent on any of them");
    system.finish().await
}

async fn a_database_outage_walks_the_retry_delays_and_is_survived_without_a_hot_loop(
    mode: Mode,
) -> Result<()> {
    let Some(system) = mode
        .start(Options {
            own_inventory_postgres: true,
            env: vec![("RETRY_ATTEMPTS_TRANSIENT", "20"), ("DATABASE_ACQUIRE_TIMEOUT", "300ms")],
            ..Options::default()
        })
        .await?
    else {
        return Ok(());
    };
    system.set_stock("book-17", 10).await?;
    system.inventory_postgres.sigkill()?;
    let order = system.place(&[("book-17", 1)]).await?;
    until_true("the message to reach the last rung of the ladder", async || {
        Ok(retries(&system).iter().any(|retry| retry["retry_in"] == "900ms"))
    })
    .await?;
    system.inventory_postgres.start_again().await?;
    system.wait_status(&order, "confirmed").await?;

    // Every delivery that failed is a retry that was delayed: no more of them than rungs climbed.
    let delays: Vec<String> =
        retries(&system).iter().map(|retry| retry["retry_in"].to_string()).collect();
    assert_eq!(&delays[..3], ["\"300ms\"", "\"600ms\"", "\"900ms\""]);
    assert!(delays[3..].iter().all(|delay| delay == "\"900ms\""), "{delays:?}");
    let attempts: Vec<u64> =
        retries(&system).iter().filter_map(|r| r["attempt"].as_u64()).collect();
    assert!(attempts.iter().copied().eq(1..=attempts.len() as u64), "{attempts:?}");
    assert_eq!(system.stock("book-17").await?, (10, 1));
    system.finish().await
}

async fn an_outage_longer_than_the_budget_parks_the_message_and_publishing_it_again_settles_it(
    mode: Mode,
) -> Result<()> {
    let Some(system) = mode
        .start(Options {
            own_inventory_postgres: true,
            env: vec![("DATABASE_ACQUIRE_TIMEOUT", "300ms")],
            ..Options::default()
        })
        .await?
    else {
        return Ok(());
    };
    system.set_stock("book-17", 10).await?;
    system.inventory_postgres.sigkill()?;
    let order = system.place(&[("book-17", 1)]).await?;

    let parked = system.take_parked("inventory.orders").await?;
    assert_eq!(parked.headers["x-park-reason"], "attempts-exhausted");
    assert_eq!(parked.headers["x-failure-class"], "transient");
    assert_eq!(parked.headers["x-retry-attempt"], "4");
    // It came back through the default exchange three times, and is still what it was.
    assert_eq!(parked.headers["x-original-exchange"], "orders");
    assert_eq!(parked.headers["x-original-routing-key"], "order.created");
    assert_eq!(parked.headers["x-schema-version"], "3");
    let delays: Vec<Value> =
        retries(&system).iter().map(|retry| retry["retry_in"].clone()).collect();
    assert_eq!(delays, ["300ms", "600ms", "900ms"]);

    // By hand, past `parking redrive`: same id and body, straight to the queue, a clean history.
    system.inventory_postgres.start_again().await?;
    let again = with_id(&parked.message_id);
    system.broker.publish("", "inventory.orders", again, &parked.body).await?;
    system.wait_status(&order, "confirmed").await?;
    assert_eq!(system.stock("book-17").await?, (10, 1));
    system.finish().await
}

#[tokio::test]
async fn a_crash_between_the_retry_copy_and_the_ack_makes_two_copies_and_one_effect() -> Result<()>
{
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    // The second event of an order, with the first one held back: a gap, so it is retried.
    let order = system.place(&[("book-17", 1)]).await?;
    let created: String = sqlx::query_scalar("SELECT id FROM outbox WHERE aggregate_id = $1")
        .bind(&order)
        .fetch_one(&system.orders_db)
        .await?;
    until_true("order.created in the queue", async || {
        Ok(system.broker.depth("inventory.orders").await? == 1)
    })
    .await?;
    let held_back = system.broker.take("inventory.orders").await?;
    assert_eq!(held_back.as_ref().map(|seen| seen.message_id.as_str()), Some(created.as_str()));
    system.cancel(&order).await?;

    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), "consumer.after_retry_confirm".into());
    let doomed = e2e::service::Service::spawn("inventory-service", &env)?;
    let status = doomed.wait_exit(e2e::wait::DEADLINE).await?;
    assert!(!status.success(), "it should have been killed");
    system.start_services().await?;
    if let Some(created) = held_back {
        let properties = created.properties.clone();
        system.broker.publish("orders", "order.created", properties, &created.body).await?;
    }
    system.wait_inbox(&created).await?;
    system.finish().await
}

async fn a_crash_between_the_parking_copy_and_the_ack_parks_two_copies_and_loses_none(
    mode: Mode,
) -> Result<()> {
    let Some(mut system) = mode.start(Options { stopped: true, ..Options::default() }).await?
    else {
        return Ok(());
    };
    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), "consumer.after_park_confirm".into());
    system.broker.publish("orders", "order.created", with_id("broken"), b"{not-json}").await?;
    let doomed = e2e::service::Service::spawn("inventory-service", &env)?;
    let status = doomed.wait_exit(e2e::wait::DEADLINE).await?;
    assert!(!status.success(), "it should have been killed");
    system.start_services().await?;
    for _ in 0..2 {
        assert_eq!(system.take_parked("inventory.orders").await?.message_id, "broken");
    }
    system.finish().await
}

async fn a_parking_that_takes_nothing_leaves_the_message_with_its_queue_until_it_does(
    mode: Mode,
) -> Result<()> {
    let Some(system) = mode.start(Options::default()).await? else { return Ok(()) };
    // Full: the copy is nacked, the original rejected into the queue's own dead lettering.
    let parking = "inventory.orders.parking";
    let limit = |most: u32| {
        let vhost = system.vhost().unwrap_or_default();
        let url = format!("{}/api/policies/{vhost}/full", system.rabbitmq.management_url());
        let definition = json!({"max-length": most, "overflow": "reject-publish"});
        let body = json!({"pattern": "^inventory\\.orders\\.parking$", "apply-to": "queues",
                          "priority": 100, "definition": definition});
        system.http.put(url).basic_auth("guest", Some("guest")).json(&body).send()
    };
    limit(1).await?.error_for_status()?;
    let broken = async |id: &str| {
        system.broker.publish("orders", "order.created", with_id(id), b"{not-json}").await
    };
    // Publishing into the parking directly shows when the limit has come into force.
    until_true("the parking to be full", async || {
        let full = system.broker.publish("", parking, with_id("filler"), b"").await.is_err();
        Ok(full)
    })
    .await?;
    broken("waits").await?;
    let says = "parking took no copy; the source queue keeps the message";
    crate::support::wait_logged(&system.inventory()?.child, says).await?;
    limit(1000).await?.error_for_status()?;
    until_true("the message to arrive in parking", async || {
        let seen = system.broker.take(parking).await?;
        Ok(seen.is_some_and(|seen| seen.message_id == "waits"))
    })
    .await?;
    while system.broker.take(parking).await?.is_some() {}
    system.finish().await
}

/// Prints how long the delays really were: for ARCHITECTURE.md.
async fn many_that_fail_together_wait_for_each_delay_in_turn_and_take_effect_once(
    mode: Mode,
) -> Result<()> {
    const MANY: usize = 20;
    let env = vec![("RETRY_ATTEMPTS_TRANSIENT", "20")];
    let Some(system) = mode.start(Options { env, ..Options::default() }).await? else {
        return Ok(());
    };
    system.set_stock("book-17", 1000).await?;
    sabotage(&system, "40001").await?;
    let placed = stream::iter(0..MANY).map(|_| system.place(&[("book-17", 1)]));
    let orders: Vec<String> = placed.buffer_unordered(10).try_collect().await?;
    until_true("each of them to have waited for each delay", async || {
        let retries = retries(&system);
        let failed_again = retries.iter().filter(|retry| retry["attempt"] == 4);
        Ok(failed_again.count() == MANY)
    })
    .await?;
    mend(&system).await?;
    for order in &orders {
        system.wait_status(order, "confirmed").await?;
    }
    assert_eq!(system.stock("book-17").await?, (1000, 20));

    // From one failure of a message to the next, by the delay that it was to wait.
    let mut last: BTreeMap<String, (DateTime<Utc>, String)> = BTreeMap::new();
    let mut waits: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for retry in retries(&system) {
        let (id, delay) = (text(&retry, "message_id")?, text(&retry, "retry_in")?.to_owned());
        let at: DateTime<Utc> = text(&retry, "timestamp")?.parse()?;
        if let Some((before, delay)) = last.insert(id.to_owned(), (at, delay)) {
            waits.entry(delay).or_default().push((at - before).num_milliseconds());
        }
    }
    assert!(waits.keys().eq(["300ms", "600ms", "900ms"]), "{waits:?}");
    for (delay, mut waits) in waits {
        waits.sort_unstable();
        // The line is logged once the copy is confirmed, when the wait has begun already.
        let shortest = i64::try_from(delay.parse::<Delay>().map_err(Error::msg)?.millis())? - 200;
        assert!(waits[0] >= shortest, "{delay}: {waits:?}");
        let (most, median) = (waits.last(), waits.get(waits.len() / 2));
        println!(
            "{}, {delay}: {} waits, {median:?} ms, at most {most:?}",
            mode.backend,
            waits.len()
        );
    }
    system.finish().await
}
