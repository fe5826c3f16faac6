//! A process under test: started, watched, frozen and killed at will.
//!
//! Guarantees: it runs in a process group of its own, registered with the
//! [`crate::reaper`]; once a `sigkill` returned or an exit was seen, none of its tree runs
//! any more, and its log is complete. Nothing here depends on the tokio runtime that created it
//! (the log is read by threads), as tests with a runtime each share servers.

mod log;
mod patience;
mod tree;

pub use log::Follower;
pub use patience::Patience;

use std::{
    os::unix::process::CommandExt,
    process::{Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::reaper;
use log::Log;

const TAIL: usize = 40;

/// A running process, or what is left of it: its status and its log. Dropped, it is killed with all
/// its tree.
#[derive(Debug)]
pub struct Child {
    name: String,
    pid: i32,
    process: Mutex<std::process::Child>,
    /// The exit was seen: the group is dead and forgotten, its number may be another's.
    buried: AtomicBool,
    log: Arc<Log>,
}

impl Child {
    /// Starts `command` with its output going into the log; `E2E_LOG=1`, or a comma-separated
    /// list of names with this one in it, copies it to our stderr, after `name`.
    pub fn spawn(name: impl Into<String>, mut command: Command) -> Result<Self> {
        let name = name.into();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut process = command
            .spawn()
            .with_context(|| format!("cannot start {name}, {:?}", command.get_program()))?;
        let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
        let child = Self {
            pid: process.id().cast_signed(),
            process: Mutex::new(process),
            buried: AtomicBool::new(false),
            log: Arc::new(Log::new(&name)),
            name,
        };
        reaper::watch_group(child.pid)?; // on failure the drop kills it
        child.log.follow(stdout)?;
        child.log.follow(stderr)?;
        Ok(child)
    }

    /// What it was called when it was started.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of the process and of its group.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether it has not exited. A frozen one runs.
    pub fn is_running(&self) -> Result<bool> {
        Ok(self.exit_status()?.is_none())
    }

    /// Its status, once it has exited. By then what it left running is killed and its log is
    /// complete.
    pub fn exit_status(&self) -> Result<Option<ExitStatus>> {
        // Held until all is done: a second caller must not see the exit before the log is complete.
        let mut process = lock(&self.process);
        let status =
            process.try_wait().with_context(|| format!("cannot wait for {}", self.name))?;
        if status.is_some() && !self.buried.load(Ordering::SeqCst) {
            tree::kill_all(self.pid)?;
            reaper::forget_group(self.pid)?;
            self.log.drain();
            self.buried.store(true, Ordering::SeqCst);
        }
        Ok(status)
    }

    /// Waits until it has exited by itself.
    pub async fn wait_exit(&self, limit: Duration) -> Result<ExitStatus> {
        let patience = Patience::new(limit, format!("{} to exit", self.name));
        loop {
            if let Some(status) = self.exit_status()? {
                return Ok(status);
            }
            patience.pause().await.with_context(|| self.report())?;
        }
    }

    /// Kills it and all its tree without warning; returns when they are gone.
    pub fn sigkill(&self) -> Result<()> {
        if self.exit_status()?.is_some() {
            return Ok(());
        }
        tree::kill_all(self.pid)?;
        let patience =
            Patience::new(Duration::from_secs(10), format!("the kernel to give up {}", self.name));
        while self.exit_status()?.is_none() {
            patience.pause_blocking()?;
        }
        Ok(())
    }

    /// Freezes it and all its tree: its sockets stay open and accept, nobody answers.
    pub fn sigstop(&self) -> Result<()> {
        self.check_running("freeze")?;
        tree::freeze(self.pid)
    }

    /// Waits until it has frozen by itself, at a fault point.
    pub async fn wait_frozen(&self, limit: Duration) -> Result<()> {
        let patience = Patience::new(limit, format!("{} to freeze", self.name));
        while !tree::is_frozen(self.pid) {
            self.check_running("see the freeze of")?;
            patience.pause().await.with_context(|| self.report())?;
        }
        Ok(())
    }

    /// Ends a freeze.
    pub fn sigcont(&self) -> Result<()> {
        self.check_running("thaw")?;
        tree::thaw(self.pid);
        Ok(())
    }

    /// Asks the process, not its tree, to shut down, as an orchestrator does.
    pub fn sigterm(&self) -> Result<()> {
        self.signal(Signal::SIGTERM)
    }

    /// Any signal to the process, not to its tree. One that has exited meanwhile is no error.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        if self.exit_status()?.is_some() {
            return Ok(());
        }
        match kill(Pid::from_raw(self.pid), signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(error) => {
                Err(error).with_context(|| format!("cannot send {signal} to {}", self.name))
            }
        }
    }

    /// The last `n` lines it wrote (at most the last 5 000 are kept).
    pub fn log_tail(&self, n: usize) -> String {
        self.log.tail(n)
    }

    /// Whether a line of this kind is among those from `position` on.
    pub fn logged_since(&self, mut position: usize, like: impl Fn(&str) -> bool) -> bool {
        self.log.find(&mut position, |line| like(line).then_some(())).is_some()
    }

    /// How many lines it wrote so far: where [`wait_for_line_from`](Self::wait_for_line_from)
    /// starts to see just new ones.
    pub fn log_position(&self) -> usize {
        self.log.end()
    }

    /// Its log from the beginning, to be read on and on: by somebody else, and after its end too.
    pub fn follow(&self) -> Follower {
        Follower::new(&self.log)
    }

    /// The first line, of all that it wrote or will write, for which `find` returns something.
    /// `what` says in the error what was waited for; an exit without such a line is an error at
    /// once.
    pub async fn wait_for_line<T>(
        &self,
        what: &str,
        limit: Duration,
        find: impl Fn(&str) -> Option<T>,
    ) -> Result<T> {
        self.wait_for_line_from(0, what, limit, find).await
    }

    /// [`wait_for_line`](Self::wait_for_line), among the lines from `position` on.
    pub async fn wait_for_line_from<T>(
        &self,
        mut position: usize,
        what: &str,
        limit: Duration,
        find: impl Fn(&str) -> Option<T>,
    ) -> Result<T> {
        let patience = Patience::new(limit, format!("{} to log {what}", self.name));
        loop {
            // The exit first: the log is complete by then, so that no last line is missed.
            let exit = self.exit_status()?;
            if let Some(found) = self.log.find(&mut position, &find) {
                return Ok(found);
            }
            if let Some(status) = exit {
                bail!("{} ended ({status}) and did not log {what}; {}", self.name, self.report());
            }
            patience.pause().await.with_context(|| self.report())?;
        }
    }

    /// The tail of the log under a headline, as a context for errors.
    pub fn report(&self) -> String {
        format!("the log of {} ends:\n{}\n", self.name, self.log_tail(TAIL))
    }

    fn check_running(&self, verb: &str) -> Result<()> {
        match self.exit_status()? {
            Some(status) => {
                bail!("cannot {verb} {}, it has ended ({status}); {}", self.name, self.report())
            }
            None => Ok(()),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Whatever stands in the way here, the reaper tries again when this process ends.
        let _ = self.sigkill();
    }
}

/// A panic elsewhere while the lock was held leaves the data whole: all critical sections here are
/// single steps.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
