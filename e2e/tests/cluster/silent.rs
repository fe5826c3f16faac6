//! A node that accepts and says nothing, to nobody.

use crate::support::{Customer, Turn, finish, until, wait_ready};
use anyhow::{Result, ensure};
use e2e::child::Child;
use e2e::rabbitmq::cluster::RabbitCluster;

#[tokio::test]
async fn services_that_connect_to_a_frozen_node_find_the_others_once_the_balancer_has() -> Result<()>
{
    let turn = Turn::wait().await?;
    let cluster = &turn.cluster;
    let system = turn.system().await?;
    let mut customer = Customer::start(&system)?;
    customer.place_more(20).await?;

    let leader = turn.leader(&system).await?;
    cluster.lead_to(&[leader])?;
    customer.settle_one(&system).await?;
    wait_ready(&system).await?;
    let services = [system.orders()?, system.inventory()?].map(|service| &service.child);
    let frozen = services.map(Child::log_position);
    cluster.nodes[leader].sigstop()?;
    // Its kernel accepts for it, and the balancer has not looked yet.
    until("every part to wait for the frozen node in vain", async || {
        for (service, position) in services.into_iter().zip(frozen) {
            for part in ["relay", "consumer"] {
                let tried = service.logged_since(position, |line| {
                    line.contains("the broker did not answer within")
                        && line.contains(&format!(r#""part":"{part}""#))
                });
                ensure!(tried, "{part} of {} has not tried", service.name());
            }
        }
        Ok(Some(()))
    })
    .await?;
    cluster.lead_newcomers_to(&RabbitCluster::others(leader))?;
    customer.place_more(20).await?;
    customer.settle_one(&system).await?;
    wait_ready(&system).await?;

    // Not thawed: on 3.10 a node that wakes up finds the partition over before it has noticed it, does not
    // pause, and stays apart from the others until somebody restarts it.
    cluster.nodes[leader].sigkill()?;
    cluster.nodes[leader].start_again().await?;
    cluster.lead_newcomers_to(&[0, 1, 2])?;
    customer.place_more(20).await?;
    finish(system, cluster, customer).await
}
