//! Telling what is wrong, so that the bug can be found from it.
//!
//! Each finding in a sentence; then, of every order concerned, its story: what happened to it at
//! which hop and when, which queue its messages are in, and what the services logged of them.

use super::audit::{Finding, Kind};
use super::books::{Event, Ledger, Side};
use crate::broker::Seen;
use crate::child::Child;
use crate::system::System;
use chrono::{DateTime, Utc};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

/// The stories told in full. Whoever mends one bug need not read a thousand of its doings.
const STORIES: usize = 5;
/// The lines of a log that are quoted for one order.
const LINES: usize = 40;

/// Which messages are in which queue, as far as it can be looked into.
#[derive(Debug, Default)]
pub struct Places {
    by_message: BTreeMap<String, Vec<String>>,
    unseen: Vec<String>,
}

/// Findings, one a line.
#[must_use]
pub fn list(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("{:<7} {}\n", finding.kind, finding.what)).collect()
}

/// Looks into every queue that holds something, and gives all of it back.
pub async fn look_into_queues(system: &System, ledger: &Ledger) -> Places {
    let mut places = Places::default();
    for queue in ledger.queues.iter().filter(|(_, depth)| **depth > 0).map(|(queue, _)| queue) {
        match system.broker.peek(queue).await {
            Ok(messages) => {
                for message in messages {
                    let place = format!("{queue}{}", account(&message));
                    places.by_message.entry(message.message_id).or_default().push(place);
                }
            }
            Err(error) => places.unseen.push(format!("{queue} cannot be looked into: {error:#}")),
        }
    }
    places
}

/// What the headers of a copy say of its way.
fn account(message: &Seen) -> String {
    let told = ["x-retry-attempt", "x-park-reason", "x-last-error", "x-redrive-count"];
    let told =
        told.iter().filter_map(|name| Some(format!("{name}: {}", message.headers.get(*name)?)));
    let told: Vec<String> = told.collect();
    if told.is_empty() { String::new() } else { format!(" ({})", told.join(", ")) }
}

/// The whole report.
#[must_use]
pub fn tell(ledger: &Ledger, findings: &[Finding], places: &Places, logs: &[&Child]) -> String {
    let mut text = format!("the ledger does not balance: {}\n\n", tally(findings));
    text.push_str(&list(findings));
    for line in &places.unseen {
        let _ = writeln!(text, "        {line}"); // writing to a String never fails
    }
    let orders: BTreeSet<&String> = findings.iter().filter_map(|f| f.order.as_ref()).collect();
    let told: BTreeSet<&String> = orders.iter().take(STORIES).copied().collect();
    for order in &told {
        let _ = write!(text, "\n{}", story(ledger, order, places, logs));
    }
    if orders.len() > STORIES {
        let _ = writeln!(text, "\n… and the stories of {} more orders", orders.len() - STORIES);
    }
    // What is in a queue and in none of the stories.
    let untold = |id: &str| {
        !ledger.events().any(|(_, event)| event.id == id && told.contains(&event.aggregate_id))
    };
    for (place, messages) in by_place(places, untold) {
        let _ = writeln!(text, "\nin {place}: {}", messages.join(", "));
    }
    for log in logs {
        let _ = write!(text, "\n{}", log.report());
    }
    text
}

/// `lost 0, doubled 0, stuck 0, wrong 0`
#[must_use]
pub fn tally(findings: &[Finding]) -> String {
    let count = |kind| findings.iter().filter(|finding| finding.kind == kind).count();
    Kind::ALL.map(|kind| format!("{kind} {}", count(kind))).join(", ")
}

fn by_place(places: &Places, wanted: impl Fn(&str) -> bool) -> BTreeMap<&str, Vec<&str>> {
    let mut by_place: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (id, at) in places.by_message.iter().filter(|(id, _)| wanted(id)) {
        for place in at {
            by_place.entry(place).or_default().push(id);
        }
    }
    by_place
}

/// What happened to an order, hop by hop.
fn story(ledger: &Ledger, id: &str, places: &Places, logs: &[&Child]) -> String {
    let mut text = match ledger.orders.get(id) {
        Some(order) => {
            let lines = order.lines.iter().map(|(sku, count)| format!("{count} {sku}"));
            let lines: Vec<String> = lines.collect();
            format!(
                "order {id}: {} at version {}, {}\n",
                order.status,
                order.version,
                lines.join(", ")
            )
        }
        None => format!("order {id}: not in the orders' database\n"),
    };
    let mut events: Vec<(Side, &Event)> =
        ledger.events().filter(|(_, event)| event.aggregate_id == id).collect();
    events.sort_by_key(|(_, event)| event.created_at);
    for (from, event) in &events {
        let _ = writeln!(text, "  {}", hops(ledger, *from, event, places));
    }
    for ((_, sku), held) in ledger.reservations.iter().filter(|((order, _), _)| order == id) {
        let _ = writeln!(text, "  the inventory has {} {sku} as {}", held.count, held.status);
    }
    let ids: Vec<&str> = events.iter().map(|(_, event)| event.id.as_str()).chain([id]).collect();
    for log in logs {
        let lines = log.log_tail(usize::MAX);
        let about = lines.lines().filter(|line| ids.iter().any(|id| line.contains(id)));
        for line in about.take(LINES) {
            let _ = writeln!(text, "  {} logged {line}", log.name());
        }
    }
    text
}

/// The way of one message.
fn hops(ledger: &Ledger, from: Side, event: &Event, places: &Places) -> String {
    let mut way = format!(
        "{} v{} ({}): written by {from} {}",
        event.event_type,
        event.aggregate_version,
        event.id,
        clock(event.created_at)
    );
    if let Some(error) = &event.last_error {
        let _ = write!(way, "; refused {} times, last: {error}", event.attempts);
    }
    match (event.published_at, event.parked_at) {
        (Some(at), _) => {
            let _ = write!(way, "; published {}", clock(at));
        }
        (None, Some(at)) => {
            let _ = write!(way, "; parked in the outbox {}", clock(at));
        }
        (None, None) => way.push_str("; not published"),
    }
    for place in places.by_message.get(&event.id).into_iter().flatten() {
        let _ = write!(way, "; in {place}");
    }
    match ledger.received(from, event) {
        Some(at) => {
            let _ = write!(way, "; taken in by {} {}", from.receiver(), clock(at));
        }
        None => {
            let _ = write!(way, "; not in the inbox of {}", from.receiver());
        }
    }
    way
}

fn clock(at: DateTime<Utc>) -> impl fmt::Display {
    at.format("%H:%M:%S%.3f")
}

/// The books in a few lines.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut by_status: BTreeMap<&str, usize> = BTreeMap::new();
        for order in self.orders.values() {
            *by_status.entry(&order.status).or_default() += 1;
        }
        let by_status: Vec<String> =
            by_status.iter().map(|(status, count)| format!("{count} {status}")).collect();
        writeln!(f, "orders    {}: {}", self.orders.len(), by_status.join(", "))?;
        let events: Vec<_> = self.events().collect();
        let published = events.iter().filter(|(_, event)| event.published_at.is_some()).count();
        let taken = events.iter().filter(|(from, event)| self.received(*from, event).is_some());
        let taken = taken.count();
        writeln!(
            f,
            "messages  {} written, {published} published, {taken} in their receivers' inboxes",
            events.len()
        )?;
        let holding = self.queues.iter().filter(|(_, depth)| **depth > 0);
        let holding: Vec<String> =
            holding.map(|(queue, depth)| format!("{queue} holds {depth}")).collect();
        let queues = if holding.is_empty() { "all empty".to_owned() } else { holding.join(", ") };
        writeln!(f, "queues    {queues}")?;
        for (sku, stock) in &self.stock {
            writeln!(
                f,
                "stock     {sku}: {} on the shelf, {} reserved",
                stock.available, stock.reserved
            )?;
        }
        Ok(())
    }
}
