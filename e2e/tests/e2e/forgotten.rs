//! What has been forgotten comes back: a message, a key.

use crate::support::{logged, text, with_id};
use anyhow::{Result, ensure};
use e2e::system::{Options, System, answer};
use e2e::wait::until_true;
use reqwest::StatusCode;
use serde_json::json;
use sqlx::PgPool;

const INBOX: &str = "SELECT count(*) FROM processed_messages";

async fn count(db: &PgPool, query: &'static str) -> Result<i64> {
    Ok(sqlx::query_scalar(query).fetch_one(db).await?)
}

/// A system that forgets often, with an order that is confirmed and known to be in all inboxes.
async fn confirmed_order(key: &str) -> Result<(System, String)> {
    let system =
        System::start(Options { env: vec![("RETENTION_INTERVAL", "50ms")], ..Options::default() })
            .await?;
    system.set_stock("book-17", 10).await?;
    let order = place_with_key(&system, key).await?;
    system.wait_status(&order, "confirmed").await?;
    until_true("the order's history in the inventory's inbox", async || {
        Ok(count(&system.inventory_db, INBOX).await? == 2)
    })
    .await?;
    Ok((system, order))
}

async fn place_with_key(system: &System, key: &str) -> Result<String> {
    let request = system.http.post(system.orders()?.api("/orders")?);
    let request = request.header("idempotency-key", key);
    let body = json!({"lines": [{"sku": "book-17", "count": 1}]});
    let order = answer(request.json(&body), StatusCode::CREATED).await?;
    Ok(text(&order, "id")?.to_owned())
}

#[tokio::test]
async fn a_message_older_than_the_inbox_is_stale_and_has_no_second_effect() -> Result<()> {
    let (system, order) = confirmed_order("k").await?;
    for db in [&system.orders_db, &system.inventory_db] {
        sqlx::query("UPDATE processed_messages SET processed_at = now() - interval '31 days'")
            .execute(db)
            .await?;
        until_true("the inbox to be empty", async || Ok(count(db, INBOX).await? == 0)).await?;
    }
    // Everything that was ever said comes again.
    for (db, exchange, consumer) in [
        (&system.orders_db, "orders", system.inventory()?),
        (&system.inventory_db, "inventory", system.orders()?),
    ] {
        let events: Vec<(String, String, String)> =
            sqlx::query_as("SELECT id, routing_key, payload::text FROM outbox ORDER BY seq")
                .fetch_all(db)
                .await?;
        ensure!(!events.is_empty(), "{exchange} said nothing");
        for (id, key, payload) in events {
            system.broker.publish(exchange, &key, with_id(&id), payload.as_bytes()).await?;
            until_true(&format!("{id} to be stale"), async || {
                let handled = logged(&consumer.child, "message handled");
                Ok(handled.iter().any(|e| e["message_id"] == id && e["outcome"] == "stale"))
            })
            .await?;
        }
    }
    assert_eq!(system.stock("book-17").await?, (10, 1));
    assert_eq!(system.order(&order).await?["version"], 2);
    system.finish().await
}

#[tokio::test]
async fn a_key_older_than_its_retention_is_a_new_one_and_makes_a_new_order() -> Result<()> {
    let (system, first) = confirmed_order("k").await?;
    assert_eq!(place_with_key(&system, "k").await?, first);
    age_keys(&system).await?;
    until_true("the key to be forgotten", async || {
        Ok(count(&system.orders_db, "SELECT count(*) FROM idempotency_keys").await? == 0)
    })
    .await?;
    let second = place_with_key(&system, "k").await?;
    assert_ne!(second, first);
    assert_eq!(place_with_key(&system, "k").await?, second);
    system.wait_status(&second, "confirmed").await?;
    system.finish().await
}

async fn age_keys(system: &System) -> Result<()> {
    sqlx::query("UPDATE idempotency_keys SET created_at = now() - interval '8 days'")
        .execute(&system.orders_db)
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_key_forgotten_while_it_is_being_asked_for_makes_a_new_order() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let first = place_with_key(&system, "k").await?;
    // The moment between "is it taken?" and "by which order?".
    sqlx::raw_sql(
        "CREATE FUNCTION forget() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             DELETE FROM idempotency_keys WHERE created_at < now() - interval '7 days';
             RETURN NULL;
         END $$;
         CREATE TRIGGER forget AFTER INSERT ON idempotency_keys
             FOR EACH STATEMENT EXECUTE FUNCTION forget()",
    )
    .execute(&system.orders_db)
    .await?;
    age_keys(&system).await?;
    let second = place_with_key(&system, "k").await?;
    assert_ne!(second, first);
    for order in [first, second] {
        system.wait_status(&order, "confirmed").await?;
    }
    system.finish().await
}
