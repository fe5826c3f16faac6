//! What an operator does to a healthy cluster.

use crate::support::{Customer, Turn, finish, until};
use anyhow::{Result, ensure};
use e2e::rabbitmq::cluster::NODES;
use std::collections::BTreeSet;

#[tokio::test]
async fn every_queue_has_a_replica_on_each_node_and_restarting_them_in_turn_loses_nothing()
-> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    let system = turn.system().await?;
    let (vhost, queues) = (system.vhost()?, system.queues()?);
    let all = BTreeSet::from_iter(0..NODES);
    let wait_replicas = async |ask: usize| {
        until("every replica to run", async || {
            for queue in &queues {
                let replicas = cluster.replicas(ask, vhost, queue).await?;
                let whole = replicas.members == all && replicas.online == all;
                ensure!(whole && replicas.leader.is_some(), "{queue}: {replicas:?}");
            }
            Ok(Some(()))
        })
        .await
    };
    wait_replicas(0).await?;

    let mut customer = Customer::start(&system)?;
    for node in 0..NODES {
        customer.place_more(20).await?;
        cluster.nodes[node].stop().await?;
        customer.place_more(20).await?;
        customer.settle_one(&system).await?;
        cluster.nodes[node].start_again().await?;
        // The next one only then: else there is no majority for a moment.
        cluster.wait_whole().await?;
        wait_replicas(node).await?;
    }
    finish(system, cluster, customer).await
}
