//! A ledger that finds nothing proves nothing: each kind of wrong, done to books that balance, is found.

use super::super::Promise;
use super::super::books::Stock;
use super::*;
use chrono::{DateTime, Utc};
use serde_json::json;

const ORDER: &str = "0190c0de-0000-7000-8000-000000000001";

fn event(id: &str, event_type: &str, schema: u32, version: i64, data: serde_json::Value) -> Event {
    let side = if event_type.starts_with("order.") { "order" } else { "reservation" };
    let producer = if side == "order" { "orders" } else { "inventory" };
    let payload = json!({
        "id": id, "type": event_type, "schema_version": schema,
        "occurred_at": "2026-07-21T09:00:00Z", "producer": producer,
        "correlation_id": "c", "causation_id": "c",
        "aggregate": { "type": side, "id": ORDER, "version": version }, "data": data,
    });
    Event {
        id: id.into(),
        event_type: event_type.into(),
        aggregate_id: ORDER.into(),
        aggregate_version: version,
        created_at: DateTime::<Utc>::UNIX_EPOCH,
        attempts: 0,
        last_error: None,
        published_at: Some(DateTime::<Utc>::UNIX_EPOCH),
        parked_at: None,
        payload: payload.to_string(),
    }
}

fn mail(sent: Vec<Event>, received: &[&str]) -> Mail {
    Mail {
        sent: sent.into_iter().map(|event| (event.id.clone(), event)).collect(),
        received: received.iter().map(|id| ((*id).to_owned(), DateTime::UNIX_EPOCH)).collect(),
    }
}

/// One order of two books, confirmed.
fn balanced() -> Ledger {
    let lines = json!({"lines": [{"sku": "book-17", "count": 2}]});
    let mut held = lines.clone();
    held["order_id"] = json!(ORDER);
    Ledger {
        orders: BTreeMap::from([(
            ORDER.to_owned(),
            Order {
                status: "confirmed".into(),
                version: 2,
                lines: BTreeMap::from([("book-17".to_owned(), 2)]),
            },
        )]),
        reservations: BTreeMap::from([(
            (ORDER.to_owned(), "book-17".to_owned()),
            Reservation { status: "reserved".into(), count: 2 },
        )]),
        stock: BTreeMap::from([("book-17".to_owned(), Stock { available: 10, reserved: 2 })]),
        of_orders: mail(
            vec![
                event("a", "order.created", 3, 1, lines.clone()),
                event("b", "order.confirmed", 1, 2, json!({})),
            ],
            &["a:reserved"],
        ),
        of_inventory: mail(
            vec![event("a:reserved", "inventory.reserved", 1, 1, held)],
            &["a", "b"],
        ),
        queues: BTreeMap::from([("inventory.orders".to_owned(), 0), (PARKING.to_owned(), 0)]),
    }
}

fn promise() -> Promise {
    Promise { lines: BTreeMap::from([("book-17".to_owned(), 2)]), cancelled: false }
}

fn expecting_the_order() -> Expect {
    let promised = BTreeMap::from([(ORDER.to_owned(), promise())]);
    Expect { promised: Some(promised), ..Expect::default() }
}

/// Does something to books that balance, and returns what is found.
fn found<R>(harm: impl FnOnce(&mut Ledger, &mut Expect) -> R) -> Vec<(Kind, String)> {
    let (mut ledger, mut expect) = (balanced(), expecting_the_order());
    harm(&mut ledger, &mut expect);
    match findings(&ledger, &expect) {
        Ok(findings) => findings.into_iter().map(|finding| (finding.kind, finding.what)).collect(),
        Err(error) => vec![(Kind::Wrong, format!("no verdict: {error:#}"))],
    }
}

#[track_caller]
fn assert_found(found: &[(Kind, String)], kind: Kind, what: &str) {
    assert!(
        found.iter().any(|(k, w)| *k == kind && w.contains(what)),
        "no {kind} {what} in {found:?}"
    );
}

#[test]
fn books_that_balance_are_left_alone() {
    assert_eq!(found(|_, _| {}), []);
}

#[test]
fn what_is_nowhere_is_lost() {
    let published = found(|books, _| books.of_inventory.received.remove("b"));
    assert_found(&published, Kind::Lost, "order.confirmed v2");
    let promised = found(|_, expect| {
        expect.promised.get_or_insert_default().insert("another".into(), promise());
    });
    assert_found(&promised, Kind::Lost, "a client was told of order another");
    let cancelled = found(|_, expect| {
        let told = Promise { cancelled: true, ..promise() };
        expect.promised.get_or_insert_default().insert(ORDER.into(), told);
    });
    assert_found(&cancelled, Kind::Lost, "is cancelled, it is confirmed");
    let answer = found(|books, _| books.of_inventory.sent.clear());
    assert_found(&answer, Kind::Lost, "the events of its reservation are [], not [1]");
    let release = found(|books, _| {
        books.orders.values_mut().for_each(|order| order.status = "cancelled".into());
        books.reservations.values_mut().for_each(|held| held.status = "released".into());
    });
    assert_found(&release, Kind::Lost, "the events of its reservation are [1], not [1, 2]");
    let parked = found(|_, expect| expect.parked = 1);
    assert_found(&parked, Kind::Lost, "holds 0 messages, not 1");
    let stock = found(|books, _| {
        books.stock.insert("book-17".into(), Stock { available: 10, reserved: 1 })
    });
    assert_found(&stock, Kind::Lost, "of book-17 1 are reserved, and the reservations add up to 2");
}

#[test]
fn what_took_effect_twice_is_doubled() {
    let order = found(|_, expect| expect.promised = Some(BTreeMap::new()));
    assert_found(&order, Kind::Doubled, "some request made two");
    let stock = found(|books, _| {
        books.stock.insert("book-17".into(), Stock { available: 10, reserved: 4 })
    });
    assert_found(&stock, Kind::Doubled, "of book-17 4 are reserved");
    let answer = found(|books, _| {
        let again = Event { id: "again".into(), ..books.of_inventory.sent["a:reserved"].clone() };
        books.of_inventory.sent.insert("again".into(), again)
    });
    assert_found(&answer, Kind::Doubled, "the events of its reservation are [1, 1], not [1]");
}

#[test]
fn what_does_not_come_to_an_end_is_stuck() {
    let order =
        found(|books, _| books.orders.values_mut().for_each(|o| o.status = "created".into()));
    assert_found(&order, Kind::Stuck, "is still created");
    let change = |change: fn(&mut Event)| {
        found(move |books, _| books.of_orders.sent.values_mut().for_each(change))
    };
    assert_found(&change(|event| event.published_at = None), Kind::Stuck, "unpublished");
    let parked = change(|event| {
        event.published_at = None;
        event.parked_at = Some(DateTime::UNIX_EPOCH);
    });
    assert_found(&parked, Kind::Stuck, "parked in the outbox");
    let queue = found(|books, _| books.queues.insert(PARKING.into(), 1));
    assert_found(&queue, Kind::Stuck, "inventory.orders.parking holds 1");
    // It may be in that queue.
    let waiting = found(|books, _| {
        books.of_inventory.received.remove("b");
        books.queues.insert("inventory.orders".into(), 1);
    });
    assert_found(&waiting, Kind::Stuck, "order.confirmed v2");
}

#[test]
fn what_disagrees_is_wrong() {
    let held = |status: &str, count| Reservation { status: status.into(), count };
    let reservation = |held| {
        found(move |books, _| {
            books.reservations.values_mut().for_each(|r| *r = Reservation::clone(&held))
        })
    };
    assert_found(
        &reservation(held("released", 2)),
        Kind::Wrong,
        "the inventory has 2 book-17 as released",
    );
    assert_found(&reservation(held("reserved", 1)), Kind::Wrong, "the inventory has 1 book-17");
    let unheard = found(|books, _| books.reservations.clear());
    assert_found(&unheard, Kind::Wrong, "has never heard of its book-17");
    let other = found(|_, expect| {
        let told = Promise { lines: BTreeMap::from([("pen-3".to_owned(), 1)]), ..promise() };
        expect.promised.get_or_insert_default().insert(ORDER.into(), told);
    });
    assert_found(&other, Kind::Wrong, "is of {\"pen-3\": 1}, it has {\"book-17\": 2}");
    let oversold =
        found(|books, _| books.stock.insert("book-17".into(), Stock { available: 1, reserved: 2 }));
    assert_found(&oversold, Kind::Wrong, "2 are reserved and 1 there");
    let hole = found(|books, _| books.orders.values_mut().for_each(|order| order.version = 3));
    assert_found(&hole, Kind::Wrong, "is at version 3, its events are [1, 2]");
    let nobody =
        found(|books, _| books.of_orders.received.insert("x".into(), DateTime::UNIX_EPOCH));
    assert_found(&nobody, Kind::Wrong, "nobody sent it");
    let broken =
        found(|books, _| books.of_orders.sent.values_mut().for_each(|e| e.payload = "{}".into()));
    assert_found(&broken, Kind::Wrong, "breaks the contract");
    let unordered = found(|books, _| {
        let held = Reservation { status: "released".into(), count: 1 };
        books.reservations.insert((ORDER.to_owned(), "pen-3".to_owned()), held)
    });
    assert_found(&unordered, Kind::Wrong, "a reservation of pen-3");
    let orphan = found(|books, _| books.orders.clear());
    assert_found(&orphan, Kind::Wrong, "and no such order");
}

#[test]
fn what_a_test_did_on_purpose_is_not_held_against_it() {
    let done = found(|books, expect| {
        books.of_inventory.received.insert("x".into(), DateTime::UNIX_EPOCH);
        books.queues.insert(PARKING.into(), 2);
        *expect = Expect { parked: 2, injected: vec!["x".into()], ..Expect::default() };
    });
    assert_eq!(done, []);
}
