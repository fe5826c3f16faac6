//! What stops a redrive loses nothing.

use super::*;
use e2e::ledger::Expect;
use e2e::system::Options;
use e2e::wait::DEADLINE;
use nix::sys::signal::Signal;

#[tokio::test]
async fn a_queue_that_is_missing_or_full_stops_a_redrive_and_nothing_is_lost() -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    for id in ["a", "b", "c"] {
        park_garbage(&system, id).await?;
    }
    system.broker.delete_queue(QUEUE).await?;
    let said = parking_fails(&system, &["redrive"]).await?;
    for says in ["run 1 ended early, 0 messages", "no queue inventory.orders", "topology apply"] {
        assert!(said.contains(says), "{says:?} is not in {said}");
    }
    wait_depth(&system, PARKING, 3).await?;

    let apply = ["topology", "apply"];
    Service::command_ok("inventory-service", &apply, &system.inventory_env).await?;
    let vhost = system.orders_env["AMQP_URL"].rsplit('/').next().unwrap_or_default().to_owned();
    let url = format!("{}/api/policies/{vhost}/full", system.rabbitmq.management_url());
    let body = json!({"pattern": "^inventory\\.orders$", "apply-to": "queues", "priority": 100,
                      "definition": {"max-length": 1, "overflow": "reject-publish"}});
    let policy = system.http.put(&url).basic_auth("guest", Some("guest")).json(&body);
    policy.send().await?.error_for_status()?;
    until_true("the queue to be full", async || {
        Ok(system.broker.publish("", QUEUE, with_id("filler"), b"").await.is_err())
    })
    .await?;
    let fillers = system.broker.depth(QUEUE).await?;
    let said = parking_fails(&system, &["redrive"]).await?;
    for says in ["run 2 ended early, 0 messages", "inventory.orders took no copy"] {
        assert!(said.contains(says), "{says:?} is not in {said}");
    }
    wait_depth(&system, PARKING, 3).await?;
    assert_eq!(system.broker.depth(QUEUE).await?, fillers);
    let outcomes: Vec<_> =
        audit(&system).await?.into_iter().filter_map(|run| run.outcome).collect();
    assert!(outcomes[0].starts_with("failed: ") && outcomes[0].contains("NO_ROUTE"));
    assert!(outcomes[1].starts_with("failed: ") && outcomes[1].contains("took no copy"));

    let gone = system.http.delete(&url).basic_auth("guest", Some("guest"));
    gone.send().await?.error_for_status()?;
    until_true("the queue to have room", async || {
        Ok(parking(&system, &["redrive"]).await?.status.success())
    })
    .await?;
    // All of it is garbage, and parked again.
    system.start_services().await?;
    wait_depth(&system, PARKING, 3 + fillers).await?;
    system.finish_expecting(Expect { parked: 3 + fillers, ..Expect::default() }).await
}

#[tokio::test]
async fn a_signal_stops_a_run_after_the_message_in_hand_and_the_rest_is_as_before() -> Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let system = System::start(Options::default()).await?;
        for id in ["a", "b", "c"] {
            park_garbage(&system, id).await?;
        }
        // The second message would leave after a hundred seconds.
        let arguments = ["parking", "redrive", "--rate", "0.01", "--by", "the test"];
        let run = Service::spawn_command("inventory-service", &arguments, &system.inventory_env)?;
        until_true("the run to hold all, and the first to be parked again", async || {
            let holds = audit(&system).await?.last().is_some_and(|run| run.matched == Some(3));
            Ok(holds && system.broker.depth(PARKING).await? == 1)
        })
        .await?;
        run.signal(signal)?;
        let status = run.wait_exit(DEADLINE).await?;
        assert_eq!(status.code(), Some(1), "{signal}");
        let said = run.log_tail(usize::MAX);
        assert!(said.contains("interrupted: 1 of 3 matching messages are redriven"), "{said}");
        wait_depth(&system, PARKING, 3).await?;
        let run = Audited {
            action: "redrive".into(),
            who: "the test".into(),
            filter: json!({}),
            max: None,
            rate: Some(0.01),
            matched: Some(3),
            done: 1,
            ended: true,
            outcome: Some("interrupted".into()),
        };
        assert_eq!(audit(&system).await?, [run], "{signal}");
        system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await?;
    }
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_noted_is_not_done() -> Result<()> {
    let system = System::start(Options::default()).await?;
    park_garbage(&system, "a").await?;
    let rename = async |from: &str, to: &str| {
        let sql = format!("ALTER TABLE {from} RENAME TO {to}");
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&system.inventory_db).await
    };
    rename("parking_audit", "elsewhere").await?;
    for arguments in [&["redrive"][..], &["discard", "--id", "a", "--yes"]] {
        let said = parking_fails(&system, arguments).await?;
        assert!(said.contains("the audit cannot be written, so nothing is moved"), "{said}");
    }
    wait_depth(&system, PARKING, 1).await?;
    rename("elsewhere", "parking_audit").await?;

    // And where it goes away in the middle, so does the run end.
    for id in ["b", "c"] {
        park_garbage(&system, id).await?;
    }
    let mut env = system.inventory_env.clone();
    env.insert("FAULT_POINT".into(), "redrive.before_publish".into());
    env.insert("FAULT_ACTION".into(), "stop".into());
    let arguments = ["parking", "redrive", "--rate", "0.9"];
    let run = Service::spawn_command("inventory-service", &arguments, &env)?;
    run.wait_frozen(DEADLINE).await?;
    rename("parking_audit", "elsewhere").await?;
    run.sigcont()?;
    assert_eq!(run.wait_exit(DEADLINE).await?.code(), Some(1));
    let said = run.log_tail(usize::MAX);
    assert!(said.contains("the audit cannot be written"), "{said}");
    wait_depth(&system, PARKING, 3).await?;
    let listed = parking_json(&system, &["list"]).await?;
    let touched = listed.iter().filter(|about| about["redrives"] != 0).count();
    assert!(touched < 3, "{listed:?}");
    rename("elsewhere", "parking_audit").await?;
    system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await
}
