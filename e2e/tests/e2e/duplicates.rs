//! Hops 4 to 6: a message may come as often as it likes.

use crate::support::{logged, order_event, text, with_id};
use anyhow::{Result, ensure};
use e2e::ledger::Expect;
use e2e::service::Service;
use e2e::system::{Options, System, answer};
use e2e::wait::{DEADLINE, until_true};
use reqwest::StatusCode;
use serde_json::{Value, json};

#[tokio::test]
async fn the_same_event_delivered_five_times_reserves_once() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    let (id, payload): (String, String) =
        sqlx::query_as("SELECT id, payload::text FROM outbox WHERE aggregate_id = $1")
            .bind(&order)
            .fetch_one(&system.orders_db)
            .await?;
    for _ in 0..4 {
        system.broker.publish("orders", "order.created", with_id(&id), payload.as_bytes()).await?;
    }
    let duplicates = || {
        let handled = logged(&system.inventory.as_ref()?.child, "message handled");
        Some(
            handled.iter().filter(|e| e["message_id"] == id && e["outcome"] == "duplicate").count(),
        )
    };
    until_true("four duplicates", async || Ok(duplicates() == Some(4))).await?;
    assert_eq!(system.stock("book-17").await?, (10, 1));
    system.finish().await
}

/// Runs the inventory with a fault point, places an order, sees the process die there, starts it
/// again and returns once the order has come to its end.
async fn crash_at(fault: &str) -> Result<System> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), fault.into());
    let doomed = Service::spawn("inventory-service", &env)?;
    let order = system.place(&[("book-17", 1)]).await?;
    let status = doomed.wait_exit(DEADLINE).await?;
    ensure!(!status.success(), "it should have been killed at {fault}");

    system.start_services().await?;
    system.wait_status(&order, "confirmed").await?;
    assert_eq!(system.stock("book-17").await?, (10, 1));
    Ok(system)
}

#[tokio::test]
async fn a_crash_after_commit_before_ack_reserves_once() -> Result<()> {
    let system = crash_at("consumer.after_commit").await?;
    let child = &system.inventory()?.child;
    until_true("the redelivery to be recognised", async || {
        let handled = logged(child, "message handled");
        Ok(handled.iter().any(|e| e["outcome"] == "duplicate" && e["redelivered"] == true))
    })
    .await?;
    let rows: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM processed_messages
         WHERE message_id NOT LIKE '%:%' AND consumer_name = 'inventory.orders'",
    )
    .fetch_one(&system.inventory_db)
    .await?;
    assert_eq!(rows, 1, "one inbox row for one order.created");
    system.finish().await
}

#[tokio::test]
async fn a_crash_before_commit_reserves_once() -> Result<()> {
    let system = crash_at("consumer.before_commit").await?;
    system.finish().await
}

#[tokio::test]
async fn a_crash_of_orders_after_committing_an_answer_settles_the_order_once() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    let mut consumer = system.orders_env.clone();
    consumer.insert("ROLES".into(), "consumer".into());
    system.orders_env.insert("ROLES".into(), "http,relay".into());
    system.start_services().await?;
    system.set_stock("book-17", 10).await?;
    let doomed = {
        let mut env = consumer.clone();
        env.insert("FAULT_POINT".into(), "consumer.after_commit".into());
        Service::spawn("orders-service", &env)?
    };
    let order = system.place(&[("book-17", 1)]).await?;
    ensure!(!doomed.wait_exit(DEADLINE).await?.success(), "it should have been killed");

    let consumer = Service::start("orders-service", &consumer).await?;
    let settled = system.wait_status(&order, "confirmed").await?;
    assert_eq!(settled["version"], 2, "confirmed once");
    let result = system.finish().await;
    consumer.stop().await?;
    result
}

#[tokio::test]
async fn a_crash_around_the_commit_of_an_order_makes_one_order_of_a_repeated_key() -> Result<()> {
    for fault in ["place_order.before_commit", "place_order.after_commit"] {
        let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
        let mut env = system.orders_env.clone();
        env.insert("FAULT_POINT".into(), fault.into());
        let doomed = Service::start("orders-service", &env).await?;
        let body = json!({"lines": [{"sku": "book-17", "count": 1}]});
        let post = |url: String| system.http.post(url).header("idempotency-key", "k").json(&body);
        let unanswered = post(doomed.api("/orders")?).send().await;
        assert!(unanswered.is_err(), "the client never hears of it: {fault}");
        ensure!(!doomed.child.wait_exit(DEADLINE).await?.success(), "it should have been killed");

        system.start_services().await?;
        system.set_stock("book-17", 10).await?;
        let url = system.orders()?.api("/orders")?;
        let repeat = system.http.post(url).header("idempotency-key", "k").json(&body);
        answer(repeat, StatusCode::CREATED).await?;
        let orders: i64 =
            sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&system.orders_db).await?;
        assert_eq!(orders, 1, "{fault}");
        system.finish().await?;
    }
    Ok(())
}

#[tokio::test]
async fn an_echo_that_inbox_and_gate_have_forgotten_is_caught_by_the_business_key() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    let (id, payload): (String, String) = sqlx::query_as(
        "SELECT id, payload::text FROM outbox WHERE aggregate_id = $1 AND aggregate_version = 1",
    )
    .bind(&order)
    .fetch_one(&system.orders_db)
    .await?;
    until_true("the order's whole history in the inbox", async || {
        let version: Option<i64> = sqlx::query_scalar("SELECT max(version) FROM stream_versions")
            .fetch_one(&system.inventory_db)
            .await?;
        Ok(version == Some(2))
    })
    .await?;
    // As if both had been forgotten.
    for forget in ["DELETE FROM processed_messages", "DELETE FROM stream_versions"] {
        sqlx::query(forget).execute(&system.inventory_db).await?;
    }
    for row in sqlx::query_as::<_, (String, String, String)>(
        "SELECT id, routing_key, payload::text FROM outbox ORDER BY aggregate_version",
    )
    .fetch_all(&system.orders_db)
    .await?
    {
        system.broker.publish("orders", &row.1, with_id(&row.0), row.2.as_bytes()).await?;
        system.wait_inbox(&row.0).await?;
    }
    assert!(payload.contains(&id));
    assert_eq!(system.stock("book-17").await?, (10, 1));
    system.finish().await
}

#[tokio::test]
async fn a_message_id_used_for_another_message_is_parked_not_taken_for_a_duplicate() -> Result<()> {
    let system = System::start(Options::default()).await?;
    let data = json!({"lines": [{"sku": "book-17", "count": 1}]});
    let mut other = order_event("reused", "order.created", 3, data);
    // Something else came by this id before.
    sqlx::query("INSERT INTO processed_messages VALUES ('inventory.orders', 'reused')")
        .execute(&system.inventory_db)
        .await?;
    other["aggregate"]["id"] = Value::from("another order");
    let body = serde_json::to_vec(&other)?;
    system.broker.publish("orders", "order.created", with_id("reused"), &body).await?;
    let parked = system.take_parked("inventory.orders").await?;
    assert_eq!(parked.headers["x-park-reason"], "permanent");
    assert!(parked.headers["x-last-error"].contains("used before"), "{:?}", parked.headers);
    assert_eq!(text(&serde_json::from_slice(&parked.body)?, "id")?, "reused");
    system.finish_expecting(Expect { injected: vec!["reused".into()], ..Expect::default() }).await
}
