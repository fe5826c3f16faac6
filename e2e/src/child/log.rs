//! What a process writes, kept in memory line by line.
//!
//! Read by threads: they go on while a test's runtime is blocked, and after it has ended.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Read},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use super::{Patience, lock};

/// Of a server that logs without end, the last lines are the ones asked for.
const LOG_LINES: usize = 5_000;

#[derive(Debug)]
pub(super) struct Log {
    name: String,
    echo: bool,
    lines: Mutex<Lines>,
    readers: AtomicUsize,
}

#[derive(Debug, Default)]
struct Lines {
    dropped: usize,
    kept: VecDeque<String>,
}

impl Lines {
    fn end(&self) -> usize {
        self.dropped + self.kept.len()
    }
}

impl Log {
    pub(super) fn new(name: &str) -> Self {
        let echo = std::env::var("E2E_LOG")
            .is_ok_and(|value| value == "1" || value.split(',').any(|chosen| chosen == name));
        Self { name: name.to_owned(), echo, lines: Mutex::default(), readers: AtomicUsize::new(0) }
    }

    pub(super) fn follow(
        self: &Arc<Self>,
        stream: Option<impl Read + Send + 'static>,
    ) -> Result<()> {
        let mut stream = BufReader::new(stream.context("its output is not captured")?);
        let log = Arc::clone(self);
        self.readers.fetch_add(1, Ordering::SeqCst);
        let reader = move || {
            let mut line = Vec::new();
            // A read error ends the log just as the end of the stream does.
            while stream.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                log.push(String::from_utf8_lossy(&line).trim_end().to_owned());
                line.clear();
            }
            log.readers.fetch_sub(1, Ordering::SeqCst);
        };
        thread::Builder::new()
            .name(format!("log of {}", self.name))
            .spawn(reader)
            .context("cannot start a thread")?;
        Ok(())
    }

    /// How many lines there were so far.
    pub(super) fn end(&self) -> usize {
        lock(&self.lines).end()
    }

    pub(super) fn tail(&self, n: usize) -> String {
        let lines = lock(&self.lines);
        let skipped = lines.kept.len().saturating_sub(n);
        lines.kept.iter().skip(skipped).cloned().collect::<Vec<_>>().join("\n")
    }

    fn push(&self, line: String) {
        if self.echo {
            eprintln!("[{}] {line}", self.name);
        }
        let mut lines = lock(&self.lines);
        if lines.kept.len() == LOG_LINES {
            lines.kept.pop_front();
            lines.dropped += 1;
        }
        lines.kept.push_back(line);
    }

    /// Until the readers have met the end of both streams. Bounded, as a process that left both
    /// group and lineage may hold them open.
    pub(super) fn drain(&self) {
        let patience = Patience::new(Duration::from_millis(500), "the end of the log");
        while self.readers.load(Ordering::SeqCst) > 0 && patience.pause_blocking().is_ok() {}
    }

    /// The lines from `position` on, which moves to the end.
    pub(super) fn since(&self, position: &mut usize) -> Vec<String> {
        let lines = lock(&self.lines);
        let seen = position.saturating_sub(lines.dropped);
        *position = lines.end();
        lines.kept.iter().skip(seen).cloned().collect()
    }

    /// The first match among the lines from `position` on, which moves to the end.
    pub(super) fn find<T>(
        &self,
        position: &mut usize,
        find: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let lines = lock(&self.lines);
        let seen = position.saturating_sub(lines.dropped);
        *position = lines.end();
        lines.kept.iter().skip(seen).find_map(|line| find(line))
    }
}

/// Reads a process's log to the end, again and again.
#[derive(Debug)]
pub struct Follower {
    log: Arc<Log>,
    position: usize,
}

impl Follower {
    pub(super) fn new(log: &Arc<Log>) -> Self {
        Self { log: Arc::clone(log), position: 0 }
    }

    /// The lines that are new since the last call.
    pub fn new_lines(&mut self) -> Vec<String> {
        self.log.since(&mut self.position)
    }
}
