//! The timeline: what the witnesses report, put in order and told as it happens.
//!
//! Each witness is a little late in its own way, so nothing is told before it has lain for a moment.
//! Then it goes by time, with one exception: an effect is not told before its cause, whatever their
//! clocks say. The firehose dates what it tells of by when it arrived.

use super::happening::{Happening, What};
use super::line::Line;
use super::teller::Teller;
use crate::child::lock;
use chrono::{DateTime, TimeDelta, Utc};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

/// How long a report lies before it is told.
const SETTLES: TimeDelta = TimeDelta::milliseconds(1000);
const LOOK: Duration = Duration::from_millis(40);

/// Where the lines go, as they are told.
pub type Out = Box<dyn FnMut(&str) + Send>;

/// What was told so far.
pub type Told = Arc<Mutex<Vec<Line>>>;

/// A story in the telling.
pub struct Timeline {
    /// To whom the witnesses report. When the last of them is gone the story ends.
    pub report: UnboundedSender<Happening>,
    /// What was told so far.
    pub told: Told,
    telling: JoinHandle<()>,
}

impl Timeline {
    /// Begins now.
    #[must_use]
    pub fn begin(out: Out) -> Self {
        let (report, reports) = unbounded_channel();
        let told = Told::default();
        let order = Order::default();
        let telling = tokio::spawn(tell(reports, order, Teller::default(), told.clone(), out));
        Self { report, told, telling }
    }

    /// Tells the rest; the witnesses must have been dismissed.
    ///
    /// # Errors
    /// When the telling panicked.
    pub async fn end(self) -> anyhow::Result<Vec<Line>> {
        drop(self.report);
        self.telling.await?;
        let lines = lock(&self.told).clone();
        Ok(lines)
    }
}

async fn tell(
    mut reports: UnboundedReceiver<Happening>,
    mut order: Order,
    mut teller: Teller,
    told: Told,
    mut out: Out,
) {
    let mut look = tokio::time::interval(LOOK);
    let mut open = true;
    while open {
        tokio::select! {
            report = reports.recv() => match report {
                Some(happening) => order.waiting.push(happening),
                None => open = false,
            },
            _ = look.tick() => {}
        }
        let until = if open { Utc::now() - SETTLES } else { DateTime::<Utc>::MAX_UTC };
        while let Some(happening) = order.next(until) {
            if let Some(line) = teller.tell(happening) {
                out(&line.to_string());
                lock(&told).push(line);
            }
        }
    }
}

/// Puts happenings in order.
#[derive(Debug, Default)]
struct Order {
    waiting: Vec<Happening>,
    /// Of each message: what the broker did to it, less what was made of that.
    open: BTreeMap<(String, Step), i64>,
}

/// What only the firehose sees, and others see the consequences of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Publish,
    RetryCopy,
    ParkingCopy,
    Delivery,
}

impl Order {
    /// The next to be told, of those that happened until then.
    fn next(&mut self, until: DateTime<Utc>) -> Option<Happening> {
        // The first of the earliest: reports of the same moment stay in their order.
        let first = (0..self.waiting.len()).min_by_key(|at| self.waiting[*at].at)?;
        if self.waiting[first].at > until {
            return None;
        }
        // Moved back to just before its effect, which is found again next time.
        let mut at = first;
        while let Some(cause) = self.cause_of(&self.waiting[at]) {
            self.waiting[cause].at = self.waiting[at].at;
            at = cause;
        }
        let happening = self.waiting.remove(at);
        self.count(&happening);
        Some(happening)
    }

    /// Which of the waiting must be told before it.
    fn cause_of(&self, happening: &Happening) -> Option<usize> {
        let id = happening.message.as_ref()?;
        consequence_of(&happening.what)
            .iter()
            .filter(|step| self.open.get(&(id.clone(), **step)).is_none_or(|open| *open <= 0))
            .find_map(|step| {
                let causes = |one: &Happening| {
                    one.message.as_ref() == Some(id) && step_of(&one.what) == Some(*step)
                };
                self.waiting.iter().position(causes)
            })
    }

    fn count(&mut self, happening: &Happening) {
        // What it had in hand will be delivered again.
        let lost = match &happening.what {
            What::Died { .. } => true,
            What::SessionFailed { part, .. } => part == "consumer",
            _ => false,
        };
        self.open.retain(|(_, step), _| !lost || *step != Step::Delivery);
        let Some(id) = &happening.message else { return };
        let mut add = |step, n| *self.open.entry((id.clone(), step)).or_default() += n;
        if let Some(step) = step_of(&happening.what) {
            add(step, 1);
        }
        // A COMMIT leaves the delivery open: it is settled after that.
        if !matches!(happening.what, What::Committed { .. }) {
            for step in consequence_of(&happening.what) {
                add(*step, -1);
            }
        }
    }
}

fn step_of(what: &What) -> Option<Step> {
    match what {
        What::Published { exchange, .. } if exchange.ends_with(".retry") => Some(Step::RetryCopy),
        What::Published { exchange, .. } if exchange.ends_with(".dlx") => Some(Step::ParkingCopy),
        What::Published { .. } => Some(Step::Publish),
        What::Delivered { .. } => Some(Step::Delivery),
        _ => None,
    }
}

fn consequence_of(what: &What) -> &'static [Step] {
    match what {
        What::Marked { .. } | What::Refused { .. } => &[Step::Publish],
        What::Committed { .. } | What::Handled { .. } => &[Step::Delivery],
        What::Retried { .. } => &[Step::Delivery, Step::RetryCopy],
        What::Parked { .. } => &[Step::Delivery, Step::ParkingCopy],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::books::Side;

    fn seen(ms: i64, what: What) -> Happening {
        let at = DateTime::<Utc>::UNIX_EPOCH + TimeDelta::milliseconds(ms);
        Happening { at, message: Some("m".to_owned()), name: None, what }
    }

    fn delivered() -> What {
        What::Delivered { queue: "inventory.orders".into(), redelivered: false, attempts: 0 }
    }

    fn handled() -> What {
        What::Handled { by: Side::Inventory, outcome: "applied".into() }
    }

    fn committed() -> What {
        What::Committed { by: Side::Inventory }
    }

    /// What is told, in order, by its first word.
    fn told(waiting: Vec<Happening>, until: i64) -> Vec<String> {
        let mut order = Order { waiting, ..Order::default() };
        let until = DateTime::<Utc>::UNIX_EPOCH + TimeDelta::milliseconds(until);
        let next = || order.next(until);
        let word =
            |what: What| format!("{what:?}").split(' ').next().unwrap_or_default().to_owned();
        std::iter::from_fn(next).map(|happening| word(happening.what)).collect()
    }

    #[test]
    fn an_effect_is_told_after_its_cause_whenever_that_was_reported() {
        let late = vec![seen(1, committed()), seen(3, handled()), seen(5, delivered())];
        assert_eq!(told(late, 10), ["Delivered", "Committed", "Handled"]);
    }

    #[test]
    fn what_has_died_with_a_delivery_in_hand_gets_it_again() {
        let died = Happening { message: None, ..seen(3, What::Died { by: Side::Inventory }) };
        let waiting = vec![
            seen(1, delivered()),
            seen(2, committed()),
            died,
            seen(5, handled()),
            seen(6, delivered()),
        ];
        assert_eq!(told(waiting, 10), ["Delivered", "Committed", "Died", "Delivered", "Handled"]);
    }

    #[test]
    fn what_is_younger_than_that_waits() {
        assert_eq!(told(vec![seen(1, delivered()), seen(3, handled())], 2), ["Delivered"]);
    }
}
