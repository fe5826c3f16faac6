//! Starting, stopping, and being without a server.

use anyhow::Result;
use e2e::servers::Servers;
use e2e::service::{Env, Service};
use e2e::system::{Options, System};
use e2e::wait::{until, until_true};
use futures_util::future::try_join_all;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::StatusCode;
use serde_json::json;
use sqlx::Connection as _;

#[tokio::test]
async fn replicas_that_start_at_once_on_an_empty_database_all_start() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    let replicas =
        try_join_all((0..3).map(|_| Service::start("orders-service", &system.orders_env))).await?;
    try_join_all(replicas.iter().map(Service::wait_ready)).await?;
    system.start_services().await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    let result = system.finish().await;
    try_join_all(replicas.iter().map(Service::stop)).await?;
    result
}

#[tokio::test]
async fn a_service_starts_without_its_database_and_becomes_ready_when_it_comes() -> Result<()> {
    let mut system = System::start(Options {
        own_inventory_postgres: true,
        stopped: true,
        ..Options::default()
    })
    .await?;
    system.inventory_postgres.sigkill()?;
    let child = Service::spawn("inventory-service", &system.inventory_env)?;
    crate::support::wait_logged(&child, "the database is not there yet").await?;
    system.inventory_postgres.start_again().await?;
    crate::support::wait_logged(&child, "consuming").await?;
    child.sigterm()?;
    assert!(child.wait_exit(e2e::wait::DEADLINE).await?.success());
    system.start_services().await?;
    system.finish().await
}

#[tokio::test]
async fn a_database_that_goes_away_is_503_and_not_ready_and_then_all_is_well_again() -> Result<()> {
    let system = System::start(Options {
        proxies: true,
        env: vec![("DATABASE_ACQUIRE_TIMEOUT", "300ms")],
        ..Options::default()
    })
    .await?;
    system.set_stock("book-17", 10).await?;
    let Some(proxies) = &system.proxies else { anyhow::bail!("no proxies") };
    proxies.orders_postgres.cut()?;
    let orders = system.orders()?;
    let response = system
        .http
        .post(orders.api("/orders")?)
        .json(&json!({"lines": [{"sku": "book-17", "count": 1}]}))
        .send()
        .await?;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key("retry-after"));
    let body = response.text().await?;
    assert!(body.contains("/problems/unavailable") && !body.contains("127.0.0.1"), "{body}");
    assert!(!orders.readiness().await?.0);
    proxies.orders_postgres.heal()?;
    orders.wait_ready().await?;
    let order = system.place(&[("book-17", 1)]).await?;
    system.wait_status(&order, "confirmed").await?;
    system.finish().await
}

#[tokio::test]
async fn connections_that_fall_silent_in_the_middle_of_requests_do_not_use_up_the_pool()
-> Result<()> {
    let system = System::start(Options {
        own_inventory_postgres: true,
        env: vec![("DATABASE_POOL_SIZE", "2"), ("DATABASE_ACQUIRE_TIMEOUT", "300ms")],
        ..Options::default()
    })
    .await?;
    system.set_stock("book-17", 10).await?;
    // Two requests wait for a lock, each on its connection, and then the other ends freeze: new
    // connections work, these will never say anything again.
    let mut lock = system.inventory_db.begin().await?;
    sqlx::query("LOCK TABLE stock IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await?;
    let url = system.inventory()?.api("/stock/book-17")?;
    let stuck = [system.http.get(&url).send(), system.http.get(&url).send()];
    let stuck = tokio::spawn(try_join_all(stuck));
    let backends = until("both requests to wait for the lock", async || {
        let pids: Vec<i32> = sqlx::query_scalar(
            "SELECT pid FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        .fetch_all(&system.inventory_db)
        .await?;
        Ok((pids.len() == 2).then_some(pids))
    });
    let backends: Vec<Pid> = backends.await?.into_iter().map(Pid::from_raw).collect();
    for backend in &backends {
        kill(*backend, Signal::SIGSTOP)?;
    }
    lock.rollback().await?;

    let statuses: Vec<StatusCode> = stuck.await??.iter().map(|answer| answer.status()).collect();
    assert_eq!(statuses, [StatusCode::SERVICE_UNAVAILABLE; 2]);
    until_true("the pool to have made new connections", async || {
        Ok(system.http.get(&url).send().await?.status().is_success())
    })
    .await?;
    for backend in &backends {
        kill(*backend, Signal::SIGCONT)?;
    }
    system.finish().await
}

#[tokio::test]
async fn a_broker_connection_that_breaks_is_rebuilt_and_nothing_is_lost() -> Result<()> {
    let system = System::start(Options { proxies: true, ..Options::default() }).await?;
    system.set_stock("book-17", 100).await?;
    let Some(proxies) = &system.proxies else { anyhow::bail!("no proxies") };
    for proxy in [&proxies.orders_amqp, &proxies.inventory_amqp] {
        proxy.cut()?;
    }
    let mut orders = Vec::new();
    for _ in 0..5 {
        orders.push(system.place(&[("book-17", 1)]).await?);
    }
    until_true("both to be not ready", async || {
        let (orders, inventory) = (system.orders()?, system.inventory()?);
        Ok(!orders.readiness().await?.0 && !inventory.readiness().await?.0)
    })
    .await?;
    for proxy in [&proxies.orders_amqp, &proxies.inventory_amqp] {
        proxy.heal()?;
    }
    for order in &orders {
        system.wait_status(order, "confirmed").await?;
    }
    system.orders()?.wait_ready().await?;
    system.inventory()?.wait_ready().await?;
    system.finish().await
}

#[tokio::test]
async fn the_outbox_tables_of_both_services_are_one_and_the_same() -> Result<()> {
    let servers = Servers::shared().await?;
    let mut shapes = Vec::new();
    for service in ["orders-service", "inventory-service"] {
        let name = format!("shape_{}", service.replace('-', "_"));
        servers.postgres.create_database(&name).await?;
        let env = Env::from([("DATABASE_URL".to_owned(), servers.postgres.url(&name))]);
        Service::command_ok(service, &["migrate"], &env).await?;
        let mut db = sqlx::PgConnection::connect(&env["DATABASE_URL"]).await?;
        let shape: Vec<String> = sqlx::query_scalar(
            "SELECT format('%s.%s %s %s', table_name, column_name, data_type, is_nullable)
             FROM information_schema.columns
             WHERE table_name = ANY($1)
             UNION ALL SELECT indexdef FROM pg_indexes WHERE tablename = ANY($1)
             UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint
             WHERE conrelid = ANY($1::regclass[])
             ORDER BY 1",
        )
        .bind(["outbox", "processed_messages", "stream_versions", "parking_audit"])
        .fetch_all(&mut db)
        .await?;
        shapes.push(shape);
    }
    assert!(shapes[0].len() > 40);
    assert_eq!(shapes[0], shapes[1]);
    Ok(())
}

#[tokio::test]
async fn every_variable_is_in_the_example_environment_with_its_default() -> Result<()> {
    let example = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../.env.example"))?;
    let compose =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docker-compose.yml"))?;
    let mut seen = 0;
    for service in ["orders-service", "inventory-service"] {
        // `[env: NAME=]`, and `[default: VALUE]` in the paragraph of the same option.
        let help = Service::command_ok(service, &["run", "--help"], &Env::new()).await?;
        for option in help.split("\n      --").skip(1) {
            let between = |start: &str| Some(option.split_once(start)?.1.split_once(']')?.0);
            let Some(name) = between("[env: ").and_then(|env| env.split('=').next()) else {
                continue;
            };
            seen += 1;
            let default = between("[default: ").unwrap_or_default();
            // The two services listen on ports of their own; their lines say so.
            let line = match name {
                "HTTP_LISTEN" | "OPS_LISTEN" => format!("{name}="),
                _ => format!("#{name}={default}"),
            };
            assert!(example.contains(&line), "{service}: {line:?} is not in .env.example");
            let set_in_images = ["HTTP_LISTEN", "OPS_LISTEN", "ROLES"].contains(&name);
            let passed_on = compose.contains(&format!("  {name}:"));
            assert!(passed_on || set_in_images, "{name} is not in docker-compose.yml");
        }
    }
    assert!(seen > 60, "only {seen} options were found in the help");
    Ok(())
}

#[tokio::test]
async fn configuration_that_cannot_work_is_refused_with_the_reason() -> Result<()> {
    let system = System::start(Options::default()).await?;
    for (variable, value, says) in [
        ("CONSUMER_PREFETCH", "0", "--consumer-prefetch"),
        ("RETRY_DELAYS", "30s,5s", "must grow"),
        ("RETRY_DELAYS", "5s,5s", "must grow"),
        ("RETRY_DELAYS", "soon", "write 300ms"),
        ("RETRY_JITTER_SHARE", "2", "from 0 to 1"),
        ("DATABASE_URL", "mysql://secret-word@nowhere/x", "postgres://user:password@host"),
        ("AMQP_URL", "http://user:secret-word@nowhere", "amqp://user:password@host"),
        ("AMQP_URL", "user:secret-word@nowhere:5672", "amqp://user:password@host"),
        ("RABBITMQ_MANAGEMENT_URL", "user:secret-word@nowhere", "http://user:password@host"),
        ("RELAY_POLL", "0s", "longer than 0"),
        ("OUTBOX_RETENTION", "1000y", "at most 36500d"),
        ("IDEMPOTENCY_RETENTION", "0s", "longer than 0"),
        ("PARKING_RETENTION", "60d", "49 days"),
        ("DATABASE_ACQUIRE_TIMEOUT", "10s", "shorter than --consumer-handle-timeout, 10s"),
        ("AMQP_HEARTBEAT", "1500ms", "--amqp-heartbeat is 1s500ms; AMQP knows whole seconds"),
        ("RELAY_LEASE", "1s", "--relay-lease is 1s; it must be longer than"),
        ("RELAY_LEASE", "25d", "at most 24d"),
        ("READY_RELAY_LAG", "40ms", "it must be longer than --relay-poll, 50ms"),
        ("RELAY_ROW_BACKOFF_MIN", "6m", "not be longer than --relay-row-backoff-max, 5m"),
        ("RETRY_MAX_AGE", "1s", "the 4 attempts of --retry-attempts-transient, which are 1s800ms"),
        ("RETRY_ATTEMPTS_UNKNOWN", "1000000", "--retry-max-age is 1d; it must be longer than"),
        ("RETRY_NOT_YET_DEADLINE", "1d", "shorter than --retry-max-age, 1d"),
        (
            "INBOX_RETENTION",
            "28d",
            "29d, for so long a message can come back: --retry-max-age 1d +",
        ),
        ("PARKING_RETENTION", "40d", "--parking-retention 40d + --redrive-horizon 14d"),
        ("CONSUMER_HANDLE_TIMEOUT", "20s", "must be longer than 30s, for a message in hand"),
        ("CONFIRM_TIMEOUT", "16s", "must be longer than 42s, for a message in hand"),
        ("AMQP_CONNECT_TIMEOUT", "13s", "must be longer than 26s, for a consumer"),
        ("SHUTDOWN_DEADLINE", "5s", "--shutdown-deadline is 5s; it must be longer than"),
        ("ROLES", "cook", "http, relay, consumer"),
        ("FAULT_POINT", "nowhere", "unknown"),
        ("HTTP_LISTEN", &system.orders()?.api("")?.replace("http://", ""), "cannot listen"),
    ] {
        let mut env = system.orders_env.clone();
        env.insert(variable.into(), value.into());
        let output = Service::command("orders-service", &["run"], &env).await?;
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!output.status.success(), "{variable}={value}");
        assert!(said.contains(says), "{variable}={value}: {said}");
        assert!(!said.contains("secret-word"), "{variable}: {said}");
    }
    system.finish().await
}
