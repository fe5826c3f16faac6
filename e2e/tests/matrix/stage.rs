//! One system, in which one process at a time is struck; and what an orchestrator, clients and the
//! people on call do about it: start it again, ask again, redrive.

mod aftermath;
mod provocation;
mod strike;

use crate::blow::Blow;
use crate::route::Route;
use anyhow::{Context, Result, bail, ensure};
use e2e::child::Child;
use e2e::ledger::books::Side;
use e2e::ledger::{Expect, Promise};
use e2e::proxy::Proxy;
use e2e::service::{Env, Service, listening};
use e2e::system::{Options, System, through};
use e2e::trickle::{Directory, PLENTY, Pace, SCARCE, Trickle};
use e2e::wait::{DEADLINE, until_true};
use shared::fault::Point;
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest time-out of all is PostgreSQL's for a transaction whose client has frozen, 15 s; and
/// several may follow each other.
const SETTLED: Duration = Duration::from_secs(90);

/// Time-outs in seconds rather than tens of them; and a budget that no number of blows exhausts: what
/// is parked is to be parked by the test.
const SHORT: &[(&str, &str)] = &[
    ("AMQP_HEARTBEAT", "1s"),
    ("AMQP_CONNECT_TIMEOUT", "4s"),
    ("CONFIRM_TIMEOUT", "3s"),
    ("CONSUMER_HANDLE_TIMEOUT", "4s"),
    ("CONSUMER_WORKERS", "1"),
    ("DATABASE_ACQUIRE_TIMEOUT", "1s"),
    ("RELAY_LEASE", "4s"),
    ("RETRY_ATTEMPTS_TRANSIENT", "100"),
    ("RETRY_ATTEMPTS_UNKNOWN", "100"),
];

/// See the module.
pub struct Stage {
    system: System,
    side: Side,
    route: Route,
    /// Of the process that is struck: its servers are behind proxies of its own.
    struck: Env,
    /// Of the same without them.
    spared: Env,
    postgres: Proxy,
    amqp: Proxy,
    directory: Directory,
    promised: BTreeMap<String, Promise>,
}

/// The process that is struck.
struct Victim {
    child: Child,
    /// The process that was started in its stead.
    successor: Option<Service>,
}

impl Stage {
    /// Everything runs but the process to be struck.
    pub async fn set(side: Side, route: Route) -> Result<Self> {
        let options = Options { stopped: true, env: SHORT.to_vec(), ..Options::default() };
        let mut system = System::start(options).await?;
        system.stock_up(&[(PLENTY, 1_000_000), (SCARCE, 5)]).await?;
        if let Some(sqlstate) = route.provocation() {
            provocation::prepare(&system, side, sqlstate).await?;
        }

        let (struck_roles, beside) = route.roles();
        let env = match side {
            Side::Orders => &mut system.orders_env,
            Side::Inventory => &mut system.inventory_env,
        };
        let mut spared = env.clone();
        if let Some(roles) = struck_roles {
            spared.insert("ROLES".into(), roles.into());
        }
        let mut struck = spared.clone();
        let postgres = through(&mut struck, "DATABASE_URL")?;
        let amqp = through(&mut struck, "AMQP_URL")?;
        if let Some(roles) = beside {
            env.insert("ROLES".into(), roles.into());
        }
        let directory = Directory::default();
        let mut stage = Self {
            system,
            side,
            route,
            struck,
            spared,
            postgres,
            amqp,
            directory,
            promised: BTreeMap::new(),
        };
        stage.start_the_rest(beside.is_some()).await?;
        Ok(stage)
    }

    async fn start_the_rest(&mut self, beside: bool) -> Result<()> {
        let system = &mut self.system;
        if beside || self.side != Side::Orders {
            system.orders = Some(Service::start("orders-service", &system.orders_env).await?);
        }
        if beside || self.side != Side::Inventory {
            system.inventory =
                Some(Service::start("inventory-service", &system.inventory_env).await?);
        }
        for service in [&system.orders, &system.inventory].into_iter().flatten() {
            service.wait_ready().await?;
        }
        if let Some(orders) = &system.orders {
            self.directory.lead_to(vec![orders.api("")?]);
        }
        Ok(())
    }

    /// One cell of the matrix.
    pub async fn strike(&mut self, point: Point, blow: Blow) -> Result<()> {
        let mut env = self.struck.clone();
        env.insert("FAULT_POINT".into(), point.name().into());
        env.insert("FAULT_ACTION".into(), blow.action().into());
        self.provoke().await?;

        let pace = Pace { every: Duration::from_millis(150), seed: rand::random() };
        let (victim, trickle) = if self.route == Route::Redrive {
            let trickle = Trickle::start(pace, self.directory.clone());
            self.wait_parked().await?;
            let name = self.side.service();
            (Service::spawn_command(name, &["parking", "redrive"], &env)?, trickle)
        } else {
            let victim = Service::spawn(self.side.service(), &env)?;
            if self.route.serves() {
                self.lead_clients_to(&victim).await?;
            }
            (victim, Trickle::start(pace, self.directory.clone()))
        };
        let mut victim = Victim { child: victim, successor: None };

        self.reach(&victim.child, point, blow).await?;
        let struck = self.blow(&mut victim, point, blow, trickle).await;
        let struck = struck.with_context(|| victim.child.report());
        let trickle = struck?;
        if let Some(trickle) = trickle {
            self.settle(&mut victim, Some(trickle)).await?;
        }
        self.settle(&mut victim, None).await?;
        // First, as a message that it has in hand is in no queue's depth; once it is gone it is.
        self.leave(&victim, blow).await?;
        let expect = self.expect();
        self.system.balance(&expect, &self.logs(&victim)).await?;
        Ok(())
    }

    async fn wait_parked(&self) -> Result<()> {
        until_true("a message to be parked", async || {
            Ok(self.system.broker.depth(&self.side.parking()).await? > 0)
        })
        .await
    }

    async fn lead_clients_to(&self, victim: &Child) -> Result<()> {
        let api = listening(victim, "api").await?;
        self.directory.lead_to(vec![format!("http://{api}")]);
        Ok(())
    }

    fn expect(&self) -> Expect {
        Expect { promised: Some(self.promised.clone()), ..Expect::default() }
    }

    fn logs<'a>(&'a self, victim: &'a Victim) -> Vec<&'a Child> {
        let services = [&victim.successor, &self.system.orders, &self.system.inventory];
        let services = services.into_iter().flatten().map(|service| &service.child);
        [&victim.child].into_iter().chain(services).collect()
    }

    /// Whoever still runs ends as it should; who does not, has had a reason.
    async fn leave(&self, victim: &Victim, blow: Blow) -> Result<()> {
        let child = &victim.child;
        if child.is_running()? {
            child.sigterm()?;
            let status = child.wait_exit(DEADLINE).await?;
            ensure!(status.success(), "it ended with {status}\n{}", child.report());
        } else {
            ensure!(self.may_end(blow), "it ended by itself\n{}", child.report());
        }
        match &victim.successor {
            Some(successor) => successor.stop().await,
            None => Ok(()),
        }
    }

    /// A command ends, and so does a service whose part has panicked.
    fn may_end(&self, blow: Blow) -> bool {
        self.route == Route::Redrive || matches!(blow, Blow::Kill | Blow::Panic)
    }

    /// The last balance, with everybody gone.
    pub async fn finish(self) -> Result<()> {
        let expect = self.expect();
        if self.promised.is_empty() {
            bail!("nobody placed an order");
        }
        self.system.finish_expecting(expect).await
    }
}
