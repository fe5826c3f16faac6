//! The database away for longer than any message's budget: the backlog waits, and uses up nothing.

use crate::support::{declare_anew, logged, wait_logged};
use anyhow::{Context, Result, ensure};
use e2e::broker::Seen;
use e2e::system::{Options, System};
use e2e::wait::{until, until_true};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use std::time::{Duration, Instant};

/// More than all retries together take: 0.3 + 0.6 + 0.9 s, and 0.3 s for each of the attempts.
const LONGER_THAN_THE_BUDGET: Duration = Duration::from_secs(4);
/// As many as it takes to begin an outage, and one in the hands of each other worker.
const A_HANDFUL: usize = 5 + 3;

async fn system() -> Result<System> {
    system_with(vec![]).await
}

async fn system_with(env: Vec<(&'static str, &'static str)>) -> Result<System> {
    let mut system = System::start(Options {
        own_inventory_postgres: true,
        stopped: true,
        env,
        ..Options::default()
    })
    .await?;
    for (name, value) in [
        ("DATABASE_ACQUIRE_TIMEOUT", "300ms"),
        ("CONSUMER_HANDLE_TIMEOUT", "1s"),
        ("OUTAGE_PROBE_INTERVAL", "200ms"),
    ] {
        system.inventory_env.insert(name.into(), value.into());
    }
    system.start_services().await?;
    system.set_stock("book-17", 10_000).await?;
    Ok(system)
}

async fn place(system: &System, orders: usize) -> Result<()> {
    stream::iter(0..orders)
        .map(|_| system.place(&[("book-17", 1)]))
        .buffer_unordered(16)
        .try_for_each(async |_| Ok(()))
        .await
}

/// Waits until the consumer says that it is in an outage.
async fn wait_outage(system: &System) -> Result<()> {
    until_true("outage mode", async || {
        let (ready, answer) = system.inventory()?.readiness().await?;
        let consumer = answer["parts"]["consumer"].as_str().unwrap_or_default();
        Ok(!ready && consumer.starts_with("outage"))
    })
    .await
}

async fn wait_confirmed(system: &System, orders: i64) -> Result<()> {
    until("all orders to be confirmed", async || {
        let confirmed: i64 =
            sqlx::query_scalar("SELECT count(*) FROM orders WHERE status = 'confirmed'")
                .fetch_one(&system.orders_db)
                .await?;
        ensure!(confirmed == orders, "{confirmed} of {orders} are confirmed");
        Ok(Some(()))
    })
    .await
}

fn retries(system: &System) -> Result<usize> {
    Ok(logged(&system.inventory()?.child, "message will be retried").len())
}

#[tokio::test]
async fn in_an_outage_longer_than_the_budget_a_thousand_orders_wait_and_use_up_nothing()
-> Result<()> {
    let system = system().await?;
    system.inventory_postgres.sigkill()?;
    let began = Instant::now();
    place(&system, 1000).await?;
    wait_outage(&system).await?;
    // Those that failed before the outage was noticed come back into the queue, and wait there.
    until_true("all to wait in the queue, for longer than the budget", async || {
        let waiting = system.broker.depth("inventory.orders").await?;
        ensure!(waiting == 1000, "{waiting} wait");
        Ok(began.elapsed() > LONGER_THAN_THE_BUDGET)
    })
    .await?;
    let used_up = retries(&system)?;
    assert!((5..=A_HANDFUL).contains(&used_up), "{used_up} messages used up an attempt");

    system.inventory_postgres.start_again().await?;
    wait_confirmed(&system, 1000).await?;
    assert_eq!(retries(&system)?, used_up, "no storm of retries after it");
    assert_eq!(logged(&system.inventory()?.child, "message is parked").len(), 0);
    assert_eq!(system.stock("book-17").await?, (10_000, 1000));
    system.inventory()?.wait_ready().await?;
    system.finish().await
}

#[tokio::test]
async fn a_frozen_database_is_an_outage_too() -> Result<()> {
    let system = system().await?;
    system.inventory_postgres.sigstop()?;
    place(&system, 100).await?;
    wait_outage(&system).await?;
    let used_up = retries(&system)?;
    assert!(used_up <= A_HANDFUL, "{used_up} messages used up an attempt");
    system.inventory_postgres.sigcont()?;
    wait_confirmed(&system, 100).await?;
    assert_eq!(logged(&system.inventory()?.child, "message is parked").len(), 0);
    system.finish().await
}

#[tokio::test]
async fn a_database_that_answers_and_takes_nothing_is_probed_and_not_tried_with_messages()
-> Result<()> {
    let system = system().await?;
    let read_only = async |on: &str| -> Result<()> {
        let name: String =
            sqlx::query_scalar("SELECT current_database()").fetch_one(&system.inventory_db).await?;
        let alter = format!("ALTER DATABASE {name} SET default_transaction_read_only = {on}");
        let everybody = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                         WHERE datname = current_database() AND pid <> pg_backend_pid()";
        let mut db = system.inventory_db.acquire().await?;
        sqlx::raw_sql("SET default_transaction_read_only = off").execute(&mut *db).await?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(alter)).execute(&mut *db).await?;
        sqlx::query(everybody).execute(&mut *db).await?;
        Ok(())
    };
    read_only("on").await?;
    place(&system, 20).await?;
    wait_outage(&system).await?;
    until_true("all to wait in the queue", async || {
        Ok(system.broker.depth("inventory.orders").await? == 20)
    })
    .await?;
    let used_up = retries(&system)?;
    assert!(used_up <= A_HANDFUL, "{used_up} messages used up an attempt");
    let began = Instant::now();
    until_true("longer than the budget", async || Ok(began.elapsed() > LONGER_THAN_THE_BUDGET))
        .await?;
    assert_eq!(retries(&system)?, used_up, "no message is tried meanwhile");
    read_only("off").await?;
    wait_confirmed(&system, 20).await?;
    system.finish().await
}

#[tokio::test]
async fn sigterm_in_an_outage_ends_the_service_in_order() -> Result<()> {
    let mut system = system().await?;
    system.inventory_postgres.sigkill()?;
    place(&system, 20).await?;
    wait_outage(&system).await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    system.inventory_postgres.start_again().await?;
    system.start_services().await?;
    wait_confirmed(&system, 20).await?;
    system.finish().await
}

#[tokio::test]
async fn each_replica_finds_the_outage_and_its_end_out_by_itself() -> Result<()> {
    let system = system().await?;
    let second = e2e::service::Service::start("inventory-service", &system.inventory_env).await?;
    second.wait_ready().await?;
    system.inventory_postgres.sigkill()?;
    place(&system, 100).await?;
    wait_logged(&second.child, "outage: consuming is paused").await?;
    wait_outage(&system).await?;
    system.inventory_postgres.start_again().await?;
    wait_confirmed(&system, 100).await?;
    second.wait_ready().await?;
    second.stop().await?;
    system.finish().await
}

#[tokio::test]
async fn in_shards_too_an_outage_uses_up_no_messages_attempts() -> Result<()> {
    // All in one shard: the failures of the outage are those of the one message at its head.
    let system = system_with(vec![("ORDERING", "shards=1")]).await?;
    system.inventory_postgres.sigkill()?;
    let began = Instant::now();
    place(&system, 50).await?;
    wait_outage(&system).await?;
    until_true("longer than the budget", async || Ok(began.elapsed() > LONGER_THAN_THE_BUDGET))
        .await?;
    system.inventory_postgres.start_again().await?;
    wait_confirmed(&system, 50).await?;
    assert_eq!(logged(&system.inventory()?.child, "message is parked").len(), 0);
    let used_up = retries(&system)?;
    assert!(used_up <= A_HANDFUL, "{used_up} attempts were used up");
    system.finish().await
}

#[tokio::test]
async fn on_trial_too_a_consumer_finds_out_that_its_queue_is_no_more() -> Result<()> {
    const QUEUE: &str = "inventory.orders";
    let system = system_with(vec![("TOPOLOGY_CHECK_INTERVAL", "1s")]).await?;
    system.inventory_postgres.sigkill()?;
    place(&system, 10).await?;
    wait_outage(&system).await?;
    until_true("all to wait", async || Ok(system.broker.depth(QUEUE).await? == 10)).await?;
    // With nothing there to be tried with, the trial goes on.
    let mut taken = Vec::new();
    while let Some(message) = system.broker.take(QUEUE).await? {
        taken.push(message);
    }
    system.inventory_postgres.start_again().await?;
    let inventory = system.inventory()?;
    wait_logged(&inventory.child, "the database answers again: consuming goes on").await?;
    inventory.wait_ready().await?;
    declare_anew(&system, QUEUE, "quorum").await?;
    for Seen { properties, body, .. } in taken {
        system.broker.publish("", QUEUE, properties, &body).await?;
    }
    wait_confirmed(&system, 10).await?;
    system.finish().await
}
