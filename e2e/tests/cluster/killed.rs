//! Nodes killed without warning.

use crate::support::{Customer, DEADLINE, QUEUE, Turn, finish, published, until, wait_ready};
use anyhow::{Result, ensure};
use e2e::broker::Broker;
use e2e::ledger::Expect;
use e2e::rabbitmq::cluster::RabbitCluster;
use e2e::system::System;
use lapin::BasicProperties;
use serde_json::{Value, json};

#[tokio::test]
async fn without_the_leader_orders_go_on_and_without_a_majority_they_wait_and_none_is_lost()
-> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    let system = turn.system().await?;
    let mut customer = Customer::start(&system)?;
    customer.place_more(20).await?;

    let leader = turn.leader(&system).await?;
    let [second, _] = RabbitCluster::others(leader);
    cluster.nodes[leader].sigkill()?;
    customer.place_more(20).await?;
    customer.settle_one(&system).await?;
    wait_ready(&system).await?;

    cluster.nodes[second].sigkill()?;
    relay_fails_again(&system).await?;
    // What was confirmed before the kill is marked by now.
    let [marked, _] = published(&system).await?;
    customer.place_more(20).await?;
    relay_fails_again(&system).await?;
    let [marked_since, _] = published(&system).await?;
    ensure!(marked_since == marked, "something was marked that no majority has");

    tokio::try_join!(cluster.nodes[leader].start_again(), cluster.nodes[second].start_again())?;
    customer.settle_one(&system).await?;
    finish(system, cluster, customer).await
}

/// The orders' relay, which has something to publish, tries to and gives up, twice.
async fn relay_fails_again(system: &System) -> Result<()> {
    let log = &system.orders()?.child;
    for _ in 0..2 {
        let failed = |line: &str| {
            let event: Value = serde_json::from_str(line).ok()?;
            (event["message"] == "session failed" && event["part"] == "relay").then_some(())
        };
        let position = log.log_position();
        log.wait_for_line_from(position, "a failure of the relay", DEADLINE, failed).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_cluster_killed_whole_comes_back_with_all_that_it_confirmed() -> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    let system = turn.system().await?;
    let mut customer = Customer::start(&system)?;
    customer.place_more(20).await?;
    // Nobody empties the queue meanwhile: what is confirmed is in it, and nowhere else.
    system.inventory()?.child.sigstop()?;
    customer.place_more(50).await?;
    wait_marked(&system).await?;

    for node in &cluster.nodes {
        node.sigkill()?;
    }
    customer.place_more(20).await?;
    system.inventory()?.child.sigcont()?;
    let [a, b, c] = &cluster.nodes;
    tokio::try_join!(a.start_again(), b.start_again(), c.start_again())?;
    customer.settle_one(&system).await?;
    finish(system, cluster, customer).await
}

/// Waits until what is in the orders' outbox now counts as published.
async fn wait_marked(system: &System) -> Result<()> {
    let last: i64 =
        sqlx::query_scalar("SELECT max(seq) FROM outbox").fetch_one(&system.orders_db).await?;
    until("the events so far to be published", async || {
        let query = "SELECT count(*) FROM outbox WHERE published_at IS NULL AND seq <= $1";
        let waiting: i64 =
            sqlx::query_scalar(query).bind(last).fetch_one(&system.orders_db).await?;
        ensure!(waiting == 0, "{waiting} are not");
        Ok(Some(()))
    })
    .await
}

#[tokio::test]
async fn a_message_that_waits_for_its_retry_survives_the_leaders_of_its_queues() -> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    let mut system = turn.system().await?;
    // The second event of an order whose first has not come.
    let event = |id: &str, kind: &str, schema: u32, version: u32, data: Value| {
        json!({
            "id": id, "type": kind, "schema_version": schema, "occurred_at": chrono::Utc::now(),
            "producer": "orders", "correlation_id": "correlation", "causation_id": "causation",
            "aggregate": { "type": "order", "id": "early", "version": version }, "data": data
        })
    };
    let publish = async |broker: &Broker, event: &Value| -> Result<()> {
        let text = |field: &str| event[field].as_str().unwrap_or_default();
        let properties =
            BasicProperties::default().with_message_id(text("id").into()).with_delivery_mode(2);
        broker.publish("orders", text("type"), properties, &serde_json::to_vec(event)?).await
    };
    publish(&system.broker, &event("second", "order.cancelled", 1, 2, json!({}))).await?;
    let log = &system.inventory()?.child;
    let retried_from = async |position: usize| {
        let found = |line: &str| line.contains("message will be retried").then_some(());
        log.wait_for_line_from(position, "a retry", DEADLINE, found).await
    };
    retried_from(0).await?;

    // Wherever it is just now. Started again at once: on 3.10 the broker's dead-letter worker may ask the
    // dead leader of the target for as long as it is dead (docs/failures.md).
    for queue in [QUEUE, "inventory.orders.retry.900ms"] {
        let leader = turn.leader_of(queue, &system).await?;
        cluster.nodes[leader].sigkill()?;
        let position = log.log_position();
        cluster.nodes[leader].start_again().await?;
        retried_from(position).await?;
    }
    let lines = json!({"lines": [{"sku": "nothing", "count": 1}]});
    let first = event("first", "order.created", 3, 1, lines);
    system.reconnect_broker().await?;
    publish(&system.broker, &first).await?;
    until("both to be handled", async || {
        let handled = "SELECT count(*) FROM processed_messages";
        let handled: i64 = sqlx::query_scalar(handled).fetch_one(&system.inventory_db).await?;
        Ok((handled == 2).then_some(()))
    })
    .await?;
    // The answer is about an order that orders-service never had.
    system.take_parked("orders.inventory").await?;
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    wait_ready(&system).await?;
    let injected = vec!["first".into(), "second".into()];
    system.finish_expecting(Expect { injected, ..Expect::default() }).await
}
