//! What must be true in the end: nothing fails any more, everybody does what is to be done, until
//! nothing is left to do.
//!
//! First without an operator: whatever has failed by then is parked, and says why. Then an operator
//! sends it all back, and all of it comes to its end.

use crate::client::Wish;
use crate::handlers::State;
use crate::outbox::Row;
use crate::rules::Side;
use crate::steps::{Kind, Step, WORK};
use crate::world::{Message, World};
use anyhow::{Result, bail, ensure};
use orders_service::order::Status;
use shared::envelope::Envelope;
use std::collections::BTreeSet;

/// Far more steps than any world here has work for.
const ENDLESS: usize = 20_000;

impl World {
    /// Runs to rest, and looks whether all is as promised.
    pub fn rest(&mut self) -> Result<()> {
        self.tell("-", format_args!("the script is over; all that is to be done is done"));
        for side in Side::BOTH {
            self.step(Step(Kind::DatabaseReturns, side, 0))?;
        }
        self.work()?;
        self.check_rest()?;
        let mut rounds = 0;
        while self.operate()? {
            self.work()?;
            self.check_rest()?;
            rounds += 1;
            ensure!(rounds < 20, "the operator comes to no end");
        }
        self.check_end()
    }

    fn work(&mut self) -> Result<()> {
        for _ in 0..ENDLESS {
            let mut idle = true;
            for kind in WORK {
                for side in Side::BOTH {
                    idle &= !self.step(Step(kind, side, 0))?;
                }
            }
            if idle && !self.wait_for_the_next()? {
                return Ok(());
            }
        }
        bail!("it does not come to rest");
    }

    /// With nothing to do, time passes until there is. `false`: there will be nothing.
    fn wait_for_the_next(&mut self) -> Result<bool> {
        let (mut expiry, mut row) = (None, None);
        for side in Side::BOTH {
            let service = self.service(side);
            let first = service.queues.retry.iter().filter_map(|queue| queue.front());
            let expiries = (0..).zip(first).map(|(rung, (due, _))| (*due, side, rung));
            expiry = expiries.chain(expiry).min();
            let waiting =
                |row: &&Row| !row.published && !row.parked && row.next_attempt_at > self.clock;
            let rows = service.database.outbox.iter().filter(waiting);
            row = rows.map(|row| row.next_attempt_at).chain(row).min();
        }
        match (expiry, row) {
            (Some((due, side, rung)), row) if row.is_none_or(|at| due <= at) => {
                self.step(Step(Kind::Expire, side, rung))
            }
            (_, Some(at)) => {
                self.clock = at;
                Ok(true)
            }
            (_, None) => Ok(false),
        }
    }

    /// An operator sends back what is parked, the oldest version of an aggregate first, except what
    /// will never be understood. `false`: there was nothing.
    fn operate(&mut self) -> Result<bool> {
        let mut anything = self.step(Step(Kind::Mend, Side::Orders, 0))?;
        for side in Side::BOTH {
            anything |= self.step(Step(Kind::RetryOutbox, side, 0))?;
            let version = |message: &Message| {
                Envelope::parse(&message.body).map_or(0, |envelope| envelope.aggregate.version)
            };
            self.service_mut(side).queues.parking.sort_by_key(version);
            while let Some(at) = self.parked_fact(side) {
                anything |= self.step(Step(Kind::Redrive, side, at))?;
            }
        }
        Ok(anything)
    }

    fn parked_fact(&self, side: Side) -> Option<u8> {
        let parking = &self.service(side).queues.parking;
        let at = parking.iter().position(|message| message.fact.is_some())?;
        u8::try_from(at).ok()
    }

    /// At rest each fact has taken effect, or is parked, or is behind one that is.
    fn check_rest(&self) -> Result<()> {
        let mut parked = BTreeSet::new();
        for side in Side::BOTH {
            let queues = &self.service(side).queues;
            for message in &queues.parking {
                let headers = message.properties.headers().clone().unwrap_or_default();
                let why = ["x-park-reason", "x-first-death-reason"];
                let told = why.iter().any(|header| headers.inner().contains_key(*header));
                ensure!(told, "{} is parked for no reason", message.name());
                parked.extend(message.fact.as_deref());
            }
            let elsewhere = queues.messages().count() - queues.parking.len();
            ensure!(elsewhere == 0, "{elsewhere} messages are left in {side}'s queues");
        }
        for (id, fact) in &self.ledger.facts {
            let outbox = &self.service(fact.from).database.outbox;
            let held_back = outbox.iter().find(|row| row.id == *id).is_some_and(|this| {
                let holds = |row: &Row| {
                    row.parked && row.aggregate == this.aggregate && row.version <= this.version
                };
                !this.published && outbox.iter().any(holds)
            });
            let known = fact.took_effect || parked.contains(id.as_str()) || held_back;
            ensure!(known, "{id} is left behind: not sent, or not done, and not parked");
        }
        Ok(())
    }

    /// With nothing parked but what strangers have sent, all is settled.
    fn check_end(&self) -> Result<()> {
        for (id, fact) in &self.ledger.facts {
            ensure!(fact.took_effect, "{id} has taken no effect in the end");
        }
        let database = &self.service(Side::Orders).database;
        let warehouse = &self.service(Side::Inventory).database.warehouse;
        let versions = &self.service(Side::Inventory).database.inbox.versions;
        for client in &self.clients {
            let order = &client.order;
            ensure!(client.wish == Wish::Granted, "{order}'s client still waits");
            let Some(row) = database.orders.get(order) else { bail!("{order} is not there") };
            let state = warehouse.reservations.get(order).map(|reservation| reservation.state);
            let fits = match row.status {
                Status::Created => false,
                Status::Confirmed => state == Some(State::Reserved),
                Status::Rejected => state == Some(State::Rejected),
                // Called off before the "no" came, or with what it held released.
                Status::Cancelled => matches!(state, Some(State::Rejected | State::Released)),
            };
            ensure!(fits, "{order} is {:?}, its reservation {state:?}", row.status);
            let known = versions.get(&("order".to_owned(), order.clone())).copied();
            let same = self.mutation.is_some() || known == Some(row.version);
            ensure!(same, "{order} is at version {}, the inventory at {known:?}", row.version);
        }
        Ok(())
    }
}
