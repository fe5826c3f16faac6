//! The operations port: health, metrics, and what only an operator may do.
//!
//! It is a port of its own, so that a network can keep it apart from the API. Reading health and
//! metrics needs no token; changing anything, or reading a message, does, and without a configured
//! token nothing of that can be done at all.

use crate::config::OpsArgs;
use crate::health::Health;
use crate::http::{Kind, Problem, edge};
use crate::metrics::Metrics;
use crate::outbox;
use crate::pool::Pool;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use subtle::ConstantTimeEq;
use tracing::error;

/// A health check that waits longer for the database has its answer.
const DATABASE_BOUND: Duration = Duration::from_secs(1);

/// What the endpoints look at.
#[derive(Clone)]
pub struct Ops {
    /// The service's own database.
    pub pool: Pool,
    /// What its parts report.
    pub health: Health,
    /// What it counts.
    pub metrics: Metrics,
    /// Token and thresholds.
    pub args: OpsArgs,
}

impl Ops {
    /// The router of the operations port. `admin` is what needs the token.
    pub fn router(self, admin: Router) -> Router {
        let token = self.args.operations_token.clone().map(Arc::from);
        let open = Router::new()
            .route("/health/live", get(async || "live\n"))
            .route("/health/ready", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self);
        edge(open.merge(admin.route_layer(from_fn_with_state(token, require_token))))
    }
}

/// The answer of `/health/ready`: each part by name, `ok` or what is wrong.
#[derive(Serialize)]
struct Readiness {
    ready: bool,
    parts: BTreeMap<&'static str, String>,
}

async fn ready(State(ops): State<Ops>) -> (StatusCode, Json<Readiness>) {
    let mut report = ops.health.report();
    match oldest_waiting(&ops.pool).await {
        Ok(seconds) => {
            report.insert("database", None);
            report.insert("outbox", late(seconds, ops.args.ready_relay_lag));
        }
        Err(error) => {
            report.insert("database", Some(error));
            report.insert("outbox", Some("unknown while the database does not answer".into()));
        }
    }
    let ready = report.values().all(Option::is_none);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let parts = report
        .into_iter()
        .map(|(name, trouble)| (name, trouble.unwrap_or_else(|| "ok".into())))
        .collect();
    (status, Json(Readiness { ready, parts }))
}

async fn oldest_waiting(pool: &Pool) -> Result<Option<f64>, String> {
    let ask = async {
        let mut db = pool.borrow().await?;
        let seconds = outbox::oldest_waiting_seconds(&mut db).await?;
        db.give_back();
        Ok::<_, sqlx::Error>(seconds)
    };
    match tokio::time::timeout(DATABASE_BOUND, ask).await {
        Ok(Ok(seconds)) => Ok(seconds),
        // Its text may name hosts and users; the log has it where it matters.
        Ok(Err(_)) => Err("the database refuses".into()),
        Err(_) => Err(format!("the database did not answer within {DATABASE_BOUND:?}")),
    }
}

fn late(seconds: Option<f64>, limit: Duration) -> Option<String> {
    let seconds = seconds.filter(|seconds| *seconds > limit.as_secs_f64())?;
    Some(format!("the oldest event has been waiting to be published for {seconds:.0} s"))
}

async fn metrics(State(ops): State<Ops>) -> Result<String, Problem> {
    ops.metrics.encode().map_err(|error| {
        error!(error = format!("{error:#}"), "metrics cannot be encoded");
        Problem::internal()
    })
}

async fn require_token(
    State(token): State<Option<Arc<str>>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let Some(token) = token.filter(|token| !token.is_empty()) else {
        return Err(Problem::new(Kind::Disabled, "this process has no operations token"));
    };
    let given =
        request.headers().get(header::AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
    // RFC 9110: the scheme's name is case-insensitive.
    let given = match given.split_at_checked(b"Bearer ".len()) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"Bearer ") => token,
        _ => &[],
    };
    // In constant time: the time of a refusal must not tell how much of a guess was right.
    if bool::from(given.ct_eq(token.as_bytes())) {
        Ok(next.run(request).await)
    } else {
        Err(Problem::new(Kind::Unauthorized, "the bearer token is missing or wrong"))
    }
}
