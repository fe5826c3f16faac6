//! A TCP proxy between a service and a server: the network that fails on demand.
//!
//! It runs on a thread and a runtime of its own, so that a test may freeze or end without stopping
//! it. Every control returns when it is in force: after [`Proxy::cut`] no old connection carries
//! another byte. The ways to fail differ in what the services see: a cut is noticed at once, a
//! black hole only by timeouts and heartbeats, a delay not at all; and of a request whose answer is
//! lost they do not know whether it was done, which it was.

mod pump;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime,
    sync::{mpsc as tasks, watch},
    task::JoinSet,
};

use crate::{child::Patience, ports};

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the service to the server: its requests, its publishes.
    ToServer,
    /// From the server to the service: replies, confirms, deliveries.
    ToClient,
    /// Both ways.
    Both,
}

/// What one direction does to the bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    hole: bool,
    loss: bool,
    delay: Duration,
}

#[derive(Debug, Clone, Copy, Default)]
struct Rules {
    cut: bool,
    to_server: Lane,
    to_client: Lane,
}

impl Rules {
    fn change(&mut self, direction: Direction, change: impl Fn(&mut Lane)) {
        if direction != Direction::ToClient {
            change(&mut self.to_server);
        }
        if direction != Direction::ToServer {
            change(&mut self.to_client);
        }
    }
}

enum Command {
    Cut,
    Heal,
    LeadTo(Vec<SocketAddr>),
    BlackHole(Direction),
    Delay(Direction, Duration),
    LoseAnswers,
}

/// What has passed.
#[derive(Debug, Default)]
struct Counters {
    accepted: AtomicUsize,
    lost_answers: AtomicUsize,
    held_by_server: AtomicUsize,
}

/// A connection that the server has not ended.
struct HeldByServer(Arc<Counters>);

impl HeldByServer {
    fn new(counters: &Arc<Counters>) -> Self {
        counters.held_by_server.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(counters))
    }
}

impl Drop for HeldByServer {
    fn drop(&mut self) {
        self.0.held_by_server.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A listener on 127.0.0.1 that passes connections on to one server, or balances them over several.
/// Dropped, it resets them all.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    counters: Arc<Counters>,
    commands: Option<tasks::UnboundedSender<(Command, mpsc::Sender<Result<()>>)>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Proxy {
    /// Listens, and passes everything. The target need not be up: a connection it refuses is reset.
    pub fn start(target: SocketAddr) -> Result<Self> {
        Self::balance(vec![target])
    }

    /// A balancer: each connection goes to the next target in turn, or to the first after it that
    /// does not refuse. That is all it knows of a target's health: to one that accepts and stays
    /// silent every third connection, say, still goes, as with a real balancer between two of its
    /// looks. Connections stay with their target.
    pub fn balance(targets: Vec<SocketAddr>) -> Result<Self> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free_port()?));
        let listener = std::net::TcpListener::bind(addr)
            .with_context(|| format!("cannot listen on {addr}"))?;
        listener.set_nonblocking(true)?;
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _context = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let counters = Arc::new(Counters::default());
        let (commands, received) = tasks::unbounded_channel();
        let network = Network {
            addr,
            targets,
            listener: Some(listener),
            counters: Arc::clone(&counters),
            rules: watch::Sender::new(Rules::default()),
            connections: JoinSet::new(),
        };
        let thread = thread::Builder::new()
            .name(format!("proxy:{}", addr.port()))
            .spawn(move || runtime.block_on(network.run(received)))
            .context("cannot start a thread")?;
        Ok(Self { addr, counters, commands: Some(commands), thread: Some(thread) })
    }

    /// Where clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections were accepted so far: a reconnect counts again.
    pub fn connections(&self) -> usize {
        self.counters.accepted.load(Ordering::SeqCst)
    }

    /// How many connections the server has not ended, whatever their clients do.
    pub fn held_by_server(&self) -> usize {
        self.counters.held_by_server.load(Ordering::SeqCst)
    }

    /// How many connections were reset over an answer, see [`Proxy::lose_answers`].
    pub fn lost_answers(&self) -> usize {
        self.counters.lost_answers.load(Ordering::SeqCst)
    }

    /// Resets all connections and refuses new ones until healed.
    pub fn cut(&self) -> Result<()> {
        self.command(Command::Cut)
    }

    /// From now on no byte passes in this direction, while connections stay open and new ones are
    /// accepted. Whether a new one reaches the server depends on the direction to the server.
    pub fn black_hole(&self, direction: Direction) -> Result<()> {
        self.command(Command::BlackHole(direction))
    }

    /// From now on each byte arrives so much later. Throughput stays.
    pub fn delay(&self, direction: Direction, delay: Duration) -> Result<()> {
        self.command(Command::Delay(direction, delay))
    }

    /// From now on requests arrive, and whatever the server says does not: its first word on a
    /// connection resets it.
    pub fn lose_answers(&self) -> Result<()> {
        self.command(Command::LoseAnswers)
    }

    /// Back to passing everything, delayed bytes at once. What was sent into a black hole is lost,
    /// and its connection reset: the rest of such a stream would make no sense. Connections that
    /// were silent meanwhile go on.
    pub fn heal(&self) -> Result<()> {
        self.command(Command::Heal)
    }

    /// From now on new connections go to these targets.
    pub fn lead_to(&self, targets: Vec<SocketAddr>) -> Result<()> {
        self.command(Command::LeadTo(targets))
    }

    fn command(&self, command: Command) -> Result<()> {
        let (done, wait) = mpsc::channel();
        let sent =
            self.commands.as_ref().is_some_and(|commands| commands.send((command, done)).is_ok());
        ensure!(sent, "the proxy on {} has stopped", self.addr);
        wait.recv().with_context(|| format!("the proxy on {} has stopped", self.addr))?
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.commands = None; // tells the thread to end
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its panic was printed when it happened
        }
    }
}

/// The thread's side.
struct Network {
    addr: SocketAddr,
    /// The next one first.
    targets: Vec<SocketAddr>,
    listener: Option<TcpListener>,
    counters: Arc<Counters>,
    rules: watch::Sender<Rules>,
    connections: JoinSet<()>,
}

impl Network {
    async fn run(
        mut self,
        mut commands: tasks::UnboundedReceiver<(Command, mpsc::Sender<Result<()>>)>,
    ) {
        loop {
            tokio::select! {
                command = commands.recv() => {
                    let Some((command, done)) = command else { break };
                    let outcome = self.obey(command).await;
                    let _ = done.send(outcome); // whoever asked is there: it blocks on this
                }
                client = accept(self.listener.as_ref()) => self.pass_on(client),
                Some(_) = self.connections.join_next() => {}
            }
        }
        self.reset_all().await;
    }

    async fn obey(&mut self, command: Command) -> Result<()> {
        // One turn of the I/O driver: whatever was sent before the command counts as sent before
        // it.
        tokio::task::yield_now().await;
        match command {
            Command::Cut => {
                self.reset_all().await;
                self.refuse().await?;
            }
            Command::BlackHole(direction) => {
                self.rules.send_modify(|rules| rules.change(direction, |lane| lane.hole = true));
            }
            Command::Delay(direction, delay) => {
                self.rules.send_modify(|rules| rules.change(direction, |lane| lane.delay = delay));
            }
            Command::LoseAnswers => {
                self.rules.send_modify(|rules| rules.to_client.loss = true);
            }
            Command::LeadTo(targets) => self.targets = targets,
            Command::Heal => {
                self.rules.send_replace(Rules::default());
                if self.listener.is_none() {
                    let listener = TcpListener::bind(self.addr).await;
                    self.listener = Some(
                        listener
                            .with_context(|| format!("cannot listen on {} again", self.addr))?,
                    );
                }
            }
        }
        Ok(())
    }

    /// A process that a test forks just now holds a copy of the listener until it execs.
    async fn refuse(&self) -> Result<()> {
        let what = format!("nobody to listen on {}", self.addr);
        let patience = Patience::new(Duration::from_secs(5), what);
        while !ports::is_free(self.addr.port()) {
            patience.pause().await?;
        }
        Ok(())
    }

    async fn reset_all(&mut self) {
        self.listener = None;
        self.rules.send_modify(|rules| rules.cut = true);
        while self.connections.join_next().await.is_some() {}
    }

    fn pass_on(&mut self, client: TcpStream) {
        self.counters.accepted.fetch_add(1, Ordering::SeqCst);
        let (targets, counters) = (self.targets.clone(), Arc::clone(&self.counters));
        self.connections.spawn(connection(client, targets, counters, self.rules.subscribe()));
        if !self.targets.is_empty() {
            self.targets.rotate_left(1);
        }
    }
}

/// The next client; none while there is no listener.
async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        match listener.accept().await {
            Ok((client, _)) => return client,
            // Of a client that is gone already, or for want of file descriptors: a moment later it
            // may work.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// From accept to the end. Ends with FINs when both sides said so, else with resets to both.
async fn connection(
    mut client: TcpStream,
    targets: Vec<SocketAddr>,
    counters: Arc<Counters>,
    mut rules: watch::Receiver<Rules>,
) {
    let mut server = None;
    let mut cut = rules.clone();
    let passed: io::Result<()> = tokio::select! {
        _ = cut.wait_for(|rules| rules.cut) => Err(io::ErrorKind::ConnectionReset.into()),
        passed = async {
            // A SYN goes to the server as well.
            let _ = rules.wait_for(|rules| !rules.to_server.hole).await;
            let server = server.insert(TcpStream::connect(targets.as_slice()).await?);
            pump::both_ways(&mut client, server, &rules, &counters).await
        } => passed,
    };
    if passed.is_err() {
        for stream in [Some(client), server].into_iter().flatten() {
            let _ = stream.set_zero_linger(); // else the close is a FIN: less of a failure, but one
        }
    }
}
