//! A replica under fire, and the orchestrator that starts it again whenever it has ended.

use super::plan::{Blow, Step, Way};
use super::{Diary, Replicas, sleep_until};
use crate::child::Child;
use crate::ledger::books::Side;
use crate::proxy::{Direction, Proxy};
use crate::service::{Env, Service, listens};
use crate::system::{System, through};
use anyhow::{Result, bail};
use shared::fault::Point;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::time::Instant;

/// How often the orchestrator looks.
const LOOK: Duration = Duration::from_millis(200);
/// A service gives itself 25 s.
const SHUTDOWN: Duration = Duration::from_secs(40);
/// By so much every byte is late.
const LATE: Duration = Duration::from_millis(150);
/// Of the processes that have ended, the logs of so many are kept for the report.
const REMEMBERED: usize = 4;

pub(super) struct Replica<'a> {
    side: Side,
    name: String,
    env: Env,
    postgres: Proxy,
    amqp: Proxy,
    child: Child,
    fallen: Vec<Child>,
    replicas: &'a Replicas,
    known: bool,
    /// Where it is to kill itself.
    doomed: Option<Point>,
}

impl<'a> Replica<'a> {
    pub(super) fn start(
        system: &System,
        side: Side,
        n: u8,
        replicas: &'a Replicas,
    ) -> Result<Self> {
        let mut env = system.env(side).clone();
        let postgres = through(&mut env, "DATABASE_URL")?;
        let amqp = through(&mut env, "AMQP_URL")?;
        let name = format!("{} {n}", side.service());
        let child = Service::spawn(side.service(), &env)?;
        Ok(Self {
            side,
            name,
            env,
            postgres,
            amqp,
            child,
            fallen: Vec::new(),
            replicas,
            known: false,
            doomed: None,
        })
    }

    /// Lives through its part of the plan, and on until `end`.
    pub(super) async fn play(
        &mut self,
        steps: &[Step],
        diary: &Diary<'_>,
        end: Instant,
    ) -> Result<()> {
        for step in steps {
            self.keep_running_until(diary.at(step.at), diary).await?;
            diary.note(step);
            self.strike(step.blow, step.lasts, diary).await?;
        }
        self.keep_running_until(end, diary).await
    }

    async fn strike(&mut self, blow: Blow, lasts: Duration, diary: &Diary<'_>) -> Result<()> {
        let until = Instant::now() + lasts;
        match blow {
            Blow::Kill => {
                // It may have ended since the last look, by itself even.
                if let Some(status) = self.child.exit_status()? {
                    self.judge(status)?;
                }
                self.child.sigkill()?;
                sleep_until(until).await;
                self.start_again(None)?;
            }
            Blow::Freeze if self.child.is_running()? => {
                self.child.sigstop()?;
                sleep_until(until).await;
                self.child.sigcont()?;
            }
            // It has just died at its point: there is nobody to freeze.
            Blow::Freeze => return Ok(()),
            Blow::Restart => self.restart(None).await?,
            // Counted when it dies.
            Blow::DieAt(point) => return self.restart(Some(point)).await,
            Blow::Cut(way) => {
                self.way(way).cut()?;
                self.then_heal(way, until, diary).await?;
            }
            Blow::BlackHole(way) => {
                self.way(way).black_hole(Direction::Both)?;
                self.then_heal(way, until, diary).await?;
            }
            Blow::LoseAnswers(way) => {
                self.way(way).lose_answers()?;
                self.then_heal(way, until, diary).await?;
            }
            Blow::Delay(way) => {
                self.way(way).delay(Direction::Both, LATE)?;
                self.then_heal(way, until, diary).await?;
            }
        }
        diary.count(blow.kind());
        Ok(())
    }

    fn way(&self, way: Way) -> &Proxy {
        match way {
            Way::Postgres => &self.postgres,
            Way::Amqp => &self.amqp,
        }
    }

    async fn then_heal(&mut self, way: Way, until: Instant, diary: &Diary<'_>) -> Result<()> {
        self.keep_running_until(until, diary).await?;
        self.way(way).heal()
    }

    async fn restart(&mut self, fault: Option<Point>) -> Result<()> {
        self.child.sigterm()?;
        let status = self.child.wait_exit(SHUTDOWN).await?;
        // With a server away it may not finish in time.
        let late = |line: &str| line.contains("not everything finished within");
        if !status.success() && !self.child.logged_since(0, late) {
            self.judge(status)?;
        }
        self.start_again(fault)
    }

    /// At the point where it was told to, it may die; nothing else that is done to it, or to its
    /// servers, is a reason to end.
    fn judge(&self, status: ExitStatus) -> Result<Point> {
        match self.doomed {
            Some(point) if status.signal() == Some(9) => Ok(point),
            _ => bail!("{} ended by itself: {status}\n{}", self.name, self.child.report()),
        }
    }

    fn start_again(&mut self, fault: Option<Point>) -> Result<()> {
        let mut env = self.env.clone();
        if let Some(point) = fault {
            env.insert("FAULT_POINT".into(), point.name().into());
        }
        self.replicas.forget(&self.name);
        self.known = false;
        self.doomed = fault;
        let child = Service::spawn(self.side.service(), &env)?;
        self.fallen.push(std::mem::replace(&mut self.child, child));
        if self.fallen.len() > REMEMBERED {
            self.fallen.remove(0);
        }
        Ok(())
    }

    /// The orchestrator.
    async fn keep_running_until(&mut self, until: Instant, diary: &Diary<'_>) -> Result<()> {
        loop {
            if let Some(status) = self.child.exit_status()? {
                let point = self.judge(status)?;
                diary.say(&format!(
                    "{} has died at {} and is started again",
                    self.name,
                    point.name()
                ));
                diary.count(Blow::DieAt(point).kind());
                self.start_again(None)?;
            }
            if self.side == Side::Orders
                && !self.known
                && let Some(api) = listens(&self.child, "api")
            {
                self.replicas.know(&self.name, format!("http://{api}"));
                self.known = true;
            }
            if Instant::now() >= until {
                return Ok(());
            }
            sleep_until(until.min(Instant::now() + LOOK)).await;
        }
    }

    /// Asks it to end, in peace now, and wants it to do so well.
    pub(super) async fn stop(&self) -> Result<()> {
        self.child.sigterm()?;
        let status = self.child.wait_exit(SHUTDOWN).await?;
        if !status.success() {
            // A standby that is told to die where only the leader comes by leads when the leader has gone.
            self.judge(status)?;
        }
        Ok(())
    }

    /// The process that runs, and those before it.
    pub(super) fn logs(&self) -> impl Iterator<Item = &Child> {
        self.fallen.iter().chain([&self.child])
    }
}
