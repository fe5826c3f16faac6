//! Many at once.

use anyhow::Result;
use e2e::system::{Options, System};
use e2e::wait::until;
use futures_util::future::try_join_all;
use std::collections::BTreeMap;

#[tokio::test]
async fn two_hundred_concurrent_orders_over_crossing_skus_add_up_to_the_unit() -> Result<()> {
    let system = System::start(Options::default()).await?;
    // Not enough for all: 200 orders want 200 of each of two skus.
    for sku in ["a", "b", "c"] {
        system.set_stock(sku, 100).await?;
    }
    let crossing = [["a", "b"], ["b", "a"], ["b", "c"], ["c", "a"]];
    let orders = (0..200).map(|number| {
        let [one, other] = crossing[number % crossing.len()];
        let system = &system;
        async move { system.place(&[(one, 1), (other, 1)]).await }
    });
    try_join_all(orders).await?;

    let statuses = until("every order to be settled", async || {
        let rows: Vec<(String, i64)> =
            sqlx::query_as("SELECT status, count(*) FROM orders GROUP BY status")
                .fetch_all(&system.orders_db)
                .await?;
        let statuses: BTreeMap<String, i64> = rows.into_iter().collect();
        Ok((!statuses.contains_key("created")).then_some(statuses))
    })
    .await?;
    let (confirmed, rejected) = (statuses["confirmed"], statuses["rejected"]);
    assert_eq!(confirmed + rejected, 200);

    let mut held = 0;
    for sku in ["a", "b", "c"] {
        let (available, reserved) = system.stock(sku).await?;
        assert!(reserved <= available, "{sku}");
        held += reserved;
    }
    assert_eq!(held, confirmed * 2, "each confirmed order holds two pieces");
    // No order was rejected while both of its skus were still to be had: of some pair nothing is left.
    assert!(system.stock("b").await?.1 == 100 || system.stock("a").await?.1 == 100);
    // The ledger sees that no deadlock led to parking, and no message is left in a retry queue.
    system.finish().await
}
