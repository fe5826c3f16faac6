//! The network that fails on demand fails as it says.

use super::{A_WHILE, SOON};
use anyhow::Result;
use e2e::proxy::{Direction, Proxy};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// A server that sends back what it gets, in a task of the test.
async fn echo() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    });
    Ok(addr)
}

async fn round_trip(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"hello").await?;
    hear(stream).await
}

async fn hear(stream: &mut TcpStream) -> io::Result<()> {
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).await?;
    assert_eq!(&answer, b"hello");
    Ok(())
}

#[tokio::test]
async fn a_cut_proxy_refuses_and_a_healed_one_passes() -> Result<()> {
    let proxy = Proxy::start(echo().await?)?;
    let mut stream = TcpStream::connect(proxy.addr()).await?;
    round_trip(&mut stream).await?;

    proxy.cut()?;
    let lost = timeout(SOON, round_trip(&mut stream)).await?;
    assert!(lost.is_err_and(|error| error.kind() != io::ErrorKind::UnexpectedEof), "not a reset");
    let refused = TcpStream::connect(proxy.addr()).await;
    assert!(refused.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused));

    proxy.heal()?;
    round_trip(&mut TcpStream::connect(proxy.addr()).await?).await?;
    assert_eq!(proxy.connections(), 2);
    Ok(())
}

#[tokio::test]
async fn a_black_hole_is_silent_and_loses_what_was_sent_into_it() -> Result<()> {
    let proxy = Proxy::start(echo().await?)?;
    let (mut speaker, mut silent) =
        tokio::try_join!(TcpStream::connect(proxy.addr()), TcpStream::connect(proxy.addr()))?;
    round_trip(&mut speaker).await?;
    round_trip(&mut silent).await?;

    proxy.black_hole(Direction::Both)?;
    let mut newcomer = TcpStream::connect(proxy.addr()).await?;
    assert!(timeout(A_WHILE, round_trip(&mut speaker)).await.is_err());
    assert!(timeout(A_WHILE, newcomer.read_u8()).await.is_err());

    proxy.heal()?;
    assert!(timeout(SOON, hear(&mut speaker)).await?.is_err(), "bytes came out of the black hole");
    timeout(SOON, round_trip(&mut silent)).await??;
    timeout(SOON, round_trip(&mut newcomer)).await??;
    Ok(())
}

#[tokio::test]
async fn a_request_arrives_whose_reply_the_black_hole_swallows() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let proxy = Proxy::start(listener.local_addr()?)?;
    let (client, accepted) = tokio::join!(TcpStream::connect(proxy.addr()), listener.accept());
    let (mut client, (mut server, _)) = (client?, accepted?);

    proxy.black_hole(Direction::ToClient)?;
    client.write_all(b"hello").await?;
    timeout(SOON, hear(&mut server)).await??;
    server.write_all(b"hello").await?;
    assert!(timeout(A_WHILE, hear(&mut client)).await.is_err());
    proxy.heal()?;
    assert!(timeout(SOON, hear(&mut client)).await?.is_err());
    assert!(timeout(SOON, server.read_u8()).await?.is_err());
    Ok(())
}

#[tokio::test]
async fn a_request_arrives_whose_lost_answer_resets_the_connection() -> Result<()> {
    let proxy = Proxy::start(echo().await?)?;
    let (mut speaker, mut silent) =
        tokio::try_join!(TcpStream::connect(proxy.addr()), TcpStream::connect(proxy.addr()))?;
    round_trip(&mut speaker).await?;
    round_trip(&mut silent).await?;
    assert_eq!(proxy.held_by_server(), 2);

    proxy.lose_answers()?;
    // The echo that is lost is the sign that the request has arrived.
    assert!(timeout(SOON, round_trip(&mut speaker)).await?.is_err());
    assert_eq!((proxy.lost_answers(), proxy.held_by_server()), (1, 1));
    proxy.heal()?;
    timeout(SOON, round_trip(&mut silent)).await??;
    Ok(())
}

#[tokio::test]
async fn a_delay_is_latency_and_ends_when_healed() -> Result<()> {
    let proxy = Proxy::start(echo().await?)?;
    let mut stream = TcpStream::connect(proxy.addr()).await?;
    proxy.delay(Direction::ToServer, A_WHILE)?;
    let started = Instant::now();
    round_trip(&mut stream).await?;
    assert!(started.elapsed() >= A_WHILE);

    proxy.delay(Direction::ToClient, Duration::from_secs(3600))?;
    assert!(timeout(2 * A_WHILE, round_trip(&mut stream)).await.is_err());
    proxy.heal()?;
    timeout(SOON, hear(&mut stream)).await??;
    Ok(())
}

#[tokio::test]
async fn a_proxy_passes_large_streams_and_their_ends_whole() -> Result<()> {
    const LENGTH: u64 = 64 * 1024 * 1024;
    let proxy = Proxy::start(echo().await?)?;
    let (mut read, mut write) = TcpStream::connect(proxy.addr()).await?.into_split();
    let sender = tokio::spawn(async move {
        tokio::io::copy(&mut tokio::io::repeat(7).take(LENGTH), &mut write).await?;
        write.shutdown().await
    });
    assert_eq!(tokio::io::copy(&mut read, &mut tokio::io::sink()).await?, LENGTH);
    sender.await??;
    Ok(())
}
