//! What a failure is, as the database and the handler really tell it.

use crate::support::{logged, order_event, publish, wait_logged};
use anyhow::{Context, Result};
use e2e::ledger::Expect;
use e2e::system::{Options, System};
use serde_json::{Value, json};

/// Makes the COMMIT of whatever takes in a message fail with this SQLSTATE.
async fn sabotage_commit(system: &System, sqlstate: &str) -> Result<()> {
    let ddl = format!(
        "DROP FUNCTION IF EXISTS sabotage CASCADE;
         CREATE FUNCTION sabotage() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'sabotaged' USING ERRCODE = '{sqlstate}'; END $$;
         CREATE CONSTRAINT TRIGGER sabotage AFTER INSERT ON processed_messages
         DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION sabotage();"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(ddl)).execute(&system.inventory_db).await?;
    Ok(())
}

#[tokio::test]
async fn a_commit_that_fails_is_of_the_class_that_its_sqlstate_says() -> Result<()> {
    let system = System::start(Options {
        // None of them is to be an outage.
        env: vec![("OUTAGE_AFTER", "100"), ("RETRY_ATTEMPTS_TRANSIENT", "2")],
        ..Options::default()
    })
    .await?;
    let inventory = &system.inventory()?.child;
    let mut injected = Vec::new();
    for (sqlstate, class) in [
        ("40001", "transient"),
        ("40P01", "transient"),
        ("55P03", "transient"),
        ("53100", "transient"),
        ("57014", "transient"),
        ("08006", "transient"),
        ("23514", "permanent"),
        ("22003", "permanent"),
        ("42703", "permanent"),
        ("XX000", "unknown"),
        ("P0001", "unknown"),
    ] {
        sabotage_commit(&system, sqlstate).await?;
        let lines = json!({"lines": [{"sku": "nothing", "count": 1}]});
        let event = order_event(&format!("e{sqlstate}"), "order.created", 3, lines);
        publish(&system, &event).await?;
        let parked = system.take_parked("inventory.orders").await?;
        assert_eq!(parked.headers["x-failure-class"], class, "{sqlstate}");
        let retries: Vec<Value> = logged(inventory, "message will be retried")
            .into_iter()
            .filter(|retry| retry["message_id"] == event["id"])
            .collect();
        let expected = usize::from(class != "permanent");
        assert_eq!(retries.len(), expected, "{sqlstate}: {retries:?}");
        injected.push(event["id"].as_str().context("an id")?.to_owned());
    }
    let committed: i64 = sqlx::query_scalar("SELECT count(*) FROM processed_messages")
        .fetch_one(&system.inventory_db)
        .await?;
    assert_eq!(committed, 0, "nothing of them was committed");
    system.finish_expecting(Expect { injected, ..Expect::default() }).await
}

#[tokio::test]
async fn a_handler_that_panics_is_caught_counted_and_tried_again() -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.stop().await?;
    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), "consumer.before_commit".into());
    env.insert("FAULT_ACTION".into(), "panic".into());
    let inventory = e2e::service::Service::start("inventory-service", &env).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    let retry = wait_logged(&inventory.child, "message will be retried").await?;
    assert_eq!(retry["class"], "unknown");
    assert!(retry["error"].to_string().contains("panicked"), "{retry}");
    system.wait_status(&order, "confirmed").await?;
    let metrics = system.http.get(inventory.operations("/metrics")).send().await?.text().await?;
    let counted = |line: &&str| {
        line.starts_with("consumer_retried_total")
            && line.contains("class=\"unknown\"")
            && line.ends_with(" 1")
    };
    assert_eq!(metrics.lines().filter(counted).count(), 1, "{metrics}");
    system.inventory = Some(inventory);
    assert_eq!(system.stock("book-17").await?, (10, 1));
    system.finish().await
}
