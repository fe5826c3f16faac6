//! Three nodes that are one broker: quorum queues with three replicas, any one node dispensable.
//!
//! Clients come through balancers, as in production: one address for AMQP, one for the management
//! API, each leading to nodes that accept. What one node says to another goes through a proxy as
//! well ([`links`]), so that a node can be partitioned from its peers: its bytes vanish, and everybody
//! finds out by silence. For a failure of another kind there are the nodes themselves: each may be
//! killed, frozen, stopped and started again like any [`RabbitMq`].

mod links;
mod membership;

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::net::TcpStream;

use super::{RabbitMq, management, node, node::Node, programs::Programs, run};
use crate::{child::Patience, ports, proxy::Proxy, reaper::ScratchDir};
use links::Links;
pub(super) use membership::Membership;

/// How many nodes there are. Two are a majority.
pub const NODES: usize = 3;

/// A cluster of our own. Dropped, its nodes are killed and their data are removed.
#[derive(Debug)]
pub struct RabbitCluster {
    // Declared before what they talk through: dropped before it.
    /// The nodes, to be harmed one by one.
    pub nodes: [Arc<RabbitMq>; NODES],
    links: Links,
    _registrations: Vec<TcpStream>,
    amqp: Proxy,
    management: Proxy,
}

/// The replicas of a quorum queue, by the numbers of their nodes, as the management API has them: some
/// moments old while something is happening.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replicas {
    /// The one that takes what is published and hands out what is consumed.
    pub leader: Option<usize>,
    /// Where it has a replica.
    pub members: BTreeSet<usize>,
    /// Which of them run.
    pub online: BTreeSet<usize>,
}

impl RabbitCluster {
    /// A new cluster, whole and ready for connections, with the timings of [`RabbitMq::start`].
    pub async fn start() -> Result<Self> {
        let scratches = scratches()?;
        let nodes = plan(&scratches)?;
        let links = Links::between(&nodes)?;
        let mut registrations = Vec::new();
        let mut epmds = Vec::new();
        for (number, node) in nodes.iter().enumerate() {
            node.prepare()?;
            epmds.push(node.spawn_epmd().await?);
            registrations.extend(links.register(number, node.epmd_port).await?);
        }
        let runs = nodes.iter().map(run);
        let servers = futures_util::future::try_join_all(runs).await?;
        let parts = nodes.into_iter().zip(servers).zip(epmds).zip(scratches);
        let nodes: Vec<_> = parts
            .map(|(((node, server), epmd), scratch)| {
                let server = Mutex::new(Arc::new(server));
                Arc::new(RabbitMq { server, _epmd: epmd, node, _scratch: scratch })
            })
            .collect();
        let nodes: [_; NODES] = nodes.try_into().map_err(|_| anyhow::anyhow!("not three nodes"))?;
        let amqp = Proxy::balance(nodes.iter().map(|node| addr(node.node.amqp_port)).collect())?;
        let management =
            Proxy::balance(nodes.iter().map(|node| addr(node.node.management_port)).collect())?;
        let cluster = Self { nodes, links, _registrations: registrations, amqp, management };
        cluster.wait_whole().await?;
        Ok(cluster)
    }

    /// Where clients find the vhost: a balancer.
    pub fn amqp_url(&self, vhost: &str) -> String {
        super::amqp_url(self.amqp_port(), vhost)
    }

    /// The balancer's AMQP port on 127.0.0.1.
    pub fn amqp_port(&self) -> u16 {
        self.amqp.addr().port()
    }

    /// The root of the management API, behind a balancer, with a login in it.
    pub fn management_url_with_login(&self) -> String {
        format!("http://guest:guest@{}", self.management.addr())
    }

    /// From now on the balancers know of these nodes alone, and the connections that there were are
    /// reset.
    pub fn lead_to(&self, nodes: &[usize]) -> Result<()> {
        self.lead_newcomers_to(nodes)?;
        for balancer in [&self.amqp, &self.management] {
            balancer.cut()?;
            balancer.heal()?;
        }
        Ok(())
    }

    /// From now on the balancers know of these nodes alone; the connections that there are stay.
    pub fn lead_newcomers_to(&self, nodes: &[usize]) -> Result<()> {
        let targets = |port: fn(&Node) -> u16| {
            nodes.iter().map(|number| addr(port(&self.nodes[*number].node))).collect()
        };
        self.amqp.lead_to(targets(|node| node.amqp_port))?;
        self.management.lead_to(targets(|node| node.management_port))
    }

    /// Cuts a node off from its peers: what they say to each other vanishes. Clients reach it as
    /// before. To be healed after [`RabbitCluster::wait_alone`]: on 3.10 a node that finds the partition
    /// over before it has noticed it does not pause, and stays apart until it is restarted.
    pub fn partition(&self, node: usize) -> Result<()> {
        self.links.black_hole(node)
    }

    /// Ends all partitions.
    pub fn heal(&self) -> Result<()> {
        self.links.heal()
    }

    /// The replicas of a queue, as `node` knows of them.
    pub async fn replicas(&self, node: usize, vhost: &str, queue: &str) -> Result<Replicas> {
        let (vhost, queue) = (management::percent_encode(vhost), management::percent_encode(queue));
        let path = format!("queues/{vhost}/{queue}");
        let answer = management::get(&self.nodes[node].management_url(), &path).await?;
        let several = |field: &str| -> BTreeSet<usize> {
            let names = answer[field].as_array().into_iter().flatten();
            names.filter_map(|name| self.number_of(name)).collect()
        };
        Ok(Replicas {
            leader: self.number_of(&answer["leader"]),
            members: several("members"),
            online: several("online"),
        })
    }

    /// The other nodes.
    pub fn others(node: usize) -> [usize; NODES - 1] {
        [(node + 1) % NODES, (node + 2) % NODES]
    }

    /// Waits until every node says that all nodes run, in one cluster.
    pub async fn wait_whole(&self) -> Result<()> {
        for number in 0..NODES {
            self.wait_peers(number, &(0..NODES).collect::<Vec<_>>()).await?;
        }
        Ok(())
    }

    /// Waits until a node says that of all nodes these run, itself included.
    pub async fn wait_peers(&self, node: usize, running: &[usize]) -> Result<()> {
        let expected: BTreeSet<usize> = running.iter().copied().collect();
        let patience = Patience::new(
            super::STARTUP,
            format!("node {node} to see the nodes {running:?}, and no others, run"),
        );
        loop {
            let seen = self.running(node).await;
            if seen.as_ref().is_ok_and(|seen| *seen == expected) {
                return Ok(());
            }
            let report = || format!("it sees {seen:?}; {}", self.nodes[node].server().report());
            patience.pause().await.with_context(report)?;
        }
    }

    /// Waits until a node that is cut off and its peers have noticed. 3.10 stops serving then; 4.3 goes
    /// on, and knows.
    pub async fn wait_alone(&self, node: usize) -> Result<()> {
        let others = Self::others(node);
        for other in others {
            self.wait_peers(other, &others).await?;
        }
        let what = format!("node {node} to notice that it is alone");
        let patience = Patience::new(super::STARTUP, what);
        loop {
            let noticed = match self.running(node).await {
                Ok(seen) => seen == BTreeSet::from([node]),
                // Paused, and so without listeners; or just slow.
                Err(_) => !self.nodes[node].node.accepts_amqp().await,
            };
            if noticed {
                return Ok(());
            }
            patience.pause().await?;
        }
    }

    /// Which nodes run, as `node` knows of them.
    pub async fn running(&self, node: usize) -> Result<BTreeSet<usize>> {
        let answer = management::get(&self.nodes[node].management_url(), "nodes").await?;
        let nodes = answer.as_array().context("no list of nodes")?;
        ensure!(nodes.len() == NODES, "a cluster of {} nodes", nodes.len());
        let running = nodes.iter().filter(|node| node["running"] == true);
        Ok(running.filter_map(|node| self.number_of(&node["name"])).collect())
    }

    fn number_of(&self, name: &Value) -> Option<usize> {
        self.nodes.iter().position(|node| *name == *node.node.name)
    }
}

fn scratches() -> Result<Vec<ScratchDir>> {
    (0..NODES).map(|_| ScratchDir::new("e2e-rabbitmq-")).collect()
}

/// The nodes before they run.
fn plan(scratches: &[ScratchDir]) -> Result<Vec<Node>> {
    let names: Vec<String> = scratches.iter().map(|_| node::unique_name()).collect();
    let cookie = ulid::Ulid::generate().to_string();
    let node = |(name, scratch): (&String, &ScratchDir)| {
        Ok(Node {
            programs: Programs::find()?,
            dir: scratch.path().to_owned(),
            name: name.clone(),
            amqp_port: ports::free_port()?,
            management_port: ports::free_port()?,
            epmd_port: ports::free_port()?,
            hurried: true,
            membership: Some(Membership {
                dist_port: ports::free_port()?,
                cookie: cookie.clone(),
                everybody: names.clone(),
            }),
        })
    };
    names.iter().zip(scratches).map(node).collect()
}

fn addr(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}
