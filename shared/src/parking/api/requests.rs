//! What the requests say, checked once, and what they are answered.

use super::{Listing, MOST, Operations};
use crate::failure::Class;
use crate::http::{ApiJson, ApiPath, ApiQuery, Kind, Problem};
use crate::parking::audit::{self, Run};
use crate::parking::filter::{Filter, read_moment};
use crate::parking::plan::Rate;
use crate::parking::task::{Action, Task, name};
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::num::NonZeroU32;

/// Who it was, where nobody says.
const WHO: &str = "operations-api";

pub(super) fn routes() -> Router<Operations> {
    Router::new()
        .route("/parking", get(list))
        .route("/parking/{id}", get(show))
        .route("/parking/redrive", post(redrive))
        .route("/parking/discard", post(discard))
        .route("/parking/runs", get(runs))
        .route("/parking/runs/{id}", get(run))
}

/// [`Filter`] as a query string has it: one id at most.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    id: Option<String>,
    #[serde(rename = "type")]
    event_type: Option<String>,
    aggregate: Option<String>,
    class: Option<Class>,
    reason: Option<String>,
    #[serde(default, deserialize_with = "read_moment")]
    before: Option<DateTime<Utc>>,
    #[serde(default, deserialize_with = "read_moment")]
    after: Option<DateTime<Utc>>,
    limit: Option<usize>,
}

/// How many of something an answer may have.
fn limited(limit: Option<usize>) -> Result<usize, Problem> {
    let limit = limit.unwrap_or(100);
    if (1..=MOST).contains(&limit) {
        return Ok(limit);
    }
    Err(Problem::new(Kind::InvalidParameter, format!("limit is {limit}, must be 1 to {MOST}")))
}

/// `GET /parking`: what is parked, in the order of parking.
async fn list(
    State(operations): State<Operations>,
    ApiQuery(query): ApiQuery<ListQuery>,
) -> Result<Json<Value>, Problem> {
    let limit = limited(query.limit)?;
    let filter = Filter {
        id: query.id.into_iter().collect(),
        event_type: query.event_type,
        aggregate: query.aggregate,
        class: query.class,
        reason: query.reason,
        before: query.before,
        after: query.after,
    };
    Ok(Json(operations.look(filter, limit).await?.brief()))
}

/// `GET /parking/{id}`: all of one message, of each copy if there are two.
async fn show(
    State(operations): State<Operations>,
    ApiPath(id): ApiPath<String>,
) -> Result<Json<Value>, Problem> {
    let seen = operations.look(Filter::of(id.clone()), MOST).await?;
    if seen.messages.is_empty() {
        let Listing { looked_at, parked, .. } = seen;
        return Err(Problem::new(
            Kind::NotFound,
            format!(
                "of {parked} parked messages {looked_at} were looked at, none has the id {id:?}"
            ),
        ));
    }
    Ok(Json(seen.in_full()))
}

/// What `POST /parking/redrive` takes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewRedrive {
    #[serde(default)]
    filter: Filter,
    max: Option<NonZeroU32>,
    rate: Option<Rate>,
    by: Option<String>,
    #[serde(default)]
    dry_run: bool,
}

/// What `POST /parking/discard` takes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewDiscard {
    #[serde(default)]
    filter: Filter,
    max: Option<NonZeroU32>,
    by: Option<String>,
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    yes: bool,
}

async fn redrive(
    State(operations): State<Operations>,
    ApiJson(new): ApiJson<NewRedrive>,
) -> Result<Response, Problem> {
    let NewRedrive { filter, max, rate, by, dry_run } = new;
    let task = Task { action: Action::Redrive, filter, max, rate, who: who(by)? };
    operations.take_on(task, dry_run).await
}

async fn discard(
    State(operations): State<Operations>,
    ApiJson(new): ApiJson<NewDiscard>,
) -> Result<Response, Problem> {
    let NewDiscard { filter, max, by, dry_run, yes } = new;
    filter.refuse_all().map_err(|error| Problem::new(Kind::InvalidBody, error.to_string()))?;
    if !(yes || dry_run) {
        let detail = "what is discarded is gone for good: look at it with \"dry_run\": true, \
                      then say \"yes\": true";
        return Err(Problem::new(Kind::InvalidBody, detail));
    }
    let task = Task { action: Action::Discard, filter, max, rate: None, who: who(by)? };
    operations.take_on(task, dry_run).await
}

fn who(by: Option<String>) -> Result<String, Problem> {
    let by = by.unwrap_or_else(|| WHO.to_owned());
    name(&by).map_err(|error| Problem::new(Kind::InvalidBody, format!("by: {error}")))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunsQuery {
    limit: Option<usize>,
}

/// Audit rows.
#[derive(Serialize)]
struct Runs {
    runs: Vec<Run>,
}

/// `GET /parking/runs`: who moved what, latest first.
async fn runs(
    State(operations): State<Operations>,
    ApiQuery(query): ApiQuery<RunsQuery>,
) -> Result<Json<Runs>, Problem> {
    let limit = i64::try_from(limited(query.limit)?).unwrap_or(i64::MAX);
    let mut db = operations.0.pool.borrow().await?;
    let runs = audit::runs(&mut db, limit).await?;
    db.give_back();
    Ok(Json(Runs { runs }))
}

/// `GET /parking/runs/{id}`: one of them, and how far it has come.
async fn run(
    State(operations): State<Operations>,
    ApiPath(id): ApiPath<i64>,
) -> Result<Json<Run>, Problem> {
    let mut db = operations.0.pool.borrow().await?;
    let run = audit::run(&mut db, id).await?;
    db.give_back();
    run.map(Json).ok_or_else(|| Problem::new(Kind::NotFound, format!("there is no run {id}")))
}
