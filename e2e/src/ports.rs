//! Free TCP ports for private servers.
//!
//! The range lies below the kernel's ephemeral range, so that no outgoing connection takes the port
//! of a server that is down for a moment: a killed server comes back on its old port. Drawn in
//! random order, as several test processes may run at once; within one process no port is handed
//! out twice.

use std::{
    collections::HashSet,
    net::Ipv4Addr,
    ops::RangeInclusive,
    sync::{Mutex, PoisonError},
};

use anyhow::{Result, bail};
use tokio::net::TcpSocket;

const RANGE: RangeInclusive<u16> = 20_000..=31_999;

static HANDED_OUT: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// A port of 127.0.0.1 on which nobody listens, and which this process was not given before.
pub fn free_port() -> Result<u16> {
    let mut handed_out = HANDED_OUT.lock().unwrap_or_else(PoisonError::into_inner);
    let handed_out = handed_out.get_or_insert_default();
    for _ in 0..RANGE.len() {
        let port = rand::random_range(RANGE);
        if !handed_out.contains(&port) && is_free(port) {
            handed_out.insert(port);
            return Ok(port);
        }
    }
    bail!("no free TCP port between {} and {} on 127.0.0.1", RANGE.start(), RANGE.end())
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
