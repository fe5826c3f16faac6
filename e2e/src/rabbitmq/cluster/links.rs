//! The network between the nodes: a proxy for each ordered pair.
//!
//! A node asks its epmd, the port mapper of Erlang, where another node listens. Each of ours has an
//! epmd of its own, in which the harness registers the *other* nodes, with the ports of proxies that
//! lead to them. So all that two nodes say to each other, whoever connected, passes a proxy, and none
//! of it needs more rights than opening a socket.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::addr;
use crate::{
    proxy::{Direction, Proxy},
    rabbitmq::node::Node,
};

/// All ways from a node to another.
#[derive(Debug)]
pub(super) struct Links(Vec<Link>);

#[derive(Debug)]
struct Link {
    from: usize,
    to: usize,
    name: String,
    proxy: Proxy,
}

impl Links {
    /// The proxies between these nodes, which are not running yet.
    pub(super) fn between(nodes: &[Node]) -> Result<Self> {
        let mut links = Vec::new();
        for from in 0..nodes.len() {
            for (to, node) in nodes.iter().enumerate().filter(|(to, _)| *to != from) {
                let membership = node.membership.as_ref().context("a node of no cluster")?;
                let proxy = Proxy::start(addr(membership.dist_port))?;
                links.push(Link { from, to, name: node.name.clone(), proxy });
            }
        }
        Ok(Self(links))
    }

    /// Tells a node's epmd where that node finds the others. It holds for as long as these connections
    /// last.
    pub(super) async fn register(&self, from: usize, epmd_port: u16) -> Result<Vec<TcpStream>> {
        let mut registrations = Vec::new();
        for link in self.0.iter().filter(|link| link.from == from) {
            let registered = register(addr(epmd_port), &link.name, link.proxy.addr().port()).await;
            registrations.push(registered.with_context(|| format!("registering {}", link.name))?);
        }
        Ok(registrations)
    }

    /// No byte passes between this node and the others any more. Nobody is told.
    pub(super) fn black_hole(&self, node: usize) -> Result<()> {
        for link in self.0.iter().filter(|link| link.from == node || link.to == node) {
            link.proxy.black_hole(Direction::Both)?;
        }
        Ok(())
    }

    /// All bytes pass again.
    pub(super) fn heal(&self) -> Result<()> {
        self.0.iter().try_for_each(|link| link.proxy.heal())
    }
}

/// ALIVE2_REQ of the epmd protocol, as a node of Erlang/OTP 23 or later sends it for itself.
async fn register(epmd: SocketAddr, name: &str, port: u16) -> Result<TcpStream> {
    const ALIVE2_REQ: u8 = 120;
    const ALIVE2_X_RESP: u8 = 118;
    const NORMAL_NODE: u8 = 77;
    const TCP: u8 = 0;
    const VERSION: [u8; 2] = 6_u16.to_be_bytes(); // of the distribution protocol, highest and lowest

    let short = name.split('@').next().unwrap_or(name).as_bytes();
    let length = u16::try_from(short.len())?.to_be_bytes();
    let port = port.to_be_bytes();
    let no_extra = [0, 0];
    let kind = [NORMAL_NODE, TCP];
    let request =
        [&[ALIVE2_REQ][..], &port, &kind, &VERSION, &VERSION, &length, short, &no_extra].concat();

    let mut stream = TcpStream::connect(epmd).await?;
    stream.write_all(&u16::try_from(request.len())?.to_be_bytes()).await?;
    stream.write_all(&request).await?;
    let mut answer = [0; 6]; // the last four: which of the nodes of that name it is
    stream.read_exact(&mut answer).await?;
    ensure!(answer[..2] == [ALIVE2_X_RESP, 0], "epmd refuses it: {answer:?}");
    Ok(stream)
}
