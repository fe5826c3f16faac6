//! Hops 1 to 9 when nothing fails.

use crate::support::{text, with_id};
use anyhow::Result;
use e2e::system::{Options, System, answer};
use reqwest::StatusCode;
use serde_json::json;

#[tokio::test]
async fn an_order_is_reserved_once_and_confirmed() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;

    let order = system.place(&[("book-17", 3)]).await?;
    let confirmed = system.wait_status(&order, "confirmed").await?;

    assert_eq!(confirmed["version"], 2);
    assert_eq!(system.stock("book-17").await?, (10, 3));
    let url = system.inventory()?.api(&format!("/reservations/{order}"))?;
    let reservation = answer(system.http.get(url), StatusCode::OK).await?;
    assert_eq!(reservation["lines"], json!([{"sku": "book-17", "count": 3, "status": "reserved"}]));
    system.finish().await
}

#[tokio::test]
async fn an_order_of_several_lines_holds_all_of_them_and_lines_of_one_sku_are_added_up()
-> Result<()> {
    let system = System::start(Options::default()).await?;
    for sku in ["a", "b", "c"] {
        system.set_stock(sku, 10).await?;
    }
    let order = system.place(&[("b", 1), ("a", 2), ("b", 4), ("c", 1)]).await?;
    let confirmed = system.wait_status(&order, "confirmed").await?;
    assert_eq!(
        confirmed["lines"],
        json!([{"sku": "a", "count": 2}, {"sku": "b", "count": 5}, {"sku": "c", "count": 1}])
    );
    for (sku, reserved) in [("a", 2), ("b", 5), ("c", 1)] {
        assert_eq!(system.stock(sku).await?, (10, reserved), "{sku}");
    }
    system.finish().await
}

#[tokio::test]
async fn an_order_that_cannot_be_had_is_rejected_with_the_reason_and_holds_nothing() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("plenty", 100).await?;
    system.set_stock("scarce", 1).await?;

    for (lines, reason, sku) in [
        (vec![("plenty", 1), ("scarce", 2)], "out_of_stock", "scarce"),
        (vec![("no-such-thing", 1), ("plenty", 1)], "unknown_sku", "no-such-thing"),
    ] {
        let order = system.place(&lines).await?;
        let rejected = system.wait_status(&order, "rejected").await?;
        assert_eq!(rejected["rejection"], json!({"reason": reason, "sku": sku}));
    }
    // All or nothing: the line that could be had is not held either.
    assert_eq!(system.stock("plenty").await?, (100, 0));
    assert_eq!(system.stock("scarce").await?, (1, 0));
    // The ledger sees that nothing went to a retry queue or to parking.
    system.finish().await
}

#[tokio::test]
async fn what_happens_to_a_message_is_counted_in_the_metrics() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 3)]).await?;
    system.wait_status(&order, "confirmed").await?;
    system.broker.publish("orders", "order.created", with_id("broken"), b"{}").await?;
    system.take_parked("inventory.orders").await?;

    let metrics = system.http.get(system.inventory()?.operations("/metrics"));
    let metrics = answer(metrics, StatusCode::OK).await?;
    let metrics = metrics.as_str().unwrap_or_default();
    let counted = |name: &str, label: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name) && line.contains(label));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    assert!(counted("messaging_client_sent_messages_total", "") >= 1.0, "{metrics}");
    assert!(counted("messaging_client_consumed_messages_total", "applied") >= 1.0, "{metrics}");
    assert_eq!(counted("consumer_parked_total", "permanent"), 1.0, "{metrics}");
    system.finish().await
}

#[tokio::test]
async fn the_trace_of_a_request_reaches_the_last_event() -> Result<()> {
    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let mut tap = system.broker.tap(&["orders", "inventory"]).await?;

    let request = system
        .http
        .post(system.orders()?.api("/orders")?)
        .header("traceparent", PARENT)
        .header("baggage", "customer=7")
        .json(&json!({"lines": [{"sku": "book-17", "count": 1}]}));
    let order = answer(request, StatusCode::CREATED).await?;

    let mut correlation = None;
    for event_type in ["order.created", "inventory.reserved", "order.confirmed"] {
        let message = tap.next().await?;
        assert_eq!(message.routing_key, event_type);
        assert_eq!(message.headers.get("traceparent").map(String::as_str), Some(PARENT));
        assert_eq!(message.headers.get("baggage").map(String::as_str), Some("customer=7"));
        let body: serde_json::Value = serde_json::from_slice(&message.body)?;
        let this = body["correlation_id"].clone();
        assert_eq!(correlation.get_or_insert(this.clone()), &this);
    }
    system.wait_status(text(&order, "id")?, "confirmed").await?;
    system.finish().await
}
