//! The broker in trouble: restarted, frozen, blocked, with something deleted. Each ends in recovery,
//! with readiness that told, and with the same consumers as before.

use crate::support::{logged, order_event, wait_logged, with_aggregate, with_id};
use anyhow::{Context, Result, ensure};
use e2e::system::{Options, System};
use e2e::wait::{until, until_true};
use lapin::options::{ExchangeDeleteOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Value, json};

const QUEUE: &str = "inventory.orders";

async fn system() -> Result<System> {
    let system = System::start(Options {
        own_rabbitmq: true,
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
    let vhost = system.orders_env["AMQP_URL"].rsplit('/').next().context("a vhost")?;
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
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    // One that will have to be parked, and, behind it, one that needs no publishing: the answer to it
    // is in the outbox.
    system.broker.publish("orders", "order.created", with_id("broken"), b"{not-json}").await?;
    let lines = json!({"lines": [{"sku": "book-17", "count": 1}]});
    let good = order_event("good", "order.created", 3, lines);
    let body = serde_json::to_vec(&good)?;
    system.broker.publish("orders", "order.created", with_aggregate(&good), &body).await?;
    alarm(&system, true).await?;
    let inventory =
        e2e::service::Service::start("inventory-service", &system.inventory_env).await?;
    wait_logged(&inventory.child, "publishing is blocked by the broker").await?;
    system.wait_inbox("good").await?;
    let (ready, answer) = inventory.readiness().await?;
    assert!(!ready && answer["parts"]["consumer"].to_string().contains("blocks"), "{answer}");
    alarm(&system, false).await?;
    assert_eq!(system.take_parked(QUEUE).await?.message_id, "broken");
    inventory.wait_ready().await?;
    assert_eq!(logged(&inventory.child, "session failed"), Vec::<Value>::new());
    system.inventory = Some(inventory);
    // Its order is none of orders-service's.
    system.take_parked("orders.inventory").await?;
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    sqlx::query("DELETE FROM reservations").execute(&system.inventory_db).await?;
    sqlx::query("UPDATE stock SET reserved = 0").execute(&system.inventory_db).await?;
    let injected = vec!["good".into()];
    system.finish_expecting(e2e::oracle::Expect { injected, ..Default::default() }).await
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
async fn an_exchange_that_is_gone_closes_the_channel_and_is_declared_again() -> Result<()> {
    let system = System::start(Options::default()).await?;
    let retry = "inventory.orders.retry";
    system.broker.channel.exchange_delete(retry.into(), ExchangeDeleteOptions::default()).await?;
    // A gap: it will be retried, into an exchange that is not there (404).
    let mut second = order_event("second", "order.cancelled", 1, json!({}));
    second["aggregate"]["version"] = json!(2);
    let body = serde_json::to_vec(&second)?;
    system.broker.publish("orders", "order.cancelled", with_aggregate(&second), &body).await?;
    let inventory = &system.inventory()?.child;
    let failed = wait_logged(inventory, "session failed").await?;
    assert!(failed["error"].to_string().contains("NOT_FOUND"), "{failed}");
    wait_logged(inventory, "message will be retried").await?;
    wait_consumers(&system).await?;
    let mut first = second.clone();
    first["id"] = json!("first");
    first["type"] = json!("order.created");
    first["schema_version"] = json!(3);
    first["aggregate"]["version"] = json!(1);
    first["data"] = json!({"lines": [{"sku": "nothing", "count": 1}]});
    let body = serde_json::to_vec(&first)?;
    system.broker.publish("orders", "order.created", with_aggregate(&first), &body).await?;
    system.wait_inbox("second").await?;
    system.take_parked("orders.inventory").await?;
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    let injected = vec!["first".into(), "second".into()];
    system.finish_expecting(e2e::oracle::Expect { injected, ..Default::default() }).await
}

#[tokio::test]
async fn a_queue_of_the_wrong_kind_is_refused_until_it_is_gone() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    // Deleted and at once declared by somebody else, as a classic queue: ours cannot be (406).
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    let mut classic = FieldTable::default();
    classic.insert("x-queue-type".into(), AMQPValue::LongString("classic".into()));
    until_true("the wrong queue to be first", async || {
        system.broker.delete_queue(QUEUE).await?;
        let channel = system.broker.open_channel().await?;
        Ok(channel.queue_declare(QUEUE.into(), durable, classic.clone()).await.is_ok())
    })
    .await?;
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
