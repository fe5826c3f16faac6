//! A redrive that is killed is simply run again.

use super::*;
use e2e::system::Options;
use e2e::wait::DEADLINE;
use futures_util::future::try_join_all;
use lapin::options::QueueBindOptions;

/// Places orders of one unit each whose events go to parking instead of their queue.
async fn park_orders(system: &System, orders: u32) -> Result<()> {
    system.set_stock("book-17", 5000).await?;
    lead_orders(system, QUEUE, PARKING).await?;
    let mut left = orders;
    while left > 0 {
        let batch = left.min(50);
        try_join_all((0..batch).map(|_| system.place(&[("book-17", 1)]))).await?;
        left -= batch;
    }
    wait_depth(system, PARKING, orders).await?;
    lead_orders(system, PARKING, QUEUE).await
}

/// Binds another queue than before to what orders-service says. First the new one: an event that is
/// unroutable would have to wait.
async fn lead_orders(system: &System, from: &str, to: &str) -> Result<()> {
    let (exchange, key) = ("orders", "order.*");
    let channel = &system.broker.channel;
    let options = QueueBindOptions::default();
    let none = FieldTable::default;
    channel.queue_bind(to.into(), exchange.into(), key.into(), options, none()).await?;
    channel.queue_unbind(from.into(), exchange.into(), key.into(), none()).await?;
    Ok(())
}

/// Redrives until everything is settled: what a killed run held comes back when the broker has
/// noticed its end.
async fn redrive_the_rest(system: &System) -> Result<()> {
    until_true("every order to be settled", async || {
        if system.broker.depth(PARKING).await? > 0 {
            parking_ok(system, &["redrive"]).await?;
        }
        let open = "SELECT count(*) FROM orders WHERE status = 'created'";
        Ok(sqlx::query_scalar::<_, i64>(open).fetch_one(&system.orders_db).await? == 0)
    })
    .await
}

#[tokio::test]
async fn a_redrive_of_a_thousand_killed_in_the_middle_and_run_again_takes_effect_once_each()
-> Result<()> {
    let system = System::start(Options::default()).await?;
    park_orders(&system, 1000).await?;
    // The rate makes sure that there is a middle.
    let arguments = ["parking", "redrive", "--rate", "300"];
    let doomed = Service::spawn_command("inventory-service", &arguments, &system.inventory_env)?;
    until_true("a part to be redriven", async || {
        Ok(audit(&system).await?.last().is_some_and(|run| run.done >= 100))
    })
    .await?;
    doomed.sigkill()?;
    let runs = audit(&system).await?;
    let [run] = &runs[..] else { anyhow::bail!("{runs:?}") };
    assert_eq!(run.matched, Some(1000));
    assert!((100..1000).contains(&run.done) && !run.ended, "{run:?}");

    redrive_the_rest(&system).await?;
    assert_eq!(system.stock("book-17").await?, (5000, 1000));
    assert_eq!(system.broker.depth(PARKING).await?, 0);
    system.finish().await
}

/// Killed at `fault` with three messages parked, none of which is settled by then. How many of them
/// are in the queue afterwards.
async fn killed_at(fault: &str, in_the_queue: u32) -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    park_orders(&system, 3).await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), fault.into());
    let doomed = Service::spawn_command("inventory-service", &["parking", "redrive"], &env)?;
    let status = doomed.wait_exit(DEADLINE).await?;
    assert!(!status.success(), "it should have been killed at {fault}");
    wait_depth(&system, PARKING, 3).await?;
    assert_eq!(system.broker.depth(QUEUE).await?, in_the_queue, "{fault}");
    system.start_services().await?;
    redrive_the_rest(&system).await?;
    assert_eq!(system.stock("book-17").await?, (5000, 3));
    system.finish().await
}

#[tokio::test]
async fn a_redrive_killed_before_it_publishes_leaves_all_parked() -> Result<()> {
    killed_at("redrive.before_publish", 0).await
}

#[tokio::test]
async fn a_redrive_killed_between_confirm_and_ack_makes_two_copies_and_one_effect() -> Result<()> {
    killed_at("redrive.after_confirm", 1).await
}
