//! Problem documents and the kinds of problem there are.

use super::ApiPath;
use crate::failure::{Class, classify};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tracing::{error, warn};
use utoipa::ToSchema;

/// Kinds of problem. Each has a page at its `type` address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No route.
    NoSuchRoute,
    /// A route, but not for this method.
    MethodNotAllowed,
    /// The body is not `application/json`.
    UnsupportedMediaType,
    /// The body is too large.
    TooLarge,
    /// The body is not JSON.
    MalformedJson,
    /// The body is JSON, and not what is asked for.
    InvalidBody,
    /// The query string or the path has a value that cannot be.
    InvalidParameter,
    /// The `Idempotency-Key` header cannot be used.
    InvalidIdempotencyKey,
    /// The key was used before, for something else.
    IdempotencyKeyReused,
    /// There is no such thing.
    NotFound,
    /// Its state does not allow that.
    Conflict,
    /// Not without a token.
    Unauthorized,
    /// Switched off in this process.
    Disabled,
    /// Not now; the same request may succeed later.
    Unavailable,
    /// A bug.
    Internal,
}

impl Kind {
    const ALL: &[Self] = &[
        Self::NoSuchRoute,
        Self::MethodNotAllowed,
        Self::UnsupportedMediaType,
        Self::TooLarge,
        Self::MalformedJson,
        Self::InvalidBody,
        Self::InvalidParameter,
        Self::InvalidIdempotencyKey,
        Self::IdempotencyKeyReused,
        Self::NotFound,
        Self::Conflict,
        Self::Unauthorized,
        Self::Disabled,
        Self::Unavailable,
        Self::Internal,
    ];

    /// Status, name (the end of `type`), title, and what a client can do.
    fn about(self) -> (StatusCode, &'static str, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::NoSuchRoute => (
                S::NOT_FOUND,
                "no-such-route",
                "No such route",
                "Check the path; an API lists its paths in /openapi.json.",
            ),
            Self::MethodNotAllowed => (
                S::METHOD_NOT_ALLOWED,
                "method-not-allowed",
                "Method not allowed",
                "The Allow header of the answer names the methods that this path takes.",
            ),
            Self::UnsupportedMediaType => (
                S::UNSUPPORTED_MEDIA_TYPE,
                "unsupported-media-type",
                "The body is not declared as JSON",
                "Send content-type: application/json.",
            ),
            Self::TooLarge => (
                S::PAYLOAD_TOO_LARGE,
                "too-large",
                "The body is too large",
                "A body has at most 65536 bytes.",
            ),
            Self::MalformedJson => (
                S::BAD_REQUEST,
                "malformed-json",
                "The body is not JSON",
                "The detail names the place where parsing stopped.",
            ),
            Self::InvalidBody => (
                S::UNPROCESSABLE_ENTITY,
                "invalid-body",
                "The body is not what is asked for",
                "The detail names the value and what would be right.",
            ),
            Self::InvalidParameter => (
                S::BAD_REQUEST,
                "invalid-parameter",
                "A parameter cannot be used",
                "The detail names the parameter and what would be right.",
            ),
            Self::InvalidIdempotencyKey => (
                S::BAD_REQUEST,
                "invalid-idempotency-key",
                "The Idempotency-Key cannot be used",
                "Send one key of 1 to 255 visible ASCII characters, a UUID for example.",
            ),
            Self::IdempotencyKeyReused => (
                S::UNPROCESSABLE_ENTITY,
                "idempotency-key-reused",
                "The Idempotency-Key was used for another request",
                "Take a new key for a new request; repeat the old one unchanged.",
            ),
            Self::NotFound => (S::NOT_FOUND, "not-found", "Not found", "Check the id."),
            Self::Conflict => (
                S::CONFLICT,
                "conflict",
                "The current state does not allow that",
                "Read the resource again; the detail names its state.",
            ),
            Self::Unauthorized => (
                S::UNAUTHORIZED,
                "unauthorized",
                "A token is needed",
                "Send authorization: Bearer with the operations token.",
            ),
            Self::Disabled => (
                S::FORBIDDEN,
                "disabled",
                "Operations are switched off",
                "Start the service with OPERATIONS_TOKEN set.",
            ),
            Self::Unavailable => (
                S::SERVICE_UNAVAILABLE,
                "unavailable",
                "Try again later",
                "Repeat the request, with its Idempotency-Key, after Retry-After seconds.",
            ),
            Self::Internal => (
                S::INTERNAL_SERVER_ERROR,
                "internal",
                "Internal error",
                "This is a bug of the service; its log has the cause.",
            ),
        }
    }
}

/// An error answer.
#[derive(Debug)]
pub struct Problem {
    kind: Kind,
    detail: String,
}

/// The document, `application/problem+json`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ProblemBody {
    /// Names the kind of problem; a page about it is at this address.
    #[serde(rename = "type")]
    #[schema(example = "/problems/invalid-body")]
    kind: String,
    /// The kind in words.
    #[schema(example = "The body is not what is asked for")]
    title: &'static str,
    /// The HTTP status.
    #[schema(example = 422)]
    status: u16,
    /// What is wrong this time, and what would be right.
    #[schema(example = "count of book-17 is 0, must be 1 to 10000")]
    detail: String,
}

impl Problem {
    /// A problem of a kind, with what is wrong this time.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }

    /// The same request may succeed later.
    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable, detail)
    }

    /// A bug; its cause has been logged and is not told.
    #[must_use]
    pub fn internal() -> Self {
        Self::new(Kind::Internal, "the cause has been logged")
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, name, title, _) = self.kind.about();
        let body = ProblemBody {
            kind: format!("/problems/{name}"),
            title,
            status: status.as_u16(),
            detail: self.detail,
        };
        let mut response = (status, axum::Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        match self.kind {
            Kind::Unavailable => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Kind::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

/// A database error that a handler did not expect: "later" if time may mend it, a bug otherwise.
/// Logged here, once; nothing of it is told.
impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        let class = classify(&error);
        if class == Class::Transient {
            warn!(error = %error, "the database did not answer a request");
            Self::unavailable("the database does not answer")
        } else {
            error!(error = %error, class = class.as_str(), "a request failed in the database");
            Self::internal()
        }
    }
}

/// `GET /problems/{kind}`: what a kind of problem means and what to do.
pub(super) async fn describe(ApiPath(name): ApiPath<String>) -> Result<String, Problem> {
    let kind = Kind::ALL.iter().find(|kind| kind.about().1 == name);
    let kind = kind.ok_or_else(|| Problem::new(Kind::NotFound, "no such kind of problem"))?;
    let (status, _, title, remedy) = kind.about();
    Ok(format!("{title} ({status})\n\n{remedy}\n"))
}
