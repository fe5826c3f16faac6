//! Clients that do not give up: orders at a steady pace, some of them cancelled, while everything
//! around them fails.
//!
//! A client knows what it may: each request has an `Idempotency-Key` and is repeated, at whichever
//! replica, until it is answered. So the trickle can say what was promised, and the ledger holds the
//! system to it: these orders and no others, of what was ordered, and cancelled if a client was told so.

use crate::child::lock;
use crate::ledger::Promise;
use anyhow::{Context, Result, bail, ensure};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How long one attempt may take; then the client asks somebody else.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// A request that is not answered for so long never will be.
const GIVE_UP: Duration = Duration::from_secs(120);
/// Clients that wait for an answer at one moment.
const CLIENTS: usize = 32;

/// There is plenty of it.
pub const PLENTY: &str = "book-17";
/// There is too little of it for all who want it.
pub const SCARCE: &str = "mug-1";
/// There is no such thing.
const UNKNOWN: &str = "nothing-0";

/// What is done, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Between two orders.
    pub every: Duration,
    /// Decides what is ordered and what is cancelled.
    pub seed: u64,
}

/// Where the replicas of the orders API are at this moment, as their clients know it.
#[derive(Clone, Default)]
pub struct Directory(Arc<Mutex<Vec<String>>>);

impl Directory {
    /// From now on they are at these roots, `http://127.0.0.1:8080` say.
    pub fn lead_to(&self, roots: Vec<String>) {
        *lock(&self.0) = roots;
    }

    fn root(&self, turn: usize) -> Option<String> {
        let roots = lock(&self.0);
        roots.get(turn.checked_rem(roots.len())?).cloned()
    }
}

/// A running trickle.
pub struct Trickle {
    stop: CancellationToken,
    running: tokio::task::JoinHandle<Result<BTreeMap<String, Promise>>>,
}

impl Trickle {
    /// Begins.
    #[must_use]
    pub fn start(pace: Pace, directory: Directory) -> Self {
        let stop = CancellationToken::new();
        let running = tokio::spawn(run(pace, directory, stop.clone()));
        Self { stop, running }
    }

    /// Places no more, waits until every client has its answer, and returns what was promised, by order.
    ///
    /// # Errors
    /// When a client was refused what it must not be, or got no answer for minutes.
    pub async fn stop(self) -> Result<BTreeMap<String, Promise>> {
        self.stop.cancel();
        self.running.await.context("the trickle broke off")?
    }
}

async fn run(
    pace: Pace,
    directory: Directory,
    stop: CancellationToken,
) -> Result<BTreeMap<String, Promise>> {
    let mut luck = StdRng::seed_from_u64(pace.seed);
    let http = Client::builder().timeout(PATIENCE).build()?;
    let mut clients = JoinSet::new();
    let mut promised = BTreeMap::new();
    let mut beat = tokio::time::interval(pace.every);
    while stop.run_until_cancelled(beat.tick()).await.is_some() {
        // All clients waiting is what an outage looks like: no more come then.
        while clients.len() >= CLIENTS
            && let Some(order) = clients.join_next().await
        {
            promised.extend([order.context("a client broke off")??]);
        }
        let client =
            Customer { http: http.clone(), directory: directory.clone(), luck: luck.random() };
        clients.spawn(client.shop(Wish::draw(&mut luck)));
    }
    while let Some(order) = clients.join_next().await {
        promised.extend([order.context("a client broke off")??]);
    }
    Ok(promised)
}

struct Wish {
    lines: BTreeMap<String, i32>,
    cancel: bool,
}

impl Wish {
    fn draw(luck: &mut StdRng) -> Self {
        let lines = match luck.random_range(0..10) {
            0 => vec![(UNKNOWN, 1)],
            1 => vec![(SCARCE, 1)],
            2 => vec![(PLENTY, 2), (SCARCE, 1)],
            _ => vec![(PLENTY, luck.random_range(1..4))],
        };
        let lines = lines.into_iter().map(|(sku, count)| (sku.to_owned(), count)).collect();
        Self { lines, cancel: luck.random_ratio(1, 4) }
    }

    fn body(&self) -> Value {
        let line = |(sku, count): (&String, &i32)| json!({ "sku": sku, "count": count });
        json!({ "lines": self.lines.iter().map(line).collect::<Vec<_>>() })
    }
}

struct Customer {
    http: Client,
    directory: Directory,
    luck: u64,
}

impl Customer {
    /// Places an order and perhaps cancels it; returns its id and what was said of it.
    async fn shop(self, wish: Wish) -> Result<(String, Promise)> {
        let key = ulid::Ulid::generate().to_string();
        let (status, placed) = self
            .ask(|root| {
                let request = self.http.post(format!("{root}/orders"));
                request.header("idempotency-key", &key).json(&wish.body())
            })
            .await?;
        ensure!(status == StatusCode::CREATED, "an order was refused: {status} {placed}");
        let order: Value = serde_json::from_str(&placed).context("a 201 without an order")?;
        let id = order["id"].as_str().context("an order without an id")?.to_owned();
        let mut cancelled = false;
        if wish.cancel {
            let (status, said) =
                self.ask(|root| self.http.post(format!("{root}/orders/{id}/cancel"))).await?;
            // One that is rejected by now cannot be cancelled.
            let fits = matches!(status, StatusCode::OK | StatusCode::CONFLICT);
            ensure!(fits, "cancelling {id} was refused: {status} {said}");
            cancelled = status == StatusCode::OK;
        }
        Ok((id, Promise { lines: wish.lines, cancelled }))
    }

    /// Asks one replica after another until one says yes or no, in full.
    async fn ask(
        &self,
        request: impl Fn(&str) -> reqwest::RequestBuilder,
    ) -> Result<(StatusCode, String)> {
        let asked = std::time::Instant::now();
        let mut turn = usize::try_from(self.luck % 1024)?;
        let mut last = String::from("no replica");
        while asked.elapsed() < GIVE_UP {
            turn = turn.wrapping_add(1);
            if let Some(root) = self.directory.root(turn) {
                match hear(request(&root)).await {
                    // "Something went wrong, and it is not you": a panic is answered so.
                    Ok((status, said)) if status.is_server_error() => {
                        last = format!("{status} {said}");
                    }
                    Ok(answer) => return Ok(answer),
                    Err(error) => last = format!("{error:#}"),
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        bail!("no answer for {GIVE_UP:?}; the last was: {last}")
    }
}

async fn hear(request: reqwest::RequestBuilder) -> reqwest::Result<(StatusCode, String)> {
    let answer = request.send().await?;
    Ok((answer.status(), answer.text().await?))
}
