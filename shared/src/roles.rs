//! The roles of a service, put together: API, relay, consumer, and the operations port beside them.
//!
//! The order is that of readiness: operations first, so that health can be asked from the first
//! moment; then the schema, waiting for the database if need be; then retention, which every process
//! runs, and the roles that were asked for.

use crate::config::{
    BrokerArgs, ConfirmArgs, ConsumerArgs, DatabaseArgs, ManagementArgs, OpsArgs, ProcessArgs,
    RelayArgs, RetentionArgs, Role, TopologyArgs,
};
use crate::consumer::{Consumer, Handler};
use crate::db;
use crate::management::Management;
use crate::ops::Ops;
use crate::outage::Outage;
use crate::parking::api::Operations;
use crate::parking::run::Parking;
use crate::pool::Pool;
use crate::relay::{Relay, WakeUp};
use crate::retention::{Job, Retention};
use crate::service::Service;
use crate::topology::{Names, Topology};
use axum::Router;
use clap::Args;
use sqlx::migrate::Migrator;
use std::net::SocketAddr;

/// The configuration that both services have alike.
#[derive(Args)]
#[allow(missing_docs)]
pub struct ServiceArgs {
    #[command(flatten)]
    pub process: ProcessArgs,
    #[command(flatten)]
    pub database: DatabaseArgs,
    #[command(flatten)]
    pub broker: BrokerArgs,
    #[command(flatten)]
    pub management: ManagementArgs,
    #[command(flatten)]
    pub topology: TopologyArgs,
    #[command(flatten)]
    pub relay: RelayArgs,
    #[command(flatten)]
    pub consumer: ConsumerArgs,
    #[command(flatten)]
    pub confirm: ConfirmArgs,
    #[command(flatten)]
    pub retention: RetentionArgs,
    #[command(flatten)]
    pub ops: OpsArgs,
}

/// What makes a service this one and not the other.
pub struct Blueprint<H> {
    /// Its place at the broker.
    pub names: Names,
    /// Its schema.
    pub migrations: &'static Migrator,
    /// Where its API listens.
    pub http_listen: SocketAddr,
    /// Where its operations listen.
    pub ops_listen: SocketAddr,
    /// Its API. The wake-up is to be rung after a COMMIT with outbox rows in it.
    pub api: fn(Pool, WakeUp) -> Router,
    /// Its own operations, to be put behind the token.
    pub admin: fn(Pool) -> Router,
    /// What it does with messages.
    pub handler: fn(WakeUp) -> H,
    /// What it prunes, beside what both services do.
    pub retention: Vec<Job>,
}

/// Runs the configured roles until SIGTERM.
///
/// # Errors
/// When the configuration cannot be used, an address cannot be had, a migration cannot be applied,
/// or a part fails in a way that no reconnecting mends.
pub async fn run<H: Handler>(blueprint: Blueprint<H>, args: ServiceArgs) -> anyhow::Result<()> {
    args.check()?;
    let names = blueprint.names;
    let topology = Topology::new(names, args.topology)?;
    let pool = db::pool(&args.database)?;
    let management = Management::new(&args.management.management_url, &args.broker.amqp_url)?;
    let mut service = Service::new(args.process.clone())?;
    let wake_up = WakeUp::default();

    let ops = Ops {
        pool: pool.clone(),
        health: service.health.clone(),
        metrics: service.metrics.clone(),
        args: args.ops,
    };
    let parking = Parking::new(&args.broker, topology.clone(), args.confirm.clone());
    let parking = Operations::new(parking, pool.clone(), service.shutdown.clone());
    let router = ops.router((blueprint.admin)(pool.clone()).merge(parking.router()));
    service.serve("operations", blueprint.ops_listen, router).await?;
    service.spawn("parking", parking.finish());

    let schema = service.health.part("schema");
    let migrations = blueprint.migrations;
    if !db::migrate_when_reached(&args.database, migrations, &schema, &service.shutdown).await? {
        return service.wait().await;
    }

    let database = args.database.clone();
    let metrics = service.metrics.clone();
    let retention = Retention::new(database, &args.retention, blueprint.retention, metrics);
    service.spawn("retention", retention.run(service.shutdown.clone()));

    let runs = |role| args.process.roles.contains(&role);
    if runs(Role::Http) {
        let router = (blueprint.api)(pool.clone(), wake_up.clone());
        service.serve("api", blueprint.http_listen, router).await?;
    }
    if runs(Role::Relay) {
        let relay = Relay {
            database: args.database,
            broker: args.broker.clone(),
            exchange: names.exchange,
            args: args.relay,
            confirm: args.confirm.clone(),
            wake_up: wake_up.clone(),
            part: service.health.part("relay"),
            metrics: service.metrics.clone(),
        };
        service.spawn("relay", relay.run(service.shutdown.clone()));
    }
    if runs(Role::Consumer) {
        let outage = Outage::new(args.consumer.outage_after(&topology.args));
        let consumer = Consumer {
            handler: (blueprint.handler)(wake_up),
            pool,
            broker: args.broker,
            management,
            topology,
            outage,
            args: args.consumer,
            confirm: args.confirm,
            part: service.health.part("consumer"),
            topology_part: service.health.part("topology"),
            metrics: service.metrics.clone(),
        };
        service.spawn("consumer", consumer.run(service.shutdown.clone()));
    }
    service.wait().await
}
