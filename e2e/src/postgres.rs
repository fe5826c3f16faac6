//! Private PostgreSQL servers: a data directory and a port of their own, gone with their owner.
//!
//! `initdb` runs once per process into a template that is then copied, so that the second server is
//! up in a fraction of a second. Only 127.0.0.1 is listened on, everybody there is trusted. A
//! server may be frozen, killed without warning, stopped and started again on the same data and
//! port, as often as a test likes.

mod install;
mod spec;

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::{
    child::{Child, lock},
    ports,
    reaper::ScratchDir,
};
use spec::Spec;

const SHUTDOWN: Duration = Duration::from_secs(30);

/// What survives what. A `kill -9` of the server loses no committed transaction with either: the
/// kernel has the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// No fsync: a crash of the machine would lose data.
    Fast,
    /// As in production.
    Durable,
}

/// A PostgreSQL server of our own, superuser `postgres`. Dropped, it is killed and its data
/// are removed.
#[derive(Debug)]
pub struct Postgres {
    // Dropped in this order: the server is dead before its traces are removed.
    server: Mutex<Arc<Child>>,
    spec: Spec,
    _scratch: ScratchDir,
}

impl Postgres {
    /// A new, empty server, [`Durability::Fast`], ready for connections.
    pub async fn start() -> Result<Self> {
        Self::start_with(Durability::Fast).await
    }

    /// A new, empty server, ready for connections.
    pub async fn start_with(durability: Durability) -> Result<Self> {
        let scratch = ScratchDir::new("e2e-postgres-")?;
        let spec = Spec {
            bin: install::find_bin()?,
            dir: scratch.path().to_owned(),
            port: ports::free_port()?,
            durability,
        };
        let spec = tokio::task::spawn_blocking(move || spec.prepare().map(|()| spec)).await??;
        let server = Mutex::new(Arc::new(spec.run().await?));
        Ok(Self { server, spec, _scratch: scratch })
    }

    /// Where clients find the database `db`.
    pub fn url(&self, db: &str) -> String {
        self.spec.url(db)
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.spec.port
    }

    /// The directory of the server: `data` and the unix socket.
    pub fn dir(&self) -> &Path {
        &self.spec.dir
    }

    /// The postmaster, for its log and its pid.
    pub fn server(&self) -> Arc<Child> {
        Arc::clone(&lock(&self.server))
    }

    /// Makes an empty database.
    pub async fn create_database(&self, name: &str) -> Result<()> {
        self.execute(format!("CREATE DATABASE {} TEMPLATE template0", quote(name))).await
    }

    /// Kills the postmaster and all its children without warning; returns when they are gone.
    pub fn sigkill(&self) -> Result<()> {
        self.server().sigkill()
    }

    /// Freezes the server: the kernel still accepts connections for it, nobody answers.
    pub fn sigstop(&self) -> Result<()> {
        self.server().sigstop()
    }

    /// Ends a freeze.
    pub fn sigcont(&self) -> Result<()> {
        self.server().sigcont()
    }

    /// Shuts the server down in order, disconnecting its clients ("fast").
    pub async fn stop(&self) -> Result<()> {
        let server = self.server();
        server.signal(Signal::SIGINT)?;
        let status = server.wait_exit(SHUTDOWN).await?;
        ensure!(
            status.success(),
            "PostgreSQL did not shut down in order ({status}); {}",
            server.report()
        );
        Ok(())
    }

    /// Starts the stopped or killed server on its data and its port; returns when it answers.
    pub async fn start_again(&self) -> Result<()> {
        ensure!(!self.server().is_running()?, "PostgreSQL on port {} still runs", self.port());
        let server = Arc::new(self.spec.run().await?);
        *lock(&self.server) = server;
        Ok(())
    }

    async fn execute(&self, statement: String) -> Result<()> {
        let run = async {
            let mut connection = PgConnection::connect(&self.url("postgres")).await?;
            sqlx::raw_sql(AssertSqlSafe(statement.as_str())).execute(&mut connection).await?;
            connection.close().await
        };
        run.await.with_context(|| format!("{statement}; {}", self.server().report()))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Even if a test still holds the `Child`. Failing, it remains the reaper's to do.
        let _ = self.sigkill();
    }
}

fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
