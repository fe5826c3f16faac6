//! The HTTP edge: every error is a problem document that says what was wrong, and bad input never
//! becomes an order.

use crate::support::text;
use anyhow::{Context, Result};
use e2e::system::{Options, System, TOKEN, answer};
use futures_util::future::try_join_all;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

/// Sends a request and returns status, `type` and `detail` of the problem.
pub(crate) async fn problem(request: reqwest::RequestBuilder) -> Result<(u16, String, String)> {
    let response = request.send().await?;
    let status = response.status().as_u16();
    let content_type = response.headers().get("content-type").cloned();
    let body = response.text().await?;
    anyhow::ensure!(
        content_type.as_ref().is_some_and(|value| value == "application/problem+json"),
        "{status} {content_type:?}: {body}"
    );
    let body: Value = serde_json::from_str(&body)?;
    anyhow::ensure!(body["status"] == status, "the body says {}, not {status}", body["status"]);
    text(&body, "title")?;
    let kind = text(&body, "type")?.trim_start_matches("/problems/").to_owned();
    Ok((status, kind, text(&body, "detail")?.to_owned()))
}

#[tokio::test]
async fn every_bad_body_is_a_problem_with_its_own_type_and_makes_no_order() -> Result<()> {
    let system = System::start(Options::default()).await?;
    let url = system.orders()?.api("/orders")?;
    let many = format!(r#"{{"lines":[{}]}}"#, vec![r#"{"sku":"a","count":1}"#; 101].join(","));
    let large = format!(r#"{{"lines":[{{"sku":"{}","count":1}}]}}"#, "a".repeat(70_000));
    let long = format!(r#"{{"lines":[{{"sku":"{}","count":1}}]}}"#, "a".repeat(65));
    let customer =
        format!(r#"{{"lines":[{{"sku":"a","count":1}}],"customer_id":"{}"}}"#, "c".repeat(65));
    let line = |sku: &str, count: &str| format!(r#"{{"lines":[{{"sku":{sku},"count":{count}}}]}}"#);
    let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
    let (malformed, invalid, large_kind) = ("malformed-json", "invalid-body", "too-large");

    for (body, status, kind, says) in [
        ("", 400, malformed, "EOF"),
        ("{not-json}", 400, malformed, "line 1 column 2"),
        (r#"{"lines":[{"sku":"a","count":1}"#, 400, malformed, "EOF"),
        (deep.as_str(), 422, invalid, ""),
        ("null", 422, invalid, "null"),
        ("[]", 422, invalid, ""),
        ("{}", 422, invalid, "lines"),
        (r#"{"lines":[]}"#, 422, invalid, "1 to 100 lines"),
        (r#"{"lines":"a"}"#, 422, invalid, "expected a sequence"),
        (many.as_str(), 422, invalid, "this one has 101"),
        (r#"{"lines":[{"sku":"a"}]}"#, 422, invalid, "count"),
        (r#"{"lines":[{"count":1}]}"#, 422, invalid, "sku"),
        (r#"{"lines":[{"sku":"a","cuont":1}]}"#, 422, invalid, "cuont"),
        (r#"{"lines":[{"sku":"a","count":1}],"custmer":"x"}"#, 422, invalid, "custmer"),
        (r#"{"lines":[{"sku":"a","count":1,"count":-1}]}"#, 422, invalid, "duplicate field"),
        (line(r#""a""#, "0").as_str(), 422, invalid, "must be 1 to 10000"),
        (line(r#""a""#, "-1").as_str(), 422, invalid, "count of a is -1"),
        (line(r#""a""#, "10001").as_str(), 422, invalid, "must be 1 to 10000"),
        (line(r#""a""#, "2147483648").as_str(), 422, invalid, "must be 1 to 10000"),
        (line(r#""a""#, "1.5").as_str(), 422, invalid, "1.5"),
        (line(r#""a""#, "1e400").as_str(), 400, malformed, "number out of range"),
        (line(r#""a""#, "\"1\"").as_str(), 422, invalid, "expected i64"),
        (line(r#""a""#, "null").as_str(), 422, invalid, "null"),
        (line(r#""""#, "1").as_str(), 422, invalid, "is not a sku"),
        (line(r#""a b""#, "1").as_str(), 422, invalid, "is not a sku"),
        (line(r#""café""#, "1").as_str(), 422, invalid, "is not a sku"),
        (line(r#""cafe\u0301""#, "1").as_str(), 422, invalid, "is not a sku"),
        (line(r#""a\u0000""#, "1").as_str(), 422, invalid, "is not a sku"),
        (long.as_str(), 422, invalid, "1 to 64 characters"),
        (large.as_str(), 413, large_kind, "65536 bytes"),
        (customer.as_str(), 422, invalid, "customer_id"),
        (r#"{"lines":[{"sku":"a","count":1}],"customer_id":""}"#, 422, invalid, "customer_id"),
        (r#"{"lines":[{"sku":"a","count":1}],"customer_id":"a\u0000"}"#, 422, invalid, "control"),
        (
            r#"{"lines":[{"sku":"a","count":10000},{"sku":"a","count":1}]}"#,
            422,
            invalid,
            "add up to 10001",
        ),
    ] {
        let request =
            system.http.post(&url).header("content-type", "application/json").body(body.to_owned());
        let shown: String = body.chars().take(80).collect();
        let (got, got_kind, detail) = problem(request).await.context(shown.clone())?;
        assert_eq!((got, got_kind.as_str()), (status, kind), "{shown} → {detail}");
        assert!(detail.contains(says), "{shown} → {detail:?} does not say {says:?}");
        assert!(detail.len() < 600, "{shown} → an answer as long as the question");
    }
    let rows: i64 =
        sqlx::query_scalar("SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM outbox)")
            .fetch_one(&system.orders_db)
            .await?;
    assert_eq!(rows, 0);
    system.finish().await
}

#[tokio::test]
async fn every_wrong_route_method_header_and_parameter_is_a_problem() -> Result<()> {
    let system = System::start(Options::default()).await?;
    let orders = system.orders()?;
    let good = r#"{"lines":[{"sku":"a","count":1}]}"#;
    let absent = uuid::Uuid::now_v7();
    let json_type = Some("application/json");
    let cancel = format!("/orders/{absent}/cancel");
    let one = format!("/orders/{absent}");
    for (method, path, content_type, key, status, kind) in [
        (Method::GET, "/orderz", None, None, 404, "no-such-route"),
        (Method::GET, "/docs/none", None, None, 404, "no-such-route"),
        (Method::DELETE, "/orders", None, None, 405, "method-not-allowed"),
        (Method::PUT, &one, None, None, 405, "method-not-allowed"),
        (Method::POST, "/orders", None, None, 415, "unsupported-media-type"),
        (Method::POST, "/orders", Some("text/plain"), None, 415, "unsupported-media-type"),
        (Method::POST, "/orders", json_type, Some(""), 400, "invalid-idempotency-key"),
        (Method::POST, "/orders", json_type, Some("a b"), 400, "invalid-idempotency-key"),
        (
            Method::POST,
            "/orders",
            json_type,
            Some(&"k".repeat(256)),
            400,
            "invalid-idempotency-key",
        ),
        (Method::GET, "/orders/7", None, None, 400, "invalid-parameter"),
        (Method::GET, "/orders/%ff", None, None, 400, "invalid-parameter"),
        (Method::GET, &one, None, None, 404, "not-found"),
        (Method::POST, &cancel, None, None, 404, "not-found"),
        (Method::GET, "/orders?limit=0", None, None, 400, "invalid-parameter"),
        (Method::GET, "/orders?limit=201", None, None, 400, "invalid-parameter"),
        (Method::GET, "/orders?limit=x", None, None, 400, "invalid-parameter"),
        (Method::GET, "/orders?status=lost", None, None, 400, "invalid-parameter"),
        (Method::GET, "/orders?after=7", None, None, 400, "invalid-parameter"),
        (Method::GET, "/orders?page=2", None, None, 400, "invalid-parameter"),
        (Method::GET, "/problems/none", None, None, 404, "not-found"),
    ] {
        let mut request = system.http.request(method.clone(), orders.api(path)?);
        if method == Method::POST {
            request = request.body(good);
        }
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let (got, got_kind, detail) = problem(request).await.context(path.to_owned())?;
        assert_eq!((got, got_kind.as_str()), (status, kind), "{method} {path}: {detail}");
        let page = system.http.get(orders.api(&format!("/problems/{kind}"))?);
        answer(page, StatusCode::OK).await?;
    }
    let allowed = system.http.delete(orders.api("/orders")?).send().await?;
    let allow = allowed.headers().get("allow").context("405 names the methods that are allowed")?;
    assert!(allow.to_str()?.contains("POST"), "{allow:?}");
    system.finish().await
}

#[tokio::test]
async fn twenty_concurrent_posts_of_one_key_make_one_order_and_get_one_answer() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 100).await?;
    let url = system.orders()?.api("/orders")?;
    let post = |key: &'static str, body: Value| {
        system.http.post(&url).header("idempotency-key", key).json(&body)
    };
    // The same order, spelled in two ways.
    let spellings = [
        json!({"lines": [{"sku": "book-17", "count": 3}]}),
        json!({"lines": [{"sku": "book-17", "count": 1}, {"count": 2, "sku": "book-17"}]}),
    ];
    let answers = try_join_all((0..20).map(|number| {
        let request = post("one-key", spellings[number % 2].clone());
        async move {
            let response = request.send().await?;
            anyhow::ensure!(response.status() == StatusCode::CREATED, "{}", response.status());
            let location = response.headers()["location"].clone();
            anyhow::Ok((location, response.text().await?))
        }
    }))
    .await?;
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let order: Value = serde_json::from_str(&answers[0].1)?;
    let id = text(&order, "id")?;
    assert_eq!(answers[0].0.to_str()?, format!("/orders/{id}"));

    // The answer stays the first one, whatever became of the order since.
    system.wait_status(id, "confirmed").await?;
    let again = post("one-key", spellings[0].clone()).send().await?.text().await?;
    assert_eq!(again, answers[0].1);

    let other = json!({"lines": [{"sku": "book-17", "count": 4}]});
    let (status, kind, _) = problem(post("one-key", other.clone())).await?;
    assert_eq!((status, kind.as_str()), (422, "idempotency-key-reused"));
    answer(post("another-key", other), StatusCode::CREATED).await?;

    let orders: i64 =
        sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&system.orders_db).await?;
    assert_eq!(orders, 2);
    system.finish().await
}

#[tokio::test]
async fn a_walk_along_the_pages_sees_every_order_once_newest_first() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 5).await?;
    let mut placed = Vec::new();
    for _ in 0..7 {
        let order = system.place(&[("book-17", 1)]).await?;
        let order = e2e::wait::until("the order to be settled", async || {
            let order = system.order(&order).await?;
            Ok((order["status"] != "created").then_some(order))
        });
        placed.push(order.await?);
    }
    placed.reverse();
    let confirmed = placed.iter().filter(|order| order["status"] == "confirmed");
    for (filter, expected) in
        [("", placed.clone()), ("&status=confirmed", confirmed.cloned().collect())]
    {
        let mut seen = Vec::new();
        let mut after = String::new();
        loop {
            let url = system.orders()?.api(&format!("/orders?limit=3{filter}{after}"))?;
            let page = answer(system.http.get(url), StatusCode::OK).await?;
            seen.extend(page["orders"].as_array().context("orders")?.clone());
            match page["next"].as_str() {
                Some(next) => after = format!("&after={next}"),
                None => break,
            }
        }
        assert_eq!(seen, expected, "{filter:?}");
    }
    system.finish().await
}

#[tokio::test]
async fn the_documents_describe_every_route_and_the_pages_are_served() -> Result<()> {
    let system = System::start(Options::default()).await?;
    let (orders, inventory) = (system.orders()?, system.inventory()?);
    for (service, paths) in [
        (orders, vec!["/orders", "/orders/{id}", "/orders/{id}/cancel"]),
        (inventory, vec!["/stock", "/stock/{sku}", "/reservations/{order_id}"]),
    ] {
        let document =
            answer(system.http.get(service.api("/openapi.json")?), StatusCode::OK).await?;
        for path in paths {
            assert!(document["paths"].get(path).is_some(), "{path}");
        }
        // By the redirect from the root.
        let page = system.http.get(service.api("/")?).send().await?;
        assert!(page.status().is_success());
        assert!(page.text().await?.contains("swagger-ui"));
    }
    system.finish().await
}

#[tokio::test]
async fn stock_is_set_with_the_token_alone_and_never_below_what_is_reserved() -> Result<()> {
    let system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let order = system.place(&[("book-17", 4)]).await?;
    system.wait_status(&order, "confirmed").await?;
    let inventory = system.inventory()?;
    let put = |path: &str, token: &str, body: Value| {
        system.http.put(inventory.operations(path)).bearer_auth(token).json(&body)
    };
    let ten = json!({"available": 10});
    for (request, status, kind) in [
        (put("/stock/book-17", "wrong", ten.clone()), 401, "unauthorized"),
        (put("/stock/book-17", "", ten.clone()), 401, "unauthorized"),
        (system.http.put(inventory.operations("/stock/book-17")).json(&ten), 401, "unauthorized"),
        (put("/stock/book-17", TOKEN, json!({"available": 3})), 409, "conflict"),
        (put("/stock/book-17", TOKEN, json!({"available": -1})), 422, "invalid-body"),
        (put("/stock/book-17", TOKEN, json!({"available": 1_000_000_001})), 422, "invalid-body"),
        (put("/stock/a%20b", TOKEN, ten.clone()), 400, "invalid-parameter"),
        (put("/stock", TOKEN, ten.clone()), 404, "no-such-route"),
        (system.http.put(inventory.api("/stock/book-17")?).json(&ten), 405, "method-not-allowed"),
        (system.http.get(inventory.api("/stock/none")?), 404, "not-found"),
        (system.http.get(inventory.api("/reservations/none")?), 404, "not-found"),
    ] {
        let (got, got_kind, detail) = problem(request).await?;
        assert_eq!((got, got_kind.as_str()), (status, kind), "{detail}");
    }
    assert_eq!(system.stock("book-17").await?, (10, 4));
    system.set_stock("book-17", 4).await?;
    let listed = answer(system.http.get(inventory.api("/stock")?), StatusCode::OK).await?;
    assert_eq!(
        listed,
        json!({"stock": [{"sku": "book-17", "available": 4, "reserved": 4}], "next": null})
    );
    system.finish().await
}
