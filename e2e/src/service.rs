//! A service as a process: started with its environment, found by the addresses that it logs,
//! killed and frozen like any other.

use crate::child::Child;
use crate::servers::binary;
use crate::wait::until;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::{Command, Output};
use std::time::Duration;

/// Generous: a start takes a fraction of a second on an idle machine.
const STARTUP: Duration = Duration::from_secs(45);
/// The services' own deadline is 25 s.
const SHUTDOWN: Duration = Duration::from_secs(30);

/// Environment of a process.
pub type Env = BTreeMap<String, String>;

/// A running service.
pub struct Service {
    /// The process.
    pub child: Child,
    api: Option<SocketAddr>,
    operations: SocketAddr,
}

impl Service {
    /// Starts a service and waits until it listens (not until it is ready).
    ///
    /// # Errors
    /// When it exits instead, or takes too long; with its log.
    pub async fn start(name: &str, env: &Env) -> Result<Self> {
        Self::found(Self::spawn(name, env)?, env).await
    }

    /// The service that a process started with this environment is, once it listens.
    ///
    /// # Errors
    /// As [`Service::start`].
    pub async fn found(child: Child, env: &Env) -> Result<Self> {
        let operations = listening(&child, "operations").await?;
        let serves_api = env.get("ROLES").is_none_or(|roles| roles.contains("http"));
        let api = if serves_api { Some(listening(&child, "api").await?) } else { None };
        Ok(Self { child, api, operations })
    }

    /// Starts a service and does not wait for anything: it may be about to die.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn spawn(name: &str, env: &Env) -> Result<Child> {
        Self::spawn_command(name, &[], env)
    }

    /// Starts one of the service's commands and does not wait for its end: a test may want to stop it.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn spawn_command(name: &str, arguments: &[&str], env: &Env) -> Result<Child> {
        let mut command = Command::new(binary(name)?);
        command.args(arguments).envs(env);
        Child::spawn(name, command)
    }

    /// Runs one of the service's commands to its end.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn command(name: &str, arguments: &[&str], env: &Env) -> Result<Output> {
        let mut command = tokio::process::Command::new(binary(name)?);
        command.args(arguments).envs(env).kill_on_drop(true);
        let ended = tokio::time::timeout(crate::wait::DEADLINE, command.output()).await;
        Ok(ended.with_context(|| format!("{name} {arguments:?} did not end"))??)
    }

    /// [`Service::command`], which must succeed.
    ///
    /// # Errors
    /// When it does not; with what it printed.
    pub async fn command_ok(name: &str, arguments: &[&str], env: &Env) -> Result<String> {
        let output = Self::command(name, arguments, env).await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(
            output.status.success(),
            "{name} {arguments:?} failed: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
        Ok(text(&output.stdout))
    }

    /// A URL of the API.
    ///
    /// # Errors
    /// When this process has no API.
    pub fn api(&self, path: &str) -> Result<String> {
        let api = self.api.context("this process does not serve the API")?;
        Ok(format!("http://{api}{path}"))
    }

    /// A URL of the operations port.
    #[must_use]
    pub fn operations(&self, path: &str) -> String {
        format!("http://{}{path}", self.operations)
    }

    /// The answer of `/health/ready`: whether it is ready, and the parts.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn readiness(&self) -> Result<(bool, Value)> {
        let response = reqwest::get(self.operations("/health/ready")).await?;
        Ok((response.status().is_success(), response.json().await?))
    }

    /// Waits until it is ready.
    ///
    /// # Errors
    /// When it does not get ready; with what it says is missing.
    pub async fn wait_ready(&self) -> Result<()> {
        let ready = until("the service to be ready", async || {
            let (ready, parts) = self.readiness().await?;
            ensure!(ready, "not ready: {parts}");
            Ok(Some(()))
        });
        ready.await.with_context(|| self.child.report())
    }

    /// Sends SIGTERM and wants an orderly end.
    ///
    /// # Errors
    /// When it does not end in time, or not well.
    pub async fn stop(&self) -> Result<()> {
        self.child.sigterm()?;
        let status = self.child.wait_exit(SHUTDOWN).await?;
        ensure!(status.success(), "ended with {status} after SIGTERM\n{}", self.child.report());
        Ok(())
    }
}

/// Where a starting service's `server`, `api` or `operations`, listens.
///
/// # Errors
/// When it ends instead, or takes too long; with its log.
pub async fn listening(child: &Child, server: &str) -> Result<SocketAddr> {
    let what = format!("where {server} listens");
    child.wait_for_line(&what, STARTUP, |line| address(line, server)).await
}

/// [`listening`], if it has said so by now.
#[must_use]
pub fn listens(child: &Child, server: &str) -> Option<SocketAddr> {
    child.log_tail(usize::MAX).lines().find_map(|line| address(line, server))
}

fn address(line: &str, server: &str) -> Option<SocketAddr> {
    let event: Value = serde_json::from_str(line).ok()?;
    let here = event["message"] == "listening" && event["server"] == server;
    here.then(|| event["address"].as_str()?.parse().ok()).flatten()
}
