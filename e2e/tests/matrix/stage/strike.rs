//! The blow itself: waiting until the process has come by its fault point, doing what is done to it
//! from outside, and seeing that it has had its effect.

use super::{SETTLED, Stage, Victim};
use crate::blow::Blow;
use crate::route::Route;
use anyhow::{Context, Result, ensure};
use e2e::child::Child;
use e2e::proxy::{Direction, Proxy};
use e2e::service::listening;
use e2e::trickle::Trickle;
use e2e::wait::{DEADLINE, until_by, until_true};
use shared::fault::Point;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

impl Stage {
    /// Waits until the process has come by the point and done there what it was asked to.
    pub(super) async fn reach(&self, victim: &Child, point: Point, blow: Blow) -> Result<()> {
        match blow {
            Blow::Kill => {
                let status = victim.wait_exit(DEADLINE).await?;
                ensure!(status.signal() == Some(9), "it ended with {status}\n{}", victim.report());
            }
            Blow::Panic => {
                let panic = format!("asked to panic at {}", point.name());
                victim
                    .wait_for_line(&panic, DEADLINE, |line| line.contains(&panic).then_some(()))
                    .await?;
            }
            _ => victim.wait_frozen(DEADLINE).await?,
        }
        Ok(())
    }

    /// Does what is done from outside, until it has had its effect. Gives the trickle back if it
    /// still flows.
    pub(super) async fn blow(
        &mut self,
        victim: &mut Victim,
        point: Point,
        blow: Blow,
        trickle: Trickle,
    ) -> Result<Option<Trickle>> {
        match blow {
            Blow::Kill | Blow::Panic => {}
            Blow::Freeze => {
                if self.route != Route::Redrive {
                    victim.successor = Some(self.start_successor().await?);
                }
                // Without it: the clients are served, everything is settled, and the broker has
                // given the frozen process up.
                self.settle(victim, Some(trickle)).await?;
                until_true("the broker to give the frozen process up", async || {
                    Ok(self.amqp.held_by_server() == 0)
                })
                .await?;
                self.settle(victim, None).await?;
                let thawed = victim.child.log_position();
                victim.child.sigcont()?;
                // Until it has noticed, it says what was true before it froze.
                until_by(SETTLED, "the process to notice that it was frozen", async || {
                    let noticed = victim.child.logged_since(thawed, complains);
                    Ok((noticed || !victim.child.is_running()?).then_some(()))
                })
                .await?;
                self.recover(&victim.child, blow).await?;
                return Ok(None);
            }
            Blow::LoseDatabaseAnswer => {
                // Other parts of a process that serves ask the database too. It is the request, frozen
                // before its COMMIT, that has to miss the answer.
                let misses = match point {
                    Point::PlaceOrderBeforeCommit | Point::CancelOrderBeforeCommit => {
                        request_complains
                    }
                    _ => complains,
                };
                self.lose(&self.postgres, 1, &victim.child, misses).await?;
            }
            Blow::LoseBrokerAnswer => {
                let answers = self.route.amqp_connections();
                self.lose(&self.amqp, answers, &victim.child, complains).await?;
            }
            Blow::BlackHole => {
                let tried = || self.postgres.connections() + self.amqp.connections();
                let before = tried();
                self.postgres.black_hole(Direction::Both)?;
                self.amqp.black_hole(Direction::Both)?;
                victim.child.sigcont()?;
                until_by(SETTLED, "the black hole to be noticed", async || {
                    if !victim.child.is_running()? {
                        return Ok(Some(()));
                    }
                    if self.route == Route::Redrive {
                        return Ok(None);
                    }
                    Ok((tried() > before && !ready(&victim.child).await?).then_some(()))
                })
                .await?;
                self.postgres.heal()?;
                self.amqp.heal()?;
            }
        }
        if blow != Blow::Kill {
            self.recover(&victim.child, blow).await?;
        }
        Ok(Some(trickle))
    }

    /// Thaws the process; whatever the server says to it is lost until that many answers were, and the
    /// process has said that it `misses` one. By then the answer that it was frozen before is among
    /// them: that request is the first thing that the thread that was frozen sends.
    async fn lose(
        &self,
        proxy: &Proxy,
        answers: usize,
        victim: &Child,
        misses: fn(&str) -> bool,
    ) -> Result<()> {
        let (before, thawed) = (proxy.lost_answers(), victim.log_position());
        proxy.lose_answers()?;
        victim.sigcont()?;
        until_true("answers to be lost and missed", async || {
            let complained = victim.logged_since(thawed, misses);
            let lost = proxy.lost_answers() >= before + answers;
            // A command says so by its end.
            Ok(lost && (complained || !victim.is_running()?))
        })
        .await
        .with_context(|| victim.report())?;
        proxy.heal()
    }

    /// Waits until the process works again, or has ended with a reason to.
    pub(super) async fn recover(&self, victim: &Child, blow: Blow) -> Result<()> {
        until_by(SETTLED, "the process to recover", async || {
            if let Some(status) = victim.exit_status()? {
                ensure!(self.may_end(blow), "it ended by itself ({status})\n{}", victim.report());
                return Ok(Some(()));
            }
            Ok((self.route != Route::Redrive && ready(victim).await?).then_some(()))
        })
        .await
    }
}

/// Whether a line of a log says that something is wrong.
fn complains(line: &str) -> bool {
    line.contains(r#""level":"WARN""#) || line.contains(r#""level":"ERROR""#)
}

/// Whether it says that of a request.
fn request_complains(line: &str) -> bool {
    line.contains("the database did not answer a request")
        || line.contains("a request failed in the database")
}

async fn ready(child: &Child) -> Result<bool> {
    let operations = listening(child, "operations").await?;
    let ask = reqwest::get(format!("http://{operations}/health/ready"));
    let asked = tokio::time::timeout(Duration::from_secs(5), ask).await;
    Ok(asked.is_ok_and(|asked| asked.is_ok_and(|answer| answer.status().is_success())))
}
