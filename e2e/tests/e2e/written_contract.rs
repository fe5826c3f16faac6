//! The contract as it is written (`shared/contract`) and as it is lived.

use anyhow::{Context, Result, ensure};
use e2e::contract::{Contract, document};
use e2e::service::Service;
use e2e::system::{Options, System};
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[tokio::test]
async fn every_type_of_event_is_published_as_the_contract_says_body_and_properties() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let mut tap = system.broker.tap(&["orders", "inventory"]).await?;
    let confirmed = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&confirmed, "confirmed").await?;
    system.cancel(&confirmed).await?;
    let rejected = system.place(&[("no-such-thing", 1)]).await?;
    system.wait_status(&rejected, "rejected").await?;

    let contract = Contract::load()?;
    let mut missing: BTreeSet<String> = contract
        .events()
        // Understood, and published by nobody any more.
        .filter(|event| *event != "order.created.v2")
        .map(str::to_owned)
        .collect();
    while !missing.is_empty() {
        let message = tap.next().await?;
        let body: Value = serde_json::from_slice(&message.body)?;
        contract.check(&body)?;
        missing.remove(&format!("{}.v{}", message.routing_key, body["schema_version"]));

        let properties = &message.properties;
        let short =
            |value: &Option<lapin::types::ShortString>| value.as_ref().map(ToString::to_string);
        let text = |field: &str| body[field].as_str().map(str::to_owned);
        assert_eq!(Some(message.message_id), text("id"));
        assert_eq!(Some(message.routing_key), text("type"));
        assert_eq!(short(properties.kind()), text("type"));
        assert_eq!(short(properties.app_id()), text("producer"));
        assert_eq!(short(properties.correlation_id()), text("correlation_id"));
        assert_eq!(short(properties.content_type()).as_deref(), Some("application/json"));
        assert_eq!(*properties.delivery_mode(), Some(2), "persistent");
        assert!(properties.timestamp().is_some());
        assert_eq!(message.headers["x-schema-version"], body["schema_version"].to_string());
        let aggregate = body["aggregate"]["id"].as_str().context("an aggregate")?;
        assert_eq!(message.headers["x-aggregate-id"], aggregate);
        assert!(message.headers.contains_key("traceparent"));
    }
    system.finish().await
}

#[tokio::test]
async fn an_order_created_of_schema_version_2_is_reserved() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    let mut relay = system.orders_env.clone();
    relay.insert("ROLES".into(), "relay".into());
    system.orders_env.insert("ROLES".into(), "http,consumer".into());
    system.start_services().await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 2)]).await?;
    // What a producer of last year would have written.
    sqlx::query(
        "UPDATE outbox SET payload = (payload::jsonb
             || '{\"schema_version\": 2, \"data\": {\"sku\": \"book-17\", \"count\": 2}}')::json
         WHERE aggregate_id = $1",
    )
    .bind(&order)
    .execute(&system.orders_db)
    .await?;
    let relay = Service::start("orders-service", &relay).await?;
    system.wait_status(&order, "confirmed").await?;
    assert_eq!(system.stock("book-17").await?, (10, 2));
    let result = system.finish().await;
    relay.stop().await?;
    result
}

#[test]
fn the_asyncapi_document_names_every_schema_and_no_other() -> Result<()> {
    let document = document("asyncapi.json")?;
    assert_eq!(document["asyncapi"], "3.0.0");
    // Every reference inside the document leads somewhere.
    let mut files = BTreeSet::new();
    for reference in references(&document) {
        if let Some(file) = reference.strip_prefix("./") {
            files.insert(file.trim_end_matches(".schema.json").to_owned());
        } else {
            let pointer = reference.strip_prefix('#').context("a local reference")?;
            ensure!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
        }
    }
    let contract = Contract::load()?;
    assert_eq!(files, contract.events().map(str::to_owned).collect());
    Ok(())
}

fn references(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| match value {
                Value::String(target) if name == "$ref" => vec![target.clone()],
                value => references(value),
            })
            .collect(),
        Value::Array(items) => items.iter().flat_map(references).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn a_message_that_breaks_the_contract_is_caught_by_the_schemas() -> Result<()> {
    let contract = Contract::load()?;
    let lines = |count: i64| json!({"lines": [{"sku": "a", "count": count}]});
    let good = crate::support::order_event("id", "order.created", 3, lines(1));
    contract.check(&good)?;
    for (pointer, bad) in [
        ("/data", lines(0)),
        ("/producer", json!("inventory")),
        ("/schema_version", json!(4)),
        ("/occurred_at", json!("yesterday")),
        ("/aggregate/version", json!(0)),
        ("/id", json!("")),
    ] {
        let mut broken = good.clone();
        *broken.pointer_mut(pointer).context("a field")? = bad;
        assert!(contract.check(&broken).is_err(), "{pointer}");
    }
    Ok(())
}
