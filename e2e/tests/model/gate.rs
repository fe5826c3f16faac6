//! Hop 5, the first half: what `shared::inbox::admit` says in SQL, stated once more.
//! [`crate::reality`] holds the two against each other.

use shared::envelope::Envelope;
use shared::events::is_genesis;
use shared::inbox::Admission;
use std::collections::{BTreeMap, BTreeSet};

/// Inbox and gate of one consumer.
#[derive(Clone, Debug, Default)]
pub struct Inbox {
    pub ids: BTreeSet<String>,
    /// By kind and id of the aggregate.
    pub versions: BTreeMap<(String, String), i64>,
}

impl Inbox {
    /// Whether this message may take effect. A refusal for now, [`Admission::Gap`], or for ever,
    /// [`Admission::ReusedId`], leaves no trace: the caller's transaction rolls back.
    pub fn admit(&mut self, envelope: &Envelope) -> Admission {
        let (id, version) = (&envelope.id, envelope.aggregate.version);
        let stream = (envelope.aggregate.kind.clone(), envelope.aggregate.id.clone());
        let last = self.versions.get(&stream).copied();
        let passed = last.is_some_and(|last| version <= last);
        let next = match last {
            Some(last) => version == last + 1,
            None => is_genesis(&envelope.event_type),
        };
        match (self.ids.contains(id), passed) {
            (true, true) => Admission::Duplicate,
            (true, false) => Admission::ReusedId,
            (false, _) if next => {
                self.ids.insert(id.clone());
                self.versions.insert(stream, version);
                Admission::Admitted
            }
            (false, true) => {
                self.ids.insert(id.clone());
                Admission::Stale
            }
            (false, false) => Admission::Gap { last },
        }
    }
}
