//! Starting one server, again and again, on the same data and port.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use sqlx::{Connection, PgConnection};

use super::{Durability, install};
use crate::child::{Child, Patience};

const STARTUP: Duration = Duration::from_secs(30);

/// The kernel's limit for a socket's path is 107 bytes, `/.s.PGSQL.NNNNN` included.
const SOCKET_DIR_MAX: usize = 90;

/// All it takes to start the server, again and again.
#[derive(Debug)]
pub(super) struct Spec {
    pub(super) bin: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) port: u16,
    pub(super) durability: Durability,
}

impl Spec {
    pub(super) fn url(&self, db: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{db}", self.port)
    }

    pub(super) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// Fills the data directory unless it holds a server already.
    pub(super) fn prepare(&self) -> Result<()> {
        if self.data().join("PG_VERSION").exists() {
            return Ok(());
        }
        install::new_data_dir(&self.bin, &self.dir, &self.data())
    }

    /// Starts the server and waits until it answers. A predecessor just killed, by us or by the
    /// reaper of an earlier run, may hold its shared memory or port for another moment; PostgreSQL
    /// then gives up and is started once more.
    pub(super) async fn run(&self) -> Result<Child> {
        let patience =
            Patience::new(STARTUP, format!("PostgreSQL to answer on port {}", self.port));
        let mut server = self.spawn()?;
        let mut hindrance = String::new();
        loop {
            if self.answers().await && server.is_running()? {
                return Ok(server);
            }
            if let Some(status) = server.exit_status()? {
                let log = server.log_tail(usize::MAX);
                let in_the_way = [
                    "pre-existing shared memory block",
                    "lock file \"postmaster.pid\"",
                    "Address already in use",
                ];
                if !in_the_way.iter().any(|message| log.contains(message)) {
                    bail!("PostgreSQL ended on start ({status}); {}", server.report());
                }
                hindrance = server.report();
                server = self.spawn()?;
            }
            patience.pause().await.with_context(|| format!("{hindrance}{}", server.report()))?;
        }
    }

    fn spawn(&self) -> Result<Child> {
        let (data, port) = (self.data(), self.port.to_string());
        let fits = self.dir.as_os_str().len() <= SOCKET_DIR_MAX;
        let socket_dir = if fits { &self.dir } else { Path::new("") };
        let fsync = match self.durability {
            Durability::Durable => "on",
            Durability::Fast => "off",
        };
        let settings = [
            ("listen_addresses", "127.0.0.1"),
            ("port", &port),
            ("max_connections", "500"),
            ("shared_buffers", "64MB"),
            ("fsync", fsync),
            ("full_page_writes", fsync),
            ("synchronous_commit", "on"),
            // In the data directory, which is removed; those in /dev/shm would outlive a killed
            // server.
            ("dynamic_shared_memory_type", "mmap"),
        ];
        let mut command = Command::new(self.bin.join("postgres"));
        command.arg("-D").arg(&data).arg("-k").arg(socket_dir).current_dir(&self.dir);
        for (name, value) in settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        install::become_server_user(&mut command)?;
        Child::spawn(format!("postgres:{port}"), command)
    }

    async fn answers(&self) -> bool {
        let attempt = async {
            let mut connection = PgConnection::connect(&self.url("postgres")).await?;
            sqlx::query("SELECT 1").execute(&mut connection).await?;
            connection.close().await
        };
        matches!(tokio::time::timeout(Duration::from_secs(2), attempt).await, Ok(Ok(())))
    }
}

impl Drop for Spec {
    fn drop(&mut self) {
        install::remove_shared_memory(&self.data());
    }
}
