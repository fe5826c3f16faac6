//! A node that its peers cannot hear, while its clients do.

use crate::support::{Customer, Turn, finish, wait_ready};
use anyhow::Result;

#[tokio::test]
async fn orders_go_on_while_the_node_of_the_leader_is_cut_off_and_nothing_is_lost() -> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    let system = turn.system().await?;
    let mut customer = Customer::start(&system)?;
    customer.place_more(20).await?;

    let leader = turn.leader(&system).await?;
    cluster.partition(leader)?;
    customer.place_more(20).await?;
    cluster.wait_alone(leader).await?;
    customer.settle_one(&system).await?;
    wait_ready(&system).await?;

    cluster.heal()?;
    customer.place_more(20).await?;
    finish(system, cluster, customer).await
}

#[tokio::test]
async fn services_on_a_node_that_is_cut_off_find_the_majority_by_themselves() -> Result<()> {
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    let system = turn.system().await?;
    let mut customer = Customer::start(&system)?;
    customer.place_more(20).await?;

    // All connections, and the leader, on the node that will be cut off.
    let leader = turn.leader(&system).await?;
    cluster.lead_to(&[leader])?;
    customer.settle_one(&system).await?;
    wait_ready(&system).await?;
    cluster.lead_newcomers_to(&[0, 1, 2])?;
    cluster.partition(leader)?;
    customer.place_more(20).await?;
    cluster.wait_alone(leader).await?;
    customer.settle_one(&system).await?;
    wait_ready(&system).await?;

    cluster.heal()?;
    customer.place_more(20).await?;
    finish(system, cluster, customer).await
}
