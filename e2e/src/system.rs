//! The system under test: both services, their databases and their virtual host.

use crate::broker::Broker;
use crate::ledger::Ledger;
use crate::ledger::books::Side;
use crate::postgres::Postgres;
use crate::proxy::Proxy;
use crate::rabbitmq::RabbitMq;
use crate::rabbitmq::cluster::RabbitCluster;
use crate::servers::{Servers, require_fault_points};
use crate::service::{Env, Service};
use crate::wait::until;
use anyhow::{Context, Result, ensure};
use reqwest::{Client, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The operations token of the services under test.
pub const TOKEN: &str = "token-of-the-tests";

/// The RabbitMQ of a system.
#[derive(Default)]
pub enum Node {
    /// The one that all share and nobody harms.
    #[default]
    Shared,
    /// One of its own, for the test to harm.
    Own,
    /// The same with RabbitMQ's own timings: it tries dead letters again after 3 minutes, not 2 s.
    Unhurried,
    /// This cluster. Its first node is then [`System::rabbitmq`]; the services, and the test's own
    /// hand, come through its balancers.
    Cluster(Arc<RabbitCluster>),
}

/// How a system is to be set up.
#[derive(Default)]
pub struct Options {
    /// More environment for both services.
    pub env: Vec<(&'static str, &'static str)>,
    /// Give the orders a PostgreSQL of their own, for the test to harm.
    pub own_orders_postgres: bool,
    /// Give the inventory a PostgreSQL of its own, for the test to harm.
    pub own_inventory_postgres: bool,
    /// Which RabbitMQ it runs on.
    pub rabbitmq: Node,
    /// Put a proxy between each service and each of its servers.
    pub proxies: bool,
    /// Do not start the services.
    pub stopped: bool,
}

/// Proxies between the services and their servers; see [`Options::proxies`].
pub struct Proxies {
    /// orders-service → PostgreSQL.
    pub orders_postgres: Proxy,
    /// orders-service → RabbitMQ.
    pub orders_amqp: Proxy,
    /// inventory-service → PostgreSQL.
    pub inventory_postgres: Proxy,
    /// inventory-service → RabbitMQ.
    pub inventory_amqp: Proxy,
}

/// What the people on call found.
pub struct Attended {
    /// The books, before they did anything.
    pub ledger: Ledger,
    /// What their commands complained of.
    pub complaints: String,
}

/// A running system. Its databases, virtual host and processes are its own.
pub struct System {
    /// The broker: the shared one or the system's own.
    pub rabbitmq: Arc<RabbitMq>,
    /// The server of the orders' database: the shared one or its own.
    pub orders_postgres: Arc<Postgres>,
    /// The server of the inventory's database: the shared one or its own.
    pub inventory_postgres: Arc<Postgres>,
    /// See [`Options::proxies`].
    pub proxies: Option<Proxies>,
    /// Environment of orders-service.
    pub orders_env: Env,
    /// Environment of inventory-service.
    pub inventory_env: Env,
    /// orders-service, if it runs.
    pub orders: Option<Service>,
    /// inventory-service, if it runs.
    pub inventory: Option<Service>,
    /// The orders' database.
    pub orders_db: PgPool,
    /// The inventory's database.
    pub inventory_db: PgPool,
    /// The test's own hand at the broker.
    pub broker: Broker,
    /// An HTTP client.
    pub http: Client,
    amqp_url: String,
}

impl System {
    /// Sets up databases, virtual host, topology and, unless told otherwise, both services, ready.
    ///
    /// # Errors
    /// When any of it does not come up.
    pub async fn start(options: Options) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let postgres = Servers::shared_postgres();
        let rabbitmq = async {
            match &options.rabbitmq {
                Node::Shared => Servers::shared_rabbitmq().await,
                Node::Own => Ok(Arc::new(RabbitMq::start().await?)),
                Node::Unhurried => Ok(Arc::new(RabbitMq::start_unhurried().await?)),
                Node::Cluster(cluster) => Ok(cluster.nodes[0].clone()),
            }
        };
        let (postgres, rabbitmq) = tokio::try_join!(postgres, rabbitmq)?;
        require_fault_points()?;

        let orders_postgres = if options.own_orders_postgres {
            Arc::new(Postgres::start().await?)
        } else {
            postgres.clone()
        };
        let inventory_postgres = if options.own_inventory_postgres {
            Arc::new(Postgres::start().await?)
        } else {
            postgres.clone()
        };
        let (orders_name, inventory_name) = (format!("{name}_orders"), format!("{name}_inventory"));
        orders_postgres.create_database(&orders_name).await?;
        inventory_postgres.create_database(&inventory_name).await?;
        rabbitmq.create_vhost(&name).await?;

        let orders_url = orders_postgres.url(&orders_name);
        let inventory_url = inventory_postgres.url(&inventory_name);
        let (amqp_url, management) = match &options.rabbitmq {
            Node::Cluster(cluster) => {
                (cluster.amqp_url(&name), cluster.management_url_with_login())
            }
            _ => (rabbitmq.amqp_url(&name), rabbitmq.management_url_with_login()),
        };
        let mut env = Env::from(
            [
                ("AMQP_URL", amqp_url.as_str()),
                ("RABBITMQ_MANAGEMENT_URL", &management),
                ("HTTP_LISTEN", "127.0.0.1:0"),
                ("OPS_LISTEN", "127.0.0.1:0"),
                ("OPERATIONS_TOKEN", TOKEN),
                ("LOG_FORMAT", "json"),
                // Sized for tests, and with the same order of delay every time.
                ("RETRY_DELAYS", "300ms,600ms,900ms"),
                ("RETRY_JITTER_SHARE", "0"),
                ("RELAY_POLL", "50ms"),
                ("RELAY_STANDBY_POLL", "50ms"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        env.extend(options.env.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        let with = |env: &Env, url: &str| {
            let mut env = env.clone();
            env.insert("DATABASE_URL".into(), url.into());
            env
        };
        let mut orders_env = with(&env, &orders_url);
        let mut inventory_env = with(&env, &inventory_url);
        tokio::try_join!(
            Service::command_ok("orders-service", &["topology", "apply"], &orders_env),
            Service::command_ok("inventory-service", &["topology", "apply"], &inventory_env),
        )?;

        let proxies = if options.proxies {
            let proxies = Proxies {
                orders_postgres: through(&mut orders_env, "DATABASE_URL")?,
                orders_amqp: through(&mut orders_env, "AMQP_URL")?,
                inventory_postgres: through(&mut inventory_env, "DATABASE_URL")?,
                inventory_amqp: through(&mut inventory_env, "AMQP_URL")?,
            };
            Some(proxies)
        } else {
            None
        };

        let pool = |url: &str| PgPoolOptions::new().max_connections(3).connect_lazy(url);
        let mut system = Self {
            rabbitmq,
            orders_postgres,
            inventory_postgres,
            proxies,
            orders_env,
            inventory_env,
            orders: None,
            inventory: None,
            orders_db: pool(&orders_url)?,
            inventory_db: pool(&inventory_url)?,
            broker: Broker::connect(&amqp_url).await?,
            http: Client::new(),
            amqp_url,
        };
        if !options.stopped {
            system.start_services().await?;
        }
        Ok(system)
    }

    /// Starts whichever service does not run, and waits until both are ready.
    ///
    /// # Errors
    /// When one does not get ready.
    pub async fn start_services(&mut self) -> Result<()> {
        if self.orders.is_none() {
            self.orders = Some(Service::start("orders-service", &self.orders_env).await?);
        }
        if self.inventory.is_none() {
            self.inventory = Some(Service::start("inventory-service", &self.inventory_env).await?);
        }
        self.orders()?.wait_ready().await?;
        self.inventory()?.wait_ready().await
    }

    /// The environment of a service.
    #[must_use]
    pub fn env(&self, side: Side) -> &Env {
        match side {
            Side::Orders => &self.orders_env,
            Side::Inventory => &self.inventory_env,
        }
    }

    /// The database of a service.
    #[must_use]
    pub fn db(&self, side: Side) -> &PgPool {
        match side {
            Side::Orders => &self.orders_db,
            Side::Inventory => &self.inventory_db,
        }
    }

    /// What the people on call do: they redrive what is parked for these services.
    ///
    /// # Errors
    /// When a server does not answer, or the command cannot be started.
    pub async fn attend(&self, parked_for: &[Side]) -> Result<Attended> {
        let ledger = Ledger::read(self).await?;
        let mut complaints = String::new();
        for side in parked_for {
            if ledger.queues.get(&side.parking()).is_some_and(|depth| *depth > 0) {
                // One that fails is run again, as a person would.
                let redrive = ["parking", "redrive"];
                let ended = Service::command(side.service(), &redrive, self.env(*side)).await?;
                if !ended.status.success() {
                    let said = String::from_utf8_lossy(&ended.stderr);
                    complaints += &format!("{side}, redrive: {}: {said}\n", ended.status);
                }
            }
        }
        Ok(Attended { ledger, complaints })
    }

    /// Sets up both schemas and puts stock on the shelf, for a system whose services do not run.
    ///
    /// # Errors
    /// When a command of the services fails.
    pub async fn stock_up(&self, stock: &[(&str, u32)]) -> Result<()> {
        Service::command_ok("orders-service", &["migrate"], &self.orders_env).await?;
        Service::command_ok("inventory-service", &["migrate"], &self.inventory_env).await?;
        let seed: Vec<String> = stock.iter().map(|(sku, count)| format!("{sku}={count}")).collect();
        let seed = ["stock", "seed"].into_iter().chain(seed.iter().map(String::as_str));
        let seed: Vec<&str> = seed.collect();
        Service::command_ok("inventory-service", &seed, &self.inventory_env).await?;
        Ok(())
    }

    /// The name of the system's virtual host.
    ///
    /// # Errors
    /// When there is none in the URL.
    pub fn vhost(&self) -> Result<&str> {
        self.amqp_url.rsplit('/').next().context("no virtual host in the URL")
    }

    /// Every queue of both consumers.
    ///
    /// # Errors
    /// When the configuration is not what the services would take either.
    pub fn queues(&self) -> Result<Vec<String>> {
        let value = |name: &str| self.orders_env.get(name).map(String::as_str);
        let mut suffixes = vec![String::new(), ".parking".to_owned()];
        if value("RETRY_BACKEND") != Some("native") {
            let delays = value("RETRY_DELAYS").unwrap_or_default().split(',');
            suffixes.extend(delays.map(|delay| format!(".retry.{delay}")));
        }
        let shards = value("ORDERING").and_then(|ordering| ordering.strip_prefix("shards="));
        let shards: u32 = shards.map_or(Ok(0), str::parse)?;
        suffixes.extend((0..shards).map(|shard| format!(".shard.{shard}")));
        let of =
            |queue: &'static str| suffixes.iter().map(move |suffix| format!("{queue}{suffix}"));
        Ok(of("inventory.orders").chain(of("orders.inventory")).collect())
    }

    /// Connects the test's own hand anew, after the broker was away.
    ///
    /// # Errors
    /// When the broker does not let it.
    pub async fn reconnect_broker(&mut self) -> Result<()> {
        self.broker = Broker::connect(&self.amqp_url).await?;
        Ok(())
    }

    /// orders-service.
    ///
    /// # Errors
    /// When it does not run.
    pub fn orders(&self) -> Result<&Service> {
        self.orders.as_ref().context("orders-service does not run")
    }

    /// inventory-service.
    ///
    /// # Errors
    /// When it does not run.
    pub fn inventory(&self) -> Result<&Service> {
        self.inventory.as_ref().context("inventory-service does not run")
    }

    /// Puts `available` of `sku` on the shelf, as an operator would.
    ///
    /// # Errors
    /// When the service refuses.
    pub async fn set_stock(&self, sku: &str, available: i64) -> Result<()> {
        let url = self.inventory()?.operations(&format!("/stock/{sku}"));
        let request =
            self.http.put(url).bearer_auth(TOKEN).json(&json!({ "available": available }));
        answer(request, StatusCode::OK).await?;
        Ok(())
    }

    /// The stock of a sku: available, reserved.
    ///
    /// # Errors
    /// When the service does not answer.
    pub async fn stock(&self, sku: &str) -> Result<(i64, i64)> {
        let url = self.inventory()?.api(&format!("/stock/{sku}"))?;
        let stock = answer(self.http.get(url), StatusCode::OK).await?;
        let number = |field: &str| stock[field].as_i64().context("not a number");
        Ok((number("available")?, number("reserved")?))
    }

    /// Places an order and returns its id.
    ///
    /// # Errors
    /// When it is not taken.
    pub async fn place(&self, lines: &[(&str, i64)]) -> Result<String> {
        let lines: Vec<Value> =
            lines.iter().map(|(sku, count)| json!({ "sku": sku, "count": count })).collect();
        let request = self.http.post(self.orders()?.api("/orders")?);
        let order = answer(request.json(&json!({ "lines": lines })), StatusCode::CREATED).await?;
        ensure!(order["status"] == "created", "a new order is {}", order["status"]);
        Ok(order["id"].as_str().context("an order without an id")?.to_owned())
    }

    /// Reads an order.
    ///
    /// # Errors
    /// When it is not there.
    pub async fn order(&self, id: &str) -> Result<Value> {
        let url = self.orders()?.api(&format!("/orders/{id}"))?;
        answer(self.http.get(url), StatusCode::OK).await
    }

    /// Cancels an order.
    ///
    /// # Errors
    /// When that is refused.
    pub async fn cancel(&self, id: &str) -> Result<Value> {
        let url = self.orders()?.api(&format!("/orders/{id}/cancel"))?;
        answer(self.http.post(url), StatusCode::OK).await
    }

    /// Waits until an order has the status, and returns it.
    ///
    /// # Errors
    /// When it does not come to that.
    pub async fn wait_status(&self, id: &str, status: &str) -> Result<Value> {
        until(&format!("order {id} to be {status}"), async || {
            let order = self.order(id).await?;
            Ok((order["status"] == status).then_some(order))
        })
        .await
    }

    /// Waits until the inventory has taken a message into its inbox.
    ///
    /// # Errors
    /// When it does not come to that.
    pub async fn wait_inbox(&self, message_id: &str) -> Result<()> {
        until(&format!("{message_id} in the inbox"), async || {
            let row: Option<i32> =
                sqlx::query_scalar("SELECT 1 FROM processed_messages WHERE message_id = $1")
                    .bind(message_id)
                    .fetch_optional(&self.inventory_db)
                    .await?;
            Ok(row.map(|_| ()))
        })
        .await
    }

    /// Waits until the next message is parked in `queue`'s parking, and takes it out.
    ///
    /// # Errors
    /// When none comes.
    pub async fn take_parked(&self, queue: &str) -> Result<crate::broker::Seen> {
        let parking = format!("{queue}.parking");
        until(&format!("a message in {parking}"), || self.broker.take(&parking)).await
    }
}

/// Sends a request and wants a status; returns the JSON of the answer.
///
/// # Errors
/// When the status is another; with the answer's body.
pub async fn answer(request: RequestBuilder, status: StatusCode) -> Result<Value> {
    let response = request.send().await?;
    let (got, url) = (response.status(), response.url().clone());
    let body = response.text().await?;
    ensure!(got == status, "{url} answered {got}, not {status}: {body}");
    Ok(serde_json::from_str(&body).unwrap_or(Value::String(body)))
}

/// Puts a proxy in front of the server that a URL in the environment names.
///
/// # Errors
/// When there is no such URL of a server on this machine.
pub fn through(env: &mut Env, variable: &str) -> Result<Proxy> {
    let url = env.get_mut(variable).with_context(|| format!("no {variable}"))?;
    let (before, after) = url.split_once("127.0.0.1:").context("the server is elsewhere")?;
    let (port, path) = after.split_once('/').context("no port")?;
    let proxy = Proxy::start(SocketAddr::from((Ipv4Addr::LOCALHOST, port.parse()?)))?;
    *url = format!("{before}{}/{path}", proxy.addr());
    Ok(proxy)
}
