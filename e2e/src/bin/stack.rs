//! `make up`: the whole system on this machine, without Docker. Private PostgreSQL and RabbitMQ, both
//! services, some stock to sell; until Ctrl-C, which leaves nothing behind.
//!
//! What dies is started again, so that breaking things on purpose is a thing one can do: `kill -9`
//! any of the processes that it names.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use e2e::ports;
use e2e::postgres::{Durability, Postgres};
use e2e::rabbitmq::RabbitMq;
use e2e::service::{Env, Service};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Runs the whole system on this machine until Ctrl-C
#[derive(Parser)]
struct Args {
    /// Port of the orders API
    #[arg(long, env = "ORDERS_PORT", default_value_t = 8080)]
    orders_port: u16,
    /// Port of the orders' operations
    #[arg(long, env = "ORDERS_OPERATIONS_PORT", default_value_t = 9080)]
    orders_ops_port: u16,
    /// Port of the inventory API
    #[arg(long, env = "INVENTORY_PORT", default_value_t = 8081)]
    inventory_port: u16,
    /// Port of the inventory's operations
    #[arg(long, env = "INVENTORY_OPERATIONS_PORT", default_value_t = 9081)]
    inventory_ops_port: u16,
    /// Bearer token for setting stock; made up if not given
    #[arg(long, env = "OPERATIONS_TOKEN", hide_env_values = true)]
    operations_token: Option<String>,
}

const STOCK: [&str; 3] = ["book-17=100", "pen-3=1000", "mug-1=10"];

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    for (port, variable) in [
        (args.orders_port, "ORDERS_PORT"),
        (args.orders_ops_port, "ORDERS_OPERATIONS_PORT"),
        (args.inventory_port, "INVENTORY_PORT"),
        (args.inventory_ops_port, "INVENTORY_OPERATIONS_PORT"),
    ] {
        ensure!(ports::is_free(port), "port {port} is taken; set {variable} to another one");
    }
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    tokio::select! {
        result = run(&args) => result,
        // Dropping the servers and the services kills them and removes their data.
        () = stop => {
            println!("\nstopped; nothing is left behind");
            Ok(())
        }
    }
}

async fn run(args: &Args) -> Result<()> {
    println!("starting PostgreSQL and RabbitMQ …");
    let (postgres, rabbitmq) =
        tokio::try_join!(Postgres::start_with(Durability::Durable), RabbitMq::start_unhurried())?;
    let token = args.operations_token.clone().unwrap_or_else(|| ulid::Ulid::generate().to_string());
    let env = |database: &str, port: u16, ops_port: u16| {
        Env::from(
            [
                ("DATABASE_URL", postgres.url(database)),
                ("AMQP_URL", rabbitmq.amqp_url("/")),
                ("RABBITMQ_MANAGEMENT_URL", rabbitmq.management_url_with_login()),
                ("HTTP_LISTEN", format!("127.0.0.1:{port}")),
                ("OPS_LISTEN", format!("127.0.0.1:{ops_port}")),
                ("OPERATIONS_TOKEN", token.clone()),
                // One object a line: the harness finds the addresses in it.
                ("LOG_FORMAT", "json".to_owned()),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        )
    };
    let orders = env("orders", args.orders_port, args.orders_ops_port);
    let inventory = env("inventory", args.inventory_port, args.inventory_ops_port);

    println!("setting up queues and policies, and the stock …");
    for (service, database, env) in
        [("orders-service", "orders", &orders), ("inventory-service", "inventory", &inventory)]
    {
        postgres.create_database(database).await?;
        Service::command_ok(service, &["migrate"], env).await?;
    }
    tokio::try_join!(
        Service::command_ok("orders-service", &["topology", "apply"], &orders),
        Service::command_ok("inventory-service", &["topology", "apply"], &inventory),
    )?;
    let seed = [&["stock", "seed"], &STOCK[..]].concat();
    Service::command_ok("inventory-service", &seed, &inventory).await?;

    println!("starting orders-service and inventory-service …");
    let (orders_service, inventory_service) = tokio::try_join!(
        Service::start("orders-service", &orders),
        Service::start("inventory-service", &inventory)
    )?;
    tokio::try_join!(orders_service.wait_ready(), inventory_service.wait_ready())?;
    let pids = [
        ("orders-service", orders_service.child.pid()),
        ("inventory-service", inventory_service.child.pid()),
        ("PostgreSQL", postgres.server().pid()),
        ("RabbitMQ", rabbitmq.server().pid()),
    ];
    println!("{}", banner(args, &postgres, &rabbitmq, &token, &pids));

    let keep = tokio::try_join!(
        keep_running("orders-service", orders_service, &orders),
        keep_running("inventory-service", inventory_service, &inventory),
        keep_postgres(&postgres),
        keep_rabbitmq(&rabbitmq),
    );
    keep.map(|_| ()).context("something cannot be started again")
}

fn banner(
    args: &Args,
    postgres: &Postgres,
    rabbitmq: &RabbitMq,
    token: &str,
    pids: &[(&str, i32)],
) -> String {
    let pids: Vec<String> = pids.iter().map(|(name, pid)| format!("{name} {pid}")).collect();
    let Args { orders_port, orders_ops_port, inventory_port, inventory_ops_port, .. } = args;
    format!(
        "
  orders API          http://127.0.0.1:{orders_port}/docs/
  inventory API       http://127.0.0.1:{inventory_port}/docs/
  health, metrics     http://127.0.0.1:{orders_ops_port}/health/ready  http://127.0.0.1:{inventory_ops_port}/metrics
  RabbitMQ            {management}  (guest, guest)
  PostgreSQL          {orders_url}  and /inventory
  token of operations {token}
  processes           {pids}

Place an order, see a moment later what became of it, look at the stock:

  curl -s -H 'content-type: application/json' -d '{{\"lines\":[{{\"sku\":\"book-17\",\"count\":1}}]}}' http://127.0.0.1:{orders_port}/orders
  curl -s http://127.0.0.1:{orders_port}/orders
  curl -s http://127.0.0.1:{inventory_port}/stock/book-17

For the commands of target/debug/orders-service and inventory-service:

  export AMQP_URL={amqp_url} RABBITMQ_MANAGEMENT_URL={management_login}
  export DATABASE_URL={orders_url}        # orders-service
  export DATABASE_URL={inventory_url}     # inventory-service

Ctrl-C stops everything. Whatever you kill is started again.
",
        management = rabbitmq.management_url(),
        pids = pids.join(", "),
        orders_url = postgres.url("orders"),
        inventory_url = postgres.url("inventory"),
        amqp_url = rabbitmq.amqp_url("/"),
        management_login = rabbitmq.management_url_with_login(),
    )
}

/// How often a look is taken whether something died.
const LOOK: Duration = Duration::from_millis(500);

async fn keep_running(name: &str, mut service: Service, env: &Env) -> Result<()> {
    loop {
        tokio::time::sleep(LOOK).await;
        if let Some(status) = service.child.exit_status()? {
            println!("{name} ended ({status}); starting it again");
            service = Service::start(name, env).await?;
            println!("{name} runs again, as process {}", service.child.pid());
        }
    }
}

async fn keep_postgres(postgres: &Postgres) -> Result<()> {
    loop {
        tokio::time::sleep(LOOK).await;
        if let Some(status) = postgres.server().exit_status()? {
            println!("PostgreSQL ended ({status}); starting it again");
            postgres.start_again().await?;
            println!("PostgreSQL runs again, as process {}", postgres.server().pid());
        }
    }
}

async fn keep_rabbitmq(rabbitmq: &RabbitMq) -> Result<()> {
    loop {
        tokio::time::sleep(LOOK).await;
        if let Some(status) = rabbitmq.server().exit_status()? {
            println!("RabbitMQ ended ({status}); starting it again");
            rabbitmq.start_again().await?;
            println!("RabbitMQ runs again, as process {}", rabbitmq.server().pid());
        }
    }
}
