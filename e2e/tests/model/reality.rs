//! The model held against a real PostgreSQL: what it says of the two decisions that are SQL,
//! `inbox::admit` and `outbox::due`, is what they do.
//!
//! A counter-example is a list of messages, or of rows, with what the model expects of them beside
//! what PostgreSQL says.

use crate::gate::Inbox;
use crate::outbox::{Row, due};
use anyhow::{Context, Result};
use chrono::{DateTime, TimeDelta};
use e2e::postgres::Postgres;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use serde_json::json;
use shared::envelope::{Aggregate, Envelope};
use shared::inbox::{Admission, admit};
use shared::outbox;
use sqlx::migrate::Migrator;
use sqlx::{Connection, PgConnection};
use std::cell::RefCell;
use std::fmt::Debug;
use tokio::runtime::Runtime;

static MIGRATIONS: Migrator = sqlx::migrate!("../migrations/orders");

/// A server with one migrated database, and a runtime to ask it by: proptest's closures do not wait.
struct Reality {
    runtime: Runtime,
    // Dropped last.
    postgres: Postgres,
}

impl Reality {
    fn start() -> Result<Self> {
        let runtime = Runtime::new()?;
        let postgres = runtime.block_on(async {
            let postgres = Postgres::start().await?;
            postgres.create_database("model").await?;
            let mut db = PgConnection::connect(&postgres.url("model")).await?;
            MIGRATIONS.run(&mut db).await?;
            anyhow::Ok(postgres)
        })?;
        Ok(Self { runtime, postgres })
    }

    fn connect(&self) -> Result<PgConnection> {
        Ok(self.runtime.block_on(PgConnection::connect(&self.postgres.url("model")))?)
    }

    /// Compares what the model expects of each case with what is.
    fn compare<Case: Debug, Answer: Debug + PartialEq>(
        cases: u32,
        case: &impl Strategy<Value = Case>,
        answers: impl Fn(&Case) -> Result<(Answer, Answer)>,
    ) -> Result<()> {
        let config = Config { failure_persistence: None, ..Config::default() };
        let mut runner = TestRunner::new(Config { cases: cases.max(config.cases), ..config });
        let compared = runner.run(case, |case| {
            let answers = answers(&case).map_err(|error| TestCaseError::fail(format!("{error:#}")));
            let (model, reality) = answers?;
            prop_assert_eq!(&model, &reality, "the model's answer, and PostgreSQL's");
            Ok(())
        });
        match compared {
            Ok(()) => Ok(()),
            Err(TestError::Fail(why, case)) => anyhow::bail!("{case:#?}\n{why}"),
            Err(TestError::Abort(why)) => anyhow::bail!("aborted: {why}"),
        }
    }
}

/// A message: few ids, few streams, few versions, so that they meet.
fn message() -> impl Strategy<Value = Envelope> {
    let types = ["order.created", "order.cancelled", "order.confirmed", "inventory.reserved"];
    (0..8, 0..2, 1i64..5, prop::sample::select(types.to_vec())).prop_map(
        |(id, aggregate, version, event_type)| Envelope {
            id: format!("id-{id}"),
            event_type: event_type.to_owned(),
            schema_version: 1,
            occurred_at: DateTime::UNIX_EPOCH,
            producer: "orders".into(),
            correlation_id: "c".into(),
            causation_id: "c".into(),
            aggregate: Aggregate { kind: "order".into(), id: format!("o{aggregate}"), version },
            data: json!({}),
        },
    )
}

/// As `Consumer::apply` ends the transaction: what took no effect for now, or never must, leaves
/// nothing.
async fn verdict(
    db: &mut PgConnection,
    consumer: &str,
    message: &Envelope,
) -> sqlx::Result<Admission> {
    let mut tx = db.begin().await?;
    let admission = admit(&mut tx, consumer, message).await?;
    match admission {
        Admission::Gap { .. } | Admission::ReusedId => tx.rollback().await?,
        Admission::Admitted | Admission::Duplicate | Admission::Stale => tx.commit().await?,
    }
    Ok(admission)
}

#[test]
fn the_models_inbox_and_gate_say_what_the_real_ones_say() -> Result<()> {
    let reality = Reality::start()?;
    let db = RefCell::new(reality.connect()?);
    let consumers = RefCell::new(0..);
    // Other sequences would seldom meet all of them.
    let seen = RefCell::new(Vec::new());
    Reality::compare(256, &prop::collection::vec(message(), 1..30), |messages| {
        let mut inbox = Inbox::default();
        let model: Vec<Admission> = messages.iter().map(|message| inbox.admit(message)).collect();
        let number = consumers.borrow_mut().next().context("a number")?;
        let consumer = format!("consumer-{number}");
        let verdict =
            |message| reality.runtime.block_on(verdict(&mut db.borrow_mut(), &consumer, message));
        let real = messages.iter().map(verdict).collect::<sqlx::Result<Vec<Admission>>>()?;
        seen.borrow_mut().extend(real.iter().map(std::mem::discriminant));
        Ok((model, real))
    })?;
    for verdict in [
        Admission::Admitted,
        Admission::Duplicate,
        Admission::Stale,
        Admission::Gap { last: None },
        Admission::ReusedId,
    ] {
        let met = seen.borrow().contains(&std::mem::discriminant(&verdict));
        anyhow::ensure!(met, "no message was {verdict:?}");
    }
    Ok(())
}

/// A row, as it is drawn: one of few aggregates, whose events may be written in any order.
#[derive(Clone, Debug)]
struct Drawn {
    aggregate: u8,
    version: i64,
    state: State,
    /// Its transaction commits after all others have, although its `seq` is among theirs.
    late: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    BackingOff,
    Published,
    Parked,
}

impl Drawn {
    fn any() -> impl Strategy<Value = Self> {
        let state = prop_oneof![
            3 => Just(State::Waiting),
            1 => Just(State::BackingOff),
            1 => Just(State::Published),
            1 => Just(State::Parked),
        ];
        (0u8..4, 1i64..5, state, prop::bool::weighted(0.25))
            .prop_map(|(aggregate, version, state, late)| Self { aggregate, version, state, late })
    }

    fn id(&self) -> String {
        format!("o{}-v{}", self.aggregate, self.version)
    }

    /// As the model has it.
    fn row(&self, seq: i64) -> Row {
        let waits = TimeDelta::hours(i64::from(self.state == State::BackingOff));
        Row {
            seq,
            id: self.id(),
            exchange: "orders".into(),
            event_type: "order.created".into(),
            aggregate: ("order".into(), format!("o{}", self.aggregate)),
            version: self.version,
            payload: "{}".into(),
            attempts: 0,
            next_attempt_at: DateTime::UNIX_EPOCH + waits,
            published: self.state == State::Published,
            parked: self.state == State::Parked,
        }
    }

    async fn insert(&self, db: &mut PgConnection) -> sqlx::Result<()> {
        sqlx::query(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type,
                                 exchange, routing_key, payload, next_attempt_at, published_at,
                                 parked_at)
             VALUES ($1, 'order', $2, $3, 'order.created', 'orders', 'order.created', '{}',
                     now() + CASE WHEN $4 THEN interval '1 hour' ELSE interval '0' END,
                     CASE WHEN $5 THEN now() END, CASE WHEN $6 THEN now() END)",
        )
        .bind(self.id())
        .bind(format!("o{}", self.aggregate))
        .bind(self.version)
        .bind(self.state == State::BackingOff)
        .bind(self.state == State::Published)
        .bind(self.state == State::Parked)
        .execute(db)
        .await?;
        Ok(())
    }
}

async fn ids(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<String>> {
    Ok(outbox::due(db, limit).await?.into_iter().map(|row| row.id).collect())
}

#[test]
fn the_models_due_rows_are_the_real_ones_before_and_after_a_late_commit() -> Result<()> {
    let reality = Reality::start()?;
    let db = RefCell::new((reality.connect()?, reality.connect()?));
    let case = (prop::collection::vec(Drawn::any(), 1..16), 1usize..6);
    Reality::compare(256, &case, |(drawn, limit)| {
        // One event for each version, as the table's key has it.
        let once = |(at, row): &(usize, &Drawn)| drawn.iter().take(*at).all(|o| o.id() != row.id());
        let drawn: Vec<&Drawn> =
            drawn.iter().enumerate().filter(once).map(|(_, row)| row).collect();
        let rows: Vec<Row> = (1..).zip(&drawn).map(|(seq, row)| row.row(seq)).collect();
        let late = |row: &Row| drawn.iter().any(|drawn| drawn.late && drawn.id() == row.id);
        let early: Vec<Row> = rows.iter().filter(|row| !late(row)).cloned().collect();
        let model = [&early, &rows].map(|rows| {
            let due = due(rows, DateTime::UNIX_EPOCH, *limit);
            due.into_iter().map(|row| row.id.clone()).collect::<Vec<_>>()
        });

        let (now, later) = &mut *db.borrow_mut();
        let limit = i64::try_from(*limit)?;
        let real = reality.runtime.block_on(async {
            sqlx::query("DELETE FROM outbox").execute(&mut *now).await?;
            let mut open = later.begin().await?;
            for row in drawn {
                row.insert(if row.late { &mut open } else { &mut *now }).await?;
            }
            let before = ids(now, limit).await?;
            open.commit().await?;
            anyhow::Ok([before, ids(now, limit).await?])
        })?;
        Ok((model, real))
    })
}
