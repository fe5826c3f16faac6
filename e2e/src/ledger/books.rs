//! Reading the books: what both databases and the queues say, as plain data.

use crate::system::System;
use anyhow::Result;
use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgPool};
use std::collections::BTreeMap;
use std::fmt;

/// One of the two services, with its database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// orders-service.
    Orders,
    /// inventory-service.
    Inventory,
}

impl Side {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Orders, Self::Inventory];

    /// The one that its events go to.
    #[must_use]
    pub fn receiver(self) -> Self {
        match self {
            Self::Orders => Self::Inventory,
            Self::Inventory => Self::Orders,
        }
    }

    /// The service's name.
    #[must_use]
    pub fn service(self) -> &'static str {
        match self {
            Self::Orders => "orders-service",
            Self::Inventory => "inventory-service",
        }
    }

    /// The queue in which messages for it wait for a person.
    #[must_use]
    pub fn parking(self) -> String {
        format!("{}.parking", self.queue())
    }

    /// The queue that it consumes.
    #[must_use]
    pub fn queue(self) -> &'static str {
        match self {
            Self::Orders => "orders.inventory",
            Self::Inventory => "inventory.orders",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Orders => "orders",
            Self::Inventory => "inventory",
        })
    }
}

/// An order, as its service has it.
#[derive(Clone, Debug)]
pub struct Order {
    /// `created`, `confirmed`, `rejected` or `cancelled`.
    pub status: String,
    /// Counts its changes.
    pub version: i64,
    /// How many of which sku.
    pub lines: BTreeMap<String, i32>,
}

/// What the inventory has noted of one line of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// `reserved`, `released` or `rejected`.
    pub status: String,
    /// Of that sku.
    pub count: i32,
}

/// The stock of a sku.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stock {
    /// On the shelf.
    pub available: i64,
    /// Promised, as the stock table has it.
    pub reserved: i64,
}

/// An outbox row.
#[derive(Clone, Debug, FromRow)]
pub struct Event {
    /// Its id, and the message's.
    pub id: String,
    /// `order.created` and the like.
    pub event_type: String,
    /// The order's id, on both sides.
    pub aggregate_id: String,
    /// Its version.
    pub aggregate_version: i64,
    /// When its transaction began.
    pub created_at: DateTime<Utc>,
    /// Refusals of this row.
    pub attempts: i32,
    /// The last one.
    pub last_error: Option<String>,
    /// When the relay knew that the broker has it.
    pub published_at: Option<DateTime<Utc>>,
    /// When the relay gave it up.
    pub parked_at: Option<DateTime<Utc>>,
    /// The envelope.
    pub payload: String,
}

/// What one database says of its messages.
#[derive(Clone, Debug, Default)]
pub struct Mail {
    /// The outbox, by id.
    pub sent: BTreeMap<String, Event>,
    /// The inbox: when the transaction began that took the message.
    pub received: BTreeMap<String, DateTime<Utc>>,
}

/// The books at one moment. While services run it is not one moment to the microsecond: what is
/// read first may be older than what is read last.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// By id.
    pub orders: BTreeMap<String, Order>,
    /// By order and sku.
    pub reservations: BTreeMap<(String, String), Reservation>,
    /// By sku.
    pub stock: BTreeMap<String, Stock>,
    /// The orders' messages.
    pub of_orders: Mail,
    /// The inventory's.
    pub of_inventory: Mail,
    /// Every queue, and how many messages are ready in it.
    pub queues: BTreeMap<String, u32>,
}

impl Ledger {
    /// Reads everything.
    ///
    /// # Errors
    /// When a database or the broker does not answer.
    pub async fn read(system: &System) -> Result<Self> {
        // In the order in which an order leaves traces, so that what is under way shows somewhere.
        let orders = orders(&system.orders_db).await?;
        let of_orders = mail(&system.orders_db).await?;
        let of_inventory = mail(&system.inventory_db).await?;
        let (reservations, stock) = inventory(&system.inventory_db).await?;
        let mut queues = BTreeMap::new();
        for queue in system.queues()? {
            let depth = system.broker.depth(&queue).await?;
            queues.insert(queue, depth);
        }
        Ok(Self { orders, reservations, stock, of_orders, of_inventory, queues })
    }

    /// The messages of one side.
    #[must_use]
    pub fn mail(&self, side: Side) -> &Mail {
        match side {
            Side::Orders => &self.of_orders,
            Side::Inventory => &self.of_inventory,
        }
    }

    /// Every event, and whose it is.
    pub fn events(&self) -> impl Iterator<Item = (Side, &Event)> {
        let of = |side| self.mail(side).sent.values().map(move |event| (side, event));
        of(Side::Orders).chain(of(Side::Inventory))
    }

    /// When an event's receiver took it.
    #[must_use]
    pub fn received(&self, from: Side, event: &Event) -> Option<DateTime<Utc>> {
        self.mail(from.receiver()).received.get(&event.id).copied()
    }
}

async fn orders(db: &PgPool) -> Result<BTreeMap<String, Order>> {
    let rows: Vec<(String, String, i64)> =
        sqlx::query_as("SELECT id::text, status, version FROM orders").fetch_all(db).await?;
    let lines: Vec<(String, String, i32)> =
        sqlx::query_as("SELECT order_id::text, sku, count FROM order_lines").fetch_all(db).await?;
    let mut orders: BTreeMap<_, _> = rows
        .into_iter()
        .map(|(id, status, version)| (id, Order { status, version, lines: BTreeMap::new() }))
        .collect();
    for (id, sku, count) in lines {
        // One that was committed between the two questions has its turn with the next look.
        if let Some(order) = orders.get_mut(&id) {
            order.lines.insert(sku, count);
        }
    }
    Ok(orders)
}

/// Reads what one database says of its messages.
///
/// # Errors
/// When it does not answer.
pub async fn mail(db: &PgPool) -> Result<Mail> {
    let sent: Vec<Event> = sqlx::query_as(
        "SELECT id, event_type, aggregate_id, aggregate_version, created_at, attempts, last_error,
                published_at, parked_at, payload::text AS payload
         FROM outbox",
    )
    .fetch_all(db)
    .await?;
    let received: Vec<(String, DateTime<Utc>)> =
        sqlx::query_as("SELECT message_id, processed_at FROM processed_messages")
            .fetch_all(db)
            .await?;
    Ok(Mail {
        sent: sent.into_iter().map(|event| (event.id.clone(), event)).collect(),
        received: received.into_iter().collect(),
    })
}

type Inventory = (BTreeMap<(String, String), Reservation>, BTreeMap<String, Stock>);

async fn inventory(db: &PgPool) -> Result<Inventory> {
    let reservations: Vec<(String, String, String, i32)> =
        sqlx::query_as("SELECT order_id, sku, status, count FROM reservations")
            .fetch_all(db)
            .await?;
    let stock: Vec<(String, i64, i64)> =
        sqlx::query_as("SELECT sku, available, reserved FROM stock").fetch_all(db).await?;
    Ok((
        reservations
            .into_iter()
            .map(|(order, sku, status, count)| ((order, sku), Reservation { status, count }))
            .collect(),
        stock
            .into_iter()
            .map(|(sku, available, reserved)| (sku, Stock { available, reserved }))
            .collect(),
    ))
}
