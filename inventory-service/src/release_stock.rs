//! Releasing: what an order holds goes back on the shelf, in the caller's transaction.

use crate::reserve_stock::lock_stock;
use shared::failure::Failure;
use shared::lines::{Line, Lines, RawLine};
use sqlx::PgConnection;

/// Releases everything that the order holds and returns it; nothing, if it holds nothing.
pub async fn release_stock(tx: &mut PgConnection, order_id: &str) -> Result<Vec<Line>, Failure> {
    let held = sqlx::query_as!(
        RawLine,
        r#"UPDATE reservations SET status = 'released', updated_at = now()
           WHERE order_id = $1 AND status = 'reserved'
           RETURNING sku, count::bigint AS "count!""#,
        order_id
    )
    .fetch_all(&mut *tx)
    .await?;
    if held.is_empty() {
        return Ok(Vec::new());
    }
    let lines = Lines::try_from(held).map_err(Failure::permanent)?;
    lock_stock(tx, &lines.skus()).await?;
    sqlx::query!(
        "UPDATE stock SET reserved = reserved - line.count, updated_at = now()
         FROM unnest($1::text[], $2::int[]) AS line (sku, count)
         WHERE stock.sku = line.sku",
        &lines.skus(),
        &lines.counts()
    )
    .execute(&mut *tx)
    .await?;
    Ok(lines.as_slice().to_vec())
}
