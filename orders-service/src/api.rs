//! The HTTP API. What a request means is checked here, once; what it does is elsewhere.

use crate::cancel_order::{Cancelled, cancel_order};
use crate::order::{Order, Status};
use crate::orders_table::{list_orders, show_order};
use crate::place_order::{PlaceOrder, Placed, place_order};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use shared::envelope;
use shared::http::{ApiJson, ApiPath, ApiQuery, Kind, Problem, ProblemBody, edge};
use shared::lines::{Lines, RawLine};
use shared::pool::Pool;
use shared::relay::WakeUp;
use shared::trace_context::TraceContext;
use utoipa::{IntoParams, OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use utoipa_swagger_ui::SwaggerUi;
use uuid::Uuid;

#[derive(OpenApi)]
#[openapi(info(
    title = "orders-service",
    description = "Takes orders. An order is `created` at once and `confirmed` or `rejected` soon \
                   after, when the inventory has answered. Every error is an RFC 9457 problem document."
))]
struct ApiDoc;

#[derive(Clone)]
struct App {
    pool: Pool,
    wake_up: WakeUp,
}

/// The router of the API port.
pub fn router(pool: Pool, wake_up: WakeUp) -> Router {
    let (api, document) = OpenApiRouter::with_openapi(ApiDoc::openapi())
        .routes(routes!(post_order, get_orders))
        .routes(routes!(get_order))
        .routes(routes!(post_cancel))
        .split_for_parts();
    let docs = SwaggerUi::new("/docs").url("/openapi.json", document);
    let start = get(async || Redirect::temporary("/docs/"));
    edge(api.route("/", start).with_state(App { pool, wake_up }).merge(docs))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewOrder {
    /// 1 to 100 lines; two lines of one sku become one with the sum
    #[schema(value_type = Vec<NewLine>, min_items = 1, max_items = 100)]
    lines: Vec<RawLine>,
    /// Whose order it is: 1 to 64 characters, none of them a control character
    #[schema(example = "customer-7")]
    customer_id: Option<String>,
}

/// For the document alone: what a line of [`NewOrder`] looks like.
#[derive(ToSchema)]
#[allow(dead_code)]
struct NewLine {
    /// `A-Z a-z 0-9 . _ -`
    #[schema(example = "book-17", min_length = 1, max_length = 64)]
    sku: String,
    #[schema(example = 1, minimum = 1, maximum = 10_000)]
    count: i32,
}

/// Place an order
#[utoipa::path(post, path = "/orders", request_body = NewOrder,
    params(("Idempotency-Key" = Option<String>, Header,
        description = "Makes repeating the request safe: the same key and body get the same answer, and one order. \
                       A key is kept for 7 days after its order was placed, unless the service is configured \
                       otherwise; after that it counts as new and makes another order")),
    responses(
        (status = 201, body = Order, headers(("Location" = String, description = "The order's address"))),
        (status = "4XX", body = ProblemBody, content_type = "application/problem+json"),
        (status = 503, body = ProblemBody, content_type = "application/problem+json",
            description = "Not now; repeat it with its key"),
    ))]
async fn post_order(
    State(app): State<App>,
    headers: HeaderMap,
    ApiJson(new): ApiJson<NewOrder>,
) -> Result<Response, Problem> {
    let request = PlaceOrder {
        lines: Lines::try_from(new.lines)
            .map_err(|error| Problem::new(Kind::InvalidBody, error.to_string()))?,
        customer_id: new.customer_id.map(customer_id).transpose()?,
        idempotency_key: idempotency_key(&headers)?,
        correlation_id: envelope::new_id(),
        trace: trace_context(&headers),
    };
    let (order_id, body) = match place_order(&app.pool, request).await? {
        Placed::New(order) => {
            app.wake_up.ring();
            (order.id, Json(order).into_response())
        }
        Placed::Again { order_id, response } => {
            (order_id, ([(header::CONTENT_TYPE, "application/json")], response).into_response())
        }
        Placed::KeyReused => {
            return Err(Problem::new(
                Kind::IdempotencyKeyReused,
                "this Idempotency-Key came before, with another order",
            ));
        }
    };
    Ok((StatusCode::CREATED, [(header::LOCATION, format!("/orders/{order_id}"))], body)
        .into_response())
}

/// Get an order
#[utoipa::path(get, path = "/orders/{id}", params(("id" = Uuid, Path)), responses(
    (status = 200, body = Order),
    (status = 404, body = ProblemBody, content_type = "application/problem+json"),
))]
async fn get_order(
    State(app): State<App>,
    ApiPath(id): ApiPath<Uuid>,
) -> Result<Json<Order>, Problem> {
    let mut db = app.pool.borrow().await?;
    let order = show_order(&mut db, id).await?;
    db.give_back();
    order.map(Json).ok_or_else(|| no_such_order(id))
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Page {
    /// Only orders in this state
    status: Option<Status>,
    /// At most this many, 1 to 200
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<i64>,
    /// The `next` of the page before
    after: Option<Uuid>,
}

/// A page of orders, newest first.
#[derive(Serialize, ToSchema)]
struct OrderPage {
    orders: Vec<Order>,
    /// Where the next page begins, if there is one: pass it as `after`
    next: Option<Uuid>,
}

/// List orders
#[utoipa::path(get, path = "/orders", params(Page), responses(
    (status = 200, body = OrderPage),
    (status = 400, body = ProblemBody, content_type = "application/problem+json"),
))]
async fn get_orders(
    State(app): State<App>,
    ApiQuery(page): ApiQuery<Page>,
) -> Result<Json<OrderPage>, Problem> {
    let limit = page.limit.unwrap_or(50);
    if !(1..=200).contains(&limit) {
        return Err(Problem::new(
            Kind::InvalidParameter,
            format!("limit is {limit}, must be 1 to 200"),
        ));
    }
    let mut db = app.pool.borrow().await?;
    let mut orders = list_orders(&mut db, page.status, page.after, limit + 1).await?;
    db.give_back();
    // One more row than asked for was read: it says whether there is a next page.
    let more = i64::try_from(orders.len()).is_ok_and(|rows| rows > limit);
    if more {
        orders.pop();
    }
    let next = orders.last().filter(|_| more).map(|last| last.id);
    Ok(Json(OrderPage { orders, next }))
}

/// Cancel an order
///
/// Cancelling a cancelled order again changes nothing and is answered in the same way.
#[utoipa::path(post, path = "/orders/{id}/cancel", params(("id" = Uuid, Path)), responses(
    (status = 200, body = Order),
    (status = 404, body = ProblemBody, content_type = "application/problem+json"),
    (status = 409, body = ProblemBody, content_type = "application/problem+json",
        description = "It is rejected: there is nothing to cancel"),
))]
async fn post_cancel(
    State(app): State<App>,
    ApiPath(id): ApiPath<Uuid>,
    headers: HeaderMap,
) -> Result<Json<Order>, Problem> {
    let correlation_id = envelope::new_id();
    match cancel_order(&app.pool, id, &correlation_id, &trace_context(&headers)).await? {
        Cancelled::Yes(order) => {
            app.wake_up.ring();
            Ok(Json(order))
        }
        Cancelled::No(status) => Err(Problem::new(
            Kind::Conflict,
            format!(
                "order {id} is {}, only a created or confirmed one can be cancelled",
                status.as_str()
            ),
        )),
        Cancelled::NoSuchOrder => Err(no_such_order(id)),
    }
}

fn no_such_order(id: Uuid) -> Problem {
    Problem::new(Kind::NotFound, format!("there is no order {id}"))
}

fn trace_context(headers: &HeaderMap) -> TraceContext {
    TraceContext::extract(|name| headers.get(name).and_then(|value| value.to_str().ok())).or_new()
}

fn customer_id(id: String) -> Result<String, Problem> {
    let characters = id.chars().count();
    if !(1..=64).contains(&characters) || id.chars().any(char::is_control) {
        return Err(Problem::new(
            Kind::InvalidBody,
            "customer_id must be 1 to 64 characters, none of them a control character",
        ));
    }
    Ok(id)
}

/// The header, if there is one. Two of them would be two wishes.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut keys = headers.get_all("idempotency-key").iter();
    let invalid = |why: &str| Problem::new(Kind::InvalidIdempotencyKey, why);
    let Some(key) = keys.next() else { return Ok(None) };
    if keys.next().is_some() {
        return Err(invalid("there is more than one Idempotency-Key header"));
    }
    let bytes = key.as_bytes();
    if !(1..=255).contains(&bytes.len()) || !bytes.iter().all(u8::is_ascii_graphic) {
        return Err(invalid("the key must be 1 to 255 visible ASCII characters"));
    }
    key.to_str().map(|key| Some(key.to_owned())).map_err(|_| invalid("the key must be ASCII"))
}
