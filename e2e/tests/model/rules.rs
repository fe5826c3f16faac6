//! What is fixed: which sides there are, how they are configured, and what their queues are called.

use clap::Parser;
use shared::config::{ConsumerArgs, RelayArgs, RetryBackend, TopologyArgs};
use shared::retry::Budget;
use shared::topology::{Names, Topology};
use std::fmt::{self, Display};
use std::rc::Rc;

/// One of the two services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    Orders,
    Inventory,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::Orders, Self::Inventory];

    pub fn other(self) -> Self {
        match self {
            Self::Orders => Self::Inventory,
            Self::Inventory => Self::Orders,
        }
    }
}

impl Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Orders => "orders",
            Self::Inventory => "inventory",
        })
    }
}

/// The configuration: the defaults, but for limits that a short story would not reach.
#[derive(Parser)]
pub struct Config {
    #[command(flatten)]
    pub relay: RelayArgs,
    #[command(flatten)]
    pub consumer: ConsumerArgs,
    #[command(flatten)]
    pub topology: TopologyArgs,
}

/// What is fixed in a world.
pub struct Rules {
    pub config: Config,
    pub budget: Budget,
    /// Lost deliveries after which the broker parks a message.
    pub delivery_limit: u32,
    /// Retries of a message whose predecessor is missing that it has in any case.
    pub once_through: u32,
    topologies: [Topology; 2],
}

impl Rules {
    pub fn new(backend: RetryBackend) -> anyhow::Result<Rc<Self>> {
        let named = match backend {
            RetryBackend::Buckets => "--retry-backend=buckets",
            RetryBackend::Native => "--retry-backend=native",
        };
        let config = Config::try_parse_from([
            "model",
            "--relay-batch=3",
            "--relay-row-attempts=2",
            "--outage-after=3",
            "--retry-delays=5s,30s,5m",
            named,
            "--ordering=gate",
        ])?;
        let names = |exchange, source, binding, queue| Names { exchange, source, binding, queue };
        let topologies = [
            names("orders", "inventory", "inventory.*", "orders.inventory"),
            names("inventory", "orders", "order.*", "inventory.orders"),
        ]
        .map(|names| Topology { names, args: config.topology.clone() });
        let budget = config.consumer.budget(&config.topology);
        // Limits that a short story can reach. Where each retry is a redelivery, the limit must leave
        // room for them.
        let (delivery_limit, once_through) = match backend {
            RetryBackend::Buckets => (3, 3),
            RetryBackend::Native => (budget.most_retries() + 3, 12),
        };
        Ok(Rc::new(Self { config, budget, delivery_limit, once_through, topologies }))
    }

    pub fn topology(&self, side: Side) -> &Topology {
        let [orders, inventory] = &self.topologies;
        match side {
            Side::Orders => orders,
            Side::Inventory => inventory,
        }
    }
}
