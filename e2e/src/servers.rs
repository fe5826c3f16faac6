//! The servers that the tests of one process share, and the service binaries that they run.

use crate::postgres::Postgres;
use crate::rabbitmq::RabbitMq;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use tokio::sync::OnceCell;

/// A private PostgreSQL and a private RabbitMQ.
#[derive(Clone)]
pub struct Servers {
    /// Databases are created in it by each test.
    pub postgres: Arc<Postgres>,
    /// Virtual hosts are created in it by each test.
    pub rabbitmq: Arc<RabbitMq>,
}

impl Servers {
    /// The servers of this process, started once. Nobody may harm them: a test that kills a server
    /// starts its own. They die with the process, whatever becomes of it (see [`crate::reaper`]).
    ///
    /// # Errors
    /// When they cannot be started.
    pub async fn shared() -> Result<Self> {
        let (postgres, rabbitmq) =
            tokio::try_join!(Self::shared_postgres(), Self::shared_rabbitmq())?;
        Ok(Self { postgres, rabbitmq })
    }

    /// The PostgreSQL of [`Servers::shared`], for a test that has a broker of its own.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn shared_postgres() -> Result<Arc<Postgres>> {
        static SHARED: OnceCell<Arc<Postgres>> = OnceCell::const_new();
        SHARED.get_or_try_init(async || Ok(Arc::new(Postgres::start().await?))).await.cloned()
    }

    /// The RabbitMQ of [`Servers::shared`].
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn shared_rabbitmq() -> Result<Arc<RabbitMq>> {
        static SHARED: OnceCell<Arc<RabbitMq>> = OnceCell::const_new();
        SHARED.get_or_try_init(async || Ok(Arc::new(RabbitMq::start().await?))).await.cloned()
    }

    /// Servers that are the caller's own.
    ///
    /// # Errors
    /// When they cannot be started.
    pub async fn start() -> Result<Self> {
        let (postgres, rabbitmq) = tokio::try_join!(Postgres::start(), RabbitMq::start())?;
        Ok(Self { postgres: Arc::new(postgres), rabbitmq: Arc::new(rabbitmq) })
    }
}

/// The binary of a service, as `cargo build` left it next to the running test.
///
/// # Errors
/// When it is not there.
pub fn binary(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe().context("where am I?")?;
    let folder = this
        .ancestors()
        .skip(1)
        .find(|folder| folder.file_name().is_some_and(|name| name != "deps"))
        .context("the test binary has no folder")?;
    let binary = folder.join(name);
    ensure!(binary.is_file(), "{} is missing: run `make build`", binary.display());
    Ok(binary)
}

/// Makes sure that the binaries honour `FAULT_POINT`: a test that asks for a crash and gets none
/// would prove nothing.
///
/// # Errors
/// When they were built without the feature.
pub fn require_fault_points() -> Result<()> {
    for service in ["orders-service", "inventory-service"] {
        let output = Command::new(binary(service)?)
            .args(["topology", "print"])
            .env("FAULT_POINT", shared::fault::Point::ALL[0].name())
            .output()?;
        ensure!(
            output.status.success(),
            "{service} has no fault points: run the tests with `make test`, or build with --all-features"
        );
    }
    Ok(())
}
