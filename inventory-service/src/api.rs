//! The API: reading stock and reservations. Changing stock is an operation ([`crate::operations`]).

use axum::extract::State;
use axum::response::Redirect;
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use shared::http::{ApiPath, ApiQuery, Kind, Problem, ProblemBody, edge};
use shared::lines::MAX_SKU;
use shared::pool::Pool;
use utoipa::{IntoParams, OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use utoipa_swagger_ui::SwaggerUi;

#[derive(OpenApi)]
#[openapi(info(
    title = "inventory-service",
    description = "Stock, and what orders hold of it. Every error is an RFC 9457 problem document. Stock is set with PUT /stock/{sku} on the operations port."
))]
struct ApiDoc;

/// The router of the API port.
pub fn router(pool: Pool) -> Router {
    let (api, document) = OpenApiRouter::with_openapi(ApiDoc::openapi())
        .routes(routes!(list_stock))
        .routes(routes!(get_stock))
        .routes(routes!(get_reservation))
        .split_for_parts();
    let docs = SwaggerUi::new("/docs").url("/openapi.json", document);
    let start = get(async || Redirect::temporary("/docs/"));
    edge(api.route("/", start).with_state(pool).merge(docs))
}

/// One sku on the shelf.
#[derive(Serialize, ToSchema)]
pub struct Stock {
    /// What.
    #[schema(example = "book-17")]
    pub sku: String,
    /// How many there are.
    pub available: i64,
    /// How many of them are promised to orders.
    pub reserved: i64,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Page {
    /// At most this many, 1 to 200
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<i64>,
    /// The `next` of the page before
    after: Option<String>,
}

/// A page of stock, by sku.
#[derive(Serialize, ToSchema)]
struct StockPage {
    stock: Vec<Stock>,
    /// Where the next page begins, if there is one: pass it as `after`
    next: Option<String>,
}

/// List stock
#[utoipa::path(get, path = "/stock", params(Page), responses(
    (status = 200, body = StockPage),
    (status = 400, body = ProblemBody, content_type = "application/problem+json"),
))]
async fn list_stock(
    State(pool): State<Pool>,
    ApiQuery(page): ApiQuery<Page>,
) -> Result<Json<StockPage>, Problem> {
    let limit = page.limit.unwrap_or(50);
    if !(1..=200).contains(&limit) {
        return Err(Problem::new(
            Kind::InvalidParameter,
            format!("limit is {limit}, must be 1 to 200"),
        ));
    }
    let after = page.after.unwrap_or_default();
    check_sku_length(&after)?;
    let mut db = pool.borrow().await?;
    let mut stock = sqlx::query_as!(
        Stock,
        "SELECT sku, available, reserved FROM stock WHERE sku > $1 ORDER BY sku LIMIT $2",
        after,
        limit + 1
    )
    .fetch_all(&mut *db)
    .await?;
    db.give_back();
    // One more row than asked for was read: it says whether there is a next page.
    let more = i64::try_from(stock.len()).is_ok_and(|rows| rows > limit);
    if more {
        stock.pop();
    }
    let next = stock.last().filter(|_| more).map(|last| last.sku.clone());
    Ok(Json(StockPage { stock, next }))
}

/// Get the stock of one sku
#[utoipa::path(get, path = "/stock/{sku}", params(("sku" = String, Path, example = "book-17")), responses(
    (status = 200, body = Stock),
    (status = 404, body = ProblemBody, content_type = "application/problem+json"),
))]
async fn get_stock(
    State(pool): State<Pool>,
    ApiPath(sku): ApiPath<String>,
) -> Result<Json<Stock>, Problem> {
    check_sku_length(&sku)?;
    let mut db = pool.borrow().await?;
    let stock =
        sqlx::query_as!(Stock, "SELECT sku, available, reserved FROM stock WHERE sku = $1", sku)
            .fetch_optional(&mut *db)
            .await?;
    db.give_back();
    stock.map(Json).ok_or_else(|| Problem::new(Kind::NotFound, format!("there is no sku {sku:?}")))
}

/// Text from a URL that is only compared with skus.
fn check_sku_length(sku: &str) -> Result<(), Problem> {
    if sku.len() > MAX_SKU || sku.contains('\0') {
        return Err(Problem::new(
            Kind::InvalidParameter,
            format!("a sku has 1 to {MAX_SKU} characters of A-Z a-z 0-9 . _ -"),
        ));
    }
    Ok(())
}

/// What an order holds, held or was refused.
#[derive(Serialize, ToSchema)]
struct Reservation {
    order_id: String,
    lines: Vec<ReservationLine>,
}

#[derive(Serialize, ToSchema)]
struct ReservationLine {
    sku: String,
    count: i32,
    /// `reserved`, `released` or `rejected`
    #[schema(example = "reserved")]
    status: String,
}

/// Get the reservation of an order
#[utoipa::path(get, path = "/reservations/{order_id}", params(("order_id" = String, Path)), responses(
    (status = 200, body = Reservation),
    (status = 404, body = ProblemBody, content_type = "application/problem+json"),
))]
async fn get_reservation(
    State(pool): State<Pool>,
    ApiPath(order_id): ApiPath<String>,
) -> Result<Json<Reservation>, Problem> {
    if order_id.contains('\0') {
        return Err(Problem::new(Kind::InvalidParameter, "an order id contains no NUL"));
    }
    let mut db = pool.borrow().await?;
    let lines = sqlx::query_as!(
        ReservationLine,
        "SELECT sku, count, status FROM reservations WHERE order_id = $1 ORDER BY sku",
        order_id
    )
    .fetch_all(&mut *db)
    .await?;
    db.give_back();
    if lines.is_empty() {
        return Err(Problem::new(
            Kind::NotFound,
            format!("nothing is known of an order {order_id:?}, or not yet"),
        ));
    }
    Ok(Json(Reservation { order_id, lines }))
}
