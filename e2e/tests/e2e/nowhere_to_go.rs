//! Hops 7 and 8 when the next owner is not there: retries and parking whose bindings are gone, messages
//! that kill whoever takes them.

use crate::support::{first_event, logged, publish, second_event, wait_logged, with_id};
use anyhow::{Context, Result, ensure};
use chrono::{DateTime, TimeDelta, Utc};
use e2e::broker::Broker;
use e2e::ledger::Expect;
use e2e::service::Service;
use e2e::system::{Options, System};
use e2e::wait::{DEADLINE, until_true};
use lapin::types::FieldTable;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::JoinHandle;

/// Takes bindings away, again and again: the service declares them anew with every session.
struct Saboteur {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Result<()>>,
}

impl Saboteur {
    /// Of `queue`, `exchange`, `key`.
    async fn start(system: &System, bindings: Vec<[String; 3]>) -> Result<Self> {
        let broker = Broker::connect(&system.orders_env["AMQP_URL"]).await?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                for [queue, exchange, key] in &bindings {
                    let (queue, exchange) = (queue.as_str().into(), exchange.as_str().into());
                    let none = FieldTable::default();
                    broker.channel.queue_unbind(queue, exchange, key.as_str().into(), none).await?;
                }
                tokio::task::yield_now().await;
            }
            Ok(())
        });
        Ok(Self { stop, task })
    }

    async fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await?
    }
}

fn failed_sessions(system: &System) -> Result<Vec<Value>> {
    Ok(logged(&system.inventory()?.child, "session failed"))
}

fn time(line: &Value) -> Result<DateTime<Utc>> {
    let text = line["timestamp"].as_str().context("a log line without a time")?;
    Ok(text.parse()?)
}

#[tokio::test]
async fn a_retry_that_is_returned_stays_with_its_queue_and_sessions_begin_ever_less_often()
-> Result<()> {
    let system = System::start(Options::default()).await?;
    let bindings = ["300ms", "600ms", "900ms"].map(|delay| {
        let queue = format!("inventory.orders.retry.{delay}");
        [queue, "inventory.orders.retry".to_owned(), delay.to_owned()]
    });
    let saboteur = Saboteur::start(&system, bindings.to_vec()).await?;
    publish(&system, &second_event()).await?;

    let first = time(&wait_logged(&system.inventory()?.child, "session failed").await?)?;
    let window = first + TimeDelta::seconds(30);
    until_true("30 s of this", async || {
        ensure!(system.broker.depth("inventory.orders.parking").await? == 0, "it was parked");
        Ok(Utc::now() > window)
    })
    .await?;
    let failed = failed_sessions(&system)?;
    let returned = |line: &Value| line["error"].to_string().contains("returned the copy");
    assert!(failed.iter().all(returned), "the return is seen: {failed:#?}");
    // 0.5 s, doubling, each between half of it and the whole: the eighth is past the 30 s.
    assert!((4..=7).contains(&failed.len()), "{} sessions in 30 s", failed.len());
    assert!(!system.inventory()?.readiness().await?.0);

    saboteur.stop().await?;
    wait_logged(&system.inventory()?.child, "message will be retried").await?;
    publish(&system, &first_event()).await?;
    system.wait_inbox("second").await?;
    system.take_parked("orders.inventory").await?;
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    let injected = vec!["first".into(), "second".into()];
    system.finish_expecting(Expect { injected, ..Expect::default() }).await
}

#[tokio::test]
async fn with_parking_gone_a_message_waits_in_the_dead_letter_backlog_and_arrives_later()
-> Result<()> {
    let system = System::start(Options::default()).await?;
    let parking = "inventory.orders.parking";
    let binding =
        [parking, "inventory.orders.dlx", "inventory.orders.failed"].map(ToOwned::to_owned);
    let saboteur = Saboteur::start(&system, vec![binding]).await?;
    system.broker.publish("orders", "order.created", with_id("broken"), b"{not-json}").await?;
    let failed = wait_logged(&system.inventory()?.child, "session failed").await?;
    assert!(failed["error"].to_string().contains("parking took no copy"), "{failed}");
    // It is in no queue's depth, and not lost.
    assert_eq!(system.broker.depth(parking).await?, 0);
    saboteur.stop().await?;
    system.inventory()?.wait_ready().await?;
    let parked = system.take_parked("inventory.orders").await?;
    assert_eq!((parked.message_id.as_str(), &parked.body[..]), ("broken", &b"{not-json}"[..]));
    system.finish().await
}

#[tokio::test]
async fn a_message_that_kills_the_process_is_parked_by_the_broker_and_takes_no_other_along()
-> Result<()> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 100).await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    let mut orders = Vec::new();
    for _ in 0..20 {
        orders.push(system.place(&[("book-17", 1)]).await?);
    }
    until_true("all of them to wait", async || {
        Ok(system.broker.depth("inventory.orders").await? == 20)
    })
    .await?;
    // Whoever is at the head of the queue kills the process: always the same message, until the
    // broker has counted to its limit.
    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), "consumer.before_commit".into());
    let mut deaths = 0;
    while system.broker.depth("inventory.orders.parking").await? == 0 {
        ensure!(deaths < 9, "nine deaths, and it is not parked");
        let doomed = Service::spawn("inventory-service", &env)?;
        ensure!(!doomed.wait_exit(DEADLINE).await?.success(), "it should have been killed");
        deaths += 1;
        until_true("the broker to have noticed", async || {
            let ready = system.broker.depth("inventory.orders").await?;
            Ok(ready + system.broker.depth("inventory.orders.parking").await? == 20)
        })
        .await?;
    }
    assert_eq!(deaths, 9, "the limit is eight redeliveries");
    system.start_services().await?;
    for order in &orders[1..] {
        system.wait_status(order, "confirmed").await?;
    }
    assert_eq!(system.broker.depth("inventory.orders.parking").await?, 1, "and no other");
    let redrive = ["parking", "redrive"];
    Service::command_ok("inventory-service", &redrive, &system.inventory_env).await?;
    system.wait_status(&orders[0], "confirmed").await?;
    assert_eq!(system.stock("book-17").await?, (100, 20));
    system.finish().await
}
