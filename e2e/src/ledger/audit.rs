//! Judging the books, without touching anything: what is still under way, and what does not add up.

use super::Expect;
use super::books::{Event, Ledger, Mail, Order, Reservation, Side};
use crate::contract::Contract;
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What kind of wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It was there, or was promised, and is nowhere.
    Lost,
    /// It took effect more than once.
    Doubled,
    /// It is somewhere and will not move by itself.
    Stuck,
    /// Two books disagree, or one says what must not be.
    Wrong,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Lost, Self::Doubled, Self::Stuck, Self::Wrong];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Lost => "lost",
            Self::Doubled => "doubled",
            Self::Stuck => "stuck",
            Self::Wrong => "wrong",
        })
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What kind of.
    pub kind: Kind,
    /// The order that it is about, where it is about one.
    pub order: Option<String>,
    /// In a sentence.
    pub what: String,
}

impl Finding {
    fn new(kind: Kind, order: &str, what: String) -> Self {
        Self { kind, order: Some(order.to_owned()), what }
    }

    fn at_large(kind: Kind, what: String) -> Self {
        Self { kind, order: None, what }
    }
}

/// Where tests leave messages on purpose.
const PARKING: &str = "inventory.orders.parking";

/// What is still under way: in a system that is left alone it comes to an end, and what does not is
/// stuck.
#[must_use]
pub fn under_way(ledger: &Ledger, expect: &Expect) -> Vec<Finding> {
    open(ledger, expect, Kind::Stuck)
}

/// Everything that does not add up in a system at rest.
///
/// # Errors
/// When the written contract cannot be read.
pub fn findings(ledger: &Ledger, expect: &Expect) -> Result<Vec<Finding>> {
    // Published, in no inbox, and no queue holds anything at all: then it is nowhere. (A depth counts
    // neither what a consumer has in hand nor what the broker waits to dead-letter. So a system whose
    // processes still run is asked what is under way first.)
    let nothing_waits = ledger.queues.values().all(|depth| *depth == 0);
    let limbo = if nothing_waits { Kind::Lost } else { Kind::Stuck };
    let mut findings = open(ledger, expect, limbo);
    promises(ledger, expect, &mut findings);
    stock(ledger, &mut findings);
    for (id, order) in &ledger.orders {
        lines(ledger, id, order, &mut findings);
    }
    orphans(ledger, expect, &mut findings);
    histories(ledger, expect, &mut findings);
    inboxes(ledger, expect, &mut findings);
    parking(ledger, expect, &mut findings);
    contract(ledger, &mut findings)?;
    findings.sort_by_key(|finding| finding.kind);
    Ok(findings)
}

/// What has not come to an end. `limbo` is what it means for a message to have left its sender and not
/// to have reached its receiver.
fn open(ledger: &Ledger, expect: &Expect, limbo: Kind) -> Vec<Finding> {
    let mut open = Vec::new();
    for (id, order) in &ledger.orders {
        if order.status == "created" {
            open.push(Finding::new(Kind::Stuck, id, format!("order {id} is still created")));
        }
    }
    for (from, event) in ledger.events() {
        let (kind, what) = if event.parked_at.is_some() {
            (Kind::Stuck, format!("is parked in the outbox of {from} ({})", said(event)))
        } else if event.published_at.is_none() {
            (Kind::Stuck, format!("is unpublished in the outbox of {from} ({})", said(event)))
        } else if ledger.received(from, event).is_none() {
            (limbo, format!("is published and not in the inbox of {}", from.receiver()))
        } else {
            continue;
        };
        open.push(Finding::new(kind, &event.aggregate_id, format!("{} {what}", name(event))));
    }
    for (queue, depth) in ledger.queues.iter().filter(|(_, depth)| **depth > 0) {
        let expected = if queue == PARKING { expect.parked } else { 0 };
        // Whether enough are parked is asked in the end; here, whether too many are.
        if *depth > expected {
            open.push(Finding::at_large(Kind::Stuck, format!("{queue} holds {depth} messages")));
        }
    }
    open
}

/// Each order that a client was told of is there, as it was told, and no other.
fn promises(ledger: &Ledger, expect: &Expect, findings: &mut Vec<Finding>) {
    let Some(promised) = &expect.promised else { return };
    for (id, promise) in promised {
        let Some(order) = ledger.orders.get(id) else {
            let what = format!("a client was told of order {id}, and it is not in the database");
            findings.push(Finding::new(Kind::Lost, id, what));
            continue;
        };
        if promise.cancelled && order.status != "cancelled" {
            let what =
                format!("a client was told that order {id} is cancelled, it is {}", order.status);
            findings.push(Finding::new(Kind::Lost, id, what));
        }
        if promise.lines != order.lines {
            let (told, has) = (&promise.lines, &order.lines);
            let what = format!("a client was told that order {id} is of {told:?}, it has {has:?}");
            findings.push(Finding::new(Kind::Wrong, id, what));
        }
    }
    for id in ledger.orders.keys().filter(|id| !promised.contains_key(*id)) {
        let what = format!("order {id} is one that no client was told of: some request made two");
        findings.push(Finding::new(Kind::Doubled, id, what));
    }
}

/// What the stock table says is promised is what the reservations add up to.
fn stock(ledger: &Ledger, findings: &mut Vec<Finding>) {
    let mut held: BTreeMap<&str, i64> = BTreeMap::new();
    for ((_, sku), reservation) in &ledger.reservations {
        if reservation.status == "reserved" {
            *held.entry(sku).or_default() += i64::from(reservation.count);
        }
    }
    for (sku, stock) in &ledger.stock {
        let held = held.remove(sku.as_str()).unwrap_or(0);
        if stock.reserved != held {
            let kind = if stock.reserved > held { Kind::Doubled } else { Kind::Lost };
            findings.push(Finding::at_large(
                kind,
                format!(
                    "of {sku} {} are reserved, and the reservations add up to {held}",
                    stock.reserved
                ),
            ));
        }
        if !(0..=stock.available).contains(&stock.reserved) {
            let what =
                format!("of {sku} {} are reserved and {} there", stock.reserved, stock.available);
            findings.push(Finding::at_large(Kind::Wrong, what));
        }
    }
    for (sku, held) in held {
        let what = format!("{held} {sku} are reserved, and there is no such sku");
        findings.push(Finding::at_large(Kind::Wrong, what));
    }
}

/// An order's end is the inventory's, line by line.
fn lines(ledger: &Ledger, id: &str, order: &Order, findings: &mut Vec<Finding>) {
    for (sku, count) in &order.lines {
        let held = ledger.reservations.get(&(id.to_owned(), sku.clone()));
        let agrees = match (order.status.as_str(), held) {
            ("confirmed", Some(Reservation { status, count: n })) => {
                status == "reserved" && n == count
            }
            ("rejected", Some(held)) => held.status == "rejected",
            ("cancelled", Some(held)) => held.status != "reserved",
            // What is still open is under way, which has been said.
            ("created", _) => true,
            _ => false,
        };
        if !agrees {
            let has = match held {
                Some(held) => format!("has {} {sku} as {}", held.count, held.status),
                None => format!("has never heard of its {sku}"),
            };
            let what =
                format!("order {id} is {} with {count} {sku}, the inventory {has}", order.status);
            findings.push(Finding::new(Kind::Wrong, id, what));
        }
    }
}

/// Nothing is noted for what nobody ordered.
fn orphans(ledger: &Ledger, expect: &Expect, findings: &mut Vec<Finding>) {
    for (id, sku) in ledger.reservations.keys() {
        let ordered = match ledger.orders.get(id) {
            Some(order) => order.lines.contains_key(sku),
            // Where nobody kept count, a test may have published an order that is none.
            None => expect.promised.is_none(),
        };
        if !ordered {
            let what =
                format!("the inventory has a reservation of {sku} for order {id}, which has none");
            findings.push(Finding::new(Kind::Wrong, id, what));
        }
    }
}

/// Every change of an order and of its reservation has its one event.
fn histories(ledger: &Ledger, expect: &Expect, findings: &mut Vec<Finding>) {
    let (mut versions, mut answers) = (versions(&ledger.of_orders), versions(&ledger.of_inventory));
    for (id, order) in &ledger.orders {
        let versions = versions.remove(id.as_str()).unwrap_or_default();
        if versions != (1..=order.version).collect::<Vec<_>>() {
            let what =
                format!("order {id} is at version {}, its events are {versions:?}", order.version);
            findings.push(Finding::new(Kind::Wrong, id, what));
        }
        // A yes or a no, and that the yes is taken back.
        let released = order.lines.keys().any(|sku| {
            let held = ledger.reservations.get(&(id.clone(), sku.clone()));
            held.is_some_and(|held| held.status == "released")
        });
        let told = answers.remove(id.as_str()).unwrap_or_default();
        let due = if released { vec![1, 2] } else { vec![1] };
        // What is still open is under way, which has been said.
        if order.status != "created" && told != due {
            let kind = if told.len() > due.len() { Kind::Doubled } else { Kind::Lost };
            let what = format!(
                "order {id} is {}, the events of its reservation are {told:?}, not {due:?}",
                order.status
            );
            findings.push(Finding::new(kind, id, what));
        }
    }
    // Where nobody kept count, a test may have written into the outbox itself.
    for (id, versions) in versions.into_iter().filter(|_| expect.promised.is_some()) {
        let what = format!("there are events {versions:?} of order {id}, and no such order");
        findings.push(Finding::new(Kind::Wrong, id, what));
    }
}

/// The versions of each aggregate that its events tell, in order.
fn versions(mail: &Mail) -> BTreeMap<&str, Vec<i64>> {
    let mut versions: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for event in mail.sent.values() {
        versions.entry(&event.aggregate_id).or_default().push(event.aggregate_version);
    }
    versions.values_mut().for_each(|versions| versions.sort_unstable());
    versions
}

/// Nothing was taken in that nobody sent.
fn inboxes(ledger: &Ledger, expect: &Expect, findings: &mut Vec<Finding>) {
    let injected: BTreeSet<&String> = expect.injected.iter().collect();
    for from in [Side::Orders, Side::Inventory] {
        let sent = &ledger.mail(from).sent;
        let received = ledger.mail(from.receiver()).received.keys();
        for id in received.filter(|id| !sent.contains_key(*id) && !injected.contains(id)) {
            let what = format!("{} has taken in {id}, and nobody sent it", from.receiver());
            findings.push(Finding::at_large(Kind::Wrong, what));
        }
    }
}

/// What was to be parked is.
fn parking(ledger: &Ledger, expect: &Expect, findings: &mut Vec<Finding>) {
    let depth = ledger.queues.get(PARKING).copied().unwrap_or(0);
    if depth < expect.parked {
        let what = format!("{PARKING} holds {depth} messages, not {}", expect.parked);
        findings.push(Finding::at_large(Kind::Lost, what));
    }
}

/// Every event is what the written contract says.
fn contract(ledger: &Ledger, findings: &mut Vec<Finding>) -> Result<()> {
    let contract = Contract::load()?;
    for (_, event) in ledger.events() {
        let checked = serde_json::from_str(&event.payload)
            .map_err(anyhow::Error::from)
            .and_then(|envelope| contract.check(&envelope));
        if let Err(broken) = checked {
            let what = format!("{} breaks the contract: {broken:#}", name(event));
            findings.push(Finding::new(Kind::Wrong, &event.aggregate_id, what));
        }
    }
    Ok(())
}

/// An event, as people speak of it.
fn name(event: &Event) -> String {
    let Event { id, event_type, aggregate_id, aggregate_version, .. } = event;
    format!("{event_type} v{aggregate_version} of order {aggregate_id} ({id})")
}

fn said(event: &Event) -> String {
    match &event.last_error {
        Some(error) => format!("refused {} times, last: {error}", event.attempts),
        None => "never refused".to_owned(),
    }
}

#[cfg(test)]
mod tests;
