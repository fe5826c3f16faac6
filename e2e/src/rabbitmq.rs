//! Private RabbitMQ nodes: ports, data, Erlang cookie and even epmd of their own, gone with their
//! owner.
//!
//! A node of the distribution's RabbitMQ or of 4.3, whichever `E2E_RABBITMQ` asks for, bound to
//! 127.0.0.1, with the management plugin and `x-consistent-hash` exchanges; user `guest`/`guest`. As
//! it has its own epmd it knows of no other node on the machine, nor they of it. It may be frozen,
//! killed without warning, stopped and started again on the same data and ports. A start takes some
//! seconds: share a node, and give each test a vhost.

pub mod cluster;
mod management;
mod node;
mod programs;

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use reqwest::Method;
use serde_json::json;

use crate::{
    child::{Child, Patience, lock},
    ports,
    reaper::ScratchDir,
};
use management::percent_encode;
use node::Node;
use programs::Programs;

/// Generous: a start takes 5 s on an idle machine, and many times that on one that compiles.
const STARTUP: Duration = Duration::from_secs(90);
const SHUTDOWN: Duration = Duration::from_secs(60);

/// A RabbitMQ node of our own. Dropped, it is killed and its data are removed.
#[derive(Debug)]
pub struct RabbitMq {
    // Declared before the directory: dropped before it.
    server: Mutex<Arc<Child>>,
    _epmd: Child,
    node: Node,
    _scratch: ScratchDir,
}

impl RabbitMq {
    /// A new node, ready for connections. It has what keeps tests short: effective policies are
    /// reported after 0.2 s and not 5 s, statistics every second, and the dead-letter worker tries
    /// again after 2 s and not 180 s. A message has at most 1 MiB.
    pub async fn start() -> Result<Self> {
        Self::start_with(true).await
    }

    /// A new node with RabbitMQ's own timings.
    pub async fn start_unhurried() -> Result<Self> {
        Self::start_with(false).await
    }

    async fn start_with(hurried: bool) -> Result<Self> {
        let scratch = ScratchDir::new("e2e-rabbitmq-")?;
        let node = Node {
            programs: Programs::find()?,
            dir: scratch.path().to_owned(),
            name: node::unique_name(),
            amqp_port: ports::free_port()?,
            management_port: ports::free_port()?,
            epmd_port: ports::free_port()?,
            hurried,
            membership: None,
        };
        node.prepare()?;
        let epmd = node.spawn_epmd().await?;
        let server = Mutex::new(Arc::new(run(&node).await?));
        Ok(Self { server, _epmd: epmd, node, _scratch: scratch })
    }

    /// Where clients find the vhost.
    pub fn amqp_url(&self, vhost: &str) -> String {
        amqp_url(self.node.amqp_port, vhost)
    }

    /// The AMQP port on 127.0.0.1.
    pub fn amqp_port(&self) -> u16 {
        self.node.amqp_port
    }

    /// The root of the management API, without a slash at its end.
    pub fn management_url(&self) -> String {
        self.node.management_url()
    }

    /// The same with a login in it, as the services are given it.
    pub fn management_url_with_login(&self) -> String {
        self.management_url().replace("//", "//guest:guest@")
    }

    /// The directory of the node: configuration, data, log files.
    pub fn dir(&self) -> &Path {
        &self.node.dir
    }

    /// The node's process, for its log and its pid.
    pub fn server(&self) -> Arc<Child> {
        Arc::clone(&lock(&self.server))
    }

    /// Makes a vhost in which `guest` may do everything.
    pub async fn create_vhost(&self, name: &str) -> Result<()> {
        let vhost = percent_encode(name);
        let all = json!({ "configure": ".*", "write": ".*", "read": ".*" });
        self.request(Method::PUT, &format!("vhosts/{vhost}"), json!({})).await?;
        self.request(Method::PUT, &format!("permissions/{vhost}/guest"), all).await
    }

    /// Deletes a vhost with everything in it.
    pub async fn delete_vhost(&self, name: &str) -> Result<()> {
        let vhost = percent_encode(name);
        self.request(Method::DELETE, &format!("vhosts/{vhost}"), json!({})).await
    }

    /// Turns the vhost's firehose on: a copy of every message that is published or delivered in it goes
    /// to its exchange `amq.rabbitmq.trace`.
    pub async fn trace(&self, vhost: &str) -> Result<()> {
        // Of several at the same time one is forgotten now and then. Measured on 3.10.8: in 10 of 15
        // rounds of six; on 4.3.6 in none.
        static ONE_BY_ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let _turn = ONE_BY_ONE.lock().await;
        let vhost = percent_encode(vhost);
        self.request(Method::PUT, &format!("vhosts/{vhost}"), json!({ "tracing": true })).await
    }

    /// Kills the node and its helpers without warning; returns when they are gone.
    pub fn sigkill(&self) -> Result<()> {
        self.server().sigkill()
    }

    /// Freezes the node: the kernel still accepts connections for it, nobody answers.
    pub fn sigstop(&self) -> Result<()> {
        self.server().sigstop()
    }

    /// Ends a freeze.
    pub fn sigcont(&self) -> Result<()> {
        self.server().sigcont()
    }

    /// Shuts the node down in order.
    pub async fn stop(&self) -> Result<()> {
        let server = self.server();
        server.sigterm()?;
        let status = server.wait_exit(SHUTDOWN).await?;
        ensure!(
            status.success(),
            "RabbitMQ did not shut down in order ({status}); {}",
            server.report()
        );
        Ok(())
    }

    /// Starts the stopped or killed node on its data and its ports; returns when it answers.
    pub async fn start_again(&self) -> Result<()> {
        ensure!(!self.server().is_running()?, "RabbitMQ on port {} still runs", self.amqp_port());
        let server = Arc::new(run(&self.node).await?);
        *lock(&self.server) = server;
        Ok(())
    }

    /// Runs `rabbitmqctl` against this node, for what the management API cannot do; returns what it
    /// printed. A failure is an error, with that too.
    pub async fn ctl(&self, arguments: &[&str]) -> Result<String> {
        self.node.ctl(arguments).await.with_context(|| self.server().report())
    }

    /// The version that the node says it is, `(4, 3)` for 4.3.6.
    pub async fn version(&self) -> Result<(u32, u32)> {
        let overview = management::overview(&self.management_url()).await?;
        let version = overview["rabbitmq_version"].as_str().unwrap_or_default();
        let mut numbers = version.split('.').map(|number| number.parse().ok());
        let (major, minor) = (numbers.next().flatten(), numbers.next().flatten());
        major.zip(minor).with_context(|| format!("{version:?} is no version"))
    }

    async fn request(&self, method: Method, path: &str, body: serde_json::Value) -> Result<()> {
        let url = format!("{}/api/{path}", self.management_url());
        management::request(method, &url, &body).await.with_context(|| self.server().report())
    }
}

fn amqp_url(port: u16, vhost: &str) -> String {
    format!("amqp://guest:guest@127.0.0.1:{port}/{}", percent_encode(vhost))
}

/// Starts the node and waits until both of its listeners serve. It opens AMQP last.
async fn run(node: &Node) -> Result<Child> {
    node.wait_for_ports().await?;
    let server = node.spawn()?;
    let patience = Patience::new(STARTUP, format!("RabbitMQ to answer on port {}", node.amqp_port));
    while !(node.accepts_amqp().await && management::overview(&node.management_url()).await.is_ok())
    {
        ensure!(server.is_running()?, "RabbitMQ ended on start; {}", server.report());
        patience.pause().await.with_context(|| server.report())?;
    }
    Ok(server)
}
