//! Hops 5 to 8: a worker with a delivery. An attempt is one step, because a transaction is; then
//! comes the copy, if it failed; then the Ack.
//!
//! Two promises are asserted here, at the moment that would break them: an attempt after a failure
//! had its delay, and a retry is within its limit, by a count that does not go by the headers.

use crate::gate::Inbox;
use crate::handlers::Event;
use crate::mutants::Mutation;
use crate::relay::Fate;
use crate::rules::Side;
use crate::world::{InHand, Message, Stage, World};
use anyhow::{Result, anyhow, bail, ensure};
use shared::config::RetryBackend;
use shared::envelope::Envelope;
use shared::failure::{Class, Failure};
use shared::inbox::Admission;
use shared::incoming::Incoming;
use shared::republish::{park_copy, retry_copy};
use shared::retry::{Disposition, Facts, Outcome, decide};
use std::time::Duration;

/// What happens to an attempt, besides what the message itself leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Luck {
    /// Nothing.
    Good,
    /// A deadlock: the transaction is rolled back.
    Deadlock,
    /// The handler panics.
    Panic,
    /// The COMMIT is done, and nobody hears of it.
    AnswerLost,
}

impl World {
    /// Tries a message, and decides what becomes of it.
    pub fn attempt(&mut self, side: Side, pick: u8, luck: Luck) -> Result<bool> {
        let Some(slot) = self.slot(side, pick, |stage| matches!(stage, Stage::Delivered)) else {
            return Ok(false);
        };
        let message = self.service(side).process.in_hand[slot].message.clone();
        let name = message.name();
        ensure!(self.clock >= message.not_before, "{name} is retried without its delay");
        let incoming = self.incoming(&message);
        let cursed = message.fact.as_ref().and_then(|fact| self.curses.get(fact));
        let luck = cursed.copied().unwrap_or(luck);
        let result = self.apply(side, &message, &incoming, luck)?;
        let jitter = 1.0 - f64::from(pick) / 256.0;
        match (self.decide(&incoming, &result, jitter), &result) {
            (Disposition::Ack, Ok(outcome)) => {
                self.tell(side, format_args!("{name} is handled: {outcome:?}"));
                self.ledger.saw(outcome.as_str());
                self.service_mut(side).process.in_hand[slot].stage = Stage::Owned;
            }
            (Disposition::Retry(delay), Err(failure)) => {
                let wait = delay.duration();
                self.tell(side, format_args!("{name} fails, {failure}: retry in {wait:?}"));
                ensure!(!wait.is_zero(), "{name} is to be retried without a delay");
                let failures = self.count(&message, &incoming, failure.class)?;
                self.ledger.saw(failure.class.as_str());
                let rules = self.rules.clone();
                let mut copy = retry_copy(&incoming, rules.topology(side), delay, failure);
                if self.breaks(Mutation::CopyForgetsAttempts) {
                    copy.properties = message.properties.clone();
                }
                let in_hand = &mut self.service_mut(side).process.in_hand[slot];
                in_hand.message.failures = Some((failure.class, failures));
                in_hand.stage = match rules.budget.backend {
                    RetryBackend::Native => Stage::Rejecting { wait },
                    RetryBackend::Buckets => {
                        Stage::Copying { copy: copy.into(), parks: false, wait }
                    }
                };
                if self.breaks(Mutation::RetryAtOnce) {
                    self.requeue_at_once(side, slot, wait);
                }
            }
            (Disposition::Park(reason), Err(failure)) => {
                self.tell(side, format_args!("{name} fails, {failure}: to parking, {reason:?}"));
                self.ledger.saw(reason.as_str());
                let rules = self.rules.clone();
                let consumer = rules.topology(side).names.queue;
                let copy =
                    park_copy(&incoming, rules.topology(side), reason, failure, consumer).into();
                let stage = Stage::Copying { copy, parks: true, wait: Duration::ZERO };
                self.service_mut(side).process.in_hand[slot].stage = stage;
            }
            (disposition, _) => bail!("{name}, which came to {result:?}, becomes {disposition:?}"),
        }
        self.hear(side, &result);
        Ok(true)
    }

    /// `Consumer::apply_bounded`.
    fn apply(
        &mut self,
        side: Side,
        message: &Message,
        incoming: &Incoming,
        luck: Luck,
    ) -> Result<Result<Outcome, Failure>> {
        let read = match &incoming.envelope {
            Err(broken) => Err(Failure::permanent(anyhow!("{broken}"))),
            Ok(envelope) => Event::decode(side, envelope).map(|event| (envelope, event)),
        };
        let (envelope, event) = match read {
            Ok(read) => read,
            Err(failure) => return Ok(Err(failure)),
        };
        if !self.service(side).database_up {
            return Ok(Err(Failure::database_away(anyhow!("the database is away"))));
        }
        if self.breaks(Mutation::InboxCommitsAlone) && matches!(luck, Luck::Deadlock | Luck::Panic)
        {
            self.service_mut(side).database.inbox.admit(envelope);
        }
        match luck {
            Luck::Good => self.transact(side, message, envelope, event),
            Luck::AnswerLost => {
                let committed = self.transact(side, message, envelope, event)?;
                let lost = || Failure::database_away(anyhow!("COMMIT, and its answer is lost"));
                Ok(committed.and_then(|_| Err(lost())))
            }
            Luck::Deadlock => {
                let (class, source) = (Class::Transient, anyhow!("deadlock"));
                Ok(Err(Failure { class, database_away: false, source }))
            }
            Luck::Panic => Ok(Err(Failure::unknown(anyhow!("the handler panicked")))),
        }
    }

    /// `Consumer::apply`: inbox, gate, effect and answer in one COMMIT.
    fn transact(
        &mut self,
        side: Side,
        message: &Message,
        envelope: &Envelope,
        event: Event,
    ) -> Result<Result<Outcome, Failure>> {
        let mut tx = self.service(side).database.clone();
        let admission = self.admit(&mut tx.inbox, envelope);
        if self.breaks(Mutation::NothingRemembers) && envelope.event_type == "order.created" {
            tx.warehouse.reservations.remove(&envelope.aggregate.id);
            let answer = format!("{}:", envelope.id);
            tx.outbox.retain(|row| !row.id.starts_with(&answer));
        }
        let rows = tx.outbox.len();
        let outcome = match admission {
            Admission::Admitted => match event.handle(envelope, &mut tx, self.clock) {
                Ok(outcome) => outcome,
                Err(failure) => return Ok(Err(failure)),
            },
            Admission::Duplicate => Outcome::Duplicate,
            Admission::Stale => Outcome::Stale,
            Admission::Gap { last } => {
                let version = envelope.aggregate.version;
                let gap = anyhow!("it is version {version}, applied so far: {last:?}");
                return Ok(Err(Failure::not_yet(gap)));
            }
            Admission::ReusedId => {
                return Ok(Err(Failure::permanent(anyhow!("its id was used before"))));
            }
        };
        if admission == Admission::Admitted {
            let before = &self.service(side).database;
            let changed = tx.outbox.len() > rows
                || tx.warehouse != before.warehouse
                || tx.orders != before.orders;
            self.ledger.took_effect(side, message.fact.as_deref(), envelope, changed)?;
        }
        for row in tx.outbox.iter().skip(rows) {
            self.ledger.committed(side, &serde_json::from_str::<Envelope>(&row.payload)?);
        }
        self.service_mut(side).database = tx;
        Ok(Ok(outcome))
    }

    fn admit(&self, inbox: &mut Inbox, envelope: &Envelope) -> Admission {
        if matches!(self.mutation, Some(Mutation::NoInbox | Mutation::NothingRemembers)) {
            inbox.ids.remove(&envelope.id);
        }
        if matches!(self.mutation, Some(Mutation::NoGate | Mutation::NothingRemembers)) {
            let new = inbox.ids.insert(envelope.id.clone());
            return if new { Admission::Admitted } else { Admission::Duplicate };
        }
        inbox.admit(envelope)
    }

    fn decide(
        &self,
        message: &Incoming,
        result: &Result<Outcome, Failure>,
        jitter: f64,
    ) -> Disposition {
        let result = result.as_ref().map(|outcome| *outcome).map_err(|failure| failure.class);
        let attempts = result.err().map_or(1, |class| message.attempts_of(class));
        let facts = Facts { attempts, age: message.age(), past_producer_deadline: false };
        decide(result, facts, &self.rules.budget, jitter)
    }

    /// Failures in a row of this class, this one included, for which there is another attempt.
    fn count(&self, message: &Message, incoming: &Incoming, class: Class) -> Result<u32> {
        let (name, limits) = (message.name(), &self.rules.budget.limits);
        let before = message.failures.filter(|(earlier, _)| *earlier == class);
        let failures = before.map_or(0, |(_, failures)| failures) + 1;
        let within = match class {
            Class::Permanent => false,
            Class::Transient => failures < limits.retry_attempts_transient.get(),
            Class::Unknown => failures < limits.retry_attempts_unknown.get(),
            Class::NotYet => {
                failures <= self.rules.once_through
                    || incoming.age() < limits.retry_not_yet_deadline
            }
        };
        ensure!(within, "{name} is retried beyond its limit, after {failures} failures: {class:?}");
        Ok(failures)
    }

    /// `Consumer::hear`.
    fn hear(&mut self, side: Side, result: &Result<Outcome, Failure>) {
        let outage = &self.service(side).process.outage;
        match result {
            Err(failure) if failure.database_away => outage.failed(),
            Ok(_) | Err(Failure { class: Class::NotYet, .. }) => outage.answered(),
            Err(_) => {}
        }
        if outage.is_on() {
            self.give_back(side);
        }
    }

    /// Hands the copy over, or the message itself where the broker delays. What is not taken is not
    /// acked: a retry's session ends, and what parking would not have is left to dead lettering.
    pub fn copy(&mut self, side: Side, pick: u8, fate: Fate) -> Result<bool> {
        let copying =
            |stage: &Stage| matches!(stage, Stage::Copying { .. } | Stage::Rejecting { .. });
        let Some(slot) = self.slot(side, pick, copying) else { return Ok(false) };
        let in_hand = &mut self.service_mut(side).process.in_hand[slot];
        let message = in_hand.message.clone();
        let name = message.name();
        let (copy, parks, wait) = match std::mem::replace(&mut in_hand.stage, Stage::Owned) {
            Stage::Copying { copy, parks, wait } => (copy, parks, wait),
            Stage::Rejecting { wait } if fate == Fate::Confirmed => {
                self.tell(side, format_args!("rejects {name}, for the broker to delay"));
                self.delay(side, slot, wait);
                return Ok(true);
            }
            // The reject is lost with its channel.
            _ => return Ok(self.end_session(side, pick)),
        };
        self.tell(side, format_args!("the copy of {name}: {fate:?}"));
        if matches!(fate, Fate::Confirmed | Fate::ConfirmLost) {
            self.take_copy(side, *copy, &message, wait)?;
        }
        if fate != Fate::Confirmed && !self.breaks(Mutation::AckBeforeTheCopysConfirm) {
            if parks {
                self.reject(side, slot);
            } else {
                self.end_session(side, pick);
            }
        }
        Ok(true)
    }

    /// Acks what somebody else owns.
    pub fn ack(&mut self, side: Side, pick: u8) -> Result<bool> {
        let Some(slot) = self.slot(side, pick, |stage| matches!(stage, Stage::Owned)) else {
            return Ok(false);
        };
        let InHand { tag, message, .. } = self.service_mut(side).process.in_hand.remove(slot);
        self.service_mut(side).queues.unacked.retain(|(other, _)| *other != tag);
        self.tell(side, format_args!("acks {}", message.name()));
        Ok(true)
    }

    fn slot(&self, side: Side, pick: u8, is: impl Fn(&Stage) -> bool) -> Option<usize> {
        let in_hand = &self.service(side).process.in_hand;
        let fitting: Vec<usize> =
            (0..in_hand.len()).filter(|slot| is(&in_hand[*slot].stage)).collect();
        fitting.get(usize::from(pick) % fitting.len().max(1)).copied()
    }
}
