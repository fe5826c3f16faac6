//! Hop 1: an HTTP request becomes an order and an event, in one COMMIT.
//!
//! | crash | then |
//! |---|---|
//! | before the COMMIT | nothing has happened; the client repeats its request |
//! | after the COMMIT, before the answer | the client repeats with its `Idempotency-Key` and gets the same answer; without a key it would get a second order, which is why there are keys |

use crate::order::{Order, aggregate};
use serde_json::json;
use shared::envelope::{self, Envelope};
use shared::events::{OrderCreated, current_version};
use shared::fault::{self, Point};
use shared::lines::Lines;
use shared::outbox;
use shared::pool::Pool;
use shared::trace_context::TraceContext;
use sqlx::{Connection, PgConnection};
use std::time::Duration;
use uuid::Uuid;

/// What a client asks for, checked.
pub struct PlaceOrder {
    pub lines: Lines,
    pub customer_id: Option<String>,
    pub idempotency_key: Option<String>,
    pub correlation_id: String,
    pub trace: TraceContext,
}

/// What became of it.
pub enum Placed {
    /// A new order.
    New(Order),
    /// The key's order, with the body that was answered the first time.
    Again { order_id: Uuid, response: String },
    /// The key is taken by another request.
    KeyReused,
}

/// Places an order: key, order, lines and outbox row commit together.
pub async fn place_order(pool: &Pool, request: PlaceOrder) -> sqlx::Result<Placed> {
    let order =
        Order::new(Uuid::now_v7(), request.customer_id.clone(), &request.lines, envelope::now());
    let mut loan = pool.borrow().await?;
    let mut tx = loan.begin().await?;
    if let Some(key) = &request.idempotency_key {
        while !claim_key(&mut tx, key, &request, &order).await? {
            // A key that was pruned between the two questions is free again.
            if let Some(again) = answer_again(&mut tx, key, &request).await? {
                tx.rollback().await?;
                loan.give_back();
                return Ok(again);
            }
        }
    }
    insert_order(&mut tx, &order, &request.lines).await?;
    outbox::append(&mut tx, "orders", &order_created(&order, &request), &request.trace).await?;
    fault::point(Point::PlaceOrderBeforeCommit);
    tx.commit().await?;
    loan.give_back();
    fault::point(Point::PlaceOrderAfterCommit);
    Ok(Placed::New(order))
}

/// The request as it is compared: what was meant, not how it was spelled.
fn canonical(request: &PlaceOrder) -> serde_json::Value {
    json!({ "lines": request.lines, "customer_id": request.customer_id })
}

/// Takes the key. A request with the same key that runs at this moment makes this one wait for its
/// COMMIT; `false` says that the key was taken.
async fn claim_key(
    tx: &mut PgConnection,
    key: &str,
    request: &PlaceOrder,
    order: &Order,
) -> sqlx::Result<bool> {
    let response =
        serde_json::to_string(order).map_err(|error| sqlx::Error::Encode(error.into()))?;
    let claimed = sqlx::query!(
        "INSERT INTO idempotency_keys (key, request, response, order_id) VALUES ($1, $2, $3, $4)
         ON CONFLICT (key) DO NOTHING",
        key,
        canonical(request),
        response,
        order.id
    )
    .execute(tx)
    .await?;
    Ok(claimed.rows_affected() == 1)
}

async fn answer_again(
    tx: &mut PgConnection,
    key: &str,
    request: &PlaceOrder,
) -> sqlx::Result<Option<Placed>> {
    let first = sqlx::query!(
        r#"SELECT order_id, response, request = $2 AS "same!" FROM idempotency_keys WHERE key = $1"#,
        key,
        canonical(request)
    )
    .fetch_optional(tx)
    .await?;
    Ok(first.map(|first| {
        if first.same {
            Placed::Again { order_id: first.order_id, response: first.response }
        } else {
            Placed::KeyReused
        }
    }))
}

/// Forgets up to `limit` keys whose orders were placed longer than `keep` ago, oldest first. Returns
/// how many. Whoever comes with such a key again places a new order.
pub async fn prune_keys(db: &mut PgConnection, keep: Duration, limit: u64) -> sqlx::Result<u64> {
    let done = sqlx::query!(
        "DELETE FROM idempotency_keys WHERE ctid = ANY (ARRAY(
             SELECT ctid FROM idempotency_keys
             WHERE created_at < now() - make_interval(secs => $1)
             ORDER BY created_at LIMIT $2))",
        keep.as_secs_f64(),
        i64::try_from(limit).unwrap_or(i64::MAX)
    )
    .execute(db)
    .await?;
    Ok(done.rows_affected())
}

async fn insert_order(tx: &mut PgConnection, order: &Order, lines: &Lines) -> sqlx::Result<()> {
    sqlx::query!(
        "INSERT INTO orders (id, status, version, customer_id, created_at, updated_at)
         VALUES ($1, $2, $3, $4, $5, $5)",
        order.id,
        order.status.as_str(),
        order.version,
        order.customer_id,
        order.created_at
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "INSERT INTO order_lines (order_id, sku, count)
         SELECT $1, sku, count FROM unnest($2::text[], $3::int[]) AS line (sku, count)",
        order.id,
        &lines.skus(),
        &lines.counts()
    )
    .execute(tx)
    .await?;
    Ok(())
}

fn order_created(order: &Order, request: &PlaceOrder) -> Envelope<OrderCreated> {
    Envelope {
        id: envelope::new_id(),
        event_type: "order.created".into(),
        schema_version: current_version("order.created"),
        occurred_at: order.created_at,
        producer: "orders".into(),
        correlation_id: request.correlation_id.clone(),
        causation_id: request.correlation_id.clone(),
        aggregate: aggregate(order.id, order.version),
        data: OrderCreated { lines: request.lines.clone() },
    }
}
