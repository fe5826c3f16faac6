//! `/parking` on the operations port, behind the token.
//!
//! A run may last longer than a request may. So it is answered with where to look for it, and goes on
//! by itself; one at a time. SIGTERM stops it after the message in hand, and the process does not end
//! before that.

mod requests;

use super::audit::Entry;
use super::filter::Filter;
use super::lot::Found;
use super::parked::{About, Parked};
use super::run::{Event, Parking, Plan, Report};
use super::task::Task;
use crate::http::{Kind, Problem};
use crate::pool::Pool;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::{Value, json};
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
        requests::routes().with_state(self.clone())
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
