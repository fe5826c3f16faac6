//! axum's extractors with the API's own error form: a rejection says what was wrong, as a problem.

use super::{Kind, MAX_BODY_BYTES, Problem};
use axum::Json;
use axum::extract::rejection::{BytesRejection, FailedToBufferBody, JsonRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

/// A JSON body.
#[derive(Debug)]
pub struct ApiJson<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for ApiJson<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(body)) => Ok(Self(body)),
            Err(rejection) => Err(problem(&rejection)),
        }
    }
}

fn problem(rejection: &JsonRejection) -> Problem {
    // The parser's own words are the clearest there are: the field, the line and the column.
    let cause = std::error::Error::source(rejection)
        .map_or_else(|| rejection.body_text(), |source| source.to_string());
    match rejection {
        JsonRejection::JsonSyntaxError(_) => Problem::new(Kind::MalformedJson, cause),
        JsonRejection::JsonDataError(_) => Problem::new(Kind::InvalidBody, cause),
        JsonRejection::MissingJsonContentType(_) => Problem::new(
            Kind::UnsupportedMediaType,
            "the request needs the header content-type: application/json",
        ),
        JsonRejection::BytesRejection(BytesRejection::FailedToBufferBody(
            FailedToBufferBody::LengthLimitError(_),
        )) => {
            Problem::new(Kind::TooLarge, format!("the body is larger than {MAX_BODY_BYTES} bytes"))
        }
        _ => Problem::new(Kind::MalformedJson, "the body could not be read"),
    }
}

/// A query string.
#[derive(Debug)]
pub struct ApiQuery<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for ApiQuery<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(query)) => Ok(Self(query)),
            Err(rejection) => Err(invalid(&rejection.body_text())),
        }
    }
}

/// A path parameter.
#[derive(Debug)]
pub struct ApiPath<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for ApiPath<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(path)) => Ok(Self(path)),
            Err(rejection) => Err(invalid(&rejection.body_text())),
        }
    }
}

/// What is wrong with a parameter, without the library's preamble.
fn invalid(text: &str) -> Problem {
    let preambles = ["Invalid URL: ", "Failed to deserialize query string: "];
    let detail = preambles.iter().find_map(|preamble| text.strip_prefix(preamble)).unwrap_or(text);
    Problem::new(Kind::InvalidParameter, detail)
}
