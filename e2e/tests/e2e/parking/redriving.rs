//! What is sent back, what of it stays the same, and in which order.

use super::*;
use crate::support::logged;
use e2e::ledger::Expect;
use e2e::system::Options;
use e2e::wait::until;

#[tokio::test]
async fn a_redriven_message_keeps_its_id_and_trace_begins_anew_and_takes_effect() -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    refuse_reservations(&system).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    wait_depth(&system, PARKING, 1).await?;
    let before = parking_json(&system, &["list"]).await?;
    assert_eq!(before[0]["reason"], "permanent");
    assert_eq!(before[0]["redrives"], 0);
    let full = parking_json(&system, &["show", ids(&before)[0]]).await?;

    // Too early: it fails again, and is parked again as a new failure of the same message.
    parking_ok(&system, &["redrive"]).await?;
    let again = until("it to be parked again", async || {
        let listed = parking_json(&system, &["list"]).await?;
        Ok((listed.len() == 1 && listed[0]["redrives"] == 1).then_some(listed))
    });
    let again = again.await?;
    assert_eq!(ids(&again), ids(&before));
    assert_eq!(again[0]["attempts"], 1);
    assert!(again[0]["redriven_at"].is_string() && again[0]["parked_at"] != before[0]["parked_at"]);

    // Mended. The copy is looked at before the inventory takes it.
    allow_reservations(&system).await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    let redriven = parking_json(&system, &["redrive"]).await?;
    assert_eq!(ids(&redriven), ids(&before));
    wait_depth(&system, PARKING, 0).await?;
    let Some(copy) = system.broker.take(QUEUE).await? else { anyhow::bail!("no copy") };
    assert_eq!(Some(copy.message_id.as_str()), before[0]["message_id"].as_str());
    assert_eq!(full[0]["body"], String::from_utf8(copy.body.clone())?);
    assert_eq!(copy.headers["x-redrive-count"], "2");
    for kept in ["traceparent", "x-aggregate-id", "x-schema-version", "x-original-exchange"] {
        let value = &full[0]["headers"][kept];
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        assert_eq!(copy.headers.get(kept), Some(&value), "{kept}");
    }
    for gone in [
        "x-retry-attempt",
        "x-failure-class",
        "x-failure-class-attempt",
        "x-first-failed-at",
        "x-last-error",
        "x-park-reason",
        "x-parked-at",
        "x-consumer",
        "x-consumer-version",
        "x-producer",
    ] {
        assert!(full[0]["headers"].get(gone).is_some(), "{gone} was not there");
        assert!(!copy.headers.contains_key(gone), "{gone} has stayed");
    }
    let property = |name: &str| full[0]["properties"][name].as_str().map(str::to_owned);
    assert_eq!(property("app_id"), copy.properties.app_id().as_ref().map(ToString::to_string));
    assert_eq!(property("type"), copy.properties.kind().as_ref().map(ToString::to_string));
    system.broker.publish("", QUEUE, copy.properties.clone(), &copy.body).await?;
    system.start_services().await?;
    system.wait_status(&order, "confirmed").await?;
    assert_eq!(system.stock("book-17").await?, (10, 1));
    system.finish().await
}

#[tokio::test]
async fn a_message_that_is_too_old_to_be_retried_is_retried_again_once_it_is_redriven() -> Result<()>
{
    let system = System::start(Options {
        own_inventory_postgres: true,
        env: vec![
            ("RETRY_MAX_AGE", "4s"),
            ("RETRY_NOT_YET_DEADLINE", "3s"),
            ("DATABASE_ACQUIRE_TIMEOUT", "300ms"),
        ],
        ..Options::default()
    })
    .await?;
    system.set_stock("book-17", 10).await?;
    // The audit is in the database that goes away: the redrive happens while it is here.
    refuse_reservations(&system).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    let placed_at = chrono::Utc::now();
    wait_depth(&system, PARKING, 1).await?;
    until_true("the message to be older than a failing one may get", async || {
        Ok(chrono::Utc::now() - placed_at > chrono::TimeDelta::seconds(4))
    })
    .await?;
    allow_reservations(&system).await?;
    // Its first attempt waits for this lock for longer than one may take.
    let mut lock = system.inventory_db.begin().await?;
    sqlx::query("LOCK TABLE stock IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await?;
    parking_ok(&system, &["redrive"]).await?;
    let child = &system.inventory()?.child;
    let retried = crate::support::wait_logged(child, "message will be retried").await?;
    assert_eq!(retried["attempt"], 1);
    lock.rollback().await?;
    system.wait_status(&order, "confirmed").await?;
    assert_eq!(logged(child, "message is parked").len(), 1, "the first time alone");
    system.finish().await
}

#[tokio::test]
async fn of_an_aggregate_the_oldest_version_is_redriven_first_and_none_finds_a_gap() -> Result<()> {
    // One worker: with more of them, each takes a version, and the later may be the faster.
    let mut system = System::start(Options {
        env: vec![("CONSUMER_WORKERS", "1")],
        stopped: true,
        ..Options::default()
    })
    .await?;
    let versions = [("v3", "order.confirmed", 3), ("v2", "order.cancelled", 2)];
    for (id, event_type, version) in versions.into_iter().chain([("v1", "order.created", 1)]) {
        let event = serde_json::to_vec(&event_of("o1", id, event_type, version))?;
        park(&system, with_id(id), &[], &event).await?;
    }
    park_garbage(&system, "garbage").await?;
    system.start_services().await?;
    assert_eq!(ids(&parking_json(&system, &["list"]).await?), ["v3", "v2", "v1", "garbage"]);

    let before = audit(&system).await?.len();
    let (shown, _) = parking_ok(&system, &["redrive", "--dry-run"]).await?;
    let order: Vec<_> = shown.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let place = |id| order.iter().position(|word| *word == id);
    assert!(place("v1") < place("v2") && place("v2") < place("v3"), "{shown}");
    assert!(shown.contains("4 of 4 matching messages would be redriven"), "{shown}");
    // `--max` counts in the order of redriving. And nothing has moved, nor been noted.
    let first = parking_json(&system, &["redrive", "--dry-run", "--max", "2"]).await?;
    assert_eq!(ids(&first), ["v1", "v2"]);
    let mut homeless = system.inventory_env.clone();
    homeless.remove("DATABASE_URL");
    let dry = ["parking", "redrive", "--dry-run", "--json"];
    let dry = Service::command_ok("inventory-service", &dry, &homeless).await?;
    assert_eq!(dry.lines().count(), 4, "a dry run needs no database");
    wait_depth(&system, PARKING, 4).await?;
    assert_eq!(audit(&system).await?.len(), before);

    let redriven = parking_json(&system, &["redrive", "--max", "2"]).await?;
    assert_eq!(ids(&redriven), ["v1", "v2"]);
    let (_, err) = parking_ok(&system, &["redrive", "--aggregate", "o1", "--json"]).await?;
    assert!(err.contains("1 of 1 matching messages are redriven"), "{err}");
    for id in ["v1", "v2", "v3"] {
        system.wait_inbox(id).await?;
    }
    let version: i64 =
        sqlx::query_scalar("SELECT version FROM stream_versions WHERE aggregate_id = 'o1'")
            .fetch_one(&system.inventory_db)
            .await?;
    assert_eq!(version, 3);
    let retried = logged(&system.inventory()?.child, "message will be retried");
    assert!(retried.is_empty(), "{retried:?}");
    // orders-service never had this order: the answers are parked there, which is right.
    system.take_parked("orders.inventory").await?;
    sqlx::query("DELETE FROM outbox").execute(&system.inventory_db).await?;
    let injected = ["v1", "v2", "v3"].map(str::to_owned).to_vec();
    system.finish_expecting(Expect { parked: 1, injected, ..Expect::default() }).await
}

#[tokio::test]
async fn three_messages_that_fail_again_are_touched_three_times_and_the_command_ends() -> Result<()>
{
    let system = System::start(Options::default()).await?;
    for id in ["a", "b", "c"] {
        park_garbage(&system, id).await?;
    }
    let (_, err) = parking_ok(&system, &["redrive", "--json"]).await?;
    assert!(err.contains("3 of 3 matching messages are redriven"), "{err}");
    wait_depth(&system, PARKING, 3).await?;
    assert_eq!(logged(&system.inventory()?.child, "message is parked").len(), 3);
    let listed = parking_json(&system, &["list"]).await?;
    assert!(listed.iter().all(|about| about["redrives"] == 1), "{listed:?}");
    system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await
}

#[tokio::test]
async fn a_message_that_came_after_the_beginning_is_left_to_the_next_run() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    system.start_services().await?;
    for id in ["a", "b"] {
        park_garbage(&system, id).await?;
    }
    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), "redrive.before_publish".into());
    env.insert("FAULT_ACTION".into(), "stop".into());
    let redrive = Service::spawn_command("inventory-service", &["parking", "redrive"], &env)?;
    redrive.wait_frozen(e2e::wait::DEADLINE).await?;
    park_garbage(&system, "late").await?;
    redrive.sigcont()?;
    assert!(redrive.wait_exit(e2e::wait::DEADLINE).await?.success());
    // "a" and "b" fail again and are parked again. None of the three has been touched twice.
    wait_depth(&system, PARKING, 3).await?;
    let listed = parking_json(&system, &["list"]).await?;
    let redrives = |id: &str| {
        listed.iter().find(|about| about["message_id"] == id).map(|about| about["redrives"].clone())
    };
    assert_eq!([redrives("a"), redrives("b")], [Some(json!(1)), Some(json!(1))]);
    assert_eq!(redrives("late"), Some(json!(0)));
    system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await
}
