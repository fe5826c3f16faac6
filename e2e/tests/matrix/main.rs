//! The kill matrix: every fault point × everything that can be done to a process there, under a
//! trickle of orders. After each blow the ledger must balance.
//!
//! The tests are made of the list of fault points ([`shared::fault::Point::ALL`]), so that a new one
//! is visited without anybody thinking of it: [`route::routes`] does not compile before it says on
//! which way the point lies, and a cell fails if the process does not come by it. Each test is one
//! point in one service on one way through it, and does all six blows, one after the other, to one
//! system: `cargo test --workspace --all-features --test matrix -- consumer.after_commit`.
//! Failed messages wait in retry queues here (`--retry-backend buckets`): with the broker's own delay
//! there is no step between a failure and its reject at which anything is to be lost.

mod blow;
mod route;
mod stage;

use crate::blow::Blow;
use crate::route::{Route, routes};
use crate::stage::Stage;
use anyhow::{Context, Result, ensure};
use e2e::ledger::books::Side;
use libtest_mimic::{Arguments, Failed, Trial};
use shared::fault::Point;
use std::collections::BTreeSet;
use std::process::ExitCode;

/// One test.
#[derive(Clone, Copy)]
struct Row {
    point: Point,
    side: Side,
    route: Route,
}

fn rows() -> impl Iterator<Item = Row> {
    let of_point = |point: &'static Point| {
        let of_route = move |route: &'static Route| {
            let row = move |side: &'static Side| Row { point: *point, side: *side, route: *route };
            route.sides().iter().map(row)
        };
        routes(*point).iter().flat_map(of_route)
    };
    Point::ALL.iter().flat_map(of_point)
}

impl Row {
    fn name(self) -> String {
        format!("{}::{} on the way of {}", self.side, self.point.name(), self.route.name())
    }

    async fn run(self) -> Result<()> {
        let mut stage = Stage::set(self.side, self.route).await?;
        for blow in Blow::ALL {
            let struck = stage.strike(self.point, *blow).await;
            struck.with_context(|| format!("{} at {}", blow.name(), self.name()))?;
        }
        stage.finish().await
    }
}

/// The list and the matrix are one. That a process really comes by each point, the cells see to.
fn every_fault_point_is_visited() -> Result<()> {
    let visited: BTreeSet<&str> = rows().map(|row| row.point.name()).collect();
    let all: BTreeSet<&str> = Point::ALL.iter().map(|point| point.name()).collect();
    ensure!(visited == all, "not visited: {:?}", all.difference(&visited));
    ensure!(all.len() == Point::ALL.len(), "two fault points have one name");
    Ok(())
}

fn block_on(test: impl Future<Output = Result<()>>) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(test).map_err(|error| format!("{error:?}").into())
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // A cell waits, for time-outs mostly: three times as many as there are cores keep them busy.
    arguments.test_threads.get_or_insert_with(|| {
        3 * std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    });
    let mut trials: Vec<Trial> =
        rows().map(|row| Trial::test(row.name(), move || block_on(row.run()))).collect();
    trials.push(Trial::test("every_fault_point_is_visited", || {
        Ok(every_fault_point_is_visited().map_err(|error| format!("{error:?}"))?)
    }));
    libtest_mimic::run(&arguments, trials).exit_code()
}
