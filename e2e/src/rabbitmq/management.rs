//! The little of the management API that the harness itself needs.
//!
//! A client per request: a shared one would tie its connections to the runtime of the test that
//! came first.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::{Client, Method};
use serde_json::Value;

/// Deleting a vhost full of quorum queues takes its time.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Sends the request as `guest`; any status but 2xx is an error.
pub(super) async fn request(method: Method, url: &str, body: &Value) -> Result<()> {
    let call = format!("{method} {url}");
    let client = Client::builder().no_proxy().timeout(TIMEOUT).build()?;
    let response =
        client.request(method, url).basic_auth("guest", Some("guest")).json(body).send().await;
    let response = response.with_context(|| call.clone())?;
    let status = response.status();
    let text = response.text().await.unwrap_or_default(); // for the message only
    ensure!(status.is_success(), "{call}: {status} {text}");
    Ok(())
}

/// What the node says about itself; an error until the API serves requests.
pub(super) async fn overview(root: &str) -> Result<Value> {
    get(root, "overview").await
}

/// What the API answers to a question.
pub(super) async fn get(root: &str, path: &str) -> Result<Value> {
    let client = Client::builder().no_proxy().timeout(Duration::from_secs(5)).build()?;
    let url = format!("{root}/api/{path}");
    let response = client.get(url).basic_auth("guest", Some("guest")).send().await?;
    Ok(response.error_for_status()?.json().await?)
}

/// For a segment of a path: all but RFC 3986's unreserved characters is escaped, `/` too.
pub(super) fn percent_encode(segment: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02x}"),
    };
    segment.bytes().map(escape).collect()
}
