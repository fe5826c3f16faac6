//! Forgetting: by age and by age alone, in batches, by one process at a time. What comes back after it
//! was forgotten is in `forgotten`.

use crate::support::{logged, text, wait_logged};
use anyhow::Result;
use e2e::proxy::Proxy;
use e2e::servers::Servers;
use e2e::service::{Env, Service};
use e2e::wait::{DEADLINE, until_true};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Transaction};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Notes each batch that deletes something: its transaction, its size, and whether its session holds
/// an advisory lock.
const WATCH_BATCHES: &str = "
    CREATE TABLE batches (tx xid8, tab text, size bigint, locked boolean);
    CREATE FUNCTION note_batch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO batches
        SELECT pg_current_xact_id(), TG_TABLE_NAME, count(*), EXISTS (
            SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND granted)
        FROM gone HAVING count(*) > 0;
        RETURN NULL;
    END $$;
    CREATE TRIGGER note AFTER DELETE ON outbox REFERENCING OLD TABLE AS gone
        FOR EACH STATEMENT EXECUTE FUNCTION note_batch();
    CREATE TRIGGER note AFTER DELETE ON processed_messages REFERENCING OLD TABLE AS gone
        FOR EACH STATEMENT EXECUTE FUNCTION note_batch()";

/// A migrated database, and the environment of processes that have little to do but prune it.
struct Tables {
    db: PgPool,
    env: Env,
}

impl Tables {
    async fn set_up(name: &str, service: &str) -> Result<Self> {
        let servers = Servers::shared().await?;
        let name = format!("forget_{name}_{}", service.replace('-', "_"));
        servers.postgres.create_database(&name).await?;
        let url = servers.postgres.url(&name);
        let env = Env::from(
            [
                ("DATABASE_URL", url.as_str()),
                // Nobody connects there: the API needs no broker.
                ("AMQP_URL", "amqp://nobody:nothing@127.0.0.1:1/none"),
                ("RABBITMQ_MANAGEMENT_URL", "http://nobody:nothing@127.0.0.1:1"),
                ("ROLES", "http"),
                ("HTTP_LISTEN", "127.0.0.1:0"),
                ("OPS_LISTEN", "127.0.0.1:0"),
                ("LOG_FORMAT", "json"),
                ("RETENTION_INTERVAL", "50ms"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        Service::command_ok(service, &["migrate"], &env).await?;
        let db = PgPoolOptions::new().max_connections(3).connect_lazy(&url)?;
        sqlx::raw_sql(WATCH_BATCHES).execute(&db).await?;
        Ok(Self { db, env })
    }

    /// Events of `age`, each of an aggregate of its own; `state` says which of their times are that
    /// long ago.
    async fn outbox(&self, name: &str, rows: i32, age: &str, state: [&str; 2]) -> Result<()> {
        sqlx::query(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type,
                                 exchange, routing_key, payload, created_at, published_at, parked_at)
             SELECT id, 'order', id, 1, 'order.created', 'orders', 'order.created', '{}', at,
                    CASE WHEN 'published' = ANY($4) THEN at END,
                    CASE WHEN 'parked' = ANY($4) THEN at END
             FROM (SELECT format('%s-%s', $1, n) AS id, now() - $3::interval AS at
                   FROM generate_series(1, $2) AS n) AS rows",
        )
        .bind(name)
        .bind(rows)
        .bind(age)
        .bind(&state[..])
        .execute(&self.db)
        .await?;
        Ok(())
    }

    /// Messages that took effect so long ago, the first one first.
    async fn inbox(&self, name: &str, rows: i32, age: &str) -> Result<()> {
        sqlx::query(
            "INSERT INTO processed_messages
             SELECT 'consumer', format('%s-%s', $1, n),
                    now() - $3::interval - make_interval(secs => $2 - n)
             FROM generate_series(1, $2) AS n",
        )
        .bind(name)
        .bind(rows)
        .bind(age)
        .execute(&self.db)
        .await?;
        Ok(())
    }

    /// Keys of so long ago, all of one order.
    async fn keys(&self, name: &str, rows: i32, age: &str) -> Result<()> {
        sqlx::query(
            "WITH placed AS (
                 INSERT INTO orders (id, status, version, created_at, updated_at)
                 VALUES (gen_random_uuid(), 'created', 1, now(), now()) RETURNING id)
             INSERT INTO idempotency_keys (key, request, response, order_id, created_at)
             SELECT format('%s-%s', $1, n), '{}', '{}', id, now() - $3::interval
             FROM placed, generate_series(1, $2) AS n",
        )
        .bind(name)
        .bind(rows)
        .bind(age)
        .execute(&self.db)
        .await?;
        Ok(())
    }

    /// How many rows of each kind are there, by the names they were given.
    async fn kinds(&self, query: &'static str) -> Result<Vec<(String, i64)>> {
        Ok(sqlx::query_as(query).fetch_all(&self.db).await?)
    }

    async fn count(&self, query: &'static str) -> Result<i64> {
        Ok(sqlx::query_scalar(query).fetch_one(&self.db).await?)
    }

    async fn wait_for_none(&self, query: &'static str) -> Result<()> {
        until_true("no old row to be left", async || Ok(self.count(query).await? == 0)).await
    }
}

const OUTBOX_KINDS: &str =
    "SELECT split_part(id, '-', 1), count(*) FROM outbox GROUP BY 1 ORDER BY 1";
const INBOX_KINDS: &str =
    "SELECT split_part(message_id, '-', 1), count(*) FROM processed_messages GROUP BY 1 ORDER BY 1";
const KEY_KINDS: &str =
    "SELECT split_part(key, '-', 1), count(*) FROM idempotency_keys GROUP BY 1 ORDER BY 1";
const OLD_INBOX: &str = "SELECT count(*) FROM processed_messages WHERE message_id LIKE 'old-%'";

/// The value of a counter whose line has all of these in it; 0 if there is none yet.
async fn counter(service: &Service, name: &str, label: &str) -> Result<u64> {
    let metrics = reqwest::get(service.operations("/metrics")).await?.text().await?;
    let line =
        metrics.lines().find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label));
    Ok(line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).unwrap_or(0))
}

#[tokio::test]
async fn each_table_is_pruned_by_age_and_by_age_alone_in_batches() -> Result<()> {
    for service in ["orders-service", "inventory-service"] {
        let tables = Tables::set_up("age", service).await?;
        tables.outbox("old", 2500, "7 days 1 minute", ["published", ""]).await?;
        tables.outbox("young", 5, "6 days 23 hours", ["published", ""]).await?;
        tables.outbox("unpublished", 5, "1 year", ["", ""]).await?;
        tables.outbox("parked", 5, "1 year", ["parked", ""]).await?;
        tables.inbox("old", 2500, "30 days 1 minute").await?;
        tables.inbox("young", 5, "29 days 23 hours").await?;
        if service == "orders-service" {
            tables.keys("old", 2500, "7 days 1 minute").await?;
            tables.keys("young", 5, "6 days 23 hours").await?;
        }

        let process = Service::start(service, &tables.env).await?;
        until_true("a round to be done", async || {
            Ok(counter(&process, "retention_rounds_total", "outcome=\"done\"").await? > 0)
        })
        .await?;
        let kept = |names: &[&str]| -> Vec<(String, i64)> {
            names.iter().map(|name| ((*name).to_owned(), 5)).collect()
        };
        assert_eq!(tables.kinds(OUTBOX_KINDS).await?, kept(&["parked", "unpublished", "young"]));
        assert_eq!(tables.kinds(INBOX_KINDS).await?, kept(&["young"]));
        let mut pruned = vec!["outbox", "processed_messages"];
        if service == "orders-service" {
            assert_eq!(tables.kinds(KEY_KINDS).await?, kept(&["young"]));
            pruned.push("idempotency_keys");
        }
        for table in pruned {
            let label = format!("table=\"{table}\"");
            assert_eq!(counter(&process, "retention_pruned_total", &label).await?, 2500, "{table}");
        }
        let batches: Vec<(String, i64)> =
            sqlx::query_as("SELECT tab, size FROM batches ORDER BY tab, tx")
                .fetch_all(&tables.db)
                .await?;
        let of = |table: &str| [1000, 1000, 500].map(|size| (table.to_owned(), size));
        assert_eq!(batches, [of("outbox"), of("processed_messages")].concat());
        process.stop().await?;
    }
    Ok(())
}

/// A process whose retention waits for a row of its first batch, which the transaction holds.
async fn blocked(
    tables: &Tables,
    service: &str,
) -> Result<(Transaction<'static, Postgres>, Service)> {
    let mut held = tables.db.begin().await?;
    sqlx::query("SELECT FROM processed_messages WHERE message_id = 'old-1' FOR UPDATE")
        .execute(&mut *held)
        .await?;
    let process = Service::start(service, &tables.env).await?;
    until_true("retention to wait for the row", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        Ok(tables.count(waiting).await? == 1)
    })
    .await?;
    Ok((held, process))
}

#[tokio::test]
async fn of_two_replicas_one_prunes_at_a_time_and_the_other_goes_on_when_it_dies() -> Result<()> {
    let tables = Tables::set_up("replicas", "orders-service").await?;
    tables.inbox("old", 2500, "31 days").await?;
    let (held, first) = blocked(&tables, "orders-service").await?;
    let second = Service::start("orders-service", &tables.env).await?;
    until_true("the second to find the first at it", async || {
        Ok(counter(&second, "retention_rounds_total", "outcome=\"elsewhere\"").await? > 0)
    })
    .await?;

    first.child.sigkill()?;
    held.rollback().await?;
    tables.wait_for_none(OLD_INBOX).await?;
    until_true("the second to have pruned", async || {
        Ok(counter(&second, "retention_pruned_total", "table=\"processed_messages\"").await? > 0)
    })
    .await?;
    assert_eq!(tables.count("SELECT sum(size)::bigint FROM batches").await?, 2500);
    assert_eq!(tables.count("SELECT count(*) FROM batches WHERE NOT locked").await?, 0);
    second.stop().await
}

#[tokio::test]
async fn at_sigterm_the_batch_in_hand_is_finished_and_no_other_is_begun() -> Result<()> {
    let tables = Tables::set_up("sigterm", "inventory-service").await?;
    tables.inbox("old", 2500, "31 days").await?;
    let (held, process) = blocked(&tables, "inventory-service").await?;
    process.child.sigterm()?;
    wait_logged(&process.child, "SIGTERM: finishing what is in hand").await?;
    held.rollback().await?;
    assert!(process.child.wait_exit(DEADLINE).await?.success());
    assert_eq!(tables.count(OLD_INBOX).await?, 1500);
    Ok(())
}

#[tokio::test]
async fn a_round_that_fails_is_logged_once_tried_again_and_no_reason_to_be_unready() -> Result<()> {
    let mut tables = Tables::set_up("failing", "orders-service").await?;
    let failed = "old rows were not pruned; the next round tries again";
    // The inbox cannot be pruned; the other tables can.
    sqlx::raw_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN RAISE 'not today'; END $$;
         CREATE TRIGGER refuse BEFORE DELETE ON processed_messages
             FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .execute(&tables.db)
    .await?;
    tables.inbox("old", 1, "31 days").await?;
    tables.outbox("old", 1, "8 days", ["published", ""]).await?;
    tables.keys("old", 1, "8 days").await?;
    let port = Servers::shared().await?.postgres.port();
    let proxy = Proxy::start(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    let url = tables.env["DATABASE_URL"]
        .replace(&format!(":{port}/"), &format!(":{}/", proxy.addr().port()));
    tables.env.insert("DATABASE_URL".into(), url);

    let process = Service::start("orders-service", &tables.env).await?;
    let error = text(&wait_logged(&process.child, failed).await?, "error")?.to_owned();
    assert!(error.contains("processed_messages") && error.contains("not today"), "{error}");
    process.wait_ready().await?;
    tables.wait_for_none("SELECT count(*) FROM outbox").await?;
    tables.wait_for_none("SELECT count(*) FROM idempotency_keys").await?;

    // Nothing can, while the database is away.
    let position = process.child.log_position();
    proxy.cut()?;
    process
        .child
        .wait_for_line_from(position, "that the database is away", DEADLINE, |line| {
            (line.contains(failed) && !line.contains("not today")).then_some(())
        })
        .await?;
    sqlx::query("DROP TRIGGER refuse ON processed_messages").execute(&tables.db).await?;
    proxy.heal()?;
    tables.wait_for_none(OLD_INBOX).await?;
    process.wait_ready().await?;
    let rounds = counter(&process, "retention_rounds_total", "outcome=\"failed\"").await?;
    until_true("one line for each round that failed", async || {
        Ok(logged(&process.child, failed).len() as u64 == rounds)
    })
    .await?;
    process.stop().await
}

#[tokio::test]
async fn a_batch_reads_no_more_than_itself_whatever_the_planner_thinks_of_the_table() -> Result<()>
{
    let tables = Tables::set_up("plans", "orders-service").await?;
    tables.inbox("old", 50_000, "31 days").await?;
    tables.outbox("old", 50_000, "8 days", ["published", ""]).await?;
    let mut db = PgConnection::connect(&tables.env["DATABASE_URL"]).await?;
    // By what it knows here a join over the whole table would be cheapest.
    sqlx::raw_sql("ANALYZE; SET plan_cache_mode = force_generic_plan").execute(&mut db).await?;
    let (week, month) = (Duration::from_secs(7 * 86_400), Duration::from_secs(30 * 86_400));
    assert_eq!(shared::outbox::prune(&mut db, week, 1000).await?, 1000);
    assert_eq!(shared::inbox::prune(&mut db, month, 1000).await?, 1000);
    sqlx::query("SELECT pg_stat_force_next_flush()").execute(&mut db).await?;
    let scanned = "SELECT sum(seq_tup_read)::bigint FROM pg_stat_user_tables
                   WHERE relname IN ('outbox', 'processed_messages')";
    assert_eq!(sqlx::query_scalar::<_, i64>(scanned).fetch_one(&mut db).await?, 0);
    Ok(())
}
