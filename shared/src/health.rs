//! What `/health/ready` knows: one entry for each part of the service that can be in trouble.
//!
//! Parts report their state when it changes; a part that has not reported yet is not ready. Database
//! and outbox are not among them: [`crate::ops`] looks at those when it is asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// All parts of this process.
#[derive(Clone, Default)]
pub struct Health(Arc<Mutex<BTreeMap<&'static str, Option<String>>>>);

/// One part's end of [`Health`].
#[derive(Clone)]
pub struct Part {
    name: &'static str,
    health: Health,
}

impl Health {
    /// Adds a part, not ready yet.
    #[must_use]
    pub fn part(&self, name: &'static str) -> Part {
        let part = Part { name, health: self.clone() };
        part.fail("starting");
        part
    }

    /// What is wrong with each part; `None` is well.
    #[must_use]
    pub fn report(&self) -> BTreeMap<&'static str, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, name: &'static str, trouble: Option<String>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name, trouble);
    }
}

impl Part {
    /// The part's name, as in the report and in logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// All is well.
    pub fn ok(&self) {
        self.health.set(self.name, None);
    }

    /// Something is not, and what.
    pub fn fail(&self, why: impl Into<String>) {
        self.health.set(self.name, Some(why.into()));
    }
}
