//! RabbitMQ's management API, as far as policies and shards need it: four requests.
//!
//! A quorum queue reports its effective policy with every tick, 5 s by default: a change shows that
//! much later, and a broker that has just started reports nothing at all for a moment. So whoever
//! needs the policies in force waits until they are reported so ([`Management::wait_in_force`]).

use crate::connection::amqp_uri;
use crate::policies::{BrokerVersion, Mismatch, Policy, compare, policies};
use crate::topology::Topology;
use anyhow::Context;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// Above the 0 that a catch-all policy usually has.
const PRIORITY: i32 = 10;
/// Quorum queues report every 5 s, and one report may just have been missed.
pub const IN_FORCE: Duration = Duration::from_secs(15);
/// An answer that takes longer is a failure.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A client of the management API: the four requests that are needed of it.
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

    async fn broker_version(&self) -> anyhow::Result<BrokerVersion> {
        let overview: Overview = send(self.request(Method::GET, &["overview"])?)
            .await
            .and_then(|answer| answer.context("404"))
            .context("cannot ask the broker's version")?
            .json()
            .await?;
        let text = overview.rabbitmq_version;
        let mut numbers = text.split('.').map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(BrokerVersion { major, minor }),
            _ => anyhow::bail!("cannot read the broker's version {text:?}"),
        }
    }

    /// Sets the policies of a topology. Setting them again changes nothing.
    ///
    /// # Errors
    /// When the API is not reached, or the user may not set policies.
    pub async fn apply(&self, topology: &Topology) -> anyhow::Result<Vec<Policy>> {
        let policies = policies(topology, self.broker_version().await?)?;
        for policy in &policies {
            let name = policy.queue.name.as_str();
            let body = json!({
                "pattern": format!("^{}$", name.replace('.', r"\.")),
                "definition": policy.definition,
                // `quorum_queues` would be exact, but 3.10 does not know it.
                "apply-to": "queues",
                "priority": PRIORITY,
            });
            let path = ["policies", &self.vhost, name];
            send(self.request(Method::PUT, &path)?.json(&body))
                .await
                .and_then(|answer| answer.context("404: is the virtual host there?"))
                .with_context(|| format!("cannot set the policy of {name}"))?;
        }
        Ok(policies)
    }

    /// Waits until the declared queues report the policies in force; `look` hears each answer.
    /// Returns what still differs after `limit`, and so is in the way for good: a policy that is
    /// missing or somebody else's, an argument of the queue. Empty: all is well.
    ///
    /// # Errors
    /// When the API has not answered within `limit`, or does not let this user look.
    pub async fn wait_in_force(
        &self,
        topology: &Topology,
        limit: Duration,
        look: impl Fn(&[Mismatch]),
    ) -> anyhow::Result<Vec<Mismatch>> {
        let began = Instant::now();
        loop {
            let checked = self.check(topology).await;
            if let Ok(mismatches) = &checked {
                look(mismatches);
                if mismatches.is_empty() {
                    return checked;
                }
            }
            // A broker that has just started may be slow to answer here.
            if began.elapsed() >= limit {
                return checked;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Compares each queue with what it must be. Empty: all is well.
    ///
    /// # Errors
    /// When the API is not reached or does not let this user look; when the broker is too old for
    /// what is configured.
    pub async fn check(&self, topology: &Topology) -> anyhow::Result<Vec<Mismatch>> {
        let mut mismatches = Vec::new();
        for policy in policies(topology, self.broker_version().await?)? {
            let name = policy.queue.name.as_str();
            let request = self.request(Method::GET, &["queues", &self.vhost, name])?;
            let looking = || format!("cannot look at {name}");
            let Some(answer) = send(request).await.with_context(looking)? else {
                mismatches.push(Mismatch {
                    queue: name.to_owned(),
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

    /// Shards that are there and not in this topology: of an ordering that was changed. What they hold
    /// still has to be handled.
    ///
    /// # Errors
    /// When the API is not reached or does not let this user look.
    pub async fn stray_shards(&self, topology: &Topology) -> anyhow::Result<Vec<String>> {
        #[derive(Deserialize)]
        struct Named {
            name: String,
        }
        let request = self.request(Method::GET, &["queues", &self.vhost])?;
        let queues: Vec<Named> = send(request.query(&[("columns", "name")]))
            .await
            .and_then(|answer| answer.context("404: is the virtual host there?"))
            .context("cannot list the queues")?
            .json()
            .await?;
        let (prefix, ours) = (topology.shard_prefix(), topology.shards());
        let names = queues.into_iter().map(|queue| queue.name);
        Ok(names.filter(|name| name.starts_with(&prefix) && !ours.contains(name)).collect())
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
