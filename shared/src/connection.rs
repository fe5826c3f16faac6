//! Connecting to the broker, and staying connected: one supervisor for every long-lived session.
//!
//! The client library's own recovery stays off: with it a frozen broker is not noticed at all,
//! without it a missed heartbeat is an error. So the pattern here is always the same: connect under
//! a bound, declare, run; on any failure drop everything that hangs on the connection, wait with
//! jitter, and begin again. What a dropped session had not acked, the broker hands out once more;
//! what it had not seen confirmed is published once more.

mod attempt;

use crate::backoff::Backoff;
use crate::config::BrokerArgs;
use crate::health::Part;
use anyhow::Context;
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Makes connections for one purpose.
pub struct Connector {
    broker: BrokerArgs,
    name: &'static str,
}

impl Connector {
    /// `name` is what the broker's management page shows.
    #[must_use]
    pub fn new(broker: BrokerArgs, name: &'static str) -> Self {
        Self { broker, name }
    }

    /// Connects, logs in, opens the virtual host; all within the configured bound. An attempt that is
    /// given up leaves nothing behind.
    ///
    /// # Errors
    /// When that fails or takes too long. The message holds no password.
    pub async fn connect(&self) -> anyhow::Result<Connection> {
        let mut uri = amqp_uri(&self.broker.amqp_url)?;
        let heartbeat = u16::try_from(self.broker.amqp_heartbeat.as_secs()).unwrap_or(u16::MAX);
        uri.query.heartbeat.get_or_insert(heartbeat.max(1));
        let properties = ConnectionProperties::default().with_connection_name(self.name.into());
        // lapin's own timeout covers TCP alone; a frozen broker would hold the login up for ever.
        let bound = self.broker.amqp_connect_timeout;
        tokio::time::timeout(bound, attempt::connect(uri, properties, bound))
            .await
            .with_context(|| format!("the broker did not answer within {bound:?}"))?
            .context("cannot connect to the broker")
    }
}

/// Reads an AMQP URL.
///
/// # Errors
/// When it cannot be read. The message does not repeat it: it holds a password.
pub fn amqp_uri(url: &str) -> anyhow::Result<AMQPUri> {
    let wrong = || anyhow::anyhow!("the AMQP URL must be amqp://user:password@host:port/vhost");
    url.parse().map_err(|_reason: String| wrong())
}

/// A step of setting a session up, within a bound: a broker that froze, or that blocks connections
/// because of an alarm, answers nothing for as long as that lasts.
///
/// # Errors
/// The step's own, or that it took too long.
pub async fn bounded<T>(
    what: &'static str,
    step: impl Future<Output = lapin::Result<T>>,
) -> anyhow::Result<T> {
    const BOUND: Duration = Duration::from_secs(10);
    let done = tokio::time::timeout(BOUND, step).await;
    done.with_context(|| format!("{what}: no answer within {BOUND:?}"))?.context(what)
}

/// Waits for the end of a resource alarm (memory, disk), during which the broker reads nothing more
/// from connections that publish. A connection in that state cannot even be closed: giving it up would
/// leave one more behind with every attempt, so it is kept and waited for.
///
/// # Errors
/// When the connection is lost meanwhile.
pub async fn wait_unblocked(connection: &Connection) -> anyhow::Result<()> {
    while connection.status().blocked() {
        anyhow::ensure!(connection.status().connected(), "the broker closed the connection");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

/// What `/health/ready` says meanwhile.
pub const BLOCKED: &str = "the broker blocks publishing: a resource alarm, see its log";

/// Closes a connection in an orderly way, or lets it drop if the broker does not answer.
pub async fn close(connection: &Connection) {
    let bye = connection.close(200, "bye".into());
    // Refused or timed out: it is gone or will be, and nothing depends on the goodbye.
    let _ = tokio::time::timeout(Duration::from_secs(1), bye).await;
}

/// Runs `session` again and again until `shutdown`. A session ends well only at shutdown; any other
/// end is a failure, logged once here, and followed by a growing, jittered wait, so that nothing
/// loops hot. A session that lasted longer than the longest wait starts the count anew.
pub async fn supervise<F, Fut>(part: Part, shutdown: CancellationToken, mut session: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    let backoff = Backoff::RECONNECT;
    let mut failures = 0;
    while !shutdown.is_cancelled() {
        let began = Instant::now();
        let ended = session().await;
        if shutdown.is_cancelled() {
            // The end of a session at shutdown is not news.
            break;
        }
        let error = ended.err().unwrap_or_else(|| anyhow::anyhow!("ended without being asked to"));
        failures = if began.elapsed() > backoff.max { 1 } else { failures + 1 };
        let wait = backoff.jittered(failures);
        warn!(
            part = part.name(),
            error = format!("{error:#}"),
            failures,
            retry_in_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
            "session failed"
        );
        part.fail("reconnecting; the log says why");
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
    info!(part = part.name(), "stopped");
}
