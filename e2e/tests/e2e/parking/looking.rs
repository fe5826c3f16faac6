//! Looking changes nothing.

use super::*;
use clap::Parser;
use e2e::ledger::Expect;
use e2e::system::Options;
use shared::config::{BrokerArgs, ConfirmArgs, TopologyArgs};
use shared::parking::filter::Filter;
use shared::parking::run::Parking;
use shared::topology::{Names, Topology};
use tokio_util::sync::CancellationToken;

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    broker: BrokerArgs,
    #[command(flatten)]
    topology: TopologyArgs,
    #[command(flatten)]
    confirm: ConfirmArgs,
}

#[tokio::test]
async fn looking_a_hundred_times_loses_nothing_and_keeps_the_order() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    for id in ["first", "second", "third"] {
        park_garbage(&system, id).await?;
    }
    let args = Args::parse_from(["look", "--amqp-url", &system.inventory_env["AMQP_URL"]]);
    let names = Names { exchange: "inventory", source: "orders", binding: "order.*", queue: QUEUE };
    let topology = Topology::new(names, args.topology)?;
    let lot = Parking::new(&args.broker, topology, args.confirm);
    for look in 0..100 {
        let stop = CancellationToken::new();
        let found = lot.look(&Filter::default(), 2, None, &stop).await?;
        let ids: Vec<_> = found.messages.iter().map(|m| m.about.message_id.as_deref()).collect();
        assert_eq!(ids, [Some("first"), Some("second")], "look {look}");
        assert_eq!((found.matched, found.looked_at, found.ready), (3, 3, 3), "look {look}");
        assert!(found.messages.iter().all(|m| m.message.delivery.data == b"{not-json}"));
    }
    assert_eq!(ids(&parking_json(&system, &["list"]).await?), ["first", "second", "third"]);
    assert_eq!(parking_json(&system, &["show", "second"]).await?.len(), 1);
    wait_depth(&system, PARKING, 3).await?;
    system.start_services().await?;
    system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await
}

#[tokio::test]
async fn every_filter_finds_its_messages_in_a_table_and_in_json() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    let parked = |reason, class, hours_ago| {
        let at = chrono::Utc::now() - chrono::TimeDelta::hours(hours_ago);
        [
            ("x-park-reason", text(reason)),
            ("x-failure-class", text(class)),
            ("x-last-error", text(&format!("this is why: {reason}"))),
            ("x-parked-at", text(&at.to_rfc3339())),
            ("x-consumer", text(QUEUE)),
            ("x-retry-attempt", AMQPValue::LongInt(4)),
            ("x-redrive-count", AMQPValue::ShortShortUInt(2)),
        ]
    };
    let body = |order, id, event_type, version| {
        serde_json::to_vec(&event_of(order, id, event_type, version))
    };
    let created = body("o1", "m1", "order.created", 1)?;
    park(&system, with_id("m1"), &parked("permanent", "permanent", 30), &created).await?;
    let cancelled = body("o1", "m2", "order.cancelled", 2)?;
    park(&system, with_id("m2"), &parked("gap-deadline", "not_yet", 3), &cancelled).await?;
    let other = body("o2", "m3", "order.created", 1)?;
    park(&system, with_id("m3"), &parked("attempts-exhausted", "transient", 1), &other).await?;
    park_garbage(&system, "m4").await?;

    let half = (chrono::Utc::now() - chrono::TimeDelta::hours(2)).to_rfc3339();
    for (filter, found) in [
        (&[][..], &["m1", "m2", "m3", "m4"][..]),
        (&["--id", "m3"], &["m3"]),
        (&["--id", "m3", "--id", "m1"], &["m1", "m3"]),
        (&["--type", "order.created"], &["m1", "m3"]),
        (&["--aggregate", "o1"], &["m1", "m2"]),
        (&["--class", "transient"], &["m3"]),
        (&["--class", "not_yet"], &["m2"]),
        (&["--reason", "permanent"], &["m1"]),
        (&["--before", "2h"], &["m1", "m2"]),
        (&["--before", &half], &["m1", "m2"]),
        (&["--after", &half], &["m3"]),
        (&["--after", "1d", "--before", "2h"], &["m2"]),
        (&["--aggregate", "o1", "--type", "order.created"], &["m1"]),
        (&["--aggregate", "o2", "--class", "not_yet"], &[]),
        (&["--limit", "3"], &["m1", "m2", "m3"]),
    ] {
        let arguments = [&["list"], filter].concat();
        let listed = parking_json(&system, &arguments).await?;
        assert_eq!(ids(&listed), found, "{filter:?}");
        let (table, _) = parking_ok(&system, &arguments).await?;
        for id in ["m1", "m2", "m3", "m4"] {
            let row = table.lines().any(|line| line.split_whitespace().next() == Some(id));
            assert_eq!(row, found.contains(&id), "{filter:?}, {id}:\n{table}");
        }
    }

    let (table, _) = parking_ok(&system, &["list", "--limit", "1"]).await?;
    let row = table.lines().find(|line| line.contains("m1")).unwrap_or_default();
    for says in ["order.created", "order o1 v1", "permanent", " 4 ", " 2 "] {
        assert!(row.contains(says), "{says:?} is not in\n{table}");
    }
    assert!(table.contains("\n    this is why: permanent\n"), "{table}");
    assert!(table.contains("4 of 4 parked messages match; these are the first 1"), "{table}");
    let (none, _) = parking_ok(&system, &["list", "--id", "m5"]).await?;
    assert_eq!(none, "none of the 4 parked messages match\n");

    let shown = parking_json(&system, &["show", "m2"]).await?;
    let [shown] = &shown[..] else { anyhow::bail!("{shown:?}") };
    assert_eq!(shown["about"]["aggregate_version"], 2);
    assert_eq!(shown["about"]["attempts"], 4);
    assert_eq!(shown["about"]["redrives"], 2);
    assert_eq!(shown["headers"]["x-failure-class"], "not_yet");
    assert_eq!(shown["properties"]["message_id"], "m2");
    assert_eq!(shown["body"], String::from_utf8(cancelled)?);
    let (page, _) = parking_ok(&system, &["show", "m2"]).await?;
    for says in ["gap-deadline", "x-failure-class", "this is why", r#""order.cancelled""#] {
        assert!(page.contains(says), "{says:?} is not in\n{page}");
    }
    let said = parking_fails(&system, &["show", "m5"]).await?;
    assert!(said.contains(r#"none of the 4 messages in inventory.orders.parking has the id "m5""#));

    // Whatever is logged, standard output is for machines.
    let mut loud = system.inventory_env.clone();
    loud.insert("LOG_FILTER".into(), "trace".into());
    let list = ["parking", "list", "--json"];
    let out = Service::command_ok("inventory-service", &list, &loud).await?;
    assert_eq!(out.lines().count(), 4, "{out}");

    // Nothing was taken, whatever was looked for.
    wait_depth(&system, PARKING, 4).await?;
    system.start_services().await?;
    system.finish_expecting(Expect { parked: 4, ..Expect::default() }).await
}

#[tokio::test]
async fn what_a_parked_message_says_of_itself_is_not_believed() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    let forged = [
        ("x-park-reason", text("\u{1b}[2Jnone\r\n\u{7}")),
        ("x-failure-class", text("hopeless")),
        ("x-last-error", AMQPValue::LongInt(5)),
        ("x-parked-at", text("2999-01-01T00:00:00Z")),
        ("x-first-failed-at", text("yesterday")),
        ("x-retry-attempt", AMQPValue::LongLongInt(-3)),
        ("x-redrive-count", AMQPValue::LongLongInt(i64::MAX)),
        ("x-redriven-at", AMQPValue::Boolean(true)),
        ("x-aggregate-id", AMQPValue::Void),
        ("x-first-death-reason", AMQPValue::Timestamp(3)),
    ];
    park(&system, with_id("forged"), &forged, b"\xff\x00").await?;
    // The body's id where the property is missing, and nothing where there is neither.
    let event = serde_json::to_vec(&event_of("o1", "in-the-body", "order.created", 1))?;
    park(&system, BasicProperties::default(), &[], &event).await?;
    park(&system, BasicProperties::default(), &[], b"").await?;

    let listed = parking_json(&system, &["list"]).await?;
    let forged = &listed[0];
    for (field, is) in [
        ("class", json!(null)),
        ("error", json!(null)),
        ("parked_at", json!(null)),
        ("first_failed_at", json!(null)),
        ("redriven_at", json!(null)),
        ("aggregate_id", json!(null)),
        ("attempts", json!(0)),
        ("redrives", json!(0)),
        ("bytes", json!(2)),
    ] {
        assert_eq!(forged[field], is, "{field}: {forged}");
    }
    assert_eq!(listed[1]["message_id"], "in-the-body");
    assert_eq!(listed[2]["message_id"], json!(null));
    let shown = parking_json(&system, &["show", "forged"]).await?;
    assert_eq!(shown[0]["body_hex"], "ff00");
    for arguments in [&["list"][..], &["show", "forged"]] {
        let (page, _) = parking_ok(&system, arguments).await?;
        assert!(page.contains(r"\u{1b}[2Jnone\r\n\u{7}"), "{page:?}");
        assert!(!page.contains('\u{1b}') && !page.contains('\u{7}'), "{page:?}");
    }
    // Sent back, it counts from nothing; it is parked again and is what it was.
    let redriven = parking_json(&system, &["redrive", "--id", "forged"]).await;
    assert!(redriven.is_err(), "the audit's table is not there yet");
    system.start_services().await?;
    parking_json(&system, &["redrive", "--id", "forged"]).await?;
    wait_depth(&system, PARKING, 3).await?;
    let listed = parking_json(&system, &["list", "--id", "forged"]).await?;
    assert_eq!(listed[0]["redrives"], 1);
    assert_eq!(listed[0]["attempts"], 1);
    assert_eq!(listed[0]["class"], "permanent");
    assert_eq!(listed[0]["reason"], "permanent");
    system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await
}

#[tokio::test]
async fn a_message_that_the_broker_parked_itself_is_listed_with_its_reason_and_can_be_redriven()
-> Result<()> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    let order = system.place(&[("book-17", 1)]).await?;
    wait_depth(&system, QUEUE, 1).await?;
    // As a consumer that dies of the message, again and again.
    until_true("the delivery limit to be reached", async || {
        let options = lapin::options::BasicGetOptions::default();
        let got = system.broker.channel.basic_get(QUEUE.into(), options).await?;
        let Some(got) = got else { return Ok(system.broker.depth(PARKING).await? == 1) };
        got.delivery.reject(lapin::options::BasicRejectOptions { requeue: true }).await?;
        Ok(false)
    })
    .await?;

    let listed = parking_json(&system, &["list", "--reason", "delivery_limit"]).await?;
    let [about] = &listed[..] else { anyhow::bail!("{listed:?}") };
    assert_eq!(about["parked_by"], "broker");
    assert_eq!(about["aggregate_id"], order.as_str());
    assert_eq!(about["original_exchange"], "orders");
    assert_eq!(about["original_routing_key"], "order.created");
    assert!(about["parked_at"].is_string(), "{about}");
    assert_eq!(ids(&parking_json(&system, &["list", "--after", "1h"]).await?), ids(&listed));

    parking_ok(&system, &["redrive", "--reason", "delivery_limit"]).await?;
    let copy = system.broker.take(QUEUE).await?;
    let Some(copy) = copy else { anyhow::bail!("nothing came back") };
    assert_eq!(copy.headers["x-original-exchange"], "orders");
    assert_eq!(copy.headers["x-original-routing-key"], "order.created");
    assert!(!copy.headers.keys().any(|name| name.contains("death")), "{:?}", copy.headers);
    system.broker.publish("", QUEUE, copy.properties.clone(), &copy.body).await?;
    system.start_services().await?;
    system.wait_status(&order, "confirmed").await?;
    system.finish().await
}
