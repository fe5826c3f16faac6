//! What goes wrong around the hops: processes die, databases go away, the inbox forgets, strangers
//! publish.

use crate::consumer::Luck;
use crate::rules::Side;
use crate::world::{Message, Process, World};
use anyhow::Result;
use lapin::BasicProperties;
use serde_json::{Value, json};
use shared::envelope::{Aggregate, Envelope};
use shared::events::current_version;
use shared::publisher::Outgoing;
use std::time::Duration;

/// Most messages of strangers.
const STRANGERS: usize = 3;

impl World {
    /// A service dies, and is started again: all that is volatile is gone.
    pub fn crash(&mut self, side: Side, pick: u8) -> bool {
        self.tell(side, format_args!("the process is killed"));
        self.end_session(side, pick);
        let rules = self.rules.clone();
        let keeps = !self.breaks(crate::mutants::Mutation::OutboxInMemory);
        let service = self.service_mut(side);
        service.process = Process::new(&rules);
        service.database.outbox.retain(|row| keeps || row.published);
        if side == Side::Orders {
            self.roll_back_orders();
        }
        true
    }

    pub fn database_goes(&mut self, side: Side) -> bool {
        if !std::mem::replace(&mut self.service_mut(side).database_up, false) {
            return false;
        }
        // The relay claims and marks over one connection: its session is over.
        self.service_mut(side).process.batch = None;
        if side == Side::Orders {
            self.roll_back_orders();
        }
        self.tell(side, format_args!("the database is away"));
        true
    }

    pub fn database_returns(&mut self, side: Side) -> bool {
        if std::mem::replace(&mut self.service_mut(side).database_up, true) {
            return false;
        }
        self.tell(side, format_args!("the database is back"));
        true
    }

    /// In an outage the database is asked whether it is back.
    pub fn probe(&mut self, side: Side) -> bool {
        let service = self.service(side);
        if !service.process.outage.is_on() || !service.database_up {
            return false;
        }
        service.process.outage.probed();
        self.time_passes(self.rules.config.consumer.outage_probe_interval);
        self.tell(side, format_args!("a probe finds the database back"));
        true
    }

    /// From here on the handling of some fact deadlocks, or panics, each time.
    pub fn curse(&mut self, pick: u8) -> bool {
        let open = self.ledger.facts.iter().filter(|(_, fact)| !fact.took_effect);
        let open: Vec<&String> = open.map(|(id, _)| id).collect();
        let Some(id) = open.get(usize::from(pick) % open.len().max(1)).map(|id| (*id).clone())
        else {
            return false;
        };
        let luck = if pick < 128 { Luck::Deadlock } else { Luck::Panic };
        self.tell("from here on", format_args!("{id} fails each time, by a {luck:?}"));
        self.curses.insert(id, luck);
        true
    }

    /// Somebody takes the binding away.
    pub fn unbind(&mut self, side: Side) -> bool {
        let done = std::mem::replace(&mut self.service_mut(side).exchange_bound, false);
        if done {
            self.tell(side, format_args!("no queue is bound to the exchange any more"));
        }
        done
    }

    /// What was wrong with the code, or with the bindings, is put right.
    pub fn mend(&mut self) -> bool {
        let mut done = !self.curses.is_empty();
        self.curses.clear();
        for side in Side::BOTH {
            done |= !std::mem::replace(&mut self.service_mut(side).exchange_bound, true);
        }
        if done {
            self.tell("operator", format_args!("puts right what was wrong with code and bindings"));
        }
        done
    }

    pub fn wait(&mut self, pick: u8) -> bool {
        let seconds = [1, 60, 1200, 86_400][usize::from(pick) % 4];
        self.time_passes(Duration::from_secs(seconds));
        self.tell("time", format_args!("{seconds} s pass"));
        true
    }

    /// Retention deletes a row of the inbox, too early. An id that a stranger uses stays: there the
    /// inbox is all that tells the two apart.
    pub fn forget(&mut self, side: Side, pick: u8) -> bool {
        let strangers = &self.ledger.strangers;
        let ids = &self.service(side).database.inbox.ids;
        let ids: Vec<&String> = ids.iter().filter(|id| !strangers.contains(*id)).collect();
        let Some(id) = ids.get(usize::from(pick) % ids.len().max(1)).map(|id| (*id).clone()) else {
            return false;
        };
        self.service_mut(side).database.inbox.ids.remove(&id);
        self.tell(side, format_args!("the inbox forgets {id}"));
        true
    }

    /// Somebody else publishes what is no event.
    pub fn broken_message(&mut self, side: Side) -> Result<bool> {
        let id = format!("broken-{}", self.ledger.strangers.len() + 1);
        self.strange(side, &id, b"{not-json".to_vec())
    }

    /// Somebody else publishes an event under an id that was used before.
    pub fn reused_id(&mut self, side: Side, pick: u8) -> Result<bool> {
        let ids = &self.service(side).database.inbox.ids;
        let strangers = &self.ledger.strangers;
        let ids: Vec<&String> = ids.iter().filter(|id| !strangers.contains(*id)).collect();
        let Some(id) = ids.get(usize::from(pick) % ids.len().max(1)).map(|id| (*id).clone()) else {
            return Ok(false);
        };
        let (event_type, kind, data) = match side {
            Side::Inventory => {
                ("order.created", "order", json!({"lines": [{"sku": "a", "count": 1}]}))
            }
            Side::Orders => ("inventory.reserved", "reservation", json!({"order_id": "o1"})),
        };
        let event: Envelope<Value> = Envelope {
            id: id.clone(),
            event_type: event_type.into(),
            schema_version: current_version(event_type),
            occurred_at: self.clock,
            producer: "a stranger".into(),
            correlation_id: "none".into(),
            causation_id: "none".into(),
            aggregate: Aggregate { kind: kind.into(), id: "a stranger's".into(), version: 1 },
            data,
        };
        self.strange(side, &id, serde_json::to_vec(&event)?)
    }

    fn strange(&mut self, side: Side, id: &str, body: Vec<u8>) -> Result<bool> {
        if self.ledger.strangers.len() >= STRANGERS {
            return Ok(false);
        }
        self.ledger.strangers.insert(id.to_owned());
        let outgoing = Outgoing {
            message_id: id.to_owned(),
            exchange: "".into(),
            routing_key: "".into(),
            properties: BasicProperties::default().with_message_id(id.into()),
            body,
        };
        let message = Message::new(outgoing, None);
        self.tell(side, format_args!("its queue gets {}", message.name()));
        self.service_mut(side).queues.ready.push_back(message);
        Ok(true)
    }
}
