//! The witnesses: who saw what happened to the messages, without a hand in it.
//!
//! | witness | sees |
//! |---|---|
//! | [`firehose`] | each publish, where it was routed or that it was not, and each delivery: RabbitMQ's own trace |
//! | [`log`] | what became of a delivery, and what the services make of trouble |
//! | [`rows`] | what is committed: outbox and inbox, in both databases |
//!
//! None of them sees what the broker does by itself: a retry that expires shows when it is delivered
//! again, a dead letter when it is found in parking.

pub mod firehose;
pub mod log;
pub mod rows;

use super::happening::Happening;
use crate::child::Child;
use crate::ledger::books::Side;
use crate::system::System;
use anyhow::Result;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How often logs and tables are looked at.
const LOOK: Duration = Duration::from_millis(40);

/// All of them, at work.
pub struct Witnesses {
    tasks: JoinSet<()>,
    done: CancellationToken,
    report: UnboundedSender<Happening>,
}

impl Witnesses {
    /// Sets them to work, before the services start.
    ///
    /// # Errors
    /// When the broker does not let itself be traced.
    pub async fn of(system: &System, report: UnboundedSender<Happening>) -> Result<Self> {
        let mut tasks = JoinSet::new();
        let done = CancellationToken::new();
        let trace = firehose::open(system).await?;
        tasks.spawn(firehose::watch(trace, report.clone(), done.clone()));
        for (side, env) in
            [(Side::Orders, &system.orders_env), (Side::Inventory, &system.inventory_env)]
        {
            let db = rows::open(&env["DATABASE_URL"])?;
            tasks.spawn(rows::watch(side, db, report.clone(), done.clone()));
        }
        Ok(Self { tasks, done, report })
    }

    /// Reads the log of one more process.
    pub fn read(&mut self, side: Side, process: &Child) {
        let (log, report, done) = (process.follow(), self.report.clone(), self.done.clone());
        self.tasks.spawn(log::watch(side, log, report, done));
    }

    /// Lets each of them have a last look, and sends them home.
    pub async fn dismiss(mut self) {
        self.done.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}
