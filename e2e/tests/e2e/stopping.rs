//! SIGTERM while clients are connected. What it does to the other parts is in their own files.

use crate::support::text;
use anyhow::{Context, Result};
use e2e::system::{Options, System, answer};
use e2e::wait::{DEADLINE, until_true};
use reqwest::StatusCode;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[tokio::test]
async fn a_client_that_does_not_do_its_part_holds_nothing_up_at_sigterm() -> Result<()> {
    let mut system = System::start(Options::default()).await?;
    system.set_stock("book-17", 10).await?;
    let orders = system.orders.take().context("orders-service runs")?;
    let says = async |text: &str| -> Result<TcpStream> {
        let mut stream = TcpStream::connect(orders.api("")?.replace("http://", "")).await?;
        stream.write_all(text.as_bytes()).await?;
        Ok(stream)
    };
    let head = "POST /orders HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let mut unfinished = [
        says("").await?,
        says("POST /orders HTTP/1.1\r\nconte").await?,
        says(&format!("{head}content-length: 99\r\n\r\n{{\"lines\":[")).await?,
    ];
    // More answers than the sockets' buffers hold, none of which is read.
    let page = "GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\n\r\n";
    let deaf = says(&page.repeat(20)).await?;
    deaf.peek(&mut [0]).await?;

    let mut lock = system.orders_db.begin().await?;
    sqlx::query("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await?;
    let body = json!({"lines": [{"sku": "book-17", "count": 1}]});
    let post = system.http.post(orders.api("/orders")?).json(&body);
    let post = tokio::spawn(answer(post, StatusCode::CREATED));
    until_true("the request to wait for the lock", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        Ok(sqlx::query_scalar::<_, i64>(waiting).fetch_one(&system.orders_db).await? == 1)
    })
    .await?;

    orders.child.sigterm()?;
    for stream in &mut unfinished {
        // Closed in order or reset, and not a byte said.
        let closed = tokio::time::timeout(DEADLINE, stream.read(&mut [0])).await?;
        assert_eq!(closed.unwrap_or(0), 0);
    }
    assert!(!post.is_finished());
    lock.rollback().await?;
    let order = post.await??;
    assert!(orders.child.wait_exit(DEADLINE).await?.success());
    drop(deaf);

    system.start_services().await?;
    system.wait_status(text(&order, "id")?, "confirmed").await?;
    system.finish().await
}
