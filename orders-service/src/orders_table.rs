//! The orders table: one order, a page of them, or one with its row locked, and moved.

use crate::order::{Order, OrderLine, Rejection, Status};
use chrono::{DateTime, Utc};
use shared::events::Refusal;
use sqlx::PgConnection;
use std::collections::HashMap;
use uuid::Uuid;

/// What a change of an order starts from. The row stays locked until the transaction ends.
pub struct Locked {
    pub status: Status,
    pub version: i64,
}

/// Locks an order's row: changes of one order happen one after the other.
pub async fn lock_order(tx: &mut PgConnection, order_id: Uuid) -> sqlx::Result<Option<Locked>> {
    let row = sqlx::query!("SELECT status, version FROM orders WHERE id = $1 FOR UPDATE", order_id)
        .fetch_optional(tx)
        .await?;
    row.map(|row| Ok(Locked { status: Status::from_column(&row.status)?, version: row.version }))
        .transpose()
}

/// Writes an order's new status and version. The caller holds its row locked, and appends the event
/// of this version to the same transaction.
pub async fn move_order(
    tx: &mut PgConnection,
    order_id: Uuid,
    version: i64,
    status: Status,
    rejection: Option<&Refusal>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "UPDATE orders SET status = $2, version = $3, rejection_reason = $4, rejected_sku = $5,
                           updated_at = now()
         WHERE id = $1",
        order_id,
        status.as_str(),
        version,
        rejection.map(|rejection| rejection.reason.as_str()),
        rejection.map(|rejection| rejection.sku.as_str())
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// An order with its lines.
pub async fn show_order(db: &mut PgConnection, order_id: Uuid) -> sqlx::Result<Option<Order>> {
    let row = sqlx::query_as!(
        OrderRow,
        "SELECT id, status, version, customer_id, rejection_reason, rejected_sku, created_at,
                updated_at
         FROM orders WHERE id = $1",
        order_id
    )
    .fetch_optional(&mut *db)
    .await?;
    let rows = row.into_iter().collect();
    Ok(with_lines(db, rows).await?.pop())
}

/// A page of orders, newest first: those before `after`, at most `limit`. Keyset pages cost the same
/// however deep they are, and do not shift when orders come in.
pub async fn list_orders(
    db: &mut PgConnection,
    status: Option<Status>,
    after: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<Order>> {
    // Ids are UUID v7, so that "before this id" is "earlier". `max` is past every one of them.
    let before = after.unwrap_or(Uuid::max());
    let rows = match status {
        None => {
            sqlx::query_as!(
                OrderRow,
                "SELECT id, status, version, customer_id, rejection_reason, rejected_sku,
                        created_at, updated_at
                 FROM orders WHERE id < $1 ORDER BY id DESC LIMIT $2",
                before,
                limit
            )
            .fetch_all(&mut *db)
            .await?
        }
        Some(status) => {
            sqlx::query_as!(
                OrderRow,
                "SELECT id, status, version, customer_id, rejection_reason, rejected_sku,
                        created_at, updated_at
                 FROM orders WHERE status = $3 AND id < $1 ORDER BY id DESC LIMIT $2",
                before,
                limit,
                status.as_str()
            )
            .fetch_all(&mut *db)
            .await?
        }
    };
    with_lines(db, rows).await
}

struct OrderRow {
    id: Uuid,
    status: String,
    version: i64,
    customer_id: Option<String>,
    rejection_reason: Option<String>,
    rejected_sku: Option<String>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

async fn with_lines(db: &mut PgConnection, rows: Vec<OrderRow>) -> sqlx::Result<Vec<Order>> {
    let ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
    let mut lines: HashMap<Uuid, Vec<OrderLine>> = HashMap::new();
    let all = sqlx::query!(
        "SELECT order_id, sku, count FROM order_lines WHERE order_id = ANY($1) ORDER BY sku",
        &ids
    )
    .fetch_all(db)
    .await?;
    for line in all {
        let line_of = lines.entry(line.order_id).or_default();
        line_of.push(OrderLine { sku: line.sku, count: line.count });
    }
    let order = |row: OrderRow| {
        Ok(Order {
            id: row.id,
            status: Status::from_column(&row.status)?,
            version: row.version,
            customer_id: row.customer_id,
            lines: lines.remove(&row.id).unwrap_or_default(),
            rejection: row
                .rejection_reason
                .zip(row.rejected_sku)
                .map(|(reason, sku)| Rejection { reason, sku }),
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    };
    rows.into_iter().map(order).collect()
}
