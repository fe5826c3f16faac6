//! Hops 2 and 3: the relay's step, cut where it can be interrupted: claim, publish row after row,
//! mark.
//!
//! A publish has five fates: taken and confirmed; returned, by a broker without a binding; nacked, by
//! a full queue; lost on its way; taken, with its confirm lost. After the last two the outcome of the
//! batch is unknown, and the session ends with nothing marked.

use crate::mutants::Mutation;
use crate::outbox::{Row, due};
use crate::rules::Side;
use crate::world::{Database, Message, World};
use anyhow::Result;
use lapin::BasicProperties;
use shared::publisher::{Outgoing, Verdict};

/// What a relay has claimed, and heard of it.
pub struct Batch {
    rows: Vec<Row>,
    verdicts: Vec<Verdict>,
}

/// What becomes of a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Confirmed,
    Returned,
    Nacked,
    Lost,
    ConfirmLost,
}

impl World {
    /// Asks which rows are due.
    pub fn claim(&mut self, side: Side) -> Result<bool> {
        let limit = usize::from(self.rules.config.relay.relay_batch.get());
        let (now, by_cursor) = (self.clock, self.breaks(Mutation::CursorOverSeq));
        let service = self.service_mut(side);
        if !service.database_up || service.process.batch.is_some() {
            return Ok(false);
        }
        let Database { outbox, cursor, .. } = &service.database;
        let mut rows: Vec<Row> = due(outbox, now, limit).into_iter().cloned().collect();
        if by_cursor {
            rows =
                outbox.iter().filter(|row| row.seq >= *cursor && !row.published).cloned().collect();
            rows.sort_by_key(|row| row.seq);
        }
        if rows.is_empty() {
            return Ok(false);
        }
        let ids: Vec<String> = rows.iter().map(|row| row.id.clone()).collect();
        service.process.batch = Some(Batch { rows, verdicts: Vec::new() });
        self.tell(side, format_args!("the relay claims {}", ids.join(", ")));
        Ok(true)
    }

    /// Publishes the next row of the batch.
    pub fn publish(&mut self, side: Side, fate: Fate) -> Result<bool> {
        let bound = self.service(side).exchange_bound;
        // Bound to no queue it is returned, whatever a queue would have made of it.
        let fate = match fate {
            Fate::Confirmed | Fate::Nacked if !bound => Fate::Returned,
            fate => fate,
        };
        let Some(batch) = &mut self.service_mut(side).process.batch else { return Ok(false) };
        let Some(row) = batch.rows.get(batch.verdicts.len()).cloned() else { return Ok(false) };
        match fate {
            Fate::Confirmed => batch.verdicts.push(Verdict::Confirmed),
            Fate::Returned => batch.verdicts.push(Verdict::Returned("312 NO_ROUTE".into())),
            Fate::Nacked => batch.verdicts.push(Verdict::Nacked),
            Fate::Lost | Fate::ConfirmLost => self.service_mut(side).process.batch = None,
        }
        if self.breaks(Mutation::MarkBeforeConfirm) {
            self.mark_row(side, row.seq, |row| row.published = true);
        }
        let id = row.id.clone();
        if matches!(fate, Fate::Confirmed | Fate::ConfirmLost) {
            self.route(side, row);
        }
        let fate = match fate {
            Fate::Confirmed => "taken and confirmed",
            Fate::Returned => "returned, no queue is bound",
            Fate::Nacked => "nacked, the queue is full",
            Fate::Lost => "lost with the connection",
            Fate::ConfirmLost => "taken, but the confirm is lost with the connection",
        };
        self.tell(side, format_args!("the relay publishes {id}: {fate}"));
        Ok(true)
    }

    /// All verdicts are in: marks what was confirmed, counts what was refused.
    pub fn mark(&mut self, side: Side) -> Result<bool> {
        let complete = |batch: &mut Batch| batch.verdicts.len() == batch.rows.len();
        let Some(batch) = self.service_mut(side).process.batch.take_if(complete) else {
            return Ok(false);
        };
        for (row, verdict) in batch.rows.iter().zip(batch.verdicts) {
            let counts = match verdict {
                Verdict::Confirmed => true,
                Verdict::Returned(_) => self.breaks(Mutation::ReturnCountsAsPublished),
                Verdict::Nacked => false,
            };
            if counts {
                let database = &mut self.service_mut(side).database;
                database.cursor = database.cursor.max(row.seq + 1);
                self.mark_row(side, row.seq, |row| row.published = true);
                self.tell(side, format_args!("the relay marks {} published", row.id));
            } else {
                self.refuse(side, row);
            }
        }
        Ok(true)
    }

    /// The relay freezes, and another takes the lead. What it had claimed it may still send.
    pub fn lose_the_lead(&mut self, side: Side) -> Result<bool> {
        let service = self.service_mut(side);
        let Some(batch) = service.process.batch.take() else { return Ok(false) };
        service.former_relay.extend(batch.rows.into_iter().skip(batch.verdicts.len()));
        self.tell(side, format_args!("the relay freezes, another takes the lead"));
        Ok(true)
    }

    /// A relay without the lead sends what it had claimed.
    pub fn publish_late(&mut self, side: Side) -> Result<bool> {
        let Some(row) = self.service_mut(side).former_relay.pop_front() else { return Ok(false) };
        let id = row.id.clone();
        self.route(side, row);
        self.tell(side, format_args!("the relay that froze wakes up and publishes {id}"));
        Ok(true)
    }

    fn refuse(&mut self, side: Side, row: &Row) {
        let limit = self.rules.config.relay.relay_row_attempts.get();
        let refusals = row.attempts + 1;
        let wait = self.rules.config.relay.row_backoff().delay(refusals, 0.0);
        let (at, parked) = (self.clock + wait, refusals >= limit);
        self.mark_row(side, row.seq, |row| {
            row.attempts = refusals;
            row.parked = parked;
            row.next_attempt_at = at;
        });
        self.ledger.saw(if parked { "row parked" } else { "row refused" });
        let then = if parked { "is parked".into() } else { format!("waits {wait:?}") };
        self.tell(side, format_args!("{}, refused {refusals} times, {then}", row.id));
    }

    fn mark_row(&mut self, side: Side, seq: i64, mark: impl Fn(&mut Row)) {
        let rows = &mut self.service_mut(side).database.outbox;
        rows.iter_mut().filter(|row| row.seq == seq).for_each(mark);
    }

    /// Into the other side's queue: there is one that is bound to each exchange, or none.
    fn route(&mut self, from: Side, row: Row) {
        if !self.service(from).exchange_bound {
            return;
        }
        let properties = BasicProperties::default().with_message_id(row.id.as_str().into());
        let outgoing = Outgoing {
            message_id: row.id.clone(),
            exchange: row.exchange.into(),
            routing_key: row.event_type.into(),
            properties,
            body: row.payload.into_bytes(),
        };
        let message = Message::new(outgoing, Some(row.id));
        self.service_mut(from.other()).queues.ready.push_back(message);
    }
}
