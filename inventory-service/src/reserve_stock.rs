//! Reserving: all lines of an order, or none, in the caller's transaction.

use crate::stock::decide;
use shared::events::Refusal;
use shared::failure::Failure;
use shared::lines::Lines;
use sqlx::PgConnection;
use std::collections::HashMap;

/// What became of the order's lines.
pub enum Reserved {
    /// All are held.
    Yes,
    /// None is.
    No(Refusal),
    /// The order has its answer; this is an echo that inbox and gate have forgotten. Nothing was
    /// changed.
    DecidedBefore,
}

/// Holds the lines of an order, or records that they could not be had.
pub async fn reserve_stock(
    tx: &mut PgConnection,
    order_id: &str,
    lines: &Lines,
) -> Result<Reserved, Failure> {
    let free = lock_stock(tx, &lines.skus()).await?;
    let decision = decide(lines, &free);

    let status = if decision.is_ok() { "reserved" } else { "rejected" };
    let inserted = sqlx::query!(
        "INSERT INTO reservations (order_id, sku, count, status)
         SELECT $1, sku, count, $4 FROM unnest($2::text[], $3::int[]) AS line (sku, count)
         ON CONFLICT (order_id, sku) DO NOTHING",
        order_id,
        &lines.skus(),
        &lines.counts(),
        status
    )
    .execute(&mut *tx)
    .await?
    .rows_affected();
    // The business key speaks where the inbox no longer does.
    if inserted == 0 {
        return Ok(Reserved::DecidedBefore);
    }
    if inserted != lines.as_slice().len() as u64 {
        return Err(Failure::permanent(anyhow::anyhow!(
            "order {order_id} has reservations already, for other lines than these"
        )));
    }
    if let Err(refusal) = decision {
        return Ok(Reserved::No(refusal));
    }
    sqlx::query!(
        "UPDATE stock SET reserved = reserved + line.count, updated_at = now()
         FROM unnest($1::text[], $2::int[]) AS line (sku, count)
         WHERE stock.sku = line.sku",
        &lines.skus(),
        &lines.counts()
    )
    .execute(&mut *tx)
    .await?;
    Ok(Reserved::Yes)
}

/// Locks the stock rows of these skus and returns what is free of each that exists. Everybody who
/// locks several does it here, in one order, so that no two wait for each other.
pub async fn lock_stock(
    tx: &mut PgConnection,
    skus: &[String],
) -> sqlx::Result<HashMap<String, i64>> {
    let rows = sqlx::query!(
        r#"SELECT sku, available - reserved AS "free!" FROM stock
           WHERE sku = ANY($1) ORDER BY sku FOR UPDATE"#,
        skus
    )
    .fetch_all(tx)
    .await?;
    Ok(rows.into_iter().map(|row| (row.sku, row.free)).collect())
}
