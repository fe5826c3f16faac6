//! Hops 2 and 3 as a process: killed, doubled, frozen out, cut off.

use crate::support::{logged, wait_logged, with_id};
use anyhow::{Context, Result, ensure};
use e2e::broker::Tap;
use e2e::ledger::Expect;
use e2e::proxy::Direction;
use e2e::service::Service;
use e2e::system::{Options, System};
use e2e::wait::{DEADLINE, until, until_true};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Counts publishes by message id until `last` has come `times` times.
async fn count_until(tap: &mut Tap, last: &str, times: u32) -> Result<BTreeMap<String, u32>> {
    let mut counts = BTreeMap::new();
    while counts.get(last) != Some(&times) {
        *counts.entry(tap.next().await?.message_id).or_insert(0) += 1;
    }
    Ok(counts)
}

async fn event_of(system: &System, order: &str) -> Result<String> {
    let query = "SELECT id FROM outbox WHERE aggregate_id = $1 AND aggregate_version = 1";
    Ok(sqlx::query_scalar(query).bind(order).fetch_one(&system.orders_db).await?)
}

#[tokio::test]
async fn a_relay_killed_between_confirm_and_mark_publishes_again_with_the_same_id() -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let mut tap = system.broker.tap(&["orders"]).await?;

    // A relay of its own process: it can die without taking the API along.
    let orders = system.orders.take().context("orders-service runs")?;
    orders.stop().await?;
    let mut env = system.orders_env.clone();
    system.orders_env.insert("ROLES".into(), "http,consumer".into());
    system.start_services().await?;
    env.insert("ROLES".into(), "relay".into());
    let doomed = {
        let mut env = env.clone();
        env.insert("FAULT_POINT".into(), "relay.before_mark".into());
        Service::spawn("orders-service", &env)?
    };
    wait_logged(&doomed, "relay is active").await?;
    let order = system.place(&[("book-17", 1)]).await?;
    let status = doomed.wait_exit(DEADLINE).await?;
    ensure!(!status.success(), "the relay should have been killed");

    let relay = Service::start("orders-service", &env).await?;
    let event = event_of(&system, &order).await?;
    let counts = count_until(&mut tap, &event, 2).await?;
    assert_eq!(counts.keys().filter(|id| !id.contains(':')).count(), 1, "one event, one id");
    system.wait_status(&order, "confirmed").await?;
    assert_eq!(system.stock("book-17").await?, (10, 1));
    let result = system.finish().await;
    relay.stop().await?;
    result
}

#[tokio::test]
async fn of_two_relays_one_publishes_and_the_other_takes_over_when_it_dies() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    let mut env = system.orders_env.clone();
    env.insert("ROLES".into(), "relay".into());
    system.orders_env.insert("ROLES".into(), "http,consumer".into());
    system.start_services().await?;
    system.set_stock("book-17", 100).await?;
    let mut tap = system.broker.tap(&["orders"]).await?;

    let first = Service::start("orders-service", &env).await?;
    wait_logged(&first.child, "relay is active").await?;
    let second = Service::start("orders-service", &env).await?;
    second.wait_ready().await?;

    let mut orders = Vec::new();
    for _ in 0..10 {
        orders.push(system.place(&[("book-17", 1)]).await?);
    }
    for order in &orders {
        system.wait_status(order, "confirmed").await?;
    }
    assert!(logged(&second.child, "relay is active").is_empty(), "one relay at a time");

    // Between a confirm and its mark a kill would make a second publish: let it come to rest.
    until_true("everything to be marked", async || {
        let waiting = "SELECT count(*) FROM outbox WHERE published_at IS NULL";
        Ok(sqlx::query_scalar::<_, i64>(waiting).fetch_one(&system.orders_db).await? == 0)
    })
    .await?;
    first.child.sigkill()?;
    wait_logged(&second.child, "relay is active").await?;
    let last = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&last, "confirmed").await?;
    let counts = count_until(&mut tap, &event_of(&system, &last).await?, 1).await?;
    assert!(counts.values().all(|times| *times == 1), "each event once: {counts:?}");
    let result = system.finish().await;
    second.stop().await?;
    result
}

#[tokio::test]
async fn a_relay_frozen_between_confirm_and_mark_loses_the_lead_and_cannot_mark_when_it_wakes()
-> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    let mut env = system.orders_env.clone();
    env.extend(
        [("ROLES", "relay"), ("RELAY_LEASE", "2s"), ("CONFIRM_TIMEOUT", "1s")]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
    );
    system.orders_env.insert("ROLES".into(), "http,consumer".into());
    system.start_services().await?;
    system.set_stock("book-17", 100).await?;
    let mut tap = system.broker.tap(&["orders"]).await?;

    let frozen = {
        let mut env = env.clone();
        env.insert("FAULT_POINT".into(), "relay.before_mark".into());
        env.insert("FAULT_ACTION".into(), "stop".into());
        Service::start("orders-service", &env).await?
    };
    wait_logged(&frozen.child, "relay is active").await?;
    let standby = Service::start("orders-service", &env).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    let event = event_of(&system, &order).await?;

    // The first publish is the frozen relay's, the second the standby's, which then marks.
    count_until(&mut tap, &event, 2).await?;
    wait_logged(&standby.child, "relay is active").await?;
    let marked = || {
        sqlx::query_scalar::<_, Option<chrono::DateTime<chrono::Utc>>>(
            "SELECT published_at FROM outbox WHERE id = $1",
        )
        .bind(&event)
        .fetch_one(&system.orders_db)
    };
    let mark = until("the standby to mark", async || Ok(marked().await?)).await?;

    frozen.child.sigcont()?;
    wait_logged(&frozen.child, "session failed").await?;
    assert_eq!(marked().await?, Some(mark), "the mark is the standby's");
    system.wait_status(&order, "confirmed").await?;
    let result = system.finish().await;
    tokio::try_join!(standby.stop(), frozen.stop())?;
    result
}

#[tokio::test]
async fn a_broker_that_confirms_nothing_costs_no_row_an_attempt() -> Result<()> {
    let system = System::start(Options {
        proxies: true,
        env: vec![("CONFIRM_TIMEOUT", "500ms")],
        ..Options::default()
    })
    .await?;
    system.set_stock("book-17", 100).await?;
    let broker = &system.proxies.as_ref().context("proxies")?.orders_amqp;
    // Publishes arrive, confirms do not.
    broker.black_hole(Direction::ToClient)?;
    let mut orders = Vec::new();
    for _ in 0..3 {
        orders.push(system.place(&[("book-17", 1)]).await?);
    }
    let child = &system.orders()?.child;
    until_true("the relay to give the session up", async || {
        let failed = logged(child, "session failed");
        Ok(failed
            .iter()
            .any(|e| e["part"] == "relay" && e["error"].to_string().contains("confirm")))
    })
    .await?;
    broker.heal()?;
    for order in &orders {
        system.wait_status(order, "confirmed").await?;
    }
    let attempts: i64 =
        sqlx::query_scalar("SELECT sum(attempts) FROM outbox").fetch_one(&system.orders_db).await?;
    assert_eq!(attempts, 0, "trouble of the broker counts against no row");
    system.finish().await
}

/// What [`shared::publisher::Publisher::is_spent`] is about: a channel that is nacked may be all that
/// is wrong. Here the queue is, so that it can be had at will.
#[tokio::test]
async fn after_a_nack_the_relay_publishes_over_another_channel() -> Result<()> {
    const QUEUE: &str = "inventory.orders";
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    // That it is confirmed is told to the inventory too.
    system.rest(&Expect::default(), DEADLINE).await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    let url = {
        let vhost = system.vhost()?;
        format!("{}/api/policies/{vhost}/full", system.rabbitmq.management_url())
    };
    let full = json!({"pattern": "^inventory\\.orders$", "apply-to": "queues", "priority": 100,
                      "definition": {"max-length": 1, "overflow": "reject-publish"}});
    let limit = system.http.put(&url).basic_auth("guest", Some("guest")).json(&full);
    limit.send().await?.error_for_status()?;
    until_true("the queue to be full", async || {
        Ok(system.broker.publish("", QUEUE, with_id("filler"), b"").await.is_err())
    })
    .await?;

    let fillers = system.broker.depth(QUEUE).await?;
    // That of the relay, and that of the test's own hand.
    let before = confirming_channels(&system).await?;
    assert_eq!(before.len(), 2, "{before:?}");
    let order = system.place(&[("book-17", 1)]).await?;
    wait_logged(&system.orders()?.child, "outbox row refused").await?;
    until_true("another channel", async || {
        Ok(!confirming_channels(&system).await?.is_subset(&before))
    })
    .await?;

    for _ in 0..fillers {
        let filler = system.broker.take(QUEUE).await?.context("it was full")?;
        ensure!(filler.message_id == "filler", "{filler:?} was in the queue");
    }
    let gone = system.http.delete(&url).basic_auth("guest", Some("guest"));
    gone.send().await?.error_for_status()?;
    system.start_services().await?;
    system.wait_status(&order, "confirmed").await?;
    system.finish().await
}

/// The system's channels in confirm mode. By the node's own account: statistics lag.
async fn confirming_channels(system: &System) -> Result<BTreeSet<String>> {
    let list = ["list_channels", "-q", "--no-table-headers", "pid", "vhost", "confirm"];
    let channels = system.rabbitmq.ctl(&list).await?;
    let ours = format!("\t{}\ttrue", system.vhost()?);
    Ok(channels.lines().filter(|line| line.ends_with(&ours)).map(str::to_owned).collect())
}
