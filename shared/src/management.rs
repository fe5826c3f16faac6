//! RabbitMQ's management API, as far as policies and shards need it: four requests.
//!
//! A quorum queue reports its effective policy with every tick, 5 s by default: a change shows that
//! much later, and a broker that has just started reports nothing at all for a moment. So whoever
//! needs the policies in force waits until they are reported so ([`Management::wait_in_force`]).

use crate::connection::amqp_uri;
use crate::policies::{BrokerVersion, Mismatch, Policy, compare, policies};
use crate::topology::Topology;
use anyhow::Context;
use futures_util::future::join_all;
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
        // Each request on a connection of its own, so that a balancer leads it anew: kept, one to a node
        // that is cut off from its cluster would answer for as long as that lasts, and know nothing.
        let client =
            reqwest::Client::builder().timeout(TIMEOUT).pool_max_idle_per_host(0).build()?;
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

    /// Waits until each of the declared queues has reported its policy in force; `look` hears each answer.
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
        let mut unseen = None;
        loop {
            let checked = self.look(topology, &mut unseen).await;
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
        self.look(topology, &mut None).await
    }

    /// Looks at those queues that were not seen as they must be yet, at first at all. A node that is cut
    /// off from its cluster knows nothing of policies in force; the next look may meet another.
    async fn look(
        &self,
        topology: &Topology,
        unseen: &mut Option<Vec<Policy>>,
    ) -> anyhow::Result<Vec<Mismatch>> {
        let unseen = match unseen {
            Some(unseen) => unseen,
            None => unseen.insert(policies(topology, self.broker_version().await?)?),
        };
        // All at once: while a node is cut off, RabbitMQ 3.10 takes two seconds for each.
        let looks = join_all(unseen.iter().map(|policy| self.check_one(policy))).await;
        let mut right = looks.iter().map(|look| look.as_ref().is_ok_and(Vec::is_empty));
        unseen.retain(|_| !right.next().unwrap_or_default());
        let mismatches: Vec<Vec<Mismatch>> = looks.into_iter().collect::<anyhow::Result<_>>()?;
        Ok(mismatches.into_iter().flatten().collect())
    }

    async fn check_one(&self, policy: &Policy) -> anyhow::Result<Vec<Mismatch>> {
        let name = policy.queue.name.as_str();
        let request = self.request(Method::GET, &["queues", &self.vhost, name])?;
        let looking = || format!("cannot look at {name}");
        let Some(answer) = send(request).await.with_context(looking)? else {
            return Ok(vec![Mismatch {
                queue: name.to_owned(),
                key: "queue".into(),
                expected: "declared".into(),
                found: "absent".into(),
            }]);
        };
        let queue: QueueInfo = answer.json().await.with_context(looking)?;
        let effective = queue.effective_policy_definition.unwrap_or_default();
        Ok(compare(policy, &queue.kind, &queue.arguments, &effective))
    }

    /// Shards that are there and not in this topology: of an ordering that was changed. What they hold
    /// still has to be handled.
    ///
    /// # Errors
    /// When the API is not reached or does not let this user look.
    pub async fn stray_shards(&self, topology: &Topology) -> anyhow::Result<Vec<String>> {
        #[derive(Deserialize)]
        struct Bound {
            destination: String,
        }
        // Every queue is bound to the default exchange by its name, and bindings are answered at once. For
        // a list of queues each of their replicas is asked how it is: while a node of a cluster is cut off,
        // that takes RabbitMQ 3.10 a second a queue of the virtual host.
        let path = ["exchanges", &self.vhost, "amq.default", "bindings", "source"];
        let queues: Vec<Bound> = send(self.request(Method::GET, &path)?)
            .await
            .and_then(|answer| answer.context("404: is the virtual host there?"))
            .context("cannot list the queues")?
            .json()
            .await?;
        let (prefix, ours) = (topology.shard_prefix(), topology.shards());
        let names = queues.into_iter().map(|queue| queue.destination);
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
