//! Connections: a request that has arrived is answered, and no client can keep the process.
//!
//! A connection is either *at work*, from when a request is here whole until its answer is there,
//! or it waits for its client: for a request, for the rest of one, for an answer to be read. Work is
//! bounded by the edge's time-out ([`super::edge`]). A client has [`CLIENT_PATIENCE`] for its part,
//! and after SIGTERM [`CLIENT_GRACE`]: then no new connection is taken, an idle one is closed at once,
//! and whatever is at work gets its whole time.
//!
//! axum's own `serve` knows no bound on any of this: half a header line would hold the end of the
//! process up for ever. So the connections are hyper's, which is what `serve` is made of as well.
//!
//! What closing on a client loses: a request that is not here whole has had no effect, and of one
//! that was answered the effect is committed. The client repeats it, with its `Idempotency-Key`. A
//! crash is the same for all clients at once.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::serve::Listener;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::pin::pin;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;
use tracing::debug;

/// How long a connection waits for its client. Longer than the minute after which load balancers
/// give up idle connections: it must be they who do, or a request and the end of its connection
/// cross on the way.
const CLIENT_PATIENCE: Duration = Duration::from_secs(75);
/// The same after SIGTERM.
pub(crate) const CLIENT_GRACE: Duration = Duration::from_secs(1);

/// Serves until `shutdown`, and then until the last connection is closed.
pub async fn serve(mut listener: TcpListener, router: Router, shutdown: CancellationToken) {
    let connections = TaskTracker::new();
    // Accepting never fails for good: axum waits where the process is out of file descriptors.
    while let Some((stream, _)) =
        shutdown.run_until_cancelled(Listener::accept(&mut listener)).await
    {
        connections.spawn(connection(stream, router.clone(), shutdown.clone()));
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// One connection, until it is closed from either side.
async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    shutdown: CancellationToken,
) {
    let at_work = watch::Sender::new(false);
    let service = service_fn(|request: Request<Incoming>| {
        // Goes with the body, which whoever reads the request drops when it is whole, or not wanted.
        let arriving = Arriving(at_work.clone());
        let request = request.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _arriving = &arriving;
                frame
            }))
        });
        let (router, at_work) = (router.clone(), at_work.clone());
        async move {
            let answer = router.oneshot(request).await;
            at_work.send_replace(false);
            answer
        }
    });
    let mut http = pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = http.as_mut() => ended,
        () = client_takes(CLIENT_PATIENCE, at_work.subscribe()) => return,
        () = shutdown.cancelled() => {
            http.as_mut().graceful_shutdown();
            tokio::select! {
                ended = http => ended,
                () = client_takes(CLIENT_GRACE, at_work.subscribe()) => return,
            }
        }
    };
    if let Err(error) = ended {
        // What clients do (they leave, they do not speak HTTP) is no failure of ours.
        debug!(error = %error, "connection failed");
    }
}

/// Returns when the connection has been waiting for its client for `limit` without a break.
async fn client_takes(limit: Duration, mut at_work: watch::Receiver<bool>) {
    while at_work.wait_for(|at_work| !at_work).await.is_ok() {
        if tokio::time::timeout(limit, at_work.changed()).await.is_err() {
            return;
        }
    }
}

/// Held by a request's body: when that is dropped, the work begins.
struct Arriving(watch::Sender<bool>);

impl Drop for Arriving {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::task::JoinHandle;

    /// What a client may leave undone: to ask, to finish its head or its body, to ask again, to read.
    const IDLERS: [&str; 5] = [
        "",
        "GET /small HT",
        "POST /echo HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf",
        "GET /small HTTP/1.1\r\n\r\n",
        "GET /large HTTP/1.1\r\n\r\n",
    ];
    const LONG_WORK: Duration = Duration::from_secs(1000);

    fn router() -> Router {
        let work = async || tokio::time::sleep(LONG_WORK).await;
        Router::new()
            .route("/small", get("small"))
            .route("/large", get("large".repeat(10_000)))
            .route("/echo", post(async |body: String| body))
            .route("/work", post(async move |_body: String| work().await))
    }

    /// A client that has said something, and the connection's other end.
    async fn client(says: &str, shutdown: &CancellationToken) -> (DuplexStream, JoinHandle<()>) {
        let (mut client, server) = tokio::io::duplex(1000);
        let served = tokio::spawn(connection(server, router(), shutdown.clone()));
        client.write_all(says.as_bytes()).await.expect("it is being read");
        (client, served)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_do_its_part_is_closed_on() {
        for says in IDLERS {
            let (_client, served) = client(says, &CancellationToken::new()).await;
            let closed = tokio::time::timeout(CLIENT_PATIENCE * 2, served).await;
            assert!(closed.is_ok(), "{says:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_signal_a_client_has_a_moment_and_work_its_whole_time() {
        let shutdown = CancellationToken::new();
        let mut idlers = Vec::new();
        for says in IDLERS {
            idlers.push(client(says, &shutdown).await);
        }
        let work = "POST /work HTTP/1.1\r\ncontent-length: 4\r\n\r\nwork";
        let (mut worker, _served) = client(work, &shutdown).await;
        tokio::time::sleep(Duration::from_secs(1)).await; // in which all of that arrives
        shutdown.cancel();
        for ((_client, served), says) in idlers.into_iter().zip(IDLERS) {
            let closed = tokio::time::timeout(CLIENT_GRACE * 2, served).await;
            assert!(closed.is_ok(), "{says:?}");
        }
        let mut answer = String::new();
        worker.read_to_string(&mut answer).await.expect("an answer, and the end");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_arrives_in_the_moment_after_the_signal_is_still_answered() {
        let shutdown = CancellationToken::new();
        let (mut client, _served) = client("GET /small HT", &shutdown).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        shutdown.cancel();
        tokio::time::sleep(CLIENT_GRACE / 2).await;
        client.write_all(b"TP/1.1\r\n\r\n").await.expect("it is being read");
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.expect("an answer, and the end");
        assert!(answer.ends_with("small"), "{answer}");
    }
}
