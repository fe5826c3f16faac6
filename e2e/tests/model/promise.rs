//! The promise, of the protocol as it is.

use crate::check::{Chance, Protocol, Script};
use crate::mutants::Mutation;
use crate::rules::Side;
use crate::steps::{Kind, Step};
use anyhow::{Result, ensure};
use shared::config::RetryBackend;

#[test]
fn whatever_happens_nothing_is_lost_nothing_happens_twice_and_all_comes_to_its_end() -> Result<()> {
    Protocol::new(None)?.check(Chance::Fresh, 1500, |_| true).map(drop)
}

/// A script that was found once, kept.
#[test]
fn a_cancel_that_overtakes_its_order_waits_for_it() -> Result<()> {
    let steps = vec![
        Step(Kind::Place, Side::Orders, 0),
        Step(Kind::CommitOrder, Side::Orders, 0),
        Step(Kind::Claim, Side::Orders, 0),
        Step(Kind::Publish, Side::Orders, 0),
        Step(Kind::Mark, Side::Orders, 0),
        Step(Kind::Cancel, Side::Orders, 0),
        Step(Kind::Claim, Side::Orders, 0),
        Step(Kind::Publish, Side::Orders, 0),
        Step(Kind::Deliver, Side::Inventory, 1),
    ];
    for backend in [RetryBackend::Buckets, RetryBackend::Native] {
        let script = Script { backend, orders: vec![vec![(0, 1)]], steps: steps.clone() };
        Protocol::new(None)?.replay(&script)?;
        let without = Protocol::new(Some(Mutation::NoGate))?.replay(&script);
        ensure!(without.is_err(), "without the gate it is found out no more");
    }
    Ok(())
}

/// A check that never gets there proves nothing.
#[test]
fn the_check_gets_everywhere() -> Result<()> {
    let seen = Protocol::new(None)?.check(Chance::Fixed, 600, |_| true)?;
    let kinds = Kind::ALL.iter().map(|(kind, _)| kind.name()).filter(|kind| *kind != "Work");
    let outcomes = ["applied", "duplicate", "stale", "rejected"];
    let failures = ["transient", "not_yet", "unknown", "outage"];
    let parked = ["permanent", "attempts-exhausted", "gap-deadline", "too-old"];
    let others = ["parked by the broker", "row refused", "row parked"];
    for what in kinds.chain(outcomes).chain(failures).chain(parked).chain(others) {
        ensure!(seen.contains_key(what), "never seen: {what}");
    }
    Ok(())
}
