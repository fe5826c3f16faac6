//! Chaos: orders and cancellations, while everything is killed, frozen and cut off at random; then
//! all is healed, people redrive what was parked, and the ledger must balance. Nothing is lost,
//! nothing doubled, nothing stuck.
//!
//! There are two replicas of each service, each with its own ways to its database and the broker, a
//! PostgreSQL for each service, and a RabbitMQ. What is done to them is a [`plan`], which a seed
//! gives: the run can be had again.

pub mod plan;
mod replica;
mod server;

use crate::child::{Child, Patience, lock};
use crate::ledger::books::Side;
use crate::ledger::{Expect, Ledger, Promise, audit, report};
use crate::system::{Node, Options, System};
use crate::trickle::{Directory, PLENTY, Pace, SCARCE, Trickle};
use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use plan::{Blow, Step, Target};
use replica::Replica;
use server::Server;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Once all is healed: reconnecting takes up to 30 s, a message may have all its retries before it,
/// and a thousand of them take their time.
const SETTLED: Duration = Duration::from_secs(300);

/// Time-outs of seconds, so that a freeze of seconds is one past them.
const SHORT: &[(&str, &str)] = &[
    ("AMQP_HEARTBEAT", "2s"),
    ("AMQP_CONNECT_TIMEOUT", "3s"),
    ("CONFIRM_TIMEOUT", "2s"),
    ("CONSUMER_HANDLE_TIMEOUT", "4s"),
    ("DATABASE_ACQUIRE_TIMEOUT", "1s"),
    ("RELAY_LEASE", "4s"),
    ("TOPOLOGY_CHECK_INTERVAL", "5s"),
];

/// What came of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Orders that clients were told of.
    pub orders: usize,
    /// Blows that had their effect, by kind.
    pub blows: BTreeMap<&'static str, usize>,
    /// Messages that ended in parking and were sent back by a person.
    pub redriven: i64,
    /// From the end of the blows until nothing was under way.
    pub settled_in: Duration,
    /// The books at the end.
    pub ledger: Ledger,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blows: Vec<String> =
            self.blows.iter().map(|(kind, count)| format!("{count} × {kind}")).collect();
        writeln!(f, "blows     {}", blows.join(", "))?;
        writeln!(
            f,
            "promised  {} orders, to clients that repeated until they were told",
            self.orders
        )?;
        writeln!(f, "redriven  {} messages", self.redriven)?;
        writeln!(f, "settled   {:.1} s after the last blow", self.settled_in.as_secs_f64())?;
        write!(f, "{}", self.ledger)?;
        writeln!(f, "{}", report::tally(&[]))
    }
}

/// Runs the plan of `seed` for `length`, heals, waits, and balances. `say` hears of each blow.
///
/// # Errors
/// When the ledger does not balance, with the stories behind it; or the harness itself fails.
pub async fn run(seed: u64, length: Duration, say: &(dyn Fn(&str) + Sync)) -> Result<Outcome> {
    let options = Options {
        stopped: true,
        rabbitmq: Node::Own,
        own_orders_postgres: true,
        own_inventory_postgres: true,
        env: SHORT.to_vec(),
        ..Options::default()
    };
    let mut system = System::start(options).await?;
    system.stock_up(&[(PLENTY, 1_000_000), (SCARCE, 50)]).await?;

    let steps = plan::plan(seed, length);
    let of = |target| steps.iter().filter(|s| s.target == target).copied().collect::<Vec<Step>>();
    let replicas = Replicas::default();
    let start = |side, n| Replica::start(&system, side, n, &replicas);
    let mut running = [
        (start(Side::Orders, 1)?, of(Target::Replica(Side::Orders, 1))),
        (start(Side::Orders, 2)?, of(Target::Replica(Side::Orders, 2))),
        (start(Side::Inventory, 1)?, of(Target::Replica(Side::Inventory, 1))),
        (start(Side::Inventory, 2)?, of(Target::Replica(Side::Inventory, 2))),
    ];
    let diary = Diary { began: Instant::now(), say, struck: Mutex::default() };
    let end = diary.at(length);
    let pace = Pace { every: Duration::from_millis(100), seed };
    let trickle = Trickle::start(pace, replicas.directory.clone());

    let [orders, inventory, broker] = [
        Server::Postgres(&system.orders_postgres),
        Server::Postgres(&system.inventory_postgres),
        Server::Broker(&system.rabbitmq),
    ];
    let services =
        try_join_all(running.iter_mut().map(|(replica, steps)| replica.play(steps, &diary, end)));
    tokio::try_join!(
        services,
        orders.play(of(Target::Postgres(Side::Orders)), &diary),
        inventory.play(of(Target::Postgres(Side::Inventory)), &diary),
        broker.play(of(Target::Broker), &diary),
    )?;

    diary.say("all is healed; waiting until nothing is under way");
    let healed = Instant::now();
    system.reconnect_broker().await?;
    let clients = tokio::spawn(trickle.stop());
    let in_peace = healed + 2 * SETTLED; // `settle` ends before
    let promised = {
        // Who still dies now, at a point that it had not come by, is started again.
        let orchestrate =
            try_join_all(running.iter_mut().map(|(r, _)| r.play(&[], &diary, in_peace)));
        tokio::select! {
            ended = orchestrate => ended.map(|_| Err(anyhow::anyhow!("the orchestrators ended first")))?,
            settled = settle(&system, clients) => settled,
        }
    };
    let logs: Vec<&Child> = running.iter().flat_map(|(replica, _)| replica.logs()).collect();
    let promised = match promised {
        Ok(promised) => promised,
        Err(stuck) => {
            system.balance(&Expect::default(), &logs).await.context(format!("{stuck:#}"))?;
            return Err(stuck);
        }
    };
    let settled_in = healed.elapsed();
    for (replica, _) in &running {
        replica.stop().await?;
    }
    let expect = Expect { promised: Some(promised), ..Expect::default() };
    let ledger = system.balance(&expect, &logs).await?;
    ensure!(!ledger.orders.is_empty(), "nobody has placed an order: this proves nothing");
    let blows = lock(&diary.struck).clone();
    ensure!(!blows.is_empty(), "nobody was struck: this proves nothing");
    Ok(Outcome {
        orders: ledger.orders.len(),
        blows,
        redriven: redriven(&system).await?,
        settled_in,
        ledger,
    })
}

/// The people on call do their part until nothing is under way. Returns what the clients were promised.
async fn settle(
    system: &System,
    clients: tokio::task::JoinHandle<Result<BTreeMap<String, Promise>>>,
) -> Result<BTreeMap<String, Promise>> {
    let patience = Patience::new(SETTLED, "everything to be settled");
    loop {
        // Asked first: who has not placed an order yet may do so while the books are read.
        let told = clients.is_finished();
        let attended = system.attend(&Side::BOTH).await?;
        let stuck = audit::under_way(&attended.ledger, &Expect::default());
        if stuck.is_empty() && told {
            return clients.await.context("the clients broke off")?;
        }
        let why =
            || format!("clients wait: {}\n{}{}", !told, report::list(&stuck), attended.complaints);
        patience.pause().await.with_context(why)?;
        // Reading all of the books is work for the servers too.
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

async fn redriven(system: &System) -> Result<i64> {
    let mut sum = 0;
    for side in Side::BOTH {
        let done = "SELECT coalesce(sum(done), 0)::bigint FROM parking_audit";
        sum += sqlx::query_scalar::<_, i64>(done).fetch_one(system.db(side)).await?;
    }
    Ok(sum)
}

/// Not a wait for a condition: the plan says when.
async fn sleep_until(at: Instant) {
    tokio::time::sleep_until(at).await;
}

/// The clock of a run, its narrator, and what has happened.
struct Diary<'a> {
    began: Instant,
    say: &'a (dyn Fn(&str) + Sync),
    struck: Mutex<BTreeMap<&'static str, usize>>,
}

impl Diary<'_> {
    fn at(&self, since: Duration) -> Instant {
        self.began + since
    }

    /// A blow is about to be struck.
    fn note(&self, step: &Step) {
        let lasts = match step.blow {
            Blow::Restart | Blow::DieAt(_) => String::new(),
            _ => format!(" ({:.1} s)", step.lasts.as_secs_f64()),
        };
        self.say(&format!("{}: {}{lasts}", step.target, step.blow));
    }

    /// It had its effect.
    fn count(&self, kind: &'static str) {
        *lock(&self.struck).entry(kind).or_default() += 1;
    }

    fn say(&self, what: &str) {
        (self.say)(&format!("{:7.1} s  {what}", self.began.elapsed().as_secs_f64()));
    }
}

/// Which replicas of the orders API there are, for their clients.
#[derive(Default)]
struct Replicas {
    roots: Mutex<BTreeMap<String, String>>,
    directory: Directory,
}

impl Replicas {
    fn know(&self, name: &str, root: String) {
        self.change(|roots| drop(roots.insert(name.to_owned(), root)));
    }

    fn forget(&self, name: &str) {
        self.change(|roots| drop(roots.remove(name)));
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, String>)) {
        let mut roots = lock(&self.roots);
        change(&mut roots);
        self.directory.lead_to(roots.values().cloned().collect());
    }
}
