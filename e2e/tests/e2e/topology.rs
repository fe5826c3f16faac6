//! Policies first, checked before anything is consumed, and again.

use anyhow::{Context, Result};
use e2e::service::Service;
use e2e::system::{Options, System};
use e2e::wait::until;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

/// A request to the management API about a policy of the test's virtual host.
async fn policy(system: &System, method: Method, name: &str, body: Option<Value>) -> Result<()> {
    let vhost = system.vhost()?;
    let url = format!("{}/api/policies/{vhost}/{name}", system.rabbitmq.management_url());
    let mut request = system.http.request(method, url).basic_auth("guest", Some("guest"));
    if let Some(body) = body {
        request = request.json(&body);
    }
    request.send().await?.error_for_status()?;
    Ok(())
}

/// Waits until the inventory says about its topology what `fits`.
async fn wait_topology(system: &System, what: &str, fits: impl Fn(&str) -> bool) -> Result<String> {
    let inventory = system.inventory()?;
    until(what, async || {
        let (_, answer) = inventory.readiness().await?;
        let said = answer["parts"]["topology"].as_str().unwrap_or_default().to_owned();
        Ok(fits(&said).then_some(said))
    })
    .await
}

#[tokio::test]
async fn nothing_is_consumed_while_a_policy_is_missing_and_the_key_is_named() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    policy(&system, Method::DELETE, "inventory.orders.retry.600ms", None).await?;
    let check = ["topology", "check"];
    // The broker reports the change with the next tick of the queue.
    let shown = until("the check to fail", async || {
        let checked = Service::command("inventory-service", &check, &system.inventory_env).await?;
        let shown = String::from_utf8_lossy(&checked.stdout).into_owned();
        let found_some = checked.status.code() == Some(1) && !shown.is_empty();
        Ok(found_some.then_some(shown))
    })
    .await?;
    assert!(
        shown.contains("inventory.orders.retry.600ms: message-ttl must be 600, is absent"),
        "{shown}"
    );

    let inventory = Service::start("inventory-service", &system.inventory_env).await?;
    system.inventory = Some(inventory);
    let said = wait_topology(&system, "drift to be noticed", |said| said.contains("600ms")).await?;
    assert!(said.contains("message-ttl must be 600, is absent"), "{said}");
    assert!(!system.inventory()?.readiness().await?.0, "not ready");
    let body =
        serde_json::to_vec(&crate::support::order_event("early", "order.created", 3, json!({})))?;
    system
        .broker
        .publish("orders", "order.created", crate::support::with_id("early"), &body)
        .await?;
    assert_eq!(system.broker.depth("inventory.orders").await?, 1, "it waits");

    let apply = ["topology", "apply"];
    Service::command_ok("inventory-service", &apply, &system.inventory_env).await?;
    system.inventory()?.wait_ready().await?;
    system.take_parked("inventory.orders").await?;
    system.start_services().await?;
    let check = ["topology", "check"];
    Service::command_ok("inventory-service", &check, &system.inventory_env).await?;
    system.finish().await
}

#[tokio::test]
async fn a_stronger_policy_of_somebody_elses_makes_the_service_not_ready_until_it_is_gone()
-> Result<()> {
    let system = System::start(Options {
        env: vec![("TOPOLOGY_CHECK_INTERVAL", "100ms")],
        ..Options::default()
    })
    .await?;
    let stronger = json!({
        "pattern": ".*", "apply-to": "queues", "priority": 100,
        "definition": {"message-ttl": 5000, "delivery-limit": 3},
    });
    policy(&system, Method::PUT, "catch-all", Some(stronger)).await?;
    // Queue by queue, as each reports it with its own tick.
    let keys = [
        "inventory.orders: delivery-limit must be 8, is 3",
        "inventory.orders.retry.300ms: message-ttl must be 300, is 5000",
        "inventory.orders.parking: message-ttl",
        "inventory.orders: message-ttl must be absent, is 5000",
    ];
    let all = |said: &str| keys.iter().all(|key| said.contains(key));
    wait_topology(&system, "every queue's drift to be named", all).await?;
    let url = system.inventory()?.operations("/health/ready");
    assert_eq!(reqwest::get(url).await?.status(), StatusCode::SERVICE_UNAVAILABLE);
    policy(&system, Method::DELETE, "catch-all", None).await?;
    wait_topology(&system, "the drift to be gone", |said| said == "ok").await?;
    system.finish().await
}

#[tokio::test]
async fn the_printed_topology_has_every_queue_binding_and_policy() -> Result<()> {
    let env = e2e::service::Env::from([("RETRY_DELAYS".into(), "5s,30s,5m".into())]);
    let printed = Service::command_ok("inventory-service", &["topology", "print"], &env).await?;
    for line in [
        "exchange inventory (topic)",
        "exchange orders (topic)",
        "exchange inventory.orders.retry (direct)",
        "exchange inventory.orders.dlx (direct)",
        "queue inventory.orders.retry.5m (quorum, durable)",
        "binding orders -order.*-> inventory.orders",
        "binding inventory.orders.retry -30s-> inventory.orders.retry.30s",
        "binding inventory.orders.dlx -inventory.orders.failed-> inventory.orders.parking",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line:?} is not in\n{printed}");
    }
    let policy = |queue: &str| -> Result<Value> {
        let start = format!("policy {queue} ");
        let line = printed.lines().find_map(|line| line.strip_prefix(start.as_str()));
        Ok(serde_json::from_str(line.context("no policy")?)?)
    };
    let retry = policy("inventory.orders.retry.30s")?;
    assert_eq!(retry["message-ttl"], 30_000);
    assert_eq!(retry["dead-letter-exchange"], "");
    assert_eq!(retry["dead-letter-routing-key"], "inventory.orders");
    assert_eq!(policy("inventory.orders.parking")?["delivery-limit"], -1);
    Ok(())
}
