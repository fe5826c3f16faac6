//! `/parking` on the operations port, behind the token.
//!
//! A run may last longer than a request may. So it is answered with where to look for it, and goes on
//! by itself; one at a time. SIGTERM stops it after the message in hand, and the process does not end
//! before that.

use super::audit::{self, Entry, Run};
use super::filter::{Filter, read_moment};
use super::lot::Found;
use super::parked::{About, Parked};
use super::plan::Rate;
use super::run::{Action, Event, Parking, Plan, Report, Task, name};
use crate::failure::Class;
use crate::http::{ApiJson, ApiPath, ApiQuery, Kind, Problem};
use crate::pool::Pool;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

/// A request is not answered after 10 s: one that looks at a long queue says how far it came.
const LOOK_BOUND: Duration = Duration::from_secs(4);
/// Messages or runs in one answer, at most.
const MOST: usize = 1000;
/// Who it was, where nobody says.
const WHO: &str = "operations-api";

/// What the endpoints work with.
#[derive(Clone)]
pub struct Operations(Arc<Inner>);

struct Inner {
    parking: Parking,
    pool: Pool,
    shutdown: CancellationToken,
    /// Looks and runs. They outlive the request that asked for them.
    tasks: TaskTracker,
    /// Two looks at once would each see a part.
    looking: Mutex<()>,
    running: Arc<Semaphore>,
}

impl Operations {
    /// For one process.
    #[must_use]
    pub fn new(parking: Parking, pool: Pool, shutdown: CancellationToken) -> Self {
        Self(Arc::new(Inner {
            parking,
            pool,
            shutdown,
            tasks: TaskTracker::new(),
            looking: Mutex::new(()),
            running: Arc::new(Semaphore::new(1)),
        }))
    }

    /// The routes, to be put behind the token.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/parking", get(list))
            .route("/parking/{id}", get(show))
            .route("/parking/redrive", post(redrive))
            .route("/parking/discard", post(discard))
            .route("/parking/runs", get(runs))
            .route("/parking/runs/{id}", get(run))
            .with_state(self.clone())
    }

    /// Ends after `shutdown`, once all that is under way has ended.
    pub async fn finish(self) {
        self.0.shutdown.cancelled().await;
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    /// Runs it in a task of its own: if the client leaves, what is held is given back all the same.
    async fn detached<T: Send + 'static>(
        &self,
        look: impl Future<Output = anyhow::Result<T>> + Send + 'static,
    ) -> Result<T, Problem> {
        match self.0.tasks.spawn(look).await {
            Ok(Ok(seen)) => Ok(seen),
            Ok(Err(error)) => {
                warn!(error = format!("{error:#}"), "the parking cannot be looked at");
                Err(Problem::unavailable("the broker does not let the parking be looked at"))
            }
            Err(error) => {
                error!(error = %error, "looking at the parking failed");
                Err(Problem::internal())
            }
        }
    }

    /// Up to `keep` of the messages that are meant.
    async fn look(&self, filter: Filter, keep: usize) -> Result<Listing, Problem> {
        let this = self.0.clone();
        let found = self.detached(async move {
            let _turn = this.looking.lock().await;
            let until = Some(Instant::now() + LOOK_BOUND);
            this.parking.look(&filter, keep, until, &this.shutdown).await
        });
        let Found { messages, matched, looked_at, ready } = found.await?;
        Ok(Listing { parked: ready, looked_at, matched, messages })
    }

    /// What a run would do, or the run itself, begun.
    async fn take_on(self, task: Task, dry_run: bool) -> Result<Response, Problem> {
        if dry_run {
            let this = self.0.clone();
            let plan = self.detached(async move {
                let _turn = this.looking.lock().await;
                let until = Some(Instant::now() + LOOK_BOUND);
                this.parking.plan(&task, until, &this.shutdown).await
            });
            let Plan { mut messages, matched, looked_at, ready } = plan.await?;
            let planned = messages.len();
            messages.truncate(MOST);
            let listing = Listing { parked: ready, looked_at, matched, messages };
            let mut answer = listing.brief();
            answer["planned"] = json!(planned);
            return Ok(Json(answer).into_response());
        }
        let busy = || {
            Problem::new(Kind::Conflict, "a run is under way, see /parking/runs; wait for its end")
        };
        let only_one = self.0.running.clone().try_acquire_owned().map_err(|_| busy())?;
        if self.0.shutdown.is_cancelled() {
            return Err(Problem::unavailable("this process is about to end"));
        }
        let entry = Entry::begin(&self.0.pool, &task).await?;
        let run = entry.id;
        let this = self.0.clone();
        self.0.tasks.spawn(async move {
            this.run(task, entry).await;
            drop(only_one);
        });
        let location = [(header::LOCATION, format!("/parking/runs/{run}"))];
        Ok((StatusCode::ACCEPTED, location, Json(json!({ "run": run }))).into_response())
    }
}

impl Inner {
    async fn run(&self, task: Task, entry: Entry) {
        let (run, action) = (entry.id, task.action.as_str());
        let done = task.action.done();
        let watch = |event: Event<'_>| {
            if let Event::Leaving(Parked { about, .. }) = event {
                let (message_id, event_type) = (&about.message_id, &about.event_type);
                info!(message_id, event_type, run, by = task.who, "parked message {done}");
            }
            Ok(())
        };
        match self.parking.run(&task, entry, &self.shutdown, watch).await {
            Ok(Report { done, matched, interrupted, .. }) => {
                info!(run, action, done, matched, interrupted, "parking run ended");
            }
            Err(error) => {
                error!(run, action, error = format!("{error:#}"), "parking run failed");
            }
        }
    }
}

/// What was seen.
struct Listing {
    /// Messages in parking, those that somebody holds excepted.
    parked: u32,
    /// How many of them were looked at; fewer where there was no time for all.
    looked_at: u32,
    matched: u32,
    messages: Vec<Parked>,
}

impl Listing {
    fn brief(&self) -> Value {
        let about: Vec<&About> = self.messages.iter().map(|parked| &parked.about).collect();
        self.with(json!(about))
    }

    fn in_full(&self) -> Value {
        self.with(self.messages.iter().map(Parked::in_full).collect())
    }

    fn with(&self, messages: Value) -> Value {
        let Self { parked, looked_at, matched, .. } = self;
        json!({ "parked": parked, "looked_at": looked_at, "matched": matched, "messages": messages })
    }
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
