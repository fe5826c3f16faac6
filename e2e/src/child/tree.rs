//! A process group and everything that descends from it, read off `/proc`.
//!
//! The group alone is not enough: PostgreSQL's backends and Erlang's port programs start sessions
//! of their own.

use std::{collections::HashSet, fs, time::Duration};

use anyhow::Result;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::Patience;

/// One line of `/proc/PID/stat`. The start time tells a process from a later one with the same
/// number.
struct Process {
    pid: i32,
    state: char,
    parent: i32,
    group: i32,
    started: u64,
}

impl Process {
    fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command's name stands in parentheses and may hold anything, parentheses and blanks
        // included.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        Some(Self {
            pid,
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            group: fields.next()?.parse().ok()?,
            started: fields.nth(16)?.parse().ok()?,
        })
    }

    /// A zombie runs no more, whether or not its parent has looked at it yet.
    fn is_alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }

    fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    fn is_gone(&self) -> bool {
        Self::read(self.pid).is_none_or(|now| now.started != self.started || !now.is_alive())
    }

    /// It may be gone by now, which is as good.
    fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.pid), signal);
    }
}

fn members(group: i32) -> Vec<Process> {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut others: Vec<Process> =
        pids.filter_map(Process::read).filter(Process::is_alive).collect();
    let mut tree: Vec<Process> = others.extract_if(.., |process| process.group == group).collect();
    let mut known: HashSet<i32> = tree.iter().map(|process| process.pid).collect();
    loop {
        let children: Vec<Process> =
            others.extract_if(.., |process| known.contains(&process.parent)).collect();
        if children.is_empty() {
            return tree;
        }
        known.extend(children.iter().map(|process| process.pid));
        tree.extend(children);
    }
}

/// SIGSTOP to all, until a look finds nobody running: a running process may fork behind the look's
/// back.
pub(super) fn freeze(group: i32) -> Result<()> {
    let patience = Patience::new(Duration::from_secs(5), format!("process group {group} to stop"));
    loop {
        let tree = members(group);
        if tree.iter().all(Process::is_stopped) {
            return Ok(());
        }
        for process in tree.iter().filter(|process| !process.is_stopped()) {
            process.signal(Signal::SIGSTOP);
        }
        patience.pause_blocking()?;
    }
}

/// Whether the process itself is stopped.
pub(super) fn is_frozen(pid: i32) -> bool {
    Process::read(pid).is_some_and(|process| process.is_stopped())
}

/// SIGCONT to all.
pub(super) fn thaw(group: i32) {
    for process in members(group) {
        process.signal(Signal::SIGCONT);
    }
}

/// SIGKILL to all; returns when none of them runs. Frozen first, so that nobody sees a neighbour
/// die, reacts, or forks.
pub(super) fn kill_all(group: i32) -> Result<()> {
    // What will not freeze within its deadline (uninterruptible in the kernel) is killed like the
    // rest.
    let _ = freeze(group);
    let tree = members(group);
    for process in &tree {
        process.signal(Signal::SIGKILL);
    }
    let patience = Patience::new(
        Duration::from_secs(10),
        format!("process group {group} to be gone after SIGKILL"),
    );
    while !tree.iter().all(Process::is_gone) {
        patience.pause_blocking()?;
    }
    Ok(())
}
