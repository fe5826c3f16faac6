//! A node's files, environment and processes.
//!
//! Everything that the node would else find in `/etc/rabbitmq`, `/var/lib/rabbitmq` or the user's
//! home is pointed into its own directory.

use std::{
    fs,
    path::PathBuf,
    process::{self, Command},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use tokio::net::TcpStream;

use super::{cluster::Membership, programs::Programs};
use crate::{
    child::{Child, Patience},
    ports,
};

/// Two schedulers, which do not spin while idle: tests share few cores with everything they test.
const SCHEDULERS: &str = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none";

/// On loopback only, and no epmd but ours.
const DISTRIBUTION: &str = "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}";

/// It takes a second on an idle machine, and 15 to give a frozen node up.
const CTL: Duration = Duration::from_secs(60);

/// All it takes to start a node, again and again.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) programs: Programs,
    pub(super) dir: PathBuf,
    pub(super) name: String,
    pub(super) amqp_port: u16,
    pub(super) management_port: u16,
    pub(super) epmd_port: u16,
    /// Shorter timings, for tests.
    pub(super) hurried: bool,
    pub(super) membership: Option<Membership>,
}

/// For people who look at a list of processes.
pub(super) fn unique_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("e2e-{}-{}@localhost", process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

impl Node {
    /// Writes the configuration, over that of an earlier run: ports may differ.
    pub(super) fn prepare(&self) -> Result<()> {
        let mut conf = format!(
            "listeners.tcp.default = 127.0.0.1:{}\n\
             management.tcp.ip = 127.0.0.1\n\
             management.tcp.port = {}\n\
             log.console = true\n\
             log.console.use_colors = off\n\
             # No alarm on a small or full machine: it would block all publishers.\n\
             disk_free_limit.absolute = 1MB\n\
             vm_memory_high_watermark.relative = 0.9\n",
            self.amqp_port, self.management_port,
        );
        let mut advanced = "[].\n";
        if self.hurried {
            conf.push_str("collect_statistics_interval = 1000\nmax_message_size = 1048576\n");
            // A quorum queue tells the management API of its effective policy once a tick.
            advanced = "[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 2000},
                                   {quorum_tick_interval, 200}]}].\n";
        }
        if let Some(membership) = &self.membership {
            conf.push_str(&membership.configuration());
        }
        self.write("rabbitmq.conf", &conf)?;
        self.write("advanced.config", advanced)?;
        let plugins = "[rabbitmq_management, rabbitmq_consistent_hash_exchange].\n";
        self.write("enabled_plugins", plugins)?;
        self.write("rabbitmq-env.conf", "")?;
        for dir in ["home", "mnesia", "log"] {
            fs::create_dir_all(self.dir.join(dir))
                .with_context(|| format!("cannot make {dir} for RabbitMQ"))?;
        }
        if let Some(membership) = &self.membership {
            membership.write_cookie(&self.dir.join("home/.erlang.cookie"))?;
        }
        Ok(())
    }

    fn write(&self, file: &str, content: &str) -> Result<()> {
        let path = self.dir.join(file);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    }

    pub(super) fn management_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.management_port)
    }

    /// In the foreground, so that it is our child: nodes start one by themselves only as a daemon
    /// that outlives them.
    pub(super) async fn spawn_epmd(&self) -> Result<Child> {
        let mut command = Command::new(self.programs.epmd());
        command
            .args(["-port", &self.epmd_port.to_string(), "-address", "127.0.0.1"])
            .current_dir(&self.dir);
        let epmd = Child::spawn(format!("epmd:{}", self.epmd_port), command)?;
        let patience = Patience::new(
            Duration::from_secs(10),
            format!("epmd to listen on port {}", self.epmd_port),
        );
        while TcpStream::connect(("127.0.0.1", self.epmd_port)).await.is_err() {
            ensure!(epmd.is_running()?, "epmd ended on start; {}", epmd.report());
            patience.pause().await.with_context(|| epmd.report())?;
        }
        Ok(epmd)
    }

    /// A predecessor that the reaper of an earlier run is just killing may still hold them.
    pub(super) async fn wait_for_ports(&self) -> Result<()> {
        let dist_port = self.membership.as_ref().map(|membership| membership.dist_port);
        for port in [self.amqp_port, self.management_port].into_iter().chain(dist_port) {
            let patience = Patience::new(
                Duration::from_secs(15),
                format!("port {port} to be free for RabbitMQ"),
            );
            while !ports::is_free(port) {
                patience.pause().await?;
            }
        }
        Ok(())
    }

    pub(super) fn spawn(&self) -> Result<Child> {
        let in_dir = |name: &str| self.dir.join(name);
        let (dist_port, ticks) = match &self.membership {
            Some(membership) => (membership.dist_port, membership.arguments()),
            // A new one each time: whoever held the last one need not be gone yet.
            None => (ports::free_port()?, String::new()),
        };
        let arguments = format!("{SCHEDULERS} {DISTRIBUTION} {ticks}");
        let mut command = self.command("rabbitmq-server")?;
        command
            .env("RABBITMQ_DIST_PORT", dist_port.to_string())
            .env("RABBITMQ_CONFIG_FILE", in_dir("rabbitmq.conf"))
            .env("RABBITMQ_ADVANCED_CONFIG_FILE", in_dir("advanced.config"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", in_dir("enabled_plugins"))
            .env("RABBITMQ_MNESIA_BASE", in_dir("mnesia"))
            .env("RABBITMQ_LOG_BASE", in_dir("log"))
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", arguments);
        Child::spawn(format!("rabbitmq:{}", self.amqp_port), command)
    }

    /// Runs `rabbitmqctl` to its end, and returns what it printed.
    pub(super) async fn ctl(&self, arguments: &[&str]) -> Result<String> {
        let port = ports::free_port()?.to_string();
        let mut command = self.command("rabbitmqctl")?;
        command
            .args(arguments)
            // It is a node too, and would take one of eleven ports that all of its kind share.
            .env("RABBITMQ_CTL_DIST_PORT_MIN", &port)
            .env("RABBITMQ_CTL_DIST_PORT_MAX", &port)
            .env("RABBITMQ_CTL_ERL_ARGS", DISTRIBUTION);
        let ctl = Child::spawn("rabbitmqctl", command)?;
        let status =
            ctl.wait_exit(CTL).await.with_context(|| format!("rabbitmqctl {arguments:?}"))?;
        ensure!(status.success(), "rabbitmqctl {arguments:?} failed ({status}); {}", ctl.report());
        Ok(ctl.log_tail(usize::MAX))
    }

    /// One of RabbitMQ's scripts in the environment of this node.
    fn command(&self, script: &str) -> Result<Command> {
        let mut command = Command::new(self.programs.script(script));
        // What the shell around us says about a node is about another one.
        for (name, _) in std::env::vars_os()
            .filter(|(name, _)| name.as_encoded_bytes().starts_with(b"RABBITMQ_"))
        {
            command.env_remove(name);
        }
        for name in [
            "ERL_FLAGS",
            "ERL_AFLAGS",
            "ERL_ZFLAGS",
            "ERL_LIBS",
            "NOTIFY_SOCKET",
            "XDG_CONFIG_HOME",
        ] {
            command.env_remove(name);
        }
        command
            .current_dir(&self.dir)
            .env("PATH", self.programs.path()?)
            .env("HOME", self.dir.join("home")) // of the Erlang cookie
            .env("ERL_EPMD_PORT", self.epmd_port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODENAME", &self.name)
            .env("RABBITMQ_CONF_ENV_FILE", self.dir.join("rabbitmq-env.conf"));
        Ok(command)
    }

    pub(super) async fn accepts_amqp(&self) -> bool {
        TcpStream::connect(("127.0.0.1", self.amqp_port)).await.is_ok()
    }
}
