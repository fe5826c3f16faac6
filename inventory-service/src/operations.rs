//! What an operator does to the stock: over the operations port, or once at set-up.

use anyhow::Context;
use axum::extract::State;
use axum::routing::put;
use axum::{Json, Router};
use serde::Deserialize;
use shared::config::DatabaseArgs;
use shared::db;
use shared::http::{ApiJson, ApiPath, Kind, Problem};
use shared::lines::Sku;
use shared::pool::Pool;
use std::str::FromStr;
use tracing::info;

use crate::api::Stock;

/// As the table's CHECK.
const MAX_AVAILABLE: i64 = 1_000_000_000;

/// Behind the token.
pub fn router(pool: Pool) -> Router {
    Router::new().route("/stock/{sku}", put(set_stock)).with_state(pool)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetStock {
    available: i64,
}

/// `PUT /stock/{sku}`: what is on the shelf now, however it came there. Saying it twice is saying it
/// once.
async fn set_stock(
    State(pool): State<Pool>,
    ApiPath(sku): ApiPath<String>,
    ApiJson(SetStock { available }): ApiJson<SetStock>,
) -> Result<Json<Stock>, Problem> {
    let sku = Sku::try_from(sku)
        .map_err(|error| Problem::new(Kind::InvalidParameter, error.to_string()))?;
    if !(0..=MAX_AVAILABLE).contains(&available) {
        return Err(Problem::new(
            Kind::InvalidBody,
            format!("available is {available}, must be 0 to {MAX_AVAILABLE}"),
        ));
    }
    let mut db = pool.borrow().await?;
    let set = sqlx::query_as!(
        Stock,
        "INSERT INTO stock AS held (sku, available) VALUES ($1, $2)
         ON CONFLICT (sku) DO UPDATE SET available = excluded.available, updated_at = now()
         WHERE held.reserved <= excluded.available
         RETURNING sku, available, reserved",
        sku.as_str(),
        available
    )
    .fetch_optional(&mut *db)
    .await?;
    db.give_back();
    let stock = set.ok_or_else(|| {
        Problem::new(
            Kind::Conflict,
            format!("more than {available} of {sku} are reserved for orders; cancel some first"),
        )
    })?;
    info!(sku = stock.sku, available = stock.available, reserved = stock.reserved, "stock set");
    Ok(Json(stock))
}

/// `sku=count` on the command line.
#[derive(Clone)]
pub struct Seed {
    sku: Sku,
    available: i64,
}

impl FromStr for Seed {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (sku, available) = text.split_once('=').context("write sku=count, like book-17=100")?;
        let available = available.parse().ok().filter(|n| (0..=MAX_AVAILABLE).contains(n));
        Ok(Self {
            sku: Sku::try_from(sku.to_owned())?,
            available: available
                .with_context(|| format!("the count must be 0 to {MAX_AVAILABLE}"))?,
        })
    }
}

/// Puts skus into stock that are not there yet.
pub async fn seed(database: &DatabaseArgs, stock: &[Seed]) -> anyhow::Result<()> {
    let mut db = db::connect_once(database).await?;
    let skus: Vec<String> = stock.iter().map(|seed| seed.sku.to_string()).collect();
    let available: Vec<i64> = stock.iter().map(|seed| seed.available).collect();
    let seeded = sqlx::query!(
        "INSERT INTO stock (sku, available) SELECT * FROM unnest($1::text[], $2::bigint[])
         ON CONFLICT (sku) DO NOTHING",
        &skus,
        &available
    )
    .execute(&mut db)
    .await
    .context("cannot seed the stock; has the database been migrated?")?;
    info!(
        new = seeded.rows_affected(),
        there_before = stock.len() as u64 - seeded.rows_affected(),
        "stock seeded"
    );
    Ok(())
}
