//! The edge of an HTTP API: every error is a problem document, and nothing internal leaves.
//!
//! RFC 9457 (`application/problem+json`): <https://www.rfc-editor.org/rfc/rfc9457>.

mod extract;
mod problem;
mod server;

pub use extract::{ApiJson, ApiPath, ApiQuery};
pub use problem::{Kind, Problem, ProblemBody};
pub(crate) use server::CLIENT_GRACE;
pub use server::serve;

use axum::error_handling::HandleErrorLayer;
use axum::extract::DefaultBodyLimit;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{BoxError, Router};
use std::any::Any;
use std::time::Duration;
use tower::ServiceBuilder;
use tower::timeout::TimeoutLayer;
use tower::util::MapResponseLayer;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::error;

/// Largest request body in bytes.
pub const MAX_BODY_BYTES: usize = 64 * 1024;
/// A request that takes longer, its body's arrival included, is answered "try again later".
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Puts the edge around an API: limits, and problem documents for whatever no handler answers.
pub fn edge<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router
        .route("/problems/{kind}", get(problem::describe))
        .fallback(async || no_such_route())
        .method_not_allowed_fallback(async || {
            Problem::new(
                Kind::MethodNotAllowed,
                "this path does not take that method; the Allow header names those it takes",
            )
        })
        .layer(
            // From the outside in.
            ServiceBuilder::new()
                .layer(CatchPanicLayer::custom(panicked))
                .layer(HandleErrorLayer::new(async |_: BoxError| {
                    Problem::unavailable("the request took too long")
                }))
                .layer(TimeoutLayer::new(REQUEST_TIMEOUT))
                .layer(MapResponseLayer::new(outspoken))
                .layer(DefaultBodyLimit::max(MAX_BODY_BYTES)),
        )
}

fn no_such_route() -> Problem {
    Problem::new(Kind::NoSuchRoute, "nothing is served at this path")
}

/// A refusal without a word comes from a library's route, such as a page that is not there.
fn outspoken(response: Response) -> Response {
    let silent = !response.headers().contains_key(header::CONTENT_TYPE);
    if silent && response.status() == StatusCode::NOT_FOUND {
        no_such_route().into_response()
    } else {
        response
    }
}

/// A bug. The text goes to the log, not to the client.
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
    error!(panic = text, "a request handler panicked");
    Problem::internal().into_response()
}
