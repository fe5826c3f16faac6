//! What several tests need.

use anyhow::{Context, Result};
use e2e::child::Child;
use e2e::system::System;
use lapin::BasicProperties;
use lapin::options::{QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Value, json};

/// An event of an order that no orders-service ever had, with this data.
pub fn order_event(id: &str, event_type: &str, schema_version: u32, data: Value) -> Value {
    json!({
        "id": id, "type": event_type, "schema_version": schema_version,
        "occurred_at": chrono::Utc::now(), "producer": "orders",
        "correlation_id": "correlation", "causation_id": "causation",
        "aggregate": { "type": "order", "id": format!("order-of-{id}"), "version": 1 },
        "data": data
    })
}

/// The AMQP properties that go with a message id.
pub fn with_id(message_id: &str) -> BasicProperties {
    BasicProperties::default().with_message_id(message_id.into()).with_delivery_mode(2)
}

/// Publishes an event as orders-service's relay would, past its outbox: with the header that chooses
/// a shard.
pub async fn publish(system: &System, event: &Value) -> Result<()> {
    let mut headers = FieldTable::default();
    let aggregate = text(&event["aggregate"], "id")?;
    headers.insert("x-aggregate-id".into(), AMQPValue::LongString(aggregate.into()));
    let properties = with_id(text(event, "id")?).with_headers(headers);
    let body = serde_json::to_vec(event)?;
    system.broker.publish("orders", text(event, "type")?, properties, &body).await
}

/// The log lines of a service with this message, as JSON.
pub fn logged(child: &Child, message: &str) -> Vec<Value> {
    child
        .log_tail(usize::MAX)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|event| event["message"] == message)
        .collect()
}

/// Waits for a log line with this message.
pub async fn wait_logged(child: &Child, message: &str) -> Result<Value> {
    child
        .wait_for_line(message, e2e::wait::DEADLINE, |line| {
            serde_json::from_str::<Value>(line).ok().filter(|event| event["message"] == message)
        })
        .await
}

/// A string field of a JSON value.
pub fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str> {
    value[field].as_str().with_context(|| format!("no text {field:?} in {value}"))
}

/// Makes reserving fail with this SQLSTATE, until [`mend`].
pub async fn sabotage(system: &System, sqlstate: &str) -> Result<()> {
    let ddl = format!(
        "CREATE FUNCTION sabotage() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'sabotaged' USING ERRCODE = '{sqlstate}'; END $$;
         CREATE TRIGGER sabotage BEFORE INSERT ON reservations
         FOR EACH ROW EXECUTE FUNCTION sabotage();"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(ddl)).execute(&system.inventory_db).await?;
    Ok(())
}

/// Ends [`sabotage`].
pub async fn mend(system: &System) -> Result<()> {
    sqlx::query("DROP FUNCTION sabotage() CASCADE").execute(&system.inventory_db).await?;
    Ok(())
}

/// Version 2 of an order whose version 1 has not come: it has to be retried.
pub fn second_event() -> Value {
    let mut second = order_event("second", "order.cancelled", 1, json!({}));
    second["aggregate"]["version"] = json!(2);
    second
}

/// The version 1 that [`second_event`] waits for.
pub fn first_event() -> Value {
    let mut first = second_event();
    first["id"] = json!("first");
    first["type"] = json!("order.created");
    first["schema_version"] = json!(3);
    first["aggregate"]["version"] = json!(1);
    first["data"] = json!({"lines": [{"sku": "nothing", "count": 1}]});
    first
}

/// Deletes a consumer's queue and declares it at once, as somebody else would, bound as it was.
pub async fn declare_anew(system: &System, queue: &str, kind: &str) -> Result<()> {
    let channel = &system.broker.channel;
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString(kind.into()));
    system.broker.delete_queue(queue).await?;
    channel.queue_declare(queue.into(), durable, arguments).await?;
    let (exchange, key) = ("orders".into(), "order.*".into());
    let (options, none) = (QueueBindOptions::default(), FieldTable::default());
    channel.queue_bind(queue.into(), exchange, key, options, none).await?;
    Ok(())
}
