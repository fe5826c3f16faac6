//! The scenarios, played with short delays ([`e2e::scenario`]). Each step is
//! checked by the scenario itself, and the ledger in the end; here is what its timeline must say.

use anyhow::{Context, Result, ensure};
use e2e::scenario::{Mark, Out, Pace, Played, Scenario, What};
use std::sync::mpsc;

const BY_THE_INBOX: Mark = Mark::Absorbed("the inbox");
const DELAYS: [&str; 3] = ["300ms", "600ms", "900ms"];

async fn play(name: &str) -> Result<Played> {
    let scenario = Scenario::named(name).context("no such scenario")?;
    let (told, lines) = mpsc::channel();
    let out: Out = Box::new(move |line| {
        let _ = told.send(line.to_owned()); // the receiver is below
    });
    let played = scenario.run(Pace::Short, out).await?;
    for told in lines {
        let wide = told.lines().find(|line| line.chars().count() > 110);
        ensure!(wide.is_none(), "wider than a terminal: {told}");
    }
    Ok(played)
}

fn retried(played: &Played) -> Vec<(&str, &str)> {
    let retried = played.lines.iter().filter_map(|line| match &line.happening.what {
        What::Retried { class, delay, .. } => Some((class.as_str(), delay.as_str())),
        _ => None,
    });
    retried.collect()
}

/// Publishes of the orders' events that no queue took.
fn returned(played: &Played, exchange: &str) -> usize {
    played.count(|what| match what {
        What::Published { exchange: to, queues, .. } => to == exchange && queues.is_empty(),
        _ => false,
    })
}

#[tokio::test]
async fn killed_after_commit_before_ack_the_message_comes_again_and_the_inbox_absorbs_it()
-> Result<()> {
    let played = play("consumer-killed-after-commit").await?;
    assert_eq!(played.marks("created"), [Mark::Repeated, BY_THE_INBOX]);
    assert_eq!(played.ledger.stock["book-17"].reserved, 1);
    Ok(())
}

#[tokio::test]
async fn a_database_away_longer_than_the_retries_parks_the_message_and_a_redrive_settles_it()
-> Result<()> {
    let played = play("database-away-too-long").await?;
    assert_eq!(retried(&played), DELAYS.map(|delay| ("transient", delay)));
    let parked =
        played.lines.iter().find(|line| matches!(line.happening.what, What::Parked { .. }));
    let parked = parked.context("it was parked")?;
    assert_eq!(parked.owner.as_deref(), Some("broker: parking"));
    let id = &parked.happening.message;
    let of_it = played.lines.iter().filter(|line| line.happening.message == *id);
    let deliveries = of_it.filter(|line| match &line.happening.what {
        What::Delivered { queue, .. } => queue == "inventory.orders",
        _ => false,
    });
    assert_eq!(deliveries.count(), 4 + 1, "four attempts, and one after the redrive");
    assert_eq!(played.marks("created"), []);
    Ok(())
}

#[tokio::test]
async fn a_database_back_before_the_retries_end_settles_the_message_without_anybodys_help()
-> Result<()> {
    let played = play("database-back-in-time").await?;
    let retried = retried(&played);
    assert_eq!(retried[..2], [("transient", DELAYS[0]), ("transient", DELAYS[1])]);
    assert_eq!(played.count(|what| matches!(what, What::Parked { .. })), 0);
    Ok(())
}

#[tokio::test]
async fn malformed_json_is_parked_without_a_retry_and_holds_up_nobody() -> Result<()> {
    let played = play("malformed-json").await?;
    assert_eq!(retried(&played), []);
    assert_eq!(played.count(|what| matches!(what, What::Parked { .. })), 1);
    assert_eq!(played.ledger.orders.len(), 2);
    Ok(())
}

#[tokio::test]
async fn a_retry_copy_whose_originals_ack_was_lost_makes_two_deliveries_and_one_effect()
-> Result<()> {
    let played = play("retry-ack-lost").await?;
    // The original again, the copy back; one of them took effect, the other did not.
    let marks = played.marks("created");
    assert_eq!(marks.first(), Some(&Mark::Repeated));
    let absorbed = marks.iter().filter(|mark| **mark == BY_THE_INBOX).count();
    assert_eq!((absorbed, marks.last()), (1, Some(&BY_THE_INBOX)), "{marks:?}");
    assert_eq!(played.ledger.stock["book-17"].reserved, 1);
    Ok(())
}

#[tokio::test]
async fn an_event_that_leads_to_no_queue_stays_in_the_outbox_and_leaves_with_the_same_id()
-> Result<()> {
    let played = play("binding-removed").await?;
    let refused = played.count(|what| matches!(what, What::Refused { .. }));
    assert!(refused >= 3, "{refused}");
    assert_eq!(returned(&played, "orders"), refused);
    // The order's event and its end's, and no other id: the returned one is the published one.
    assert_eq!(played.ledger.of_orders.sent.len(), 2);
    assert_eq!(played.ledger.of_inventory.received.len(), 2);
    Ok(())
}

#[tokio::test]
async fn a_retry_copy_that_leads_to_no_queue_leaves_the_original_unacked_and_nothing_loops()
-> Result<()> {
    let played = play("retry-binding-removed").await?;
    let of_consumer = |what: &What| match what {
        What::SessionFailed { part, error, .. } => {
            part == "consumer" && error.contains("returned the copy")
        }
        _ => false,
    };
    let failed = played.lines.iter().filter(|line| of_consumer(&line.happening.what));
    let began: Vec<i64> = failed.map(|line| line.offset.num_milliseconds()).collect();
    assert!(began.len() >= 3, "{began:?}");
    assert_eq!(returned(&played, "inventory.orders.retry"), began.len());
    // 0.5 s, doubling, each between half of it and the whole.
    assert!(began[1] - began[0] >= 250 && began[2] - began[1] >= 500, "{began:?}");
    Ok(())
}

#[tokio::test]
async fn a_later_event_waits_for_the_earlier_one_that_is_retried_and_both_apply_in_order()
-> Result<()> {
    let played = play("order-violated").await?;
    let (mut of_v1, mut of_v2) = (retried(&played), retried(&played));
    of_v1.retain(|(class, _)| *class == "transient");
    of_v2.retain(|(class, _)| *class == "not_yet");
    assert!(of_v1.len() >= 2 && of_v2.len() >= 2, "{of_v1:?} {of_v2:?}");
    let mut orders: Vec<&str> =
        played.ledger.orders.values().map(|order| order.status.as_str()).collect();
    orders.sort_unstable();
    assert_eq!(orders, ["cancelled", "confirmed"]);
    assert_eq!(played.ledger.stock["book-17"].reserved, 1);
    Ok(())
}

#[tokio::test]
async fn with_parking_unavailable_the_source_queue_keeps_the_message_until_it_is_back() -> Result<()>
{
    let played = play("parking-unavailable").await?;
    let of_it =
        |line: &&e2e::scenario::Line| line.happening.message.as_deref() == Some("not-json-1");
    let owners: Vec<&str> =
        played.lines.iter().filter(of_it).filter_map(|line| line.owner.as_deref()).collect();
    // Brought there, and looked at.
    let parking = ["broker: parking"; 2];
    let way = ["broker: queue", "broker: unacked", "broker: dead letters"];
    assert_eq!(owners, [&way[..], &parking].concat());
    Ok(())
}
