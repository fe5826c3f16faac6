//! Connecting to PostgreSQL, with bounds on everything that could hang.
//!
//! A process that freezes in the middle of a transaction holds row locks, and one that freezes as
//! the active relay holds the advisory lock. The server cannot tell a frozen client from a slow
//! one, so it is told how long to bear with either.

use crate::backoff::Backoff;
use crate::config::DatabaseArgs;
use crate::failure::{Class, classify};
use crate::health::Part;
use crate::pool::Pool;
use anyhow::Context;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection as _, PgConnection};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Reads the URL. The error does not repeat it: it holds a password.
fn options(args: &DatabaseArgs) -> anyhow::Result<PgConnectOptions> {
    let wrong = "the database URL must be postgres://user:password@host:port/database";
    let scheme = args.database_url.split_once("://").map(|(scheme, _)| scheme);
    anyhow::ensure!(matches!(scheme, Some("postgres" | "postgresql")), wrong);
    let options: PgConnectOptions = args.database_url.parse().context(wrong)?;
    // Queries that fail are logged by whoever decides what the failure means, once.
    Ok(options.disable_statement_logging())
}

/// The pool that HTTP handlers and consumers share. It connects when first used, so a service
/// starts while its database is away.
///
/// # Errors
/// When the URL cannot be read.
pub fn pool(args: &DatabaseArgs) -> anyhow::Result<Pool> {
    let options = options(args)?.options([
        // Transactions here are a handful of statements by primary key.
        ("statement_timeout", "8s"),
        ("lock_timeout", "5s"),
        // Ends the transaction of a process that froze in it, and frees its row locks.
        ("idle_in_transaction_session_timeout", "15s"),
    ]);
    let pool = PgPoolOptions::new()
        .max_connections(args.database_pool_size.get())
        .acquire_timeout(args.database_acquire_timeout)
        .connect_lazy_with(options);
    Ok(Pool(pool))
}

/// The connection of work that one process at a time does (the relay's, retention's). It is also the
/// lock, once [`try_lock`] got it.
///
/// # Errors
/// When the database is not reached.
pub async fn connect_for_one(args: &DatabaseArgs, lease: Duration) -> anyhow::Result<PgConnection> {
    let options = options(args)?.options([
        ("statement_timeout", "8s".to_owned()),
        // Such a process says something again and again. A session that is silent for longer belongs
        // to a frozen process or a lost host: the server ends it, which frees the advisory lock for
        // another. PostgreSQL 14 and later.
        ("idle_session_timeout", format!("{}ms", lease.as_millis())),
    ]);
    connect(&options).await
}

/// Tries to become the one process that does what `key` stands for in this database, for as long as
/// this session lives.
///
/// # Errors
/// Whatever PostgreSQL says.
pub async fn try_lock(db: &mut PgConnection, key: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar!(r#"SELECT pg_try_advisory_lock($1) AS "locked!""#, key).fetch_one(db).await
}

/// A statement on such a connection, within a bound: one that takes longer means that the database is
/// in trouble, or out of reach.
///
/// # Errors
/// The statement's own, or that it took too long.
pub async fn bounded<T>(statement: impl Future<Output = sqlx::Result<T>>) -> anyhow::Result<T> {
    const BOUND: Duration = Duration::from_secs(10);
    tokio::time::timeout(BOUND, statement)
        .await
        .with_context(|| format!("the database did not answer within {BOUND:?}"))?
        .context("the database session failed")
}

/// One plain connection, for a command.
///
/// # Errors
/// When the database is not reached.
pub async fn connect_once(args: &DatabaseArgs) -> anyhow::Result<PgConnection> {
    connect(&options(args)?).await
}

async fn connect(options: &PgConnectOptions) -> anyhow::Result<PgConnection> {
    const BOUND: Duration = Duration::from_secs(5);
    tokio::time::timeout(BOUND, PgConnection::connect_with(options))
        .await
        .with_context(|| format!("the database did not answer within {BOUND:?}"))?
        .context("cannot connect to the database")
}

/// Brings the schema up to date. Replicas that start at once wait for each other on the migrator's
/// own advisory lock; the second finds nothing to do.
///
/// # Errors
/// When the database is not reached, or a migration fails (it is rolled back then).
pub async fn migrate(args: &DatabaseArgs, migrator: &Migrator) -> anyhow::Result<()> {
    // A replica that freezes in its migration must not keep the others waiting for its lock.
    let options = options(args)?
        .options([("idle_session_timeout", "60s"), ("idle_in_transaction_session_timeout", "60s")]);
    let mut connection = connect(&options).await?;
    migrator.run(&mut connection).await.context("cannot migrate the database")?;
    connection.close().await.context("cannot close the migration's connection")?;
    info!("database schema is up to date");
    Ok(())
}

/// [`migrate`], again and again while the database is away. `false`: asked to end before that.
///
/// # Errors
/// When a migration cannot be applied whatever the time: the process must not go on.
pub async fn migrate_when_reached(
    args: &DatabaseArgs,
    migrator: &Migrator,
    part: &Part,
    shutdown: &CancellationToken,
) -> anyhow::Result<bool> {
    let mut failures = 0;
    loop {
        let error = tokio::select! {
            () = shutdown.cancelled() => return Ok(false),
            migrated = migrate(args, migrator) => match migrated {
                Ok(()) => { part.ok(); return Ok(true) }
                Err(error) => error,
            },
        };
        if !may_pass(&error) {
            return Err(error);
        }
        failures += 1;
        let wait = Backoff::RECONNECT.jittered(failures);
        warn!(error = format!("{error:#}"), failures, "the database is not there yet");
        part.fail("waiting for the database; the log says why");
        tokio::select! {
            () = shutdown.cancelled() => return Ok(false),
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Whether a failed migration may succeed later: the database was away, rather than the migration
/// wrong.
fn may_pass(error: &anyhow::Error) -> bool {
    let cause = match error.downcast_ref::<MigrateError>() {
        Some(MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _)) => {
            Some(cause)
        }
        Some(_) => return false,
        None => error.downcast_ref::<sqlx::Error>(),
    };
    // No database error at all: the connection timed out.
    cause.is_none_or(|cause| classify(cause) == Class::Transient)
}
