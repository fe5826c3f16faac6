//! Hop 8's other half: what waits in parking is looked at, sent back, or thrown away.

mod api;
mod discarding;
mod killed;
mod looking;
mod operating;
mod redriving;
mod stopping;

use crate::support::{order_event, with_id};
use anyhow::{Result, ensure};
use e2e::service::Service;
use e2e::system::System;
use e2e::wait::until_true;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Value, json};
use std::process::Output;

const QUEUE: &str = "inventory.orders";
const PARKING: &str = "inventory.orders.parking";

/// `inventory-service parking …`, to its end.
async fn parking(system: &System, arguments: &[&str]) -> Result<Output> {
    let arguments = [&["parking"], arguments].concat();
    Service::command("inventory-service", &arguments, &system.inventory_env).await
}

/// The same, which must succeed: standard output, standard error.
async fn parking_ok(system: &System, arguments: &[&str]) -> Result<(String, String)> {
    let output = parking(system, arguments).await?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    ensure!(output.status.success(), "parking {arguments:?} failed: {out}{err}");
    Ok((out, err))
}

/// The same with `--json`: every line of standard output.
async fn parking_json(system: &System, arguments: &[&str]) -> Result<Vec<Value>> {
    let (out, _) = parking_ok(system, &[arguments, &["--json"]].concat()).await?;
    Ok(out.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// The same, which must fail: what it says.
async fn parking_fails(system: &System, arguments: &[&str]) -> Result<String> {
    let output = parking(system, arguments).await?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(!output.status.success(), "parking {arguments:?} should have failed: {said}");
    Ok(said)
}

/// The ids in a list, in its order.
fn ids(listed: &[Value]) -> Vec<&str> {
    listed.iter().filter_map(|about| about["message_id"].as_str()).collect()
}

/// Parks a message as the consumer's copy would be, with these headers.
async fn park(
    system: &System,
    properties: BasicProperties,
    headers: &[(&str, AMQPValue)],
    body: &[u8],
) -> Result<()> {
    let mut table = FieldTable::default();
    for (name, value) in headers {
        table.insert((*name).into(), value.clone());
    }
    let (exchange, key) = ("inventory.orders.dlx", "inventory.orders.failed");
    system.broker.publish(exchange, key, properties.with_headers(table), body).await
}

/// Parks garbage under this id.
async fn park_garbage(system: &System, id: &str) -> Result<()> {
    park(system, with_id(id), &[], b"{not-json}").await
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

/// An event of the order `order`, whose body says so.
fn event_of(order: &str, id: &str, event_type: &str, version: i64) -> Value {
    let data = match event_type {
        "order.created" => json!({"lines": [{"sku": "none", "count": 1}]}),
        _ => json!({}),
    };
    let schema_version = if event_type == "order.created" { 3 } else { 1 };
    let mut event = order_event(id, event_type, schema_version, data);
    event["aggregate"]["id"] = json!(order);
    event["aggregate"]["version"] = json!(version);
    event
}

/// From now on no reservation can be written, which no retry mends: orders are parked.
async fn refuse_reservations(system: &System) -> Result<()> {
    let refuse = "ALTER TABLE reservations ADD CONSTRAINT refused CHECK (false) NOT VALID";
    sqlx::query(refuse).execute(&system.inventory_db).await?;
    Ok(())
}

/// The cause is mended.
async fn allow_reservations(system: &System) -> Result<()> {
    sqlx::query("ALTER TABLE reservations DROP CONSTRAINT refused")
        .execute(&system.inventory_db)
        .await?;
    Ok(())
}

/// Waits until as many messages are in a queue, with nobody holding any.
async fn wait_depth(system: &System, queue: &str, depth: u32) -> Result<()> {
    until_true(&format!("{depth} messages in {queue}"), async || {
        Ok(system.broker.depth(queue).await? == depth)
    })
    .await
}

/// An audit row.
#[derive(Debug, PartialEq, sqlx::FromRow)]
struct Audited {
    action: String,
    who: String,
    filter: Value,
    max: Option<i32>,
    rate: Option<f64>,
    matched: Option<i32>,
    done: i32,
    ended: bool,
    outcome: Option<String>,
}

/// The audit, oldest first.
async fn audit(system: &System) -> Result<Vec<Audited>> {
    Ok(sqlx::query_as(
        "SELECT action, who, filter, max, rate, matched, done, finished_at IS NOT NULL AS ended,
                outcome
         FROM parking_audit ORDER BY id",
    )
    .fetch_all(&system.inventory_db)
    .await?)
}
