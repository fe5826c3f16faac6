//! What an orchestrator, clients and the people on call do about it: start again, ask again, redrive.

use super::{SETTLED, Stage, Victim};
use crate::route::Route;
use anyhow::{Context, Result};
use e2e::child::Patience;
use e2e::ledger::books::Side;
use e2e::ledger::{Expect, audit, report};
use e2e::service::Service;
use e2e::trickle::Trickle;
use tokio::task::JoinHandle;

impl Stage {
    /// The orchestrator, the clients and the people on call do their part until nothing is under way.
    pub(super) async fn settle(
        &mut self,
        victim: &mut Victim,
        trickle: Option<Trickle>,
    ) -> Result<()> {
        let clients = trickle.map(|trickle| tokio::spawn(trickle.stop()));
        let waiting = |clients: &Option<JoinHandle<_>>| {
            clients.as_ref().is_some_and(|clients| !clients.is_finished())
        };
        let settled = async {
            let patience = Patience::new(SETTLED, "everything to be settled");
            loop {
                self.supervise(victim).await?;
                // Asked first: who has not placed an order yet may do so while the books are read.
                let wait = waiting(&clients);
                let attended = self.system.attend(self.redrives()).await?;
                let stuck = audit::under_way(&attended.ledger, &Expect::default());
                if stuck.is_empty() && !wait {
                    return Ok(());
                }
                let (stuck, said) = (report::list(&stuck), attended.complaints);
                let why = || format!("clients wait: {wait}\n{stuck}{said}");
                patience.pause().await.with_context(why)?;
            }
        };
        let settled: Result<()> = settled.await;
        if let Err(stuck) = settled {
            // Told in full, with the stories, if the ledger sees it too.
            self.system
                .balance(&Expect::default(), &self.logs(victim))
                .await
                .context(stuck.to_string())?;
            return Err(stuck);
        }
        if let Some(clients) = clients {
            self.promised.extend(clients.await.context("the clients broke off")??);
        }
        Ok(())
    }

    /// Whose parking the people on call look after: where the test has a message parked. Any other that
    /// is parked stays there, and the ledger finds it.
    fn redrives(&self) -> &[Side] {
        match self.route {
            Route::Park | Route::Redrive => std::slice::from_ref(&self.side),
            _ => &[],
        }
    }

    /// A process that has ended is started again, without the fault.
    pub(super) async fn supervise(&self, victim: &mut Victim) -> Result<()> {
        let gone = self.route != Route::Redrive && !victim.child.is_running()?;
        if gone && victim.successor.is_none() {
            victim.successor = Some(self.start_successor().await?);
        }
        Ok(())
    }

    pub(super) async fn start_successor(&self) -> Result<Service> {
        let successor = Service::start(self.side.service(), &self.spared).await?;
        successor.wait_ready().await?;
        if self.route.serves() {
            self.directory.lead_to(vec![successor.api("")?]);
        }
        Ok(successor)
    }
}
