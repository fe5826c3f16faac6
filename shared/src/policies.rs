//! Policies: time-to-live, limits and dead lettering of the queues, set apart from the queues.
//!
//! They must be in force *before the first message*. Measured on RabbitMQ 3.10.8 and 4.3.6: a
//! message that enters a retry queue before its TTL policy never expires, and everything behind it
//! waits for ever. Therefore `topology apply`, a job with a user of its own, sets them before the
//! services start, and each consumer checks the *effective* policy of each of its queues before it
//! consumes and again from time to time ([`Management::check`]). Effective, because only one policy
//! applies to a queue: somebody else's, with a higher priority, would switch ours off without a word.
//!
//! A quorum queue reports its effective policy with every tick, 5 s by default: a change shows that
//! much later, and a broker that has just started reports nothing at all for a moment. So whoever
//! needs the policies in force waits until they are reported so ([`Management::wait_in_force`]).
//!
//! Keys: <https://www.rabbitmq.com/docs/parameters#policies>,
//! <https://www.rabbitmq.com/docs/quorum-queues>.

use crate::connection::amqp_uri;
use crate::topology::{DELIVERY_LIMIT, Topology};
use anyhow::Context;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::fmt;
use std::time::{Duration, Instant};

/// Above the 0 that a catch-all policy usually has.
const PRIORITY: i32 = 10;
/// Quorum queues report every 5 s, and one report may just have been missed.
pub const IN_FORCE: Duration = Duration::from_secs(15);
/// An answer of the management API that takes longer is a failure.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Keys whose presence changes what the queues promise. One of these that we did not set is drift;
/// any other key of an operator's is not ours to judge.
const GUARDED: &[&str] = &[
    "dead-letter-exchange",
    "dead-letter-routing-key",
    "dead-letter-strategy",
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
    /// The queue, which is also the policy's name.
    pub queue: String,
    /// Keys and values.
    pub definition: Map<String, Value>,
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

/// The policies of a topology. `broker_major` decides what may be said at all: before 4.0 a
/// delivery-limit of −1 ("none") is refused, and none is the default; from 4.0 the default is 20.
#[must_use]
pub fn policies(topology: &Topology, broker_major: u32) -> Vec<Policy> {
    let policy = |queue: String, definition: Value| Policy {
        queue,
        definition: definition.as_object().cloned().unwrap_or_default(),
    };
    let queue = topology.names.queue;
    let max_length = topology.args.queue_max_length.get();

    let mut policies = vec![policy(
        queue.to_owned(),
        json!({
            "dead-letter-exchange": topology.dead_letter_exchange(),
            "dead-letter-routing-key": topology.dead_letter_key(),
            // The source keeps a dead letter until the parking queue has confirmed it. Needs
            // overflow reject-publish.
            "dead-letter-strategy": "at-least-once",
            "overflow": "reject-publish",
            "delivery-limit": DELIVERY_LIMIT,
            "max-length": max_length,
        }),
    )];
    policies.extend(topology.args.retry_delays.iter().map(|delay| {
        policy(
            topology.retry_queue(*delay),
            json!({
                "message-ttl": delay.millis(),
                "dead-letter-exchange": "",
                "dead-letter-routing-key": queue,
                "dead-letter-strategy": "at-least-once",
                "overflow": "reject-publish",
                "max-length": max_length,
            }),
        )
    }));
    let mut parking = json!({
        "message-ttl": u64::try_from(topology.args.parking_retention.as_millis()).unwrap_or(u64::MAX),
        "overflow": "reject-publish",
    });
    if broker_major >= 4 {
        // Looking at a parked message returns it to the queue, which counts as a delivery. That
        // must never be what drops it.
        parking["delivery-limit"] = json!(-1);
    }
    policies.push(policy(topology.parking_queue(), parking));
    policies
}

/// A client of the management API: the three requests that are needed of it.
pub struct Management {
    client: reqwest::Client,
    base: reqwest::Url,
    vhost: String,
}

/// What the API says of a queue, as far as it matters here.
#[derive(Deserialize)]
struct QueueInfo {
    #[serde(rename = "type")]
    kind: String,
    arguments: Map<String, Value>,
    /// Absent until the queue's first tick.
    #[serde(default)]
    effective_policy_definition: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct Overview {
    rabbitmq_version: String,
}

impl Management {
    /// `url` is `http://user:password@host:port`; the virtual host is that of `amqp_url`.
    ///
    /// # Errors
    /// When one of the URLs cannot be read. The message does not repeat it: it holds a password.
    pub fn new(url: &str, amqp_url: &str) -> anyhow::Result<Self> {
        let wrong = "the management URL must be http://user:password@host:port";
        let base: reqwest::Url = url.parse().context(wrong)?;
        let usable = base.scheme() == "http" && base.has_host() && !base.username().is_empty();
        anyhow::ensure!(usable, wrong);
        let client = reqwest::Client::builder().timeout(TIMEOUT).build()?;
        Ok(Self { client, base, vhost: amqp_uri(amqp_url)?.vhost })
    }

    /// A request to `/api/{path…}`; the segments are encoded here. reqwest takes the login out of
    /// the URL and sends it as a header.
    fn request(&self, method: Method, path: &[&str]) -> anyhow::Result<RequestBuilder> {
        let mut url = self.base.clone();
        url.path_segments_mut()
            .map_err(|()| anyhow::anyhow!("the management URL cannot have a path"))?
            .pop_if_empty()
            .push("api")
            .extend(path);
        Ok(self.client.request(method, url))
    }

    async fn broker_major(&self) -> anyhow::Result<u32> {
        let overview: Overview = send(self.request(Method::GET, &["overview"])?)
            .await
            .and_then(|answer| answer.context("404"))
            .context("cannot ask the broker's version")?
            .json()
            .await?;
        let version = overview.rabbitmq_version;
        let major = version.split('.').next().and_then(|major| major.parse().ok());
        major.with_context(|| format!("cannot read the broker's version {version:?}"))
    }

    /// Sets the policies of a topology. Setting them again changes nothing.
    ///
    /// # Errors
    /// When the API is not reached, or the user may not set policies.
    pub async fn apply(&self, topology: &Topology) -> anyhow::Result<Vec<Policy>> {
        let policies = policies(topology, self.broker_major().await?);
        for policy in &policies {
            let body = json!({
                "pattern": format!("^{}$", policy.queue.replace('.', r"\.")),
                "definition": policy.definition,
                // `quorum_queues` would be exact, but 3.10 does not know it.
                "apply-to": "queues",
                "priority": PRIORITY,
            });
            let path = ["policies", &self.vhost, &policy.queue];
            send(self.request(Method::PUT, &path)?.json(&body))
                .await
                .and_then(|answer| answer.context("404: is the virtual host there?"))
                .with_context(|| format!("cannot set the policy of {}", policy.queue))?;
        }
        Ok(policies)
    }

    /// Waits until the declared queues report the policies in force; `look` hears each answer.
    /// Whatever still differs after `limit` is in the way for good: a policy that is missing or
    /// somebody else's, an argument of the queue.
    ///
    /// # Errors
    /// What differs; or when the API is not reached.
    pub async fn wait_in_force(
        &self,
        topology: &Topology,
        limit: Duration,
        look: impl Fn(&[Mismatch]),
    ) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let mismatches = self.check(topology).await?;
            look(&mismatches);
            if mismatches.is_empty() {
                return Ok(());
            }
            anyhow::ensure!(
                began.elapsed() < limit,
                "the topology is not as it must be: {}",
                list(&mismatches)
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Compares each queue with what it must be. Empty: all is well.
    ///
    /// # Errors
    /// When the API is not reached or does not let this user look.
    pub async fn check(&self, topology: &Topology) -> anyhow::Result<Vec<Mismatch>> {
        let mut mismatches = Vec::new();
        for policy in policies(topology, self.broker_major().await?) {
            let request = self.request(Method::GET, &["queues", &self.vhost, &policy.queue])?;
            let looking = || format!("cannot look at {}", policy.queue);
            let Some(answer) = send(request).await.with_context(looking)? else {
                mismatches.push(Mismatch {
                    queue: policy.queue,
                    key: "queue".into(),
                    expected: "declared".into(),
                    found: "absent".into(),
                });
                continue;
            };
            let queue: QueueInfo = answer.json().await.with_context(looking)?;
            let effective = queue.effective_policy_definition.unwrap_or_default();
            mismatches.extend(compare(&policy, &queue.kind, &queue.arguments, &effective));
        }
        Ok(mismatches)
    }
}

/// Sends a request. `None` is 404; any other refusal is an error, without the URL: it may hold a
/// login.
async fn send(request: RequestBuilder) -> anyhow::Result<Option<Response>> {
    let response = request.send().await.map_err(reqwest::Error::without_url)?;
    let status = response.status();
    if status == StatusCode::NOT_FOUND {
        return Ok(None);
    }
    if !status.is_success() {
        let reason = response.text().await.unwrap_or_default();
        anyhow::bail!("the management API answered {status}: {reason}");
    }
    Ok(Some(response))
}

/// All differences in one line.
#[must_use]
pub fn list(mismatches: &[Mismatch]) -> String {
    mismatches.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn compare(
    policy: &Policy,
    queue_type: &str,
    arguments: &Map<String, Value>,
    effective: &Map<String, Value>,
) -> Vec<Mismatch> {
    let mismatch = |key: &str, expected: String, found: String| Mismatch {
        queue: policy.queue.clone(),
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
    for (key, value) in arguments.iter().filter(|(key, _)| *key != "x-queue-type") {
        mismatches.push(mismatch(&format!("argument {key}"), "absent".into(), value.to_string()));
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
            queue: "q".into(),
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
    }
}
