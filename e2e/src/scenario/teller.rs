//! Tells what happened: at which hop, to which message, and who owns it from then on.
//!
//! The hops are those of ARCHITECTURE.md's table. A hop 9 is one of 2 to 6 on the way back, from the
//! inventory to the orders.

use super::happening::{Happening, What};
use super::line::{Line, Mark};
use super::owner::{Owner, Place};
use crate::ledger::books::Side;
use chrono::{DateTime, Utc};
use std::collections::BTreeMap;

/// Remembers what was told before.
#[derive(Debug, Default)]
pub struct Teller {
    /// The time of the first line.
    began: Option<DateTime<Utc>>,
    messages: BTreeMap<String, Message>,
    /// The parts of services whose last session failed.
    failing: Vec<(Side, String)>,
}

#[derive(Debug, Default)]
struct Message {
    name: Option<String>,
    /// The inventory's answers, and what they lead to, go the way back.
    back: bool,
    owner: Owner,
    published: u32,
    committed: bool,
}

/// What is said of one happening.
struct Said {
    hop: u8,
    text: String,
    mark: Option<Mark>,
}

fn said(hop: u8, text: impl Into<String>) -> Said {
    Said { hop, text: text.into(), mark: None }
}

fn marked(hop: u8, mark: Mark, text: impl Into<String>) -> Said {
    Said { hop, text: text.into(), mark: Some(mark) }
}

impl Teller {
    /// What there is to say of it, if anything.
    pub fn tell(&mut self, happening: Happening) -> Option<Line> {
        let (said, owner, label) = match &happening.message {
            Some(id) => {
                let message = self.messages.entry(id.clone()).or_default();
                message.name = message.name.take().or_else(|| happening.name.clone());
                let said = message.tell(&happening.what)?;
                let label = message.label(id);
                (said, Some(message.owner.to_string()), label)
            }
            None => (self.tell_at_large(&happening.what)?, None, String::new()),
        };
        let Said { hop, text, mark } = said;
        let hop = (hop > 0).then_some(hop);
        let offset = happening.at - *self.began.get_or_insert(happening.at);
        Some(Line { offset, hop, label, text, mark, owner, happening })
    }

    /// What happened to no message alone.
    fn tell_at_large(&mut self, what: &What) -> Option<Said> {
        match what {
            What::Direction(text) => Some(said(0, text)),
            What::SessionFailed { by, part, retry_in_ms, error } => {
                // The relay says the same at each attempt while its database is away.
                let told = (*by, part.clone());
                if part == "relay" && self.failing.contains(&told) {
                    return None;
                }
                self.failing.push(told);
                let next = seconds(*retry_in_ms);
                let text = format!(
                    "{by}: the {part}'s session failed, the next in {next}: {}",
                    short(error)
                );
                Some(said(0, text))
            }
            What::Died { by } => Some(said(0, format!("kill -9: {by}-service is dead"))),
            What::Active { by, part } => {
                let told = (*by, part.clone());
                let failed = self.failing.contains(&told);
                self.failing.retain(|one| *one != told);
                failed.then(|| said(0, format!("{by}: the {part} works again")))
            }
            _ => None,
        }
    }
}

impl Message {
    /// `created v1 …4ZC9`
    fn label(&self, id: &str) -> String {
        let Some(name) = &self.name else { return id.to_owned() };
        let ulid = id.split(':').next().unwrap_or(id);
        let short: String = ulid.chars().skip(ulid.chars().count().saturating_sub(4)).collect();
        format!("{name} …{short}")
    }

    fn hop(&self, there: u8) -> u8 {
        if self.back { 9 } else { there }
    }

    fn tell(&mut self, what: &What) -> Option<Said> {
        Some(match what {
            What::Written { by } => {
                self.owner.is_database(*by);
                self.back = *by == Side::Inventory;
                match (by, self.name.as_deref()) {
                    (Side::Orders, Some(name)) if name.starts_with("created") => {
                        said(1, "in the outbox, committed with its order")
                    }
                    (Side::Orders, Some(name)) if name.starts_with("cancelled") => {
                        said(1, "in the outbox, committed with the cancelling")
                    }
                    (Side::Orders, _) => said(9, "in the outbox, committed with the order's end"),
                    (Side::Inventory, _) => said(9, "the answer: in the outbox, same COMMIT"),
                }
            }
            What::Published { exchange, key, queues, attempts } => {
                self.published(exchange, key, queues, *attempts)
            }
            What::Marked { .. } => said(self.hop(3), "its outbox row is marked published"),
            What::Refused { refusals, retry_in_ms, error } => {
                let again = seconds(*retry_in_ms);
                let text = format!(
                    "stays in the outbox: refusal {refusals}, tried again in {again} ({})",
                    short(error)
                );
                said(self.hop(2), text)
            }
            What::Delivered { queue, redelivered, attempts } => {
                self.delivered(queue, *redelivered, *attempts)
            }
            What::Committed { by } => {
                self.owner.is_database(*by);
                self.committed = true;
                let what = match (by, self.name.as_deref()) {
                    (Side::Inventory, Some(name)) if !name.starts_with("confirmed") => {
                        "inbox, stock and answer in one COMMIT"
                    }
                    // Nothing follows from it but that its version has passed.
                    (Side::Inventory, _) => "inbox and version in one COMMIT",
                    (Side::Orders, _) => "inbox and the order, if it changes, in one COMMIT",
                };
                said(if *by == Side::Orders { 9 } else { 5 }, what)
            }
            What::Handled { by, outcome } => {
                self.owner.is_acked();
                let hop = self.hop(6);
                match (outcome.as_str(), by) {
                    ("duplicate", _) => {
                        marked(hop, Mark::Absorbed("the inbox"), "seen before: no effect; acked")
                    }
                    ("stale", Side::Inventory) => {
                        let gate = Mark::Absorbed("the version gate");
                        marked(hop, gate, "its version has passed: no effect; acked")
                    }
                    ("stale", Side::Orders) => {
                        said(hop, "too late for the order: no effect; acked")
                    }
                    (other, _) => said(hop, format!("acked ({other})")),
                }
            }
            What::Retried { class, delay, error } => {
                self.owner.is_acked();
                let text = format!(
                    "copy confirmed, the original is acked next; back in {delay}. {class}: {}",
                    short(error)
                );
                said(self.hop(7), text)
            }
            What::Parked { reason, error } => {
                self.owner.is_acked();
                let text = format!(
                    "copy confirmed, the original is acked next. {reason}: {}",
                    short(error)
                );
                said(self.hop(8), text)
            }
            What::Arrived { queue } => {
                self.owner.arrives(Place::of_queue(queue));
                said(8, format!("in {queue}: brought by the broker"))
            }
            What::Direction(_)
            | What::SessionFailed { .. }
            | What::Died { .. }
            | What::Active { .. } => return None,
        })
    }

    fn published(&mut self, exchange: &str, key: &str, queues: &[String], attempts: u64) -> Said {
        self.back |= exchange == "inventory";
        let place = queues.first().map(|queue| Place::of_queue(queue));
        if exchange.ends_with(".retry") {
            let Some(place) = place else {
                return said(
                    7,
                    format!("attempt {attempts} failed; its copy leads to no queue: returned"),
                );
            };
            self.owner.copied(place);
            return said(7, format!("attempt {attempts} failed; a copy enters retry.{key}"));
        }
        if exchange.ends_with(".dlx") {
            let Some(place) = place else {
                self.owner.is_rejected();
                return said(
                    8,
                    "its copy for parking leads to no queue: returned; so it is rejected into its queue's dead lettering",
                );
            };
            self.owner.copied(place);
            return said(8, format!("attempt {attempts} failed; a copy enters parking"));
        }
        if exchange.is_empty() {
            self.owner.is_redriven();
            return said(8, format!("redriven: a copy enters {key}, its attempts anew"));
        }
        let Some(place) = place else {
            return said(
                self.hop(2),
                format!("published to {exchange}, leads to no queue: returned"),
            );
        };
        self.published += 1;
        self.owner.is_at_broker(place);
        let into = format!("published to {exchange} → {}", queues.join(", "));
        if self.published > 1 {
            marked(self.hop(2), Mark::Repeated, format!("{into}, again, with the same id"))
        } else {
            said(self.hop(2), into)
        }
    }

    fn delivered(&mut self, queue: &str, redelivered: bool, attempts: u64) -> Said {
        if queue.ends_with(".parking") {
            return said(8, "taken from parking, to be looked at");
        }
        let waited = self.owner.is_delivered(redelivered, attempts > 0);
        let hop = self.hop(4);
        match waited {
            Some(queue) if self.committed => {
                marked(hop, Mark::Repeated, format!("the copy comes back from {queue}"))
            }
            // Redelivered, if it met a consumer that was just leaving.
            Some(queue) => said(hop, format!("back from {queue}, attempt {}", attempts + 1)),
            None if redelivered => {
                let text = format!("delivered again from {queue}, as it was not acked");
                marked(hop, Mark::Repeated, text)
            }
            None => said(hop, format!("delivered from {queue}")),
        }
    }
}

fn seconds(ms: u64) -> String {
    format!("{}.{:02} s", ms / 1000, ms % 1000 / 10)
}

/// An error's beginning and its end: the rest is in the service's log.
fn short(error: &str) -> String {
    const HALF: usize = 70;
    let words: Vec<&str> = error.split_whitespace().collect();
    let fit = |words: &mut dyn Iterator<Item = &&str>| {
        let mut length = 0;
        words
            .take_while(|word| {
                length += word.chars().count() + 1;
                length <= HALF
            })
            .count()
    };
    let (first, last) = (fit(&mut words.iter()), fit(&mut words.iter().rev()));
    if first + last >= words.len() {
        return words.join(" ");
    }
    format!("{} … {}", words[..first].join(" "), words[words.len() - last..].join(" "))
}
