//! RabbitMQ's firehose: a copy of everything that clients publish and get.
//!
//! It tells of a publish what no consumer could, that it was routed to no queue; and it changes no
//! routing, so that what would be unroutable without it still is. RabbitMQ 3.10.8 and 4.3.6 tell the
//! same. Neither tells of acks and confirms, nor of what a queue does by itself: expiring a retry,
//! dead lettering.

use super::super::happening::{Happening, What, name};
use crate::system::System;
use anyhow::Result;
use chrono::Utc;
use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties, Consumer};
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;
use tokio_util::sync::CancellationToken;

const EXCHANGE: &str = "amq.rabbitmq.trace";

/// A queue of our own at the firehose.
pub struct Trace {
    _connection: Connection,
    copies: Consumer,
}

/// Turns the firehose on and drinks from it.
///
/// # Errors
/// When the broker does not let us.
pub async fn open(system: &System) -> Result<Trace> {
    let url = system.rabbitmq.amqp_url(system.vhost()?);
    let properties = ConnectionProperties::default().with_connection_name("firehose".into());
    let connection = Connection::connect(&url, properties).await?;
    let channel = connection.create_channel().await?;
    let own = QueueDeclareOptions { exclusive: true, ..Default::default() };
    let queue = channel.queue_declare("".into(), own, FieldTable::default()).await?;
    let queue = queue.name().clone();
    for key in ["publish.#", "deliver.#"] {
        let (options, none) = (QueueBindOptions::default(), FieldTable::default());
        channel.queue_bind(queue.clone(), EXCHANGE.into(), key.into(), options, none).await?;
    }
    let no_ack = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let copies =
        channel.basic_consume(queue, "firehose".into(), no_ack, FieldTable::default()).await?;
    system.rabbitmq.trace(system.vhost()?).await?;
    Ok(Trace { _connection: connection, copies })
}

/// Reports until told to stop, what has arrived by then included, or until the broker goes.
pub async fn watch(mut trace: Trace, report: UnboundedSender<Happening>, done: CancellationToken) {
    let tell = |copy: &Delivery| {
        if let Some(happening) = read(copy) {
            // Nobody listens any more: then the story is over.
            let _ = report.send(happening);
        }
    };
    while let Some(Some(Ok(copy))) = done.run_until_cancelled(trace.copies.next()).await {
        tell(&copy);
    }
    while let Some(Some(Ok(copy))) = trace.copies.next().now_or_never() {
        tell(&copy);
    }
}

fn read(copy: &Delivery) -> Option<Happening> {
    let none = FieldTable::default();
    let headers = copy.properties.headers().as_ref().unwrap_or(&none);
    let properties = table(headers, "properties").unwrap_or(&none);
    let attempts = table(properties, "headers").map_or(0, |own| number(own, "x-retry-attempt"));
    let (kind, queue) = copy.routing_key.as_str().split_once('.')?;
    let what = match kind {
        "publish" => What::Published {
            exchange: text(headers, "exchange_name")?,
            key: texts(headers, "routing_keys").into_iter().next()?,
            queues: texts(headers, "routed_queues"),
            attempts,
        },
        "deliver" => What::Delivered {
            queue: queue.to_owned(),
            redelivered: number(headers, "redelivered") != 0,
            attempts,
        },
        _ => return None,
    };
    let body: Option<Value> = serde_json::from_slice(&copy.data).ok();
    let name = body.and_then(|body| {
        Some(name(body["type"].as_str()?, body["aggregate"]["version"].as_i64()?))
    });
    Some(Happening { at: Utc::now(), message: text(properties, "message_id"), name, what })
}

fn table<'a>(of: &'a FieldTable, name: &str) -> Option<&'a FieldTable> {
    match of.inner().get(name)? {
        AMQPValue::FieldTable(table) => Some(table),
        _ => None,
    }
}

fn text(of: &FieldTable, name: &str) -> Option<String> {
    written(of.inner().get(name)?)
}

fn texts(of: &FieldTable, name: &str) -> Vec<String> {
    match of.inner().get(name) {
        Some(AMQPValue::FieldArray(array)) => array.as_slice().iter().filter_map(written).collect(),
        _ => Vec::new(),
    }
}

fn written(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => Some(text.to_string()),
        AMQPValue::ShortString(text) => Some(text.to_string()),
        _ => None,
    }
}

/// The broker writes numbers in the width that they fit into; what is none counts as 0.
fn number(of: &FieldTable, name: &str) -> u64 {
    let number = match of.inner().get(name) {
        Some(AMQPValue::ShortShortInt(n)) => i64::from(*n),
        Some(AMQPValue::ShortInt(n)) => i64::from(*n),
        Some(AMQPValue::LongInt(n)) => i64::from(*n),
        Some(AMQPValue::LongLongInt(n)) => *n,
        Some(AMQPValue::Boolean(yes)) => i64::from(*yes),
        _ => 0,
    };
    u64::try_from(number).unwrap_or(0)
}
