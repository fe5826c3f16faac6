//! SIGTERM in the middle of work: what is in hand is finished, the rest goes back untouched.

use crate::support::{logged, wait_logged};
use anyhow::{Context, Result};
use e2e::system::{Options, System};
use e2e::wait::until_true;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use lapin::options::{BasicGetOptions, BasicNackOptions};
use lapin::types::AMQPValue;

const ORDERS: usize = 100;
/// Four workers with sixteen messages each.
const PREFETCHED: u32 = 64;

/// How often each waiting message counts as delivered.
async fn delivery_counts(system: &System) -> Result<Vec<i64>> {
    let channel = system.broker.open_channel().await?;
    let mut counts = Vec::new();
    while let Some(got) =
        channel.basic_get("inventory.orders".into(), BasicGetOptions::default()).await?
    {
        let headers = got.delivery.properties.headers().clone().unwrap_or_default();
        counts.push(match headers.inner().get("x-delivery-count") {
            Some(AMQPValue::LongLongInt(count)) => *count,
            None => 0,
            other => anyhow::bail!("a count of {other:?}"),
        });
    }
    let everything = BasicNackOptions { multiple: true, requeue: true };
    channel.basic_nack(0, everything).await?;
    channel.close(200, "bye".into()).await?;
    Ok(counts)
}

#[tokio::test]
async fn sigterm_amid_64_prefetched_messages_finishes_those_in_hand_and_returns_the_rest()
-> Result<()> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 1000).await?;
    wait_logged(&system.inventory()?.child, "consuming").await?;
    // Everybody who reserves waits for this lock.
    let mut lock = system.inventory_db.begin().await?;
    sqlx::query("LOCK TABLE stock IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await?;
    // Soon, as no statement waits for a lock for longer than 5 s.
    let placed = stream::iter(0..ORDERS).map(|_| system.place(&[("book-17", 1)]));
    let orders: Vec<String> = placed.buffer_unordered(10).try_collect().await?;
    let waiting = u32::try_from(ORDERS)? - PREFETCHED;
    let inventory = system.inventory.take().context("the inventory runs")?;
    until_true("64 to be prefetched, 4 of them in hand", async || {
        let in_hand: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        .fetch_one(&system.inventory_db)
        .await?;
        Ok(in_hand == 4 && system.broker.depth("inventory.orders").await? == waiting)
    })
    .await?;
    inventory.child.sigterm()?;
    wait_logged(&inventory.child, "SIGTERM: finishing what is in hand").await?;
    lock.rollback().await?;
    let status = inventory.child.wait_exit(std::time::Duration::from_secs(25)).await?;
    assert!(status.success(), "{status}");
    assert_eq!(logged(&inventory.child, "message handled").len(), 4, "those in hand");
    assert_eq!(logged(&inventory.child, "message will be retried").len(), 0);

    until_true("the rest to be back", async || {
        Ok(system.broker.depth("inventory.orders").await? as usize == ORDERS - 4)
    })
    .await?;
    let counts = delivery_counts(&system).await?;
    // RabbitMQ 3 counts a nack like any other delivery, 4 does not; closing the channel counts on
    // both. Eight are allowed.
    let most = i64::from(system.rabbitmq.version().await? < (4, 0));
    assert!(counts.len() == ORDERS - 4 && counts.iter().all(|count| *count <= most), "{counts:?}");

    system.start_services().await?;
    for order in &orders {
        system.wait_status(order, "confirmed").await?;
    }
    assert_eq!(system.stock("book-17").await?, (1000, 100));
    system.finish().await
}
