//! A process: what it runs, until when, and how it ends.
//!
//! SIGTERM and SIGINT ask it to end. Everything that runs is told at once, stops taking work,
//! finishes what it has in hand and returns the rest; that may take as long as the deadline. What is
//! unfinished then is dropped, which loses nothing: it is unacked, uncommitted or unmarked, and comes
//! again.

use crate::config::ProcessArgs;
use crate::health::Health;
use crate::http;
use crate::metrics::Metrics;
use anyhow::Context;
use axum::Router;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::info;

/// A process in the making, then running.
pub struct Service {
    /// What its parts report.
    pub health: Health,
    /// What it counts.
    pub metrics: Metrics,
    /// Cancelled when it must end.
    pub shutdown: CancellationToken,
    tasks: JoinSet<&'static str>,
    args: ProcessArgs,
}

impl Service {
    /// A process that runs nothing yet, and hears signals already.
    ///
    /// # Errors
    /// When signals cannot be listened to.
    pub fn new(args: ProcessArgs) -> anyhow::Result<Self> {
        let shutdown = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen to SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen to SIGINT")?;
        let token = shutdown.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => info!("SIGTERM: finishing what is in hand"),
                _ = interrupt.recv() => info!("SIGINT: finishing what is in hand"),
            }
            token.cancel();
        });
        Ok(Self {
            health: Health::default(),
            metrics: Metrics::new()?,
            shutdown,
            tasks: JoinSet::new(),
            args,
        })
    }

    /// Runs a part. It ends when [`Service::shutdown`] is cancelled; earlier is a bug and ends the
    /// process, for its supervisor to start anew.
    pub fn spawn(&mut self, name: &'static str, part: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            part.await;
            name
        });
    }

    /// Serves HTTP. The address is taken before anything is answered or logged.
    ///
    /// # Errors
    /// When the address cannot be had.
    pub async fn serve(
        &mut self,
        name: &'static str,
        listen: SocketAddr,
        router: Router,
    ) -> anyhow::Result<()> {
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("cannot listen on {listen} ({name})"))?;
        info!(server = name, address = %listener.local_addr()?, "listening");
        self.spawn(name, http::serve(listener, router, self.shutdown.clone()));
        Ok(())
    }

    /// Waits for the end: a signal, or a part that ended by itself.
    ///
    /// # Errors
    /// When a part failed, or did not finish within the deadline. Nothing is lost either way.
    pub async fn wait(mut self) -> anyhow::Result<()> {
        let mut failed = None;
        tokio::select! {
            () = self.shutdown.cancelled() => {}
            ended = self.tasks.join_next() => {
                if !self.shutdown.is_cancelled() {
                    failed = Some(ended.map_or_else(|| "nothing runs".to_owned(), why));
                }
                self.shutdown.cancel();
            }
        }
        let drain = async {
            while let Some(ended) = self.tasks.join_next().await {
                if ended.is_err() {
                    failed.get_or_insert_with(|| why(ended));
                }
            }
        };
        let deadline = self.args.shutdown_deadline;
        let drained = tokio::time::timeout(deadline, drain).await;
        if let Some(failed) = failed {
            anyhow::bail!(failed);
        }
        drained.map_err(|_| anyhow::anyhow!("not everything finished within {deadline:?}"))?;
        info!("finished");
        Ok(())
    }
}

fn why(ended: Result<&'static str, tokio::task::JoinError>) -> String {
    match ended {
        Ok(name) => format!("{name} ended without being asked to"),
        Err(error) => format!("a part panicked: {error}"),
    }
}
