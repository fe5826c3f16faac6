//! The same over the operations port.

use super::*;
use crate::http_edge::problem;
use anyhow::Context;
use e2e::ledger::Expect;
use e2e::system::{Options, TOKEN, answer};
use e2e::wait::{DEADLINE, until};
use reqwest::{Method, StatusCode};

/// A request with the token.
fn ask(system: &System, method: Method, path: &str) -> Result<reqwest::RequestBuilder> {
    Ok(system.http.request(method, system.inventory()?.operations(path)).bearer_auth(TOKEN))
}

async fn get(system: &System, path: &str) -> Result<Value> {
    answer(ask(system, Method::GET, path)?, StatusCode::OK).await
}

/// Begins a run and returns where it is to be seen.
async fn begin(system: &System, path: &str, body: Value) -> Result<String> {
    let response = ask(system, Method::POST, path)?.json(&body).send().await?;
    let status = response.status();
    let location = response.headers().get("location").cloned();
    let body: Value = response.json().await?;
    ensure!(status == StatusCode::ACCEPTED, "{status}: {body}");
    let location = location.context("no location")?.to_str()?.to_owned();
    ensure!(location == format!("/parking/runs/{}", body["run"]), "{location}, {body}");
    Ok(location)
}

/// Waits until a run has ended.
async fn ended(system: &System, location: &str) -> Result<Value> {
    until("the run to end", async || {
        let run = get(system, location).await?;
        Ok(run["finished_at"].is_string().then_some(run))
    })
    .await
}

#[tokio::test]
async fn the_operations_api_lists_shows_redrives_and_discards() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    refuse_reservations(&system).await?;
    let order = system.place(&[("book-17", 1)]).await?;
    wait_depth(&system, PARKING, 1).await?;
    allow_reservations(&system).await?;
    for id in ["a", "b/c"] {
        park_garbage(&system, id).await?;
    }
    let listed = get(&system, "/parking").await?;
    assert_eq!((&listed["parked"], &listed["matched"]), (&json!(3), &json!(3)));
    let messages = listed["messages"].as_array().context("messages")?;
    assert_eq!(&ids(messages)[1..], ["a", "b/c"]);
    assert_eq!(messages[0]["aggregate_id"], order.as_str());
    for (query, matched) in [
        ("?id=a", 1),
        ("?type=order.created", 1),
        (&format!("?aggregate={order}"), 1),
        ("?class=permanent", 1),
        ("?reason=permanent&before=0s", 1),
        ("?after=1h", 1),
        ("?after=2999-01-01T00:00:00Z", 0),
        ("?limit=1", 3),
    ] {
        let listed = get(&system, &format!("/parking{query}")).await?;
        assert_eq!(listed["matched"], matched, "{query}: {listed}");
    }
    let shown = get(&system, "/parking/b%2Fc").await?;
    assert_eq!(shown["messages"][0]["body"], "{not-json}");
    assert_eq!(shown["messages"][0]["about"]["message_id"], "b/c");

    let what = json!({"filter": {"type": "order.created"}, "by": "operator", "max": 5});
    let mut dry = what.clone();
    dry["dry_run"] = json!(true);
    let post = ask(&system, Method::POST, "/parking/redrive")?.json(&dry);
    let plan = answer(post, StatusCode::OK).await?;
    assert_eq!((&plan["planned"], &plan["matched"]), (&json!(1), &json!(1)), "{plan}");
    wait_depth(&system, PARKING, 3).await?;
    assert!(audit(&system).await?.is_empty());

    let run = begin(&system, "/parking/redrive", what).await?;
    let run = ended(&system, &run).await?;
    assert_eq!(run["outcome"], "finished");
    assert_eq!(run["who"], "operator");
    assert_eq!(run["filter"], json!({"type": "order.created"}));
    assert_eq!((&run["matched"], &run["done"], &run["max"]), (&json!(1), &json!(1), &json!(5)));
    system.wait_status(&order, "confirmed").await?;

    let what = json!({"filter": {"id": ["a"]}, "yes": true});
    let run = begin(&system, "/parking/discard", what).await?;
    let run = ended(&system, &run).await?;
    assert_eq!((&run["action"], &run["who"]), (&json!("discard"), &json!("operations-api")));
    let runs = get(&system, "/parking/runs").await?;
    let latest: Vec<_> = runs["runs"].as_array().context("runs")?.iter().collect();
    assert_eq!(latest.iter().map(|run| &run["action"]).collect::<Vec<_>>(), ["discard", "redrive"]);
    let logged = crate::support::logged(&system.inventory()?.child, "parked message redriven");
    assert_eq!(logged.len(), 1);
    assert_eq!(logged[0]["by"], "operator");
    // orders-service has a parking too, and the same routes.
    let url = system.orders()?.operations("/parking");
    let other = answer(system.http.get(url).bearer_auth(TOKEN), StatusCode::OK).await?;
    assert_eq!(other["parked"], 0);
    system.finish_expecting(Expect { parked: 1, ..Expect::default() }).await
}

#[tokio::test]
async fn the_operations_api_says_what_was_wrong_and_moves_nothing() -> Result<()> {
    let system = System::start(Options::default()).await?;
    park_garbage(&system, "a").await?;
    let (redrive, discard) = ("/parking/redrive", "/parking/discard");
    let (invalid, parameter) = ("invalid-body", "invalid-parameter");
    for (path, body, status, kind, says) in [
        (redrive, r#"{"filter":{"typ":"x"}}"#, 422, invalid, "unknown field `typ`"),
        (redrive, r#"{"flter":{}}"#, 422, invalid, "unknown field `flter`"),
        (redrive, r#"{"yes":true}"#, 422, invalid, "unknown field `yes`"),
        (redrive, r#"{"filter":{"id":"a"}}"#, 422, invalid, "expected a sequence"),
        (redrive, r#"{"filter":{"class":"bad"}}"#, 422, invalid, "transient"),
        (redrive, r#"{"filter":{"before":"soon"}}"#, 422, invalid, "like 2h"),
        (redrive, r#"{"filter":{"before":5}}"#, 422, invalid, "expected a string"),
        (redrive, r#"{"rate":0}"#, 422, invalid, "more than 0, like 50"),
        (redrive, r#"{"rate":-1}"#, 422, invalid, "more than 0, like 50"),
        (redrive, r#"{"rate":1e-9}"#, 422, invalid, "one in 20 minutes"),
        (redrive, r#"{"max":0}"#, 422, invalid, "nonzero"),
        (redrive, r#"{"max":1,"max":2}"#, 422, invalid, "duplicate field"),
        (redrive, r#"{"by":""}"#, 422, invalid, "by: a name has 1 to 200 bytes"),
        (redrive, r#"{"by":"a\u0000"}"#, 422, invalid, "no control characters"),
        (redrive, r#"{"dry_run":"yes"}"#, 422, invalid, "expected a boolean"),
        (redrive, "{not-json}", 400, "malformed-json", "line 1"),
        (discard, r#"{"yes":true}"#, 422, invalid, "at least one filter"),
        (discard, r#"{"filter":{},"yes":true}"#, 422, invalid, "at least one filter"),
        (discard, r#"{"filter":{"id":["a"]}}"#, 422, invalid, "\"yes\": true"),
        (discard, r#"{"filter":{"id":["a"]},"yes":true,"rate":1}"#, 422, invalid, "rate"),
    ] {
        let request = ask(&system, Method::POST, path)?.header("content-type", "application/json");
        let (got, got_kind, detail) = problem(request.body(body)).await.context(body)?;
        assert_eq!((got, got_kind.as_str()), (status, kind), "{body} → {detail}");
        assert!(detail.contains(says), "{body} → {detail:?} does not say {says:?}");
    }
    for (path, status, kind, says) in [
        ("/parking?limit=0", 400, parameter, "must be 1 to 1000"),
        ("/parking?class=bad", 400, parameter, "transient"),
        ("/parking?before=soon", 400, parameter, "like 2h"),
        ("/parking?colour=red", 400, parameter, "unknown field `colour`"),
        ("/parking/none", 404, "not-found", "none has the id \"none\""),
        ("/parking/runs/7", 404, "not-found", "there is no run 7"),
        ("/parking/runs/seven", 400, parameter, "seven"),
        ("/parking/runs?limit=1001", 400, parameter, "must be 1 to 1000"),
        ("/parking/redrive", 405, "method-not-allowed", "Allow"),
    ] {
        let (got, got_kind, detail) = problem(ask(&system, Method::GET, path)?).await?;
        assert_eq!((got, got_kind.as_str()), (status, kind), "{path} → {detail}");
        assert!(detail.contains(says), "{path} → {detail:?} does not say {says:?}");
    }
    let open = async |method: Method, path: &str| {
        let request = system.http.request(method, system.inventory()?.operations(path));
        problem(request.header("content-type", "application/json").body("{}")).await
    };
    for (method, path) in [
        (Method::GET, "/parking"),
        (Method::GET, "/parking/a"),
        (Method::GET, "/parking/runs"),
        (Method::GET, "/parking/runs/1"),
        (Method::POST, "/parking/redrive"),
        (Method::POST, "/parking/discard"),
    ] {
        let (status, kind, _) = open(method, path).await?;
        assert_eq!((status, kind.as_str()), (401, "unauthorized"), "{path}");
    }
    assert!(audit(&system).await?.is_empty());
    wait_depth(&system, PARKING, 1).await?;

    // A process without a token does nothing of the kind, whatever token comes.
    let mut env = system.inventory_env.clone();
    env.remove("OPERATIONS_TOKEN");
    env.insert("ROLES".into(), "http".into());
    let tokenless = Service::start("inventory-service", &env).await?;
    for path in ["/parking", "/parking/runs"] {
        let request = system.http.get(tokenless.operations(path)).bearer_auth(TOKEN);
        let (status, kind, _) = problem(request).await?;
        assert_eq!((status, kind.as_str()), (403, "disabled"), "{path}");
    }
    tokenless.stop().await?;
    system.finish_expecting(Expect { parked: 1, ..Expect::default() }).await
}

#[tokio::test]
async fn one_run_at_a_time_goes_on_by_itself_and_ends_in_order_at_sigterm() -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    for id in ["a", "b", "c"] {
        park_garbage(&system, id).await?;
    }
    // The second message would leave after a hundred seconds.
    let run = begin(&system, "/parking/redrive", json!({"rate": 0.01})).await?;
    until_true("the first message to be redriven", async || {
        Ok(get(&system, &run).await?["matched"] == 3 && system.broker.depth(PARKING).await? == 1)
    })
    .await?;
    let second = ask(&system, Method::POST, "/parking/redrive")?.json(&json!({}));
    let (status, kind, detail) = problem(second).await?;
    assert_eq!((status, kind.as_str()), (409, "conflict"), "{detail}");
    // What a run holds nobody else sees.
    assert_eq!(get(&system, "/parking").await?["parked"], 1);

    let inventory = system.inventory.take().context("the inventory runs")?;
    inventory.child.sigterm()?;
    assert!(inventory.child.wait_exit(DEADLINE).await?.success());
    let runs = audit(&system).await?;
    let [stopped] = &runs[..] else { anyhow::bail!("{runs:?}") };
    assert_eq!((stopped.matched, stopped.done, stopped.ended), (Some(3), 1, true));
    assert_eq!(stopped.outcome.as_deref(), Some("interrupted"));
    wait_depth(&system, PARKING, 3).await?;
    system.start_services().await?;
    let run = begin(&system, "/parking/redrive", json!({})).await?;
    assert_eq!(ended(&system, &run).await?["done"], 3);
    wait_depth(&system, PARKING, 3).await?;
    system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await
}

#[tokio::test]
async fn a_run_of_the_api_that_fails_says_why_in_its_row() -> Result<()> {
    let system = System::start(Options { proxies: true, ..Options::default() }).await?;
    park_garbage(&system, "a").await?;
    let broker = &system.proxies.as_ref().context("proxies")?.inventory_amqp;
    broker.cut()?;
    let (status, kind, detail) = problem(ask(&system, Method::GET, "/parking")?).await?;
    assert_eq!((status, kind.as_str()), (503, "unavailable"), "{detail}");
    assert!(!detail.contains("127.0.0.1"), "{detail}");
    let run = begin(&system, "/parking/redrive", json!({})).await?;
    let run = ended(&system, &run).await?;
    let outcome = run["outcome"].as_str().context("an outcome")?;
    assert!(outcome.starts_with("failed: ") && outcome.contains("broker"), "{outcome}");
    assert_eq!(run["done"], 0);
    broker.heal()?;
    system.inventory()?.wait_ready().await?;
    wait_depth(&system, PARKING, 1).await?;
    system.finish_expecting(Expect { parked: 1, ..Expect::default() }).await
}
