//! What waits for a person, and what a person does: redrives, and gives outbox rows a new budget.

use crate::mutants::Mutation;
use crate::relay::Fate;
use crate::rules::Side;
use crate::world::{Message, World};
use anyhow::Result;
use shared::republish::redrive_copy;
use std::time::Duration;

impl World {
    /// Sends a parked message back: the copy confirmed, then the original acked. Where the copy is
    /// not confirmed, or the operator dies in between, the original stays parked.
    pub fn redrive(&mut self, side: Side, pick: u8, fate: Fate) -> Result<bool> {
        let parking = &self.service(side).queues.parking;
        let at = usize::from(pick) % parking.len().max(1);
        let Some(parked) = parking.get(at).cloned() else { return Ok(false) };
        let incoming = self.incoming(&parked);
        let (rules, name) = (self.rules.clone(), parked.name());
        let copy = redrive_copy(&incoming, rules.topology(side), None, self.clock);
        self.tell("operator", format_args!("redrives {side}'s {name}: {fate:?}"));
        if matches!(fate, Fate::Confirmed | Fate::ConfirmLost) {
            let fresh = Message { failures: None, ..parked };
            self.take_copy(side, copy, &fresh, Duration::ZERO)?;
        }
        if fate == Fate::Confirmed || self.breaks(Mutation::AckBeforeTheCopysConfirm) {
            self.service_mut(side).queues.parking.remove(at);
        }
        Ok(true)
    }

    /// `outbox retry --all`.
    pub fn retry_outbox(&mut self, side: Side) -> bool {
        let now = self.clock;
        let mut rows = 0;
        for row in self.service_mut(side).database.outbox.iter_mut().filter(|row| row.parked) {
            (row.parked, row.attempts, row.next_attempt_at) = (false, 0, now);
            rows += 1;
        }
        if rows > 0 {
            self.tell("operator", format_args!("{rows} parked rows of {side} may go again"));
        }
        rows > 0
    }
}
