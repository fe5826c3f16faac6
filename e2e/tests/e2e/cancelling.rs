//! Cancelling, before, after and during the reservation.

use anyhow::Result;
use e2e::service::Service;
use e2e::system::{Options, System, answer};
use futures_util::future::try_join_all;
use reqwest::StatusCode;

#[tokio::test]
async fn cancelling_a_confirmed_order_releases_its_stock() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 4)]).await?;
    system.wait_status(&order, "confirmed").await?;

    assert_eq!(system.cancel(&order).await?["status"], "cancelled");
    // Saying it again changes nothing, and makes no second event: the ledger counts them.
    assert_eq!(system.cancel(&order).await?["version"], 3);

    e2e::wait::until_true("the stock to be released", async || {
        Ok(system.stock("book-17").await?.1 == 0)
    })
    .await?;
    // All ten can be had again.
    let another = system.place(&[("book-17", 10)]).await?;
    system.wait_status(&another, "confirmed").await?;
    system.finish().await
}

#[tokio::test]
async fn a_rejected_order_cannot_be_cancelled() -> Result<()> {
    let system = System::start(Options::default()).await?;
    let order = system.place(&[("no-such-thing", 1)]).await?;
    system.wait_status(&order, "rejected").await?;
    let url = system.orders()?.api(&format!("/orders/{order}/cancel"))?;
    let problem = answer(system.http.post(url), StatusCode::CONFLICT).await?;
    assert_eq!(problem["type"], "/problems/conflict");
    system.finish().await
}

#[tokio::test]
async fn an_order_cancelled_before_the_inventory_hears_of_it_ends_with_nothing_held() -> Result<()>
{
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    system.inventory()?.child.sigstop()?;
    let order = system.place(&[("book-17", 4)]).await?;
    assert_eq!(system.cancel(&order).await?["status"], "cancelled");
    system.inventory()?.child.sigcont()?;
    system.finish().await
}

#[tokio::test]
async fn an_answer_that_comes_after_the_cancellation_has_no_effect() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    // Orders that do not listen to the inventory yet.
    system.orders_env.insert("ROLES".into(), "http,relay".into());
    system.start_services().await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 4)]).await?;
    e2e::wait::until_true("the stock to be reserved", async || {
        Ok(system.stock("book-17").await?.1 == 4)
    })
    .await?;
    system.cancel(&order).await?;

    // The answer waits in the queue; now somebody listens.
    system.orders_env.insert("ROLES".into(), "consumer".into());
    let listener = Service::start("orders-service", &system.orders_env).await?;
    system.wait_status(&order, "cancelled").await?;
    e2e::wait::until_true("the stock to be released", async || {
        Ok(system.stock("book-17").await?.1 == 0)
    })
    .await?;
    let result = system.finish().await;
    listener.stop().await?;
    result
}

#[tokio::test]
async fn cancels_that_race_with_reservations_end_consistent_whichever_is_first() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 1000).await?;
    let orders = (0..40).map(async |number| {
        let order = system.place(&[("book-17", 1)]).await?;
        // Some are confirmed by then, some are not.
        if number % 2 == 0 {
            tokio::task::yield_now().await;
        } else {
            system.wait_status(&order, "confirmed").await?;
        }
        system.cancel(&order).await
    });
    let cancelled = try_join_all(orders).await?;
    assert!(cancelled.iter().all(|order| order["status"] == "cancelled"));
    e2e::wait::until_true("everything to be released", async || {
        Ok(system.stock("book-17").await?.1 == 0)
    })
    .await?;
    system.finish().await
}
