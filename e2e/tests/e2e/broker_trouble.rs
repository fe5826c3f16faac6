//! The broker in trouble: restarted, frozen, blocked, with something deleted. Each ends in recovery,
//! with readiness that told, and with the same consumers as before.

use crate::support::{
    declare_anew, first_event, logged, order_event, publish, second_event, wait_logged, with_id,
};
use anyhow::{Context, Result, ensure};
use e2e::ledger::Expect;
use e2e::service::Service;
use e2e::system::{Node, Options, System};
use e2e::wait::{until, until_true};
use lapin::options::ExchangeDeleteOptions;
use serde_json::{Value, json};

const QUEUE: &str = "inventory.orders";

async fn system() -> Result<System> {
    let system = System::start(Options {
        rabbitmq: Node::Own,
        env: vec![("AMQP_HEARTBEAT", "1s"), ("CONFIRM_TIMEOUT", "1s")],
        ..Options::default()
    })
    .await?;
    system.set_stock("book-17", 100).await?;
    Ok(system)
}

/// Waits until the queue has its consumers again: four workers, each with its window. By the node's own
/// account: statistics lag.
async fn wait_consumers(system: &System) -> Result<()> {
    let vhost = system.vhost()?;
    let list = ["list_consumers", "-q", "--no-table-headers", "-p", vhost];
    let list = [&list[..], &["queue_name", "prefetch_count"]].concat();
    until("the consumers to be what they were", async || {
        let consumers = system.rabbitmq.ctl(&list).await?;
        let ours = consumers.lines().filter(|line| line.starts_with("inventory.orders\t"));
        let ours: Vec<&str> = ours.collect();
        ensure!(ours == ["inventory.orders\t16"; 4], "{ours:?}");
        Ok(Some(()))
    })
    .await
}

/// Orders are placed while the trouble lasts; both services say that they are not ready, and why; all
/// is settled after it.
async fn survives(
    mut system: System,
    begin: impl AsyncFn(&System) -> Result<()>,
    end: impl AsyncFn(&System) -> Result<()>,
) -> Result<()> {
    wait_consumers(&system).await?;
    begin(&system).await?;
    let mut orders = Vec::new();
    for _ in 0..5 {
        orders.push(system.place(&[("book-17", 1)]).await?);
    }
    until_true("both to be not ready", async || {
        let (orders, inventory) = (system.orders()?, system.inventory()?);
        Ok(!orders.readiness().await?.0 && !inventory.readiness().await?.0)
    })
    .await?;
    end(&system).await?;
    for order in &orders {
        system.wait_status(order, "confirmed").await?;
    }
    system.orders()?.wait_ready().await?;
    system.inventory()?.wait_ready().await?;
    system.reconnect_broker().await?;
    wait_consumers(&system).await?;
    system.finish().await
}

#[tokio::test]
async fn a_broker_that_restarts_finds_everything_as_it_was() -> Result<()> {
    let stop = async |system: &System| system.rabbitmq.stop().await;
    survives(system().await?, stop, async |system| system.rabbitmq.start_again().await).await
}

#[tokio::test]
async fn a_broker_that_is_killed_loses_nothing_that_it_confirmed() -> Result<()> {
    let kill = async |system: &System| system.rabbitmq.sigkill();
    survives(system().await?, kill, async |system| system.rabbitmq.start_again().await).await
}

#[tokio::test]
async fn a_frozen_broker_is_noticed_by_its_silence() -> Result<()> {
    let freeze = async |system: &System| system.rabbitmq.sigstop();
    survives(system().await?, freeze, async |system| system.rabbitmq.sigcont()).await
}

async fn alarm(system: &System, on: bool) -> Result<()> {
    let watermark = if on { "0" } else { "0.9" };
    system.rabbitmq.ctl(&["set_vm_memory_high_watermark", watermark]).await?;
    Ok(())
}

#[tokio::test]
async fn an_alarm_that_blocks_publishing_is_waited_for_on_the_connections_that_there_are()
-> Result<()> {
    let system = system().await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    alarm(&system, true).await?;
    let mut orders = Vec::new();
    for _ in 0..5 {
        orders.push(system.place(&[("book-17", 1)]).await?);
    }
    until_true("the relay to say that it is blocked", async || {
        let (_, answer) = system.orders()?.readiness().await?;
        Ok(answer["parts"]["relay"].as_str().is_some_and(|relay| relay.contains("blocks")))
    })
    .await?;
    alarm(&system, false).await?;
    for order in &orders {
        system.wait_status(order, "confirmed").await?;
    }
    system.orders()?.wait_ready().await?;
    for service in [system.orders()?, system.inventory()?] {
        assert_eq!(logged(&service.child, "session failed"), Vec::<Value>::new());
    }
    let refused: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox WHERE attempts > 0")
        .fetch_one(&system.orders_db)
        .await?;
    assert_eq!(refused, 0, "an alarm counts against no row");
    system.finish().await
}

#[tokio::test]
async fn a_copy_that_an_alarm_blocks_stays_in_hand_while_other_messages_are_acked() -> Result<()> {
    let mut system = system().await?;
    let lines = json!({"lines": [{"sku": "nothing", "count": 1}]});
    let first = order_event("first", "order.created", 3, lines);
    publish(&system, &first).await?;
    // The answer is about an order that orders-service never had.
    system.take_parked("orders.inventory").await?;
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;

    // One that will have to be parked; behind it one that leads to no publishing.
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    system.broker.publish("orders", "order.created", with_id("broken"), b"{not-json}").await?;
    let mut second = order_event("second", "order.confirmed", 1, json!({}));
    second["aggregate"] = json!({"type": "order", "id": first["aggregate"]["id"], "version": 2});
    publish(&system, &second).await?;
    alarm(&system, true).await?;
    system.inventory = Some(Service::start("inventory-service", &system.inventory_env).await?);
    let inventory = system.inventory()?;
    wait_logged(&inventory.child, "publishing is blocked by the broker").await?;
    system.wait_inbox("second").await?;
    let (ready, answer) = inventory.readiness().await?;
    assert!(!ready && answer["parts"]["consumer"].to_string().contains("blocks"), "{answer}");
    // Logged after the Ack, which the client library has written by then.
    wait_logged(&inventory.child, "message handled").await?;

    alarm(&system, false).await?;
    wait_logged(&inventory.child, "message is parked").await?;
    // What was sent before the alarm was known and what was sent after it: the same message.
    while let Some(parked) = system.broker.take("inventory.orders.parking").await? {
        assert_eq!(parked.message_id, "broken");
    }
    inventory.wait_ready().await?;
    assert_eq!(logged(&inventory.child, "session failed"), Vec::<Value>::new());
    let injected = vec!["first".into(), "second".into()];
    system.finish_expecting(Expect { injected, ..Expect::default() }).await
}

#[tokio::test]
async fn a_queue_deleted_under_its_consumer_is_declared_again_and_consumed() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    system.broker.delete_queue(QUEUE).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    wait_consumers(&system).await?;
    system.finish().await
}

#[tokio::test]
async fn consumers_that_are_not_told_of_their_queues_end_find_it_out() -> Result<()> {
    let system = System::start(Options {
        env: vec![("TOPOLOGY_CHECK_INTERVAL", "1s")],
        ..Options::default()
    })
    .await?;
    system.set_stock("book-17", 10).await?;
    wait_consumers(&system).await?;
    // Deleted, and there again before anybody could have noticed.
    declare_anew(&system, QUEUE, "quorum").await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    wait_consumers(&system).await?;
    system.finish().await
}

#[tokio::test]
async fn an_exchange_that_is_gone_closes_the_channel_and_is_declared_again() -> Result<()> {
    let system = System::start(Options::default()).await?;
    let retry = "inventory.orders.retry";
    system.broker.channel.exchange_delete(retry.into(), ExchangeDeleteOptions::default()).await?;
    // A gap: it will be retried, into an exchange that is not there (404).
    publish(&system, &second_event()).await?;
    let inventory = &system.inventory()?.child;
    let failed = wait_logged(inventory, "session failed").await?;
    assert!(failed["error"].to_string().contains("NOT_FOUND"), "{failed}");
    wait_logged(inventory, "message will be retried").await?;
    wait_consumers(&system).await?;
    publish(&system, &first_event()).await?;
    system.wait_inbox("second").await?;
    system.take_parked("orders.inventory").await?;
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    let injected = vec!["first".into(), "second".into()];
    system.finish_expecting(Expect { injected, ..Expect::default() }).await
}

#[tokio::test]
async fn a_queue_of_the_wrong_kind_is_refused_until_it_is_gone() -> Result<()> {
    let system = System::start(Options {
        env: vec![("TOPOLOGY_CHECK_INTERVAL", "1s")],
        ..Options::default()
    })
    .await?;
    system.set_stock("book-17", 10).await?;
    // Deleted and at once declared by somebody else, as a classic queue: ours cannot be (406).
    declare_anew(&system, QUEUE, "classic").await?;
    let inventory = system.inventory()?;
    inventory
        .child
        .wait_for_line("a refusal", e2e::wait::DEADLINE, |line| {
            line.contains("PRECONDITION_FAILED").then_some(())
        })
        .await?;
    assert!(!inventory.readiness().await?.0);
    system.broker.delete_queue(QUEUE).await?;
    inventory.wait_ready().await?;
    wait_consumers(&system).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    system.finish().await
}
