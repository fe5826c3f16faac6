//! The ledger: what must be true of the whole system once it is left alone, whatever was done to it.
//!
//! Every end-to-end test ends with [`System::finish`]. It waits until nothing is under way any more,
//! stops both services in an orderly way, and balances the books: both databases and every queue.
//! Four things can be wrong. Something is *lost* (a client was told of an order that is not there, a
//! published event is in no inbox and in no queue), *doubled* (two orders for one request, stock held
//! twice), *stuck* (it will not move by itself), or *wrong* (the two sides disagree, or an event is
//! not what the written contract says).
//!
//! [`books`] reads, [`audit`] judges without touching anything, [`report`] tells: each finding with
//! the story of the order or message that it is about, hop by hop, the queue that the message is in,
//! and what the services logged of it.

pub mod audit;
pub mod books;
pub mod report;

use crate::system::System;
use crate::wait::until_by;
use anyhow::{Result, bail, ensure};
use std::collections::BTreeMap;
use std::time::Duration;

pub use audit::{Finding, Kind};
pub use books::Ledger;

/// What a test has done on purpose, so that the ledger does not complain of it.
#[derive(Default, Clone)]
pub struct Expect {
    /// Messages left in `inventory.orders.parking`.
    pub parked: u32,
    /// Ids that the test published itself, past the outbox.
    pub injected: Vec<String>,
    /// The orders that clients were told of, by id: all that there may be, and each of them. Without
    /// it nobody kept count.
    pub promised: Option<BTreeMap<String, Promise>>,
}

/// What a client was told of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    /// How many of which sku it has.
    pub lines: BTreeMap<String, i32>,
    /// That it is cancelled.
    pub cancelled: bool,
}

impl System {
    /// Comes to rest, stops, and balances, with nothing out of the ordinary expected.
    ///
    /// # Errors
    /// Everything that does not add up.
    pub async fn finish(self) -> Result<()> {
        self.finish_expecting(Expect::default()).await
    }

    /// Comes to rest, stops, and balances.
    ///
    /// # Errors
    /// Everything that does not add up.
    pub async fn finish_expecting(self, expect: Expect) -> Result<()> {
        self.close(expect).await.map(|_ledger| ())
    }

    /// [`System::finish_expecting`], for who wants to see the books.
    ///
    /// # Errors
    /// Everything that does not add up.
    pub async fn close(mut self, expect: Expect) -> Result<Ledger> {
        let rested = self.rest(&expect, crate::wait::DEADLINE).await;
        // An unacked message is in no queue's depth; once its consumer is gone it is.
        let services = [self.orders.take(), self.inventory.take()];
        for service in services.iter().flatten() {
            match rested {
                Ok(()) => service.stop().await?,
                Err(_) => service.child.sigkill()?,
            }
        }
        let logs: Vec<_> = services.iter().flatten().map(|service| &service.child).collect();
        let ledger = self.balance(&expect, &logs).await?;
        rested?; // the books balance, but not in time
        // Idle queues cost the shared broker a tick each, five times a second.
        self.rabbitmq.delete_vhost(self.vhost()?).await?;
        Ok(ledger)
    }

    /// Waits until nothing is under way.
    ///
    /// # Errors
    /// What still is when patience ends.
    pub async fn rest(&self, expect: &Expect, limit: Duration) -> Result<()> {
        until_by(limit, "nothing to be under way", async || {
            let ledger = Ledger::read(self).await?;
            let stuck = audit::under_way(&ledger, expect);
            // As an error, so that the last one is told when patience ends.
            ensure!(stuck.is_empty(), "{}", report::list(&stuck));
            Ok(Some(()))
        })
        .await
    }

    /// Balances the books of a system at rest.
    ///
    /// # Errors
    /// Everything that does not add up, with the stories behind it; `logs` are of the processes that
    /// may have had a hand in it.
    pub async fn balance(&self, expect: &Expect, logs: &[&crate::child::Child]) -> Result<Ledger> {
        let ledger = Ledger::read(self).await?;
        let findings = audit::findings(&ledger, expect)?;
        if findings.is_empty() {
            return Ok(ledger);
        }
        let places = report::look_into_queues(self, &ledger).await;
        bail!("{}", report::tell(&ledger, &findings, &places, logs));
    }
}
