//! The edge of an HTTP API: every error is a problem document, and nothing internal leaves.
//!
//! RFC 9457 (`application/problem+json`): <https://www.rfc-editor.org/rfc/rfc9457>.

mod extract;
mod problem;

pub use extract::{ApiJson, ApiPath, ApiQuery};
pub use problem::{Kind, Problem, ProblemBody};

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use std::any::Any;
use std::time::Duration;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::error;

/// Largest request body in bytes.
pub const MAX_BODY_BYTES: usize = 64 * 1024;
/// A request that takes longer, its body's arrival included, is answered "try again later".
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Puts the edge around an API: limits, and problem documents for whatever no handler answers.
pub fn edge<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router
        .route("/problems/{kind}", get(problem::describe))
        .fallback(async || Problem::new(Kind::NoSuchRoute, "nothing is served at this path"))
        .method_not_allowed_fallback(async || {
            Problem::new(Kind::MethodNotAllowed, "the Allow header names the methods that are")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(middleware::from_fn(bounded))
        .layer(CatchPanicLayer::custom(panicked))
}

async fn bounded(request: Request, next: Next) -> Response {
    match tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await {
        // A refusal without a word comes from a library's route, such as a page that is not there.
        Ok(response)
            if response.status() == StatusCode::NOT_FOUND
                && !response.headers().contains_key(header::CONTENT_TYPE) =>
        {
            Problem::new(Kind::NoSuchRoute, "nothing is served at this path").into_response()
        }
        Ok(response) => response,
        Err(_) => Problem::unavailable("the request took too long").into_response(),
    }
}

/// A bug. The text goes to the log, not to the client.
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
    error!(panic = text, "a request handler panicked");
    Problem::internal().into_response()
}
