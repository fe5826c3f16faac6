//! What has really happened, written down by the model beside the system's own tables, and what must
//! be true after every step.

use crate::client::Wish;
use crate::handlers::State;
use crate::rules::Side;
use crate::world::World;
use anyhow::{Result, bail, ensure};
use shared::envelope::Envelope;
use shared::events::is_genesis;
use std::collections::{BTreeMap, BTreeSet};

/// The book.
#[derive(Default)]
pub struct Ledger {
    /// By id: what was committed to be told.
    pub facts: BTreeMap<String, Fact>,
    /// Ids that strangers have used.
    pub strangers: BTreeSet<String>,
    /// How often what was seen.
    pub seen: Seen,
    /// The last version that took effect, by who took it and whose it is.
    versions: BTreeMap<(Side, String, String), i64>,
}

/// Steps, outcomes, failures, and how often they were seen: a check that never sees them is none.
pub type Seen = BTreeMap<&'static str, usize>;

/// Something that became true on one side, and of which the other must hear.
pub struct Fact {
    pub from: Side,
    /// Whether it took effect on the other side.
    pub took_effect: bool,
    owner: Owner,
}

/// Who a fact is with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// Its outbox will send it, or has parked it.
    Sender,
    /// Some queue has it, one for parking included.
    Broker,
    /// It is done.
    Receiver,
}

impl Ledger {
    /// An event is in a committed outbox row.
    pub fn committed(&mut self, from: Side, event: &Envelope) {
        let fact = Fact { from, took_effect: false, owner: Owner::Sender };
        self.facts.insert(event.id.clone(), fact);
    }

    pub fn saw(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// A message has taken effect at `side`; `fact` is what it really tells, and `changed` is whether
    /// anything is other than before it. What is let through once more and finds everything done has
    /// no effect.
    pub fn took_effect(
        &mut self,
        side: Side,
        fact: Option<&str>,
        said: &Envelope,
        changed: bool,
    ) -> Result<()> {
        let id = &said.id;
        let fact = fact.and_then(|fact| self.facts.get_mut(fact));
        ensure!(fact.is_some(), "{id} has taken effect twice: once as what a stranger said");
        if let Some(fact) = fact {
            if fact.took_effect && !changed {
                return Ok(());
            }
            ensure!(!fact.took_effect, "{id} has taken effect twice");
            fact.took_effect = true;
        }
        let version = said.aggregate.version;
        let stream = (side, said.aggregate.kind.clone(), said.aggregate.id.clone());
        let in_turn = match self.versions.insert(stream, version) {
            Some(last) => version == last + 1,
            None => is_genesis(&said.event_type),
        };
        ensure!(in_turn, "{id}, version {version}, has taken effect out of its turn");
        Ok(())
    }
}

impl World {
    /// Who a fact is with: the furthest on its way, where several have copies of it.
    fn owner(&self, id: &str, fact: &Fact, at_the_broker: &BTreeSet<&str>) -> Option<Owner> {
        let outbox = &self.service(fact.from).database.outbox;
        if fact.took_effect {
            Some(Owner::Receiver)
        } else if at_the_broker.contains(id) {
            Some(Owner::Broker)
        } else if outbox.iter().any(|row| row.id == id && !row.published) {
            Some(Owner::Sender)
        } else if self.mutation.is_some() && self.in_hand_alone(id) {
            // The memory of a process owns nothing. But a mutant is to be caught by what follows from
            // that, and not by its definition.
            Some(fact.owner)
        } else {
            None
        }
    }

    fn in_hand_alone(&self, id: &str) -> bool {
        let workers = Side::BOTH.map(|side| &self.service(side).process.in_hand);
        workers.into_iter().flatten().any(|in_hand| in_hand.message.fact.as_deref() == Some(id))
    }

    /// What must be true at every moment.
    pub fn check(&mut self) -> Result<()> {
        self.check_owners()?;
        self.check_stock()
    }

    fn check_owners(&mut self) -> Result<()> {
        let queues = Side::BOTH.map(|side| self.service(side).queues.messages());
        let at_the_broker: BTreeSet<&str> =
            queues.into_iter().flatten().filter_map(|message| message.fact.as_deref()).collect();
        let mut owners = Vec::with_capacity(self.ledger.facts.len());
        for (id, fact) in &self.ledger.facts {
            let Some(owner) = self.owner(id, fact, &at_the_broker) else {
                bail!("{id} is lost: it is in no table, and in no queue");
            };
            let onward = fact.owner <= owner || self.mutation.is_some();
            ensure!(onward, "{id} goes back from {:?} to {owner:?}", fact.owner);
            owners.push(owner);
        }
        for (fact, owner) in self.ledger.facts.values_mut().zip(owners) {
            fact.owner = owner;
        }
        Ok(())
    }

    fn check_stock(&self) -> Result<()> {
        let orders = &self.service(Side::Orders).database.orders;
        for client in &self.clients {
            let kept = client.wish != Wish::Granted || orders.contains_key(&client.order);
            ensure!(kept, "{} was promised, and is lost", client.order);
        }
        let warehouse = &self.service(Side::Inventory).database.warehouse;
        for (sku, stock) in &warehouse.stock {
            let held: i64 = warehouse
                .reservations
                .values()
                .filter(|reservation| reservation.state == State::Reserved)
                .flat_map(|reservation| reservation.lines.as_slice())
                .filter(|line| line.sku.as_str() == sku)
                .map(|line| i64::from(line.count))
                .sum();
            ensure!(stock.reserved == held, "of {sku} {held} are held, the stock says {stock:?}");
            ensure!(held <= stock.available, "{sku} is oversold: {stock:?}");
        }
        Ok(())
    }
}
