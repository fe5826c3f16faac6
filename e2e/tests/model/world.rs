//! The state: two services, each a database, a process and its queues at the broker; and the clients.
//!
//! What is in a [`Process`] is volatile, the rest is not: a crash is a new `Process`. A step that
//! touches two of the three at once would be a dual write, and there is none.

use crate::client::Client;
use crate::consumer::Luck;
use crate::gate::Inbox;
use crate::handlers::{Orders, Warehouse};
use crate::ledger::Ledger;
use crate::mutants::Mutation;
use crate::outbox::Row;
use crate::relay::Batch;
use crate::rules::{Rules, Side};
use crate::steps::Step;
use chrono::{DateTime, TimeDelta, Utc};
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::AMQPValue;
use shared::failure::Class;
use shared::incoming::Incoming;
use shared::outage::Outage;
use shared::publisher::Outgoing;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::{Arguments, Display};
use std::rc::Rc;
use std::time::Duration;

/// A message, wherever it is.
#[derive(Clone, Debug)]
pub struct Message {
    /// Travels.
    pub properties: BasicProperties,
    /// Travels.
    pub body: Vec<u8>,
    /// The broker's count: deliveries that were lost with their consumer, or rejected to wait.
    pub redeliveries: u32,
    /// Known to the model alone, as all below: the fact that it tells, if it tells one. Not its
    /// `message_id`, which anybody may write on anything.
    pub fact: Option<String>,
    /// Its last failures of one class, told apart from what its headers say.
    pub failures: Option<(Class, u32)>,
    /// It must not be tried earlier.
    pub not_before: DateTime<Utc>,
}

impl Message {
    pub fn new(outgoing: Outgoing, fact: Option<String>) -> Self {
        Self {
            properties: outgoing.properties,
            body: outgoing.body,
            redeliveries: 0,
            fact,
            failures: None,
            not_before: DateTime::UNIX_EPOCH,
        }
    }

    /// How the story calls it.
    pub fn name(&self) -> String {
        let id = self.properties.message_id().as_ref().map_or("no id", |id| id.as_str());
        if self.fact.is_some() { id.to_owned() } else { format!("a stranger's {id}") }
    }
}

/// A PostgreSQL database. Cloned for a transaction, which may roll back.
#[derive(Clone, Default)]
pub struct Database {
    pub outbox: Vec<Row>,
    pub next_seq: i64,
    /// How far the relay got. A mutant's: the real one remembers nothing.
    pub cursor: i64,
    pub inbox: Inbox,
    /// Of orders-service alone.
    pub orders: Orders,
    /// Of inventory-service alone.
    pub warehouse: Warehouse,
}

/// A process: all that a crash forgets.
pub struct Process {
    /// What the relay has claimed and not marked.
    pub batch: Option<Batch>,
    /// Deliveries in the hands of workers.
    pub in_hand: Vec<InHand>,
    pub outage: Outage,
}

impl Process {
    pub fn new(rules: &Rules) -> Self {
        let outage = Outage::new(rules.config.consumer.outage_after(&rules.config.topology));
        Self { batch: None, in_hand: Vec::new(), outage }
    }
}

/// A delivery that a worker has.
pub struct InHand {
    pub tag: u64,
    pub message: Message,
    pub stage: Stage,
}

/// How far a worker is with a delivery.
pub enum Stage {
    /// Nothing was done yet.
    Delivered,
    /// It failed; this copy must have an owner next.
    Copying { copy: Box<Outgoing>, parks: bool, wait: Duration },
    /// It failed, and is to be rejected: the broker will delay it.
    Rejecting { wait: Duration },
    /// Somebody else owns it, the Ack is next.
    Owned,
}

/// The broker's queues around one consumer.
#[derive(Default)]
pub struct Queues {
    pub ready: VecDeque<Message>,
    pub unacked: Vec<(u64, Message)>,
    /// The retry queues, a delay each; or, where the broker delays, the first for all that waits.
    pub retry: [VecDeque<(DateTime<Utc>, Message)>; 3],
    /// Rejected or over the delivery limit: on its way to parking, by the broker's own hand.
    pub dead_letters: VecDeque<Message>,
    pub parking: Vec<Message>,
    pub next_tag: u64,
}

impl Queues {
    /// Everything that is here.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        let unacked = self.unacked.iter().map(|(_, message)| message);
        let retry = self.retry.iter().flatten().map(|(_, message)| message);
        let dead = self.dead_letters.iter();
        self.ready.iter().chain(unacked).chain(retry).chain(dead).chain(&self.parking)
    }
}

/// A service, and what the broker keeps for it.
pub struct Service {
    pub database: Database,
    /// Whether the database answers.
    pub database_up: bool,
    /// Whether a queue is bound to the exchange that it publishes to.
    pub exchange_bound: bool,
    pub process: Process,
    pub queues: Queues,
    /// Claimed by a relay that has lost the lead and does not know it: it may still send, never mark.
    pub former_relay: VecDeque<Row>,
}

/// Everything.
pub struct World {
    pub rules: Rc<Rules>,
    pub mutation: Option<Mutation>,
    pub clock: DateTime<Utc>,
    pub clients: Vec<Client>,
    services: [Service; 2],
    pub ledger: Ledger,
    /// Facts that fail whenever they are handled, until that is mended.
    pub curses: BTreeMap<String, Luck>,
    story: Option<Story>,
}

/// What has happened, for people and to be repeated.
#[derive(Default)]
pub struct Story {
    pub lines: Vec<String>,
    pub steps: Vec<Step>,
}

impl World {
    /// Before anything has happened.
    pub fn new(rules: Rc<Rules>, mutation: Option<Mutation>, clients: Vec<Client>) -> Self {
        let services = Side::BOTH.map(|side| Service {
            database: Database {
                warehouse: match side {
                    Side::Orders => Warehouse::default(),
                    Side::Inventory => Warehouse::stocked(),
                },
                ..Database::default()
            },
            database_up: true,
            exchange_bound: true,
            process: Process::new(&rules),
            queues: Queues::default(),
            former_relay: VecDeque::new(),
        });
        let clock = DateTime::UNIX_EPOCH;
        let (ledger, curses) = (Ledger::default(), BTreeMap::new());
        Self { rules, mutation, clock, clients, services, ledger, curses, story: None }
    }

    pub fn service(&self, side: Side) -> &Service {
        let [orders, inventory] = &self.services;
        match side {
            Side::Orders => orders,
            Side::Inventory => inventory,
        }
    }

    pub fn service_mut(&mut self, side: Side) -> &mut Service {
        let [orders, inventory] = &mut self.services;
        match side {
            Side::Orders => orders,
            Side::Inventory => inventory,
        }
    }

    /// A message, as a consumer reads it now.
    pub fn incoming(&self, message: &Message) -> Incoming {
        let body = message.body.clone();
        let mut delivery = Delivery::mock(0, "".into(), "".into(), false, body);
        let mut headers = message.properties.headers().clone().unwrap_or_default();
        if message.redeliveries > 0 {
            let count = AMQPValue::LongLongInt(message.redeliveries.into());
            headers.insert("x-delivery-count".into(), count);
        }
        delivery.properties = message.properties.clone().with_headers(headers);
        let mut incoming = Incoming::new(delivery, self.rules.budget.backend);
        incoming.received_at = self.clock;
        incoming
    }

    pub fn breaks(&self, rule: Mutation) -> bool {
        self.mutation == Some(rule)
    }

    pub fn time_passes(&mut self, time: Duration) {
        self.clock += TimeDelta::from_std(time).unwrap_or(TimeDelta::MAX);
    }

    /// From here on the steps are told.
    pub fn tell_story(&mut self) {
        self.story = Some(Story::default());
    }

    pub fn tell(&mut self, who: impl Display, what: Arguments<'_>) {
        if let Some(story) = &mut self.story {
            let minutes = (self.clock - DateTime::UNIX_EPOCH).as_seconds_f64() / 60.0;
            story.lines.push(format!("{minutes:8.1} min  {who}: {what}"));
        }
    }

    pub fn note(&mut self, step: Step) {
        if let Some(story) = &mut self.story {
            story.steps.push(step);
        }
    }

    pub fn story(self) -> Story {
        self.story.unwrap_or_default()
    }
}
