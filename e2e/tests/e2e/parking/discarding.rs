//! Thrown away is what somebody meant, and there is a record of it.

use super::*;
use e2e::system::Options;

#[tokio::test]
async fn discard_takes_a_filter_and_a_yes_and_leaves_a_record_that_can_be_published_again()
-> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    refuse_reservations(&system).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    wait_depth(&system, PARKING, 1).await?;
    for id in ["a", "b"] {
        park_garbage(&system, id).await?;
    }
    for (arguments, says) in [
        (&["discard"][..], "at least one filter"),
        (&["discard", "--yes"], "at least one filter"),
        (&["discard", "--yes", "--max", "1"], "at least one filter"),
        (&["discard", "--dry-run"], "at least one filter"),
        (&["discard", "--id", "a"], "then say --yes"),
        (&["discard", "--id", "a", "--yes", "--rate", "5"], "--rate"),
    ] {
        let said = parking_fails(&system, arguments).await?;
        assert!(said.contains(says), "{arguments:?}: {said}");
    }
    let dry = parking_json(&system, &["discard", "--id", "a", "--dry-run"]).await?;
    assert_eq!(ids(&dry), ["a"]);
    wait_depth(&system, PARKING, 3).await?;
    assert!(audit(&system).await?.is_empty());

    let of_order = ["discard", "--aggregate", &order, "--yes", "--by", "operator"];
    let record = parking_json(&system, &of_order).await?;
    let [record] = &record[..] else { anyhow::bail!("{record:?}") };
    let (out, err) = parking_ok(&system, &["discard", "--id", "a", "--yes"]).await?;
    assert_eq!(out, "1 of 1 matching messages are discarded (run 2)\n", "{err}");
    let expected = Audited {
        action: "discard".into(),
        who: "operator".into(),
        filter: json!({ "aggregate": order }),
        max: None,
        rate: None,
        matched: Some(1),
        done: 1,
        ended: true,
        outcome: Some("finished".into()),
    };
    assert_eq!(audit(&system).await?[0], expected);
    assert_eq!(ids(&parking_json(&system, &["list"]).await?), ["b"]);

    // The record is all that is left of the order's event, and it is enough.
    allow_reservations(&system).await?;
    let id = record["properties"]["message_id"].as_str().unwrap_or_default();
    let body = record["body"].as_str().unwrap_or_default();
    system.broker.publish("", QUEUE, with_id(id), body.as_bytes()).await?;
    system.wait_status(&order, "confirmed").await?;
    parking_ok(&system, &["discard", "--before", "1s", "--reason", "x", "--yes"]).await?;
    parking_ok(&system, &["discard", "--id", "b", "--yes"]).await?;
    system.finish().await
}

#[tokio::test]
async fn what_cannot_be_recorded_is_not_discarded() -> Result<()> {
    let system = System::start(Options::default()).await?;
    park_garbage(&system, "a").await?;
    // A reader that is gone, as of a pipe whose other end failed.
    let service = e2e::servers::binary("inventory-service")?;
    let output = tokio::process::Command::new("bash")
        .args(["-c", r#""$0" parking discard --id a --yes --json > /dev/full"#])
        .arg(service)
        .envs(&system.inventory_env)
        .output()
        .await?;
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("No space left"), "{said}");
    wait_depth(&system, PARKING, 1).await?;
    parking_ok(&system, &["discard", "--id", "a", "--yes"]).await?;
    system.finish().await
}
