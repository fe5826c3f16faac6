//! Connecting to the broker, and staying connected: one supervisor for every long-lived session.
//!
//! The client library's own recovery stays off: with it a frozen broker is not noticed at all,
//! without it a missed heartbeat is an error. So the pattern here is always the same: connect under
//! a bound, declare, run; on any failure drop everything that hangs on the connection, wait with
//! jitter, and begin again. What a dropped session had not acked, the broker hands out once more;
//! what it had not seen confirmed is published once more.

use crate::backoff::Backoff;
use crate::config::BrokerArgs;
use crate::health::Part;
use anyhow::Context;
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Connects, logs in, opens the virtual host; all within the configured bound. `name` is what the
/// broker's management page shows.
///
/// # Errors
/// When that fails or takes too long. The message holds no password.
pub async fn connect(broker: &BrokerArgs, name: &str) -> anyhow::Result<Connection> {
    let mut uri = amqp_uri(&broker.amqp_url)?;
    let heartbeat = u16::try_from(broker.amqp_heartbeat.as_secs()).unwrap_or(u16::MAX).max(1);
    uri.query.heartbeat.get_or_insert(heartbeat);
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    // lapin's own timeout covers TCP alone; a frozen broker would hold the login up for ever.
    tokio::time::timeout(broker.amqp_connect_timeout, Connection::connect_uri(uri, properties))
        .await
        .with_context(|| {
            format!("the broker did not answer within {:?}", broker.amqp_connect_timeout)
        })?
        .context("cannot connect to the broker")
}

/// Reads an AMQP URL.
///
/// # Errors
/// When it cannot be read. The message does not repeat it: it holds a password.
pub fn amqp_uri(url: &str) -> anyhow::Result<AMQPUri> {
    url.parse().map_err(|reason: String| {
        anyhow::anyhow!("the AMQP URL must be amqp://user:password@host:port/vhost ({reason})")
    })
}

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
        part.fail(format!("{error:#}"));
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
    info!(part = part.name(), "stopped");
}
