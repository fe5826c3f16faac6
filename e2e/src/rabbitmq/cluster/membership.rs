//! What makes a node one of a cluster.

use std::{fs, io::Write, os::unix::fs::OpenOptionsExt, path::Path};

use anyhow::{Context, Result};

/// A silent peer is given up after this many seconds, a quarter more or less; Erlang's own value is 60.
/// Shorter would take a node for dead that just gets no processor for a moment.
const NET_TICKTIME: u32 = 8;

/// A node's place in its cluster.
#[derive(Debug)]
pub(in super::super) struct Membership {
    /// Where the others reach it; the same after each start: they are told once.
    pub(in super::super) dist_port: u16,
    /// What the nodes know each other by.
    pub(super) cookie: String,
    /// The names of all nodes, its own included.
    pub(super) everybody: Vec<String>,
}

impl Membership {
    /// More lines of `rabbitmq.conf`. Whoever starts without data joins those that are there.
    ///
    /// `pause_minority` is RabbitMQ's recommendation for three nodes: the one that cannot see the
    /// others stops serving, so that its clients go to where there is a majority, and it has
    /// nothing to throw away when it is back. RabbitMQ 4.3 takes the line and ignores it: its metadata
    /// are replicated like a quorum queue, a minority goes on to accept connections, and whatever needs
    /// the majority waits.
    pub(in super::super) fn configuration(&self) -> String {
        let mut conf = "cluster_partition_handling = pause_minority\n\
                        cluster_formation.peer_discovery_backend = classic_config\n"
            .to_owned();
        for (number, name) in self.everybody.iter().enumerate() {
            conf += &format!("cluster_formation.classic_config.nodes.{} = {name}\n", number + 1);
        }
        conf
    }

    /// More arguments for Erlang.
    pub(in super::super) fn arguments(&self) -> String {
        format!("-kernel net_ticktime {NET_TICKTIME}")
    }

    /// Erlang refuses a cookie that others may read.
    pub(in super::super) fn write_cookie(&self, path: &Path) -> Result<()> {
        let write = || {
            let mut options = fs::OpenOptions::new();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
            file.write_all(self.cookie.as_bytes())
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}
