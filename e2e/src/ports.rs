//! Free TCP ports for private servers.
//!
//! The range lies below the kernel's ephemeral range, so that no outgoing connection takes the port
//! of a server that is down for a moment: a killed server comes back on its old port. Several test
//! processes may run at once, and half a minute passes between a port's being found free and the last
//! node of a cluster listening on it. So each process claims blocks of ports, by a name that the kernel
//! gives to one process at a time, and takes back when it ends; and hands out none of them twice.

use std::{
    net::Ipv4Addr,
    ops::Range,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
    sync::{Mutex, PoisonError},
};

use anyhow::{Result, bail};
use rand::seq::SliceRandom;
use tokio::net::TcpSocket;

const RANGE: Range<u16> = 20_000..32_000;
const BLOCK: u16 = 50;

static CLAIMS: Mutex<Claims> = Mutex::new(Claims { names: Vec::new(), ports: Vec::new() });

struct Claims {
    names: Vec<UnixDatagram>,
    /// Those of them that nobody was given.
    ports: Vec<u16>,
}

/// A port of 127.0.0.1 on which nobody listens, and which neither this process nor another that asks
/// here was given before.
pub fn free_port() -> Result<u16> {
    let mut claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        while let Some(port) = claims.ports.pop() {
            if is_free(port) {
                return Ok(port);
            }
        }
        let Some((name, block)) = claim() else {
            bail!("no free TCP port in {RANGE:?} on 127.0.0.1");
        };
        claims.names.push(name);
        claims.ports.extend(block);
    }
}

/// A block that no process has.
fn claim() -> Option<(UnixDatagram, Range<u16>)> {
    let mut blocks: Vec<u16> = RANGE.step_by(usize::from(BLOCK)).collect();
    blocks.shuffle(&mut rand::rng());
    // In the abstract namespace: of the network, as ports are, and with nothing left in a file system.
    let bind = |first: u16| {
        let name = SocketAddr::from_abstract_name(format!("e2e-ports-{first}"))?;
        UnixDatagram::bind_addr(&name)
    };
    blocks.into_iter().find_map(|first| Some((bind(first).ok()?, first..first + BLOCK)))
}

/// Whether a server could listen on the port of 127.0.0.1 now.
///
/// Binds as servers do, but does not listen: a process forked by another thread at this moment holds
/// copies of our sockets until it execs, and the copy of a listener would block the port.
pub fn is_free(port: u16) -> bool {
    let bind = || {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        socket.bind((Ipv4Addr::LOCALHOST, port).into())
    };
    bind().is_ok()
}
