//! Policies: time-to-live, limits and dead lettering of the queues, set apart from the queues.
//!
//! They must be in force *before the first message*. Measured on RabbitMQ 3.10.8 and 4.3.6: a
//! message that enters a retry queue before its TTL policy never expires, and everything behind it
//! waits for ever. Therefore `topology apply`, a job with a user of its own, sets them before the
//! services start, and each consumer checks the *effective* policy of each of its queues before it
//! consumes and again from time to time ([`crate::management`]). Effective, because only one policy
//! applies to a queue: somebody else's, with a higher priority, would switch ours off without a word.
//!
//! Keys: <https://www.rabbitmq.com/docs/parameters#policies>,
//! <https://www.rabbitmq.com/docs/quorum-queues>.

use crate::config::RetryBackend;
use crate::topology::{DELIVERY_LIMIT, NATIVE_DELIVERY_LIMIT, Queue, SINGLE_ACTIVE, Topology};
use serde_json::{Map, Value, json};
use std::fmt;

/// Keys whose presence changes what the queues promise. One of these that we did not set is drift;
/// any other key of an operator's is not ours to judge.
const GUARDED: &[&str] = &[
    "dead-letter-exchange",
    "dead-letter-routing-key",
    "dead-letter-strategy",
    "delayed-retry-max",
    "delayed-retry-min",
    "delayed-retry-type",
    "delivery-limit",
    "expires",
    "max-length",
    "max-length-bytes",
    "message-ttl",
    "overflow",
];

/// What the policy of one queue must say.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// The queue; its name is also the policy's.
    pub queue: Queue,
    /// Keys and values.
    pub definition: Map<String, Value>,
}

/// The broker's version, as far as it decides what policies may say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BrokerVersion {
    /// 3, 4.
    pub major: u32,
    /// 10, 13; 0 to 3.
    pub minor: u32,
}

impl BrokerVersion {
    /// The first to know delayed retries of quorum queues.
    pub const NATIVE_RETRY: Self = Self { major: 4, minor: 3 };
    /// The first with a delivery-limit by default (20), and with a word for "none" (−1).
    const UNLIMITED: Self = Self { major: 4, minor: 0 };
}

impl fmt::Display for BrokerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A queue that is not as it must be.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// Which queue.
    pub queue: String,
    /// Which key, or `queue`, `type`, `arguments`.
    pub key: String,
    /// What it must be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue, key, expected, found } = self;
        write!(f, "{queue}: {key} must be {expected}, is {found}")
    }
}

/// The broker does not know what is configured, and will not before it is upgraded.
#[derive(Debug, thiserror::Error)]
#[error(
    "--retry-backend native needs RabbitMQ 4.3 or newer, and this broker is {0}: use --retry-backend \
     buckets"
)]
pub struct TooOld(BrokerVersion);

/// The policies of a topology, as far as a broker of this version knows them.
///
/// # Errors
/// When the broker is too old for what is configured.
pub fn policies(topology: &Topology, broker: BrokerVersion) -> Result<Vec<Policy>, TooOld> {
    let native = topology.args.retry_backend == RetryBackend::Native;
    if native && broker < BrokerVersion::NATIVE_RETRY {
        return Err(TooOld(broker));
    }
    let policies = topology.queues().into_iter().map(|queue| {
        let definition = match definition(topology, &queue.name, broker) {
            Value::Object(definition) => definition,
            _ => Map::new(),
        };
        Policy { queue, definition }
    });
    Ok(policies.collect())
}

fn definition(topology: &Topology, queue: &str, broker: BrokerVersion) -> Value {
    let bucket = topology.buckets().iter().find(|delay| topology.retry_queue(**delay) == queue);
    if let Some(delay) = bucket {
        let (exchange, key) = topology.entrance();
        return json!({
            "message-ttl": delay.millis(),
            "dead-letter-exchange": exchange,
            "dead-letter-routing-key": key,
            "dead-letter-strategy": "at-least-once",
            "overflow": "reject-publish",
            "max-length": topology.args.queue_max_length.get(),
        });
    }
    if queue == topology.parking_queue() {
        let retention = topology.args.parking_retention.as_millis();
        let mut parking = json!({
            "message-ttl": u64::try_from(retention).unwrap_or(u64::MAX),
            "overflow": "reject-publish",
        });
        if broker >= BrokerVersion::UNLIMITED {
            // A look that crashes counts as a delivery. That must never be what drops a message.
            parking["delivery-limit"] = json!(-1);
        }
        return parking;
    }
    let mut source = json!({
        "dead-letter-exchange": topology.dead_letter_exchange(),
        "dead-letter-routing-key": topology.dead_letter_key(),
        // The source keeps a dead letter until the parking queue has confirmed it. Needs overflow
        // reject-publish.
        "dead-letter-strategy": "at-least-once",
        "overflow": "reject-publish",
        "delivery-limit": DELIVERY_LIMIT,
        "max-length": topology.args.queue_max_length.get(),
    });
    let delays = &topology.args.retry_delays;
    if topology.args.retry_backend == RetryBackend::Native
        && let (Some(min), Some(max)) = (delays.first(), delays.last())
    {
        // A reject means "failed" and waits; a nack, with which a worker that stops gives back what
        // it has not tried, does not.
        source["delayed-retry-type"] = json!("failed");
        source["delayed-retry-min"] = json!(min.millis());
        source["delayed-retry-max"] = json!(max.millis());
        source["delivery-limit"] = json!(NATIVE_DELIVERY_LIMIT);
    }
    source
}

/// Refuses what differs.
///
/// # Errors
/// All of it, by queue and key.
pub fn require_none(mismatches: &[Mismatch]) -> anyhow::Result<()> {
    let all = list(mismatches);
    anyhow::ensure!(mismatches.is_empty(), "the topology is not as it must be: {all}");
    Ok(())
}

/// All differences in one line.
#[must_use]
pub fn list(mismatches: &[Mismatch]) -> String {
    mismatches.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Compares a queue, as the management API describes it, with its policy.
pub(crate) fn compare(
    policy: &Policy,
    queue_type: &str,
    arguments: &Map<String, Value>,
    effective: &Map<String, Value>,
) -> Vec<Mismatch> {
    let mismatch = |key: &str, expected: String, found: String| Mismatch {
        queue: policy.queue.name.clone(),
        key: key.into(),
        expected,
        found,
    };
    let shown =
        |value: Option<&Value>| value.map_or_else(|| "absent".to_owned(), ToString::to_string);

    let mut mismatches = Vec::new();
    if queue_type != "quorum" {
        mismatches.push(mismatch("type", "quorum".into(), queue_type.into()));
    }
    // An argument of the queue competes with the policy (the smaller number wins) and cannot be
    // changed while the queue lives.
    let ours = ["x-queue-type", SINGLE_ACTIVE];
    for (key, value) in arguments.iter().filter(|(key, _)| !ours.contains(&key.as_str())) {
        mismatches.push(mismatch(&format!("argument {key}"), "absent".into(), value.to_string()));
    }
    let single_active = arguments.get(SINGLE_ACTIVE).and_then(Value::as_bool).unwrap_or(false);
    if single_active != policy.queue.single_active {
        let (expected, found) = (policy.queue.single_active, single_active);
        let key = format!("argument {SINGLE_ACTIVE}");
        mismatches.push(mismatch(&key, expected.to_string(), found.to_string()));
    }
    for (key, expected) in &policy.definition {
        let found = effective.get(key);
        if found != Some(expected) {
            mismatches.push(mismatch(key, expected.to_string(), shown(found)));
        }
    }
    for key in GUARDED.iter().filter(|key| !policy.definition.contains_key(**key)) {
        if let Some(found) = effective.get(*key) {
            mismatches.push(mismatch(key, "absent".into(), found.to_string()));
        }
    }
    mismatches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(definition: Value) -> Policy {
        Policy {
            queue: Queue { name: "q".into(), single_active: false },
            definition: definition.as_object().cloned().unwrap_or_default(),
        }
    }

    fn keys(mismatches: &[Mismatch]) -> Vec<&str> {
        mismatches.iter().map(|mismatch| mismatch.key.as_str()).collect()
    }

    #[test]
    fn drift_is_named_key_by_key() {
        let ours = policy(json!({"message-ttl": 5000, "overflow": "reject-publish"}));
        let none = Map::new();
        assert_eq!(compare(&ours, "quorum", &none, &ours.definition), []);

        let theirs = policy(json!({"message-ttl": 60, "delivery-limit": 3, "queue-version": 2}));
        let mismatches = compare(&ours, "classic", &none, &theirs.definition);
        assert_eq!(keys(&mismatches), ["type", "message-ttl", "overflow", "delivery-limit"]);
        assert_eq!(mismatches[1].to_string(), "q: message-ttl must be 5000, is 60");
    }

    #[test]
    fn an_argument_of_the_queue_that_competes_with_the_policy_is_drift() {
        let ours = policy(json!({"message-ttl": 5000}));
        let arguments = policy(json!({"x-queue-type": "quorum", "x-message-ttl": 60})).definition;
        let mismatches = compare(&ours, "quorum", &arguments, &ours.definition);
        assert_eq!(keys(&mismatches), ["argument x-message-ttl"]);
        let arguments = policy(json!({"x-single-active-consumer": true})).definition;
        let mismatches = compare(&ours, "quorum", &arguments, &ours.definition);
        assert_eq!(keys(&mismatches), ["argument x-single-active-consumer"]);
    }
}
