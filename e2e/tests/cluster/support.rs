//! What the tests of a cluster need: their turn, a system on the cluster, and customers.

use anyhow::{Context, Result, bail, ensure};
use e2e::child::Patience;
use e2e::ledger::{Expect, Promise};
use e2e::rabbitmq::cluster::{NODES, RabbitCluster};
use e2e::system::{Node, Options, System, answer};
use e2e::wait::until_by;
use reqwest::StatusCode;
use serde_json::json;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

/// The queue of which much is made here: what orders-service publishes waits in it.
pub const QUEUE: &str = "inventory.orders";

/// Longer than elsewhere: the cluster has to notice (10 s by the nodes' ticks), elect, and start parts
/// of itself again, and then a service may just have begun its longest wait before it connects again,
/// 30 s; on a machine with few cores.
pub const DEADLINE: Duration = Duration::from_secs(150);

/// A cluster and the right to run one. Dropped in this order.
pub struct Turn {
    pub cluster: Arc<RabbitCluster>,
    _turn: MutexGuard<'static, ()>,
}

impl Turn {
    /// Waits for the turn, and starts a cluster.
    pub async fn wait() -> Result<Self> {
        // Three nodes are enough for a machine.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
        let turn = ONE_AT_A_TIME.lock().await;
        Ok(Self { cluster: Arc::new(RabbitCluster::start().await?), _turn: turn })
    }

    /// A system on the cluster, with more on the shelf than will be ordered.
    pub async fn system(&self) -> Result<System> {
        let system = System::start(Options {
            rabbitmq: Node::Cluster(self.cluster.clone()),
            env: vec![
                ("AMQP_HEARTBEAT", "2s"),
                ("CONFIRM_TIMEOUT", "2s"),
                // A consumer that is not told finds out that much later.
                ("TOPOLOGY_CHECK_INTERVAL", "5s"),
            ],
            ..Options::default()
        })
        .await?;
        system.set_stock("book-17", 1_000_000).await?;
        Ok(system)
    }

    /// The node with the leader of [`QUEUE`]; see [`Turn::leader_of`].
    pub async fn leader(&self, system: &System) -> Result<usize> {
        self.leader_of(QUEUE, system).await
    }

    /// The node with a queue's leader, once all three replicas run and all nodes name the same: what
    /// one says is some moments old.
    pub async fn leader_of(&self, queue: &str, system: &System) -> Result<usize> {
        let vhost = system.vhost()?;
        until("a leader, and three replicas that run", async || {
            let views = (0..NODES).map(|node| self.cluster.replicas(node, vhost, queue));
            let views = futures_util::future::try_join_all(views).await?;
            let leader = views[0].leader;
            let agreed = views.iter().all(|v| v.leader == leader && v.online.len() == NODES);
            ensure!(agreed, "{views:?}");
            Ok(leader)
        })
        .await
    }
}

/// [`e2e::wait::until`] with the deadline of a cluster.
pub async fn until<T, F>(what: &str, probe: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<Option<T>>>,
{
    until_by(DEADLINE, what, probe).await
}

/// Somebody who places one order after the other, each with an `Idempotency-Key`, and repeats it until
/// it is taken.
pub struct Customer {
    placed: watch::Receiver<usize>,
    enough: watch::Sender<bool>,
    orders: JoinHandle<Result<Vec<String>>>,
    /// See [`Customer::settle_one`].
    settled: Vec<String>,
}

impl Customer {
    pub fn start(system: &System) -> Result<Self> {
        let (http, url) = (system.http.clone(), system.orders()?.api("/orders")?);
        let (count, placed) = watch::channel(0);
        let (enough, stop) = watch::channel(false);
        let orders = tokio::spawn(async move {
            let mut orders = Vec::new();
            // So many a second, and no more: nobody is to be flooded here.
            let mut pace = tokio::time::interval(Duration::from_millis(50));
            pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while !*stop.borrow() {
                pace.tick().await;
                orders.push(place(&http, &url, orders.len()).await?);
                count.send_replace(orders.len());
            }
            Ok(orders)
        });
        Ok(Self { placed, enough, orders, settled: Vec::new() })
    }

    /// Waits until so many more orders were placed.
    pub async fn place_more(&mut self, more: usize) -> Result<()> {
        let until = *self.placed.borrow() + more;
        let placed = self.placed.wait_for(|placed| *placed >= until);
        match tokio::time::timeout(DEADLINE, placed).await {
            Ok(Ok(_)) => Ok(()),
            // Gone, and knows why.
            Ok(Err(_)) => (&mut self.orders).await?.and_then(|_| bail!("the customer has gone")),
            Err(_) => bail!("{more} more orders were not placed"),
        }
    }

    /// Places one more and waits until it is confirmed: events have gone through both queues.
    pub async fn settle_one(&mut self, system: &System) -> Result<()> {
        let order = system.place(&[("book-17", 1)]).await?;
        self.settled.push(order.clone());
        wait_confirmed(system, &[order]).await
    }

    /// Goes home, with the orders.
    async fn stop(self) -> Result<Vec<String>> {
        self.enough.send_replace(true);
        let mut orders = self.orders.await??;
        orders.extend(self.settled);
        Ok(orders)
    }
}

async fn place(http: &reqwest::Client, url: &str, number: usize) -> Result<String> {
    let patience = Patience::new(DEADLINE, format!("order {number} to be taken"));
    loop {
        match try_to_place(http, url, number).await {
            Ok(order) => return Ok(order),
            Err(error) => patience.pause().await.context(format!("{error:#}"))?,
        }
    }
}

async fn try_to_place(http: &reqwest::Client, url: &str, number: usize) -> Result<String> {
    let body = json!({"lines": [{"sku": "book-17", "count": 1}]});
    let request = http.post(url).header("idempotency-key", format!("order-{number}"));
    let order = answer(request.json(&body), StatusCode::CREATED).await?;
    Ok(order["id"].as_str().context("an order without an id")?.to_owned())
}

/// Waits until all of these are confirmed.
pub async fn wait_confirmed(system: &System, orders: &[String]) -> Result<()> {
    until("all orders to be confirmed", async || {
        let query = "SELECT count(*) FROM orders WHERE status = 'confirmed' AND id::text = ANY($1)";
        let confirmed: i64 =
            sqlx::query_scalar(query).bind(orders).fetch_one(&system.orders_db).await?;
        let [ours, theirs] = published(system).await?;
        ensure!(
            confirmed == i64::try_from(orders.len())?,
            "{confirmed} of {} are; {ours} events of orders and {theirs} of the inventory are published",
            orders.len()
        );
        Ok(Some(()))
    })
    .await
    .with_context(|| report(system))
}

/// Waits until both services say that they are ready.
pub async fn wait_ready(system: &System) -> Result<()> {
    until("both services to be ready", async || {
        for service in [system.orders()?, system.inventory()?] {
            let (ready, parts) = service.readiness().await?;
            ensure!(ready, "not ready: {parts}");
        }
        Ok(Some(()))
    })
    .await
    .with_context(|| report(system))
}

/// All is well again: what the customer was promised is confirmed, no other order is there, and
/// everything adds up.
pub async fn finish(mut system: System, cluster: &RabbitCluster, customer: Customer) -> Result<()> {
    let orders = customer.stop().await?;
    cluster.wait_whole().await?;
    wait_confirmed(&system, &orders).await?;
    wait_ready(&system).await?;
    system.reconnect_broker().await?;
    let promise = Promise { lines: BTreeMap::from([("book-17".into(), 1)]), cancelled: false };
    let promised = orders.into_iter().map(|order| (order, promise.clone())).collect();
    let expect = Expect { promised: Some(promised), ..Expect::default() };
    system.rest(&expect, DEADLINE).await?;
    system.finish_expecting(expect).await
}

/// Events that count as published, in both outboxes.
pub async fn published(system: &System) -> Result<[i64; 2]> {
    let count = async |db: &PgPool| -> Result<i64> {
        let query = "SELECT count(*) FROM outbox WHERE published_at IS NOT NULL";
        Ok(sqlx::query_scalar(query).fetch_one(db).await?)
    };
    Ok([count(&system.orders_db).await?, count(&system.inventory_db).await?])
}

/// What the services logged of anything but good messages, of which there are many.
fn report(system: &System) -> String {
    let mut report = String::new();
    for service in system.orders.iter().chain(&system.inventory) {
        let log = service.child.log_tail(usize::MAX);
        let lines = log.lines().filter(|line| !line.contains("\"message handled\""));
        report.extend(lines.map(|line| format!("{line}\n")));
        report.push('\n');
    }
    report
}
