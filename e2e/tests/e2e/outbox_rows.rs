//! The relay's step, called by hand on one outbox: whose fault a failure is decides what it costs.
//! Both databases have the same outbox; the step is tried on both.

use crate::support::{order_event, text};
use anyhow::{Context, Result};
use clap::Parser;
use e2e::broker::Broker;
use e2e::servers::Servers;
use e2e::service::{Env, Service};
use lapin::{Connection, ConnectionProperties};
use serde_json::json;
use shared::config::RelayArgs;
use shared::metrics::Metrics;
use shared::publisher::Publisher;
use shared::relay::{Progress, Step};
use shared::topology::declare_topic;
use sqlx::{Connection as _, PgConnection};
use std::time::Duration;

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    relay: RelayArgs,
}

/// An outbox, an exchange `orders`, and a queue `sink` that takes `order.created` from it.
struct Outbox {
    db: PgConnection,
    broker: Broker,
    connection: Connection,
    amqp_url: String,
    step: Step,
    service: &'static str,
    env: Env,
}

impl Outbox {
    async fn set_up(name: &str, service: &'static str, relay: &[&str]) -> Result<Self> {
        let servers = Servers::shared().await?;
        let name = format!("{name}_{}", service.replace('-', "_"));
        servers.postgres.create_database(&name).await?;
        servers.rabbitmq.create_vhost(&name).await?;
        let url = servers.postgres.url(&name);
        let env = Env::from([("DATABASE_URL".to_owned(), url.clone())]);
        Service::command_ok(service, &["migrate"], &env).await?;

        let amqp_url = servers.rabbitmq.amqp_url(&name);
        let broker = Broker::connect(&amqp_url).await?;
        declare_topic(&broker.channel, "orders").await?;
        broker.bind_queue("sink", "orders", "order.created").await?;
        let connection = Connection::connect(&amqp_url, ConnectionProperties::default()).await?;
        let arguments = ["relay"].iter().chain(relay);
        let step = Step {
            publisher: Publisher::open(&connection, Duration::from_secs(30)).await?,
            args: Args::parse_from(arguments).relay,
            metrics: Metrics::new()?,
            one_by_one: false,
        };
        let db = PgConnection::connect(&url).await?;
        Ok(Self { db, broker, connection, amqp_url, step, service, env })
    }

    async fn reconnect(&mut self) -> Result<()> {
        self.connection =
            Connection::connect(&self.amqp_url, ConnectionProperties::default()).await?;
        self.step.publisher = Publisher::open(&self.connection, Duration::from_secs(30)).await?;
        Ok(())
    }

    /// Writes a row; `exchange` and `event_type` decide whether it can be delivered.
    async fn append(&mut self, id: &str, exchange: &str, event_type: &str) -> Result<()> {
        let event = order_event(id, event_type, 3, json!({}));
        self.append_raw(id, exchange, event_type, 1, &event.to_string()).await
    }

    async fn append_raw(
        &mut self,
        id: &str,
        exchange: &str,
        event_type: &str,
        version: i64,
        payload: &str,
    ) -> Result<()> {
        sqlx::query(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type,
                                 exchange, routing_key, payload)
             VALUES ($1, 'order', 'order-of-' || split_part($1, '/', 1), $2, $3, $4, $3, $5::json)",
        )
        .bind(id)
        .bind(version)
        .bind(event_type)
        .bind(exchange)
        .bind(payload)
        .execute(&mut self.db)
        .await?;
        Ok(())
    }

    /// Writes many deliverable rows in one statement.
    async fn append_many(&mut self, prefix: &str, rows: i32) -> Result<()> {
        let event = order_event("ID", "order.created", 3, json!({}));
        sqlx::query(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type,
                                 exchange, routing_key, payload)
             SELECT id, 'order', 'order-of-' || id, 1, 'order.created', 'orders', 'order.created',
                    replace($2, 'ID', id)::json
             FROM (SELECT format('%s-%s', $1, n) AS id FROM generate_series(1, $3) AS n) AS ids",
        )
        .bind(prefix)
        .bind(event.to_string())
        .bind(rows)
        .execute(&mut self.db)
        .await?;
        Ok(())
    }

    async fn unpublished(&mut self) -> Result<Vec<String>> {
        let query = "SELECT id FROM outbox WHERE published_at IS NULL ORDER BY seq";
        Ok(sqlx::query_scalar(query).fetch_all(&mut self.db).await?)
    }

    /// Makes every backed-off row due again, instead of waiting for it.
    async fn all_due(&mut self) -> Result<()> {
        let query = "UPDATE outbox SET next_attempt_at = now() WHERE published_at IS NULL";
        sqlx::query(query).execute(&mut self.db).await?;
        Ok(())
    }

    /// Binds `sink` to what led nowhere until now.
    async fn bind_the_rest(&self) -> Result<()> {
        self.broker.bind_queue("sink", "orders", "order.cancelled").await
    }

    async fn relay(&mut self) -> Result<Progress> {
        self.step.relay_once(&mut self.db).await
    }

    /// Index entries that reading the table has cost so far.
    async fn index_entries_read(&mut self) -> Result<i64> {
        sqlx::query("SELECT pg_stat_force_next_flush()").execute(&mut self.db).await?;
        let query = "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes
                     WHERE relname = 'outbox'";
        Ok(sqlx::query_scalar(query).fetch_one(&mut self.db).await?)
    }

    async fn outbox_command(&self, arguments: &[&str]) -> Result<String> {
        Service::command_ok(self.service, &[&["outbox"], arguments].concat(), &self.env).await
    }
}

#[tokio::test]
async fn an_unroutable_row_is_the_only_one_left_in_fifty_pipelined_batches_of_500() -> Result<()> {
    let mut outbox =
        Outbox::set_up("unroutable", "orders-service", &["--relay-row-attempts", "1000"]).await?;
    outbox.append("stray", "orders", "order.cancelled").await?;
    for batch in 0..50 {
        outbox.append_many(&format!("batch{batch}"), 499).await?;
        outbox.all_due().await?;
        let progress = outbox.relay().await?;
        assert_eq!(progress, Progress { published: 499, refused: 1 }, "batch {batch}");
        assert_eq!(outbox.unpublished().await?, ["stray"], "batch {batch}");
    }

    outbox.bind_the_rest().await?;
    outbox.all_due().await?;
    assert_eq!(outbox.relay().await?, Progress { published: 1, refused: 0 });
    assert_eq!(outbox.broker.depth("sink").await?, 50 * 499 + 1);
    Ok(())
}

#[tokio::test]
async fn a_row_that_spends_its_budget_is_parked_and_holds_back_its_own_aggregate_alone()
-> Result<()> {
    for service in ["orders-service", "inventory-service"] {
        let mut outbox = Outbox::set_up("budget", service, &["--relay-row-attempts", "3"]).await?;
        outbox.append("stray", "orders", "order.cancelled").await?;
        // The next event of the stray's aggregate could be delivered, but must not overtake it.
        let next = order_event("stray/2", "order.created", 3, json!({}));
        outbox.append_raw("stray/2", "orders", "order.created", 2, &next.to_string()).await?;
        outbox.append("not-an-envelope", "orders", "order.created").await?;
        sqlx::query("UPDATE outbox SET payload = '{}' WHERE id = 'not-an-envelope'")
            .execute(&mut outbox.db)
            .await?;
        outbox.append("good", "orders", "order.created").await?;

        assert_eq!(outbox.relay().await?, Progress { published: 1, refused: 2 });
        assert_eq!(outbox.unpublished().await?, ["stray", "stray/2", "not-an-envelope"]);
        // Backed off: not due at once.
        assert_eq!(outbox.relay().await?, Progress::default());
        for _ in 0..2 {
            outbox.all_due().await?;
            assert_eq!(outbox.relay().await?, Progress { published: 0, refused: 2 });
        }
        outbox.all_due().await?;
        assert_eq!(outbox.relay().await?, Progress::default(), "parked rows are not tried");

        let listed = outbox.outbox_command(&["list", "--parked"]).await?;
        let rows: Vec<serde_json::Value> =
            listed.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let ids: Vec<&str> = rows.iter().map(|row| text(row, "id")).collect::<Result<_>>()?;
        assert_eq!(ids, ["stray", "not-an-envelope"]);
        assert!(text(&rows[0], "last_error")?.contains("NO_ROUTE"), "{listed}");

        outbox.bind_the_rest().await?;
        outbox.outbox_command(&["retry", "stray"]).await?;
        assert_eq!(outbox.relay().await?, Progress { published: 1, refused: 0 });
        assert_eq!(outbox.relay().await?, Progress { published: 1, refused: 0 });
        assert_eq!(outbox.unpublished().await?, ["not-an-envelope"]);

        let unknown = Service::command(service, &["outbox", "retry", "stray"], &outbox.env).await?;
        assert!(!unknown.status.success(), "a row that is not parked cannot be retried");
    }
    Ok(())
}

#[tokio::test]
async fn a_row_over_which_the_broker_closes_the_channel_is_found_and_blamed_alone() -> Result<()> {
    let mut outbox = Outbox::set_up("blame", "orders-service", &[]).await?;
    // Larger than the broker takes: it closes the channel with 406, whatever else is in the batch,
    // and does so while the rest of the batch is still being published.
    let mut large = order_event("large", "order.created", 3, json!({}));
    large["data"]["padding"] = json!("x".repeat(2 << 20));
    outbox.append_raw("large", "orders", "order.created", 1, &large.to_string()).await?;
    outbox.append_many("small", 499).await?;

    // As the sessions do: on with a new connection after trouble that may be a row's.
    let mut troubles = 0;
    loop {
        match outbox.relay().await {
            Ok(progress) if progress == Progress::default() => break,
            Ok(_) => {}
            Err(trouble) => {
                troubles += 1;
                assert!(outbox.step.suspects_a_row(&trouble), "{trouble:#}");
                outbox.reconnect().await?;
            }
        }
    }
    assert_eq!(troubles, 2, "one for the batch, one for the row");
    let rows: Vec<(String, i32)> = sqlx::query_as(
        "SELECT id, attempts FROM outbox WHERE published_at IS NULL OR attempts > 0",
    )
    .fetch_all(&mut outbox.db)
    .await?;
    assert_eq!(rows, [("large".to_owned(), 1)]);
    Ok(())
}

#[tokio::test]
async fn a_batch_of_a_backlog_that_the_planner_does_not_expect_reads_that_batch_alone() -> Result<()>
{
    let mut outbox = Outbox::set_up("backlog", "orders-service", &[]).await?;
    // Statistics of the good days: much is published, nothing waits.
    sqlx::query("ALTER TABLE outbox SET (autovacuum_enabled = false)")
        .execute(&mut outbox.db)
        .await?;
    outbox.append_many("published", 20_000).await?;
    sqlx::query("UPDATE outbox SET published_at = now()").execute(&mut outbox.db).await?;
    sqlx::query("VACUUM ANALYZE outbox").execute(&mut outbox.db).await?;
    outbox.append_many("waiting", 20_000).await?;

    let before = outbox.index_entries_read().await?;
    assert_eq!(outbox.relay().await?, Progress { published: 500, refused: 0 });
    let read = outbox.index_entries_read().await? - before;
    // Planned as a join it reads the backlog once for each row: ten million.
    assert!(read < 10_000, "{read} index entries for a batch of 500");
    Ok(())
}

#[tokio::test]
async fn a_low_seq_that_commits_late_is_published() -> Result<()> {
    let mut outbox = Outbox::set_up("late", "orders-service", &[]).await?;
    let mut slow = PgConnection::connect(outbox.env.get("DATABASE_URL").context("a URL")?).await?;
    let mut open = slow.begin().await?;
    let event = order_event("late", "order.created", 3, json!({})).to_string();
    sqlx::query(
        "INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type,
                             exchange, routing_key, payload)
         VALUES ('late', 'order', 'order-of-late', 1, 'order.created', 'orders', 'order.created',
                 $1::json)",
    )
    .bind(event)
    .execute(&mut *open)
    .await?;
    outbox.append("early", "orders", "order.created").await?;
    assert_eq!(outbox.relay().await?, Progress { published: 1, refused: 0 });
    open.commit().await?;
    assert_eq!(outbox.relay().await?, Progress { published: 1, refused: 0 });
    let order: Vec<String> =
        sqlx::query_scalar("SELECT id FROM outbox ORDER BY seq").fetch_all(&mut outbox.db).await?;
    assert_eq!(order, ["late", "early"], "the test must have made the late row the lower one");
    Ok(())
}
