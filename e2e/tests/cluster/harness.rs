//! The cluster keeps its own promises.

use crate::support::Turn;
use anyhow::{Context, Result, ensure};
use e2e::broker::Broker;
use e2e::ports::free_port;
use e2e::proxy::Proxy;
use e2e::rabbitmq::cluster::NODES;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[tokio::test]
async fn a_partitioned_node_loses_its_peers_and_finds_them_again() -> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    cluster.partition(0)?;
    cluster.wait_alone(0).await?;
    cluster.heal()?;
    cluster.wait_whole().await
}

#[tokio::test]
async fn a_killed_node_comes_back_into_the_cluster_with_what_it_missed() -> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    cluster.nodes[1].sigkill()?;
    cluster.wait_peers(0, &[0, 2]).await?;
    cluster.nodes[0].create_vhost("made meanwhile").await?;
    cluster.nodes[1].start_again().await?;
    cluster.wait_whole().await?;
    let vhosts = cluster.nodes[1].ctl(&["list_vhosts", "-q", "--no-table-headers"]).await?;
    ensure!(vhosts.contains("made meanwhile"), "{vhosts}");
    Ok(())
}

#[tokio::test]
async fn clients_reach_whichever_node_of_the_cluster_there_is() -> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    cluster.nodes[0].create_vhost("one").await?;
    let url = cluster.amqp_url("one");
    for node in 0..NODES {
        cluster.nodes[node].sigkill()?;
        for _ in 0..NODES {
            Broker::connect(&url).await.with_context(|| format!("without node {node}"))?;
        }
        cluster.nodes[node].start_again().await?;
        cluster.wait_whole().await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_balancer_takes_its_targets_by_turns_and_passes_over_those_that_refuse() -> Result<()> {
    let (one, other) = (speaker(1).await?, speaker(2).await?);
    let nobody = SocketAddr::from(([127, 0, 0, 1], free_port()?));
    let balancer = Proxy::balance(vec![one, nobody, other])?;
    let mut heard = Vec::new();
    for _ in 0..6 {
        heard.push(TcpStream::connect(balancer.addr()).await?.read_u8().await?);
    }
    assert_eq!(heard, [1, 2, 2, 1, 2, 2]);
    balancer.lead_to(vec![one])?;
    assert_eq!(TcpStream::connect(balancer.addr()).await?.read_u8().await?, 1);
    balancer.lead_to(vec![nobody])?;
    assert!(TcpStream::connect(balancer.addr()).await?.read_u8().await.is_err());
    Ok(())
}

/// A server that says this to everybody.
async fn speaker(word: u8) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            if stream.write_u8(word).await.is_err() {
                break;
            }
        }
    });
    Ok(addr)
}
