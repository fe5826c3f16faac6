//! Hop 4 and the broker's part of hops 7 and 8: ready, unacked, waiting, dead-lettered, parked.
//!
//! The broker itself neither loses nor makes up a message; that is what quorum queues, persistence
//! and at-least-once dead lettering are for. It may deliver twice, and in any order.

use crate::mutants::Mutation;
use crate::rules::Side;
use crate::world::{InHand, Message, Stage, World};
use anyhow::{Context, Result, bail};
use lapin::types::AMQPValue;
use shared::publisher::Outgoing;
use std::time::Duration;

/// Workers of a consumer.
const WORKERS: usize = 3;

impl World {
    /// Gives a worker a message: the oldest, or one out of turn.
    pub fn deliver(&mut self, side: Side, pick: u8) -> Result<bool> {
        let early = self.breaks(Mutation::AckBeforeCommit);
        let service = self.service_mut(side);
        let outage = &service.process.outage;
        let workers = if outage.on_trial() { 1 } else { WORKERS };
        let ready = service.queues.ready.len();
        if outage.is_on() || service.process.in_hand.len() >= workers || ready == 0 {
            return Ok(false);
        }
        let at = usize::from(pick) % ready;
        let message = service.queues.ready.remove(at).context("a message that is ready")?;
        let (tag, name) = (service.queues.next_tag, message.name());
        service.queues.next_tag += 1;
        if !early {
            service.queues.unacked.push((tag, message.clone()));
        }
        service.process.in_hand.push(InHand { tag, message, stage: Stage::Delivered });
        let turn = if at == 0 { "" } else { ", out of turn" };
        self.tell(side, format_args!("a worker gets {name}{turn}"));
        Ok(true)
    }

    /// Time passes until the first message of a retry queue expires, back into the queue.
    pub fn expire(&mut self, side: Side, pick: u8) -> Result<bool> {
        let retry = &self.service(side).queues.retry;
        let filled: Vec<usize> = (0..retry.len()).filter(|rung| !retry[*rung].is_empty()).collect();
        let Some(rung) = filled.get(usize::from(pick) % filled.len().max(1)) else {
            return Ok(false);
        };
        let first = self.service_mut(side).queues.retry[*rung].pop_front();
        let (due, message) = first.context("a message that waits")?;
        self.clock = self.clock.max(due);
        self.tell(side, format_args!("{} has waited and is back", message.name()));
        self.service_mut(side).queues.ready.push_back(message);
        Ok(true)
    }

    /// The broker parks what was rejected, or delivered in vain too often.
    pub fn dead_letter(&mut self, side: Side) -> Result<bool> {
        let queues = &mut self.service_mut(side).queues;
        let Some(message) = queues.dead_letters.pop_front() else { return Ok(false) };
        let name = message.name();
        queues.parking.push(message);
        self.ledger.saw("parked by the broker");
        self.tell(side, format_args!("the broker parks {name} by itself"));
        Ok(true)
    }

    /// A message is in its queue twice.
    pub fn duplicate(&mut self, side: Side, pick: u8) -> Result<bool> {
        let ready = &mut self.service_mut(side).queues.ready;
        let at = usize::from(pick) % ready.len().max(1);
        let Some(message) = ready.get(at).cloned() else { return Ok(false) };
        let name = message.name();
        ready.push_back(message);
        self.tell(side, format_args!("the broker has {name} twice"));
        Ok(true)
    }

    /// The consumer's channel ends, and an Ack on it may be lost: what was unacked is ready again, in
    /// one order or the other.
    pub fn end_session(&mut self, side: Side, pick: u8) -> bool {
        let limit = self.rules.delivery_limit;
        let service = self.service_mut(side);
        if service.process.in_hand.is_empty() {
            return false;
        }
        service.process.in_hand.clear();
        let mut unacked = std::mem::take(&mut service.queues.unacked);
        if pick.is_multiple_of(2) {
            unacked.reverse();
        }
        for (_, mut message) in unacked {
            message.redeliveries += 1;
            if message.redeliveries > limit {
                service.queues.dead_letters.push_back(dead(message, "delivery_limit"));
            } else {
                service.queues.ready.push_front(message);
            }
        }
        self.tell(
            side,
            format_args!("its consumer's session ends, what was unacked is ready again"),
        );
        true
    }

    /// Workers give back what they have not tried.
    pub fn give_back(&mut self, side: Side) {
        let service = self.service_mut(side);
        let untried = service
            .process
            .in_hand
            .extract_if(.., |in_hand| matches!(in_hand.stage, Stage::Delivered));
        for InHand { tag, .. } in untried {
            let given = service.queues.unacked.extract_if(.., |(other, _)| *other == tag);
            given.for_each(|(_, message)| service.queues.ready.push_front(message));
        }
        self.ledger.saw("outage");
        self.tell(side, format_args!("an outage: what was not tried is given back"));
    }

    /// A reject without requeue.
    pub fn reject(&mut self, side: Side, slot: usize) {
        let service = self.service_mut(side);
        let InHand { tag, .. } = service.process.in_hand.remove(slot);
        let rejected = service.queues.unacked.extract_if(.., |(other, _)| *other == tag);
        rejected.for_each(|(_, message)| {
            service.queues.dead_letters.push_back(dead(message, "rejected"));
        });
    }

    /// A reject with requeue, where the broker delays: the message waits as it is, and is counted.
    pub fn delay(&mut self, side: Side, slot: usize, wait: Duration) {
        let (due, limit) = (self.clock + wait, self.rules.delivery_limit);
        let service = self.service_mut(side);
        let InHand { tag, mut message, .. } = service.process.in_hand.remove(slot);
        service.queues.unacked.retain(|(other, _)| *other != tag);
        (message.redeliveries, message.not_before) = (message.redeliveries + 1, due);
        if message.redeliveries > limit {
            service.queues.dead_letters.push_back(dead(message, "delivery_limit"));
        } else {
            let [waiting, ..] = &mut service.queues.retry;
            let at = waiting.partition_point(|(other, _)| *other <= due);
            waiting.insert(at, (due, message));
        }
    }

    /// A nack with requeue, which is a retry without a delay: a mutant's.
    pub fn requeue_at_once(&mut self, side: Side, slot: usize, wait: Duration) {
        let not_before = self.clock + wait;
        let service = self.service_mut(side);
        let InHand { tag, message, .. } = service.process.in_hand.remove(slot);
        service.queues.unacked.retain(|(other, _)| *other != tag);
        service.queues.ready.push_front(Message { not_before, ..message });
    }

    /// Takes a copy of `original`, wherever its exchange and key say. `wait` is what was decided.
    pub fn take_copy(
        &mut self,
        side: Side,
        copy: Outgoing,
        original: &Message,
        wait: Duration,
    ) -> Result<()> {
        let (rules, now) = (self.rules.clone(), self.clock);
        let topology = rules.topology(side);
        let (exchange, key) = (copy.exchange.to_string(), copy.routing_key.to_string());
        let mut message = Message::new(copy, original.fact.clone());
        let queues = &mut self.service_mut(side).queues;
        if exchange == topology.retry_exchange() {
            let mut delays = rules.budget.delays.iter();
            let rung =
                delays.position(|delay| delay.to_string() == key).context("a retry queue")?;
            message.failures = original.failures;
            message.not_before = now + wait;
            let due = now + rules.budget.delays[rung].duration();
            queues.retry[rung].push_back((due, message));
        } else if (exchange.as_str(), key.as_str())
            == (&topology.dead_letter_exchange(), &topology.dead_letter_key())
        {
            queues.parking.push(message);
        } else if (exchange.as_str(), key.as_str()) == ("", topology.names.queue) {
            queues.ready.push_back(message);
        } else {
            bail!("nothing is bound to {exchange:?} with {key:?}");
        }
        Ok(())
    }
}

/// With the broker's account of why.
fn dead(mut message: Message, reason: &str) -> Message {
    let mut headers = message.properties.headers().clone().unwrap_or_default();
    headers.insert("x-first-death-reason".into(), AMQPValue::LongString(reason.into()));
    message.properties = message.properties.with_headers(headers);
    message
}
