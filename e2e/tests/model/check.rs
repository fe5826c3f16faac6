//! How scripts are drawn, run, shrunk and told.

use crate::client::{Client, Wish};
use crate::handlers::wanted;
use crate::ledger::Seen;
use crate::mutants::Mutation;
use crate::rules::Rules;
use crate::steps::{Kind, Step, any_step};
use crate::world::{Story, World};
use anyhow::{Result, anyhow, bail};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use shared::config::RetryBackend;
use std::cell::RefCell;
use std::rc::Rc;

/// A test case: who wants what (skus by number, with counts), and what happens, step by step. After
/// it, nothing fails any more.
#[derive(Clone, Debug)]
pub struct Script {
    pub backend: RetryBackend,
    pub orders: Vec<Vec<(usize, i64)>>,
    pub steps: Vec<Step>,
}

/// Where the scripts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chance {
    /// Others in each run, so that many runs see more than one.
    Fresh,
    /// The same in each run. For what must be found, and must not be missed by bad luck.
    Fixed,
}

/// A protocol, as it is or with a rule broken.
pub struct Protocol {
    mutation: Option<Mutation>,
    buckets: Rc<Rules>,
    native: Rc<Rules>,
}

fn any_script() -> impl Strategy<Value = Script> {
    let backend = prop::sample::select(vec![RetryBackend::Buckets, RetryBackend::Native]);
    let order = prop::collection::vec((0usize..3, 1i64..4), 1..3);
    let orders = prop::collection::vec(order, 1..4);
    let steps = prop::collection::vec(any_step(), 0..250);
    (backend, orders, steps).prop_map(|(backend, orders, steps)| Script { backend, orders, steps })
}

impl Protocol {
    pub fn new(mutation: Option<Mutation>) -> Result<Self> {
        let buckets = Rules::new(RetryBackend::Buckets)?;
        Ok(Self { mutation, buckets, native: Rules::new(RetryBackend::Native)? })
    }

    /// Draws scripts of the `allowed` steps and runs each to rest. Says what was seen.
    ///
    /// # Errors
    /// A counter-example, as a story.
    pub fn check(&self, chance: Chance, cases: u32, allowed: fn(Kind) -> bool) -> Result<Seen> {
        let config =
            Config { max_shrink_iters: 2000, failure_persistence: None, ..Config::default() };
        let mut runner = match chance {
            Chance::Fresh => TestRunner::new(Config { cases: cases.max(config.cases), ..config }),
            Chance::Fixed => TestRunner::new_with_rng(
                Config { cases, ..config },
                TestRng::deterministic_rng(RngAlgorithm::ChaCha),
            ),
        };
        let allow = |Script { backend, orders, mut steps }| {
            steps.retain(|Step(kind, ..)| allowed(*kind));
            Script { backend, orders, steps }
        };
        let seen = RefCell::new(Seen::new());
        let ran = runner.run(&any_script().prop_map(allow), |script| {
            let world = self.run(&script);
            let world = world.map_err(|broken| TestCaseError::fail(format!("{broken:#}")))?;
            for (what, times) in world.ledger.seen {
                *seen.borrow_mut().entry(what).or_default() += times;
            }
            Ok(())
        });
        match ran {
            Ok(()) => Ok(seen.into_inner()),
            Err(TestError::Fail(why, script)) => {
                self.replay(&self.spelled_out(script)?)?;
                Err(anyhow!("a script failed once and not again: {why}"))
            }
            Err(TestError::Abort(why)) => Err(anyhow!("aborted: {why}")),
        }
    }

    /// Runs one script.
    ///
    /// # Errors
    /// What it breaks, as a story.
    pub fn replay(&self, script: &Script) -> Result<()> {
        let (broken, story) = self.tell(script)?;
        let Err(broken) = broken else { return Ok(()) };
        let lines = story.lines.join("\n");
        bail!("\n{lines}\n→ {broken:#}\n\n{script:?}\n")
    }

    /// Shrinks further what proptest has shrunk: each piece of work, those at rest included, is spelled
    /// out as the step that it turned out to be; then whatever can be left out is left out.
    fn spelled_out(&self, script: Script) -> Result<Script> {
        let (_, story) = self.tell(&script)?;
        let spelled = Script { steps: story.steps, ..script.clone() };
        let mut least = if self.run(&spelled).is_err() { spelled } else { script };
        let shrink = |least: &mut Script, change: &dyn Fn(&mut Script)| {
            let mut other = least.clone();
            change(&mut other);
            let breaks = self.run(&other).is_err();
            if breaks {
                *least = other;
            }
            breaks
        };
        let mut size = least.steps.len();
        while size > 0 {
            let (before, mut at) = (least.steps.len(), 0);
            while at < least.steps.len() {
                let end = least.steps.len().min(at + size);
                if !shrink(&mut least, &|script| drop(script.steps.drain(at..end))) {
                    at += size;
                }
            }
            // Single steps, as long as that helps.
            size = if size == 1 && least.steps.len() < before { 1 } else { size / 2 };
        }
        for step in 0..least.steps.len() {
            shrink(&mut least, &|script| script.steps[step].2 = 0);
        }
        for order in (0..least.orders.len()).rev() {
            shrink(&mut least, &|script| drop(script.orders.remove(order)));
        }
        Ok(least)
    }

    fn world(&self, script: &Script) -> Result<World> {
        let client = |(number, order): (usize, &Vec<_>)| {
            Ok(Client { order: format!("o{number}"), lines: wanted(order)?, wish: Wish::Open })
        };
        let clients = (1..).zip(&script.orders).map(client).collect::<Result<_>>()?;
        let rules = match script.backend {
            RetryBackend::Buckets => &self.buckets,
            RetryBackend::Native => &self.native,
        };
        Ok(World::new(Rc::clone(rules), self.mutation, clients))
    }

    fn run(&self, script: &Script) -> Result<World> {
        let mut world = self.world(script)?;
        script.steps.iter().try_for_each(|step| world.step(*step).map(drop))?;
        world.rest()?;
        Ok(world)
    }

    fn tell(&self, script: &Script) -> Result<(Result<()>, Story)> {
        let mut world = self.world(script)?;
        world.tell_story();
        world.tell("-", format_args!("retry backend: {:?}", script.backend));
        let steps = script.steps.iter().try_for_each(|step| world.step(*step).map(drop));
        let broken = steps.and_then(|()| world.rest());
        Ok((broken, world.story()))
    }
}
