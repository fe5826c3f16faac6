//! The harness keeps its own promises: private servers, honest failures, and nothing left behind.

mod proxy;

use std::{
    fs,
    future::pending,
    io,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use e2e::{
    child::{Child, Patience},
    ports,
    postgres::{Durability, Postgres},
    rabbitmq::RabbitMq,
    servers::Servers,
    wait::until_true,
};
use nix::sys::signal::Signal;
use sqlx::{Connection, PgConnection};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const SOON: Duration = Duration::from_secs(10);
/// How long nothing must happen to count as never.
const A_WHILE: Duration = Duration::from_millis(200);

// --- Nothing is left behind ---------------------------------------------------------------------

#[tokio::test]
async fn a_killed_test_process_leaves_no_server_behind() -> Result<()> {
    if std::env::var_os("E2E_VICTIM").is_some() {
        return be_the_victim().await;
    }
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--exact", "harness::a_killed_test_process_leaves_no_server_behind", "--nocapture"])
        .env("E2E_VICTIM", "1");
    let victim = Child::spawn("victim", command)?;
    let dirs = |line: &str| {
        line.split_once("at home in ")?.1.split_once(" and ").map(|(a, b)| [a.into(), b.into()])
    };
    let dirs: [PathBuf; 2] =
        victim.wait_for_line("its directories", Duration::from_secs(120), dirs).await?;
    for dir in &dirs {
        ensure!(
            dir.exists() && !processes_in(dir).is_empty(),
            "nothing lives in {}",
            dir.display()
        );
    }

    victim.signal(Signal::SIGKILL)?;
    victim.wait_exit(SOON).await?;

    let patience = Patience::new(SOON, "servers and directories of a killed process to be gone");
    while dirs.iter().any(|dir| dir.exists() || !processes_in(dir).is_empty()) {
        patience.pause().await?;
    }
    Ok(())
}

/// A frozen server is the harder one to get rid of: it does not see its parent die.
async fn be_the_victim() -> Result<()> {
    let (postgres, rabbitmq) = tokio::try_join!(Postgres::start(), RabbitMq::start())?;
    postgres.sigstop()?;
    println!("\nat home in {} and {}", postgres.dir().display(), rabbitmq.dir().display());
    pending().await
}

/// All processes of a server work in its directory, in whichever group and session they are. In a
/// container root may not ask where another user's process works; then its command line tells of the
/// first of them.
fn processes_in(dir: &Path) -> Vec<PathBuf> {
    let named = dir.to_string_lossy().into_owned();
    let lives_there = |process: &PathBuf| {
        let works = fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(dir));
        let command = fs::read(process.join("cmdline")).unwrap_or_default();
        works || String::from_utf8_lossy(&command).contains(&named)
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    processes.filter(lives_there).collect()
}

#[tokio::test]
async fn a_dropped_server_takes_its_processes_and_its_directory_along() -> Result<()> {
    let postgres = Postgres::start().await?;
    let dir = postgres.dir().to_owned();
    assert!(!processes_in(&dir).is_empty());
    drop(postgres);
    assert!(!dir.exists());
    assert!(processes_in(&dir).is_empty());
    Ok(())
}

// --- Processes and ports ------------------------------------------------------------------------

fn sh(script: &str) -> Result<Child> {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    Child::spawn("sh", command)
}

#[tokio::test]
async fn a_kill_takes_descendants_that_left_the_group() -> Result<()> {
    let child = sh("setsid sh -c 'echo $$; exec sleep 600' & wait")?;
    let pid: i32 = child.wait_for_line("a pid", SOON, |line| line.parse().ok()).await?;
    assert!(Path::new(&format!("/proc/{pid}/exe")).exists());
    child.sigkill()?;
    assert!(fs::read_link(format!("/proc/{pid}/exe")).is_err(), "{pid} runs on");
    assert!(!child.is_running()?);
    Ok(())
}

#[tokio::test]
async fn an_exit_before_the_awaited_line_is_an_error_at_once_and_shows_the_log() -> Result<()> {
    let child = sh("echo out of paper >&2; exit 3")?;
    let started = Instant::now();
    let Err(error) =
        child.wait_for_line("ready", SOON, |line| (line == "ready").then_some(())).await
    else {
        bail!("a line was found that nobody wrote")
    };
    assert!(started.elapsed() < SOON / 2);
    assert!(error.to_string().contains("out of paper"), "{error}");
    Ok(())
}

#[tokio::test]
async fn the_last_line_before_an_exit_is_seen() -> Result<()> {
    let child = sh("seq 7000")?;
    assert!(child.wait_exit(SOON).await?.success());
    child.wait_for_line("7000", SOON, |line| (line == "7000").then_some(())).await?;
    assert_eq!(child.log_position(), 7000);
    assert_eq!(child.log_tail(2), "6999\n7000");
    Ok(())
}

#[tokio::test]
async fn a_frozen_process_goes_on_after_the_thaw() -> Result<()> {
    let child = sh("while :; do echo tick; sleep 0.02; done")?;
    child.wait_for_line("a tick", SOON, |_| Some(())).await?;
    child.sigstop()?;
    tokio::time::sleep(A_WHILE).await; // what it wrote before may still be on its way into the log
    let frozen = child.log_position();
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(child.log_position(), frozen);
    child.sigcont()?;
    child.wait_for_line_from(frozen, "a tick", SOON, |_| Some(())).await?;
    child.sigterm()?;
    assert!(!child.wait_exit(SOON).await?.success());
    Ok(())
}

#[test]
fn no_port_is_handed_out_twice() -> Result<()> {
    let mut ports = (0..500).map(|_| ports::free_port()).collect::<Result<Vec<u16>>>()?;
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 500);
    Ok(())
}

// --- PostgreSQL ---------------------------------------------------------------------------------

async fn count(url: &str) -> Result<i64> {
    let mut connection = PgConnection::connect(url).await?;
    Ok(sqlx::query_scalar("SELECT count(*) FROM t").fetch_one(&mut connection).await?)
}

async fn fill(url: &str) -> Result<PgConnection> {
    let mut connection = PgConnection::connect(url).await?;
    sqlx::raw_sql("CREATE TABLE t (n int); INSERT INTO t SELECT generate_series(1, 1000)")
        .execute(&mut connection)
        .await?;
    Ok(connection)
}

#[tokio::test]
async fn a_postgres_killed_without_warning_comes_back_with_its_data() -> Result<()> {
    let postgres = Postgres::start_with(Durability::Fast).await?;
    postgres.create_database("Odd name").await?;
    let url = postgres.url("Odd%20name");
    let mut client = fill(&url).await?;

    postgres.sigkill()?;
    assert!(client.ping().await.is_err());
    assert!(processes_in(postgres.dir()).is_empty());
    postgres.start_again().await?;
    assert_eq!(count(&url).await?, 1000);

    postgres.stop().await?;
    assert!(PgConnection::connect(&url).await.is_err());
    postgres.start_again().await?;
    assert_eq!(count(&url).await?, 1000);
    Ok(())
}

#[tokio::test]
async fn a_frozen_postgres_stays_silent_until_the_thaw() -> Result<()> {
    let postgres = Postgres::start().await?;
    let url = postgres.url("postgres");
    postgres.sigstop()?;
    let connecting = PgConnection::connect(&url);
    tokio::pin!(connecting);
    assert!(timeout(A_WHILE, &mut connecting).await.is_err(), "a frozen server answered");
    postgres.sigcont()?;
    timeout(SOON, connecting).await??.ping().await?;
    Ok(())
}

async fn has_vhost(broker: &RabbitMq, name: &str) -> Result<bool> {
    let url = format!("{}/api/vhosts", broker.management_url());
    let vhosts = reqwest::Client::new().get(url).basic_auth("guest", Some("guest")).send().await?;
    let vhosts: serde_json::Value = vhosts.error_for_status()?.json().await?;
    let vhosts = vhosts.as_array().context("no list of vhosts")?;
    Ok(vhosts.iter().any(|vhost| vhost["name"] == name))
}

/// Whether somebody there greets a client as an AMQP 0-9-1 server does.
async fn speaks_amqp(port: u16) -> io::Result<bool> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
    let mut frame = [0; 11];
    stream.read_exact(&mut frame).await?;
    Ok(frame[0] == 1 && frame[7..] == [0, 10, 0, 10]) // a method frame: Connection.Start
}

#[tokio::test]
async fn two_private_brokers_run_side_by_side() -> Result<()> {
    let (one, other) = tokio::try_join!(RabbitMq::start(), RabbitMq::start())?;
    assert!(one.amqp_url("a/b").ends_with("/a%2fb"));
    one.create_vhost("a/b").await?;
    assert!(has_vhost(&one, "a/b").await?);
    assert!(!has_vhost(&other, "a/b").await?);

    other.sigkill()?;
    assert!(processes_in(other.dir()).len() <= 1, "more than its epmd is left");
    assert!(!speaks_amqp(other.amqp_port()).await.unwrap_or(false));
    assert!(speaks_amqp(one.amqp_port()).await?);

    Ok(())
}

#[tokio::test]
async fn a_broker_killed_without_warning_comes_back_with_its_vhosts() -> Result<()> {
    let broker = RabbitMq::start().await?;
    broker.create_vhost("kept").await?;
    broker.sigkill()?;
    assert!(!broker.server().is_running()?);
    broker.start_again().await?;
    assert!(has_vhost(&broker, "kept").await?);

    broker.sigstop()?;
    let port = broker.amqp_port();
    assert!(timeout(A_WHILE, speaks_amqp(port)).await.is_err(), "a frozen broker answered");
    broker.sigcont()?;
    assert!(timeout(SOON, speaks_amqp(port)).await??);
    Ok(())
}

#[tokio::test]
async fn the_suite_runs_on_the_broker_that_was_asked_for() -> Result<()> {
    let (major, minor) = Servers::shared().await?.rabbitmq.version().await?;
    let asked = std::env::var("E2E_RABBITMQ").unwrap_or_default();
    if asked.is_empty() {
        let mut installed = Command::new("dpkg-query");
        let output = installed.args(["-Wf", "${Version}", "rabbitmq-server"]).output()?;
        let installed = String::from_utf8(output.stdout)?;
        assert!(installed.starts_with(&format!("{major}.{minor}.")), "{installed} is installed");
    } else {
        assert_eq!(format!("{major}.{minor}"), asked);
    }
    Ok(())
}

#[tokio::test]
async fn rabbitmqctl_reaches_its_own_node_and_a_failure_shows_what_it_said() -> Result<()> {
    let broker = RabbitMq::start().await?;
    assert!(!broker.ctl(&["status"]).await?.contains("Memory alarm"));
    broker.ctl(&["set_vm_memory_high_watermark", "0"]).await?;
    until_true("the node to raise an alarm", async || {
        Ok(broker.ctl(&["status"]).await?.contains("Memory alarm"))
    })
    .await?;

    let nowhere = ["set_permissions", "--vhost", "nowhere", "guest", ".*", ".*", ".*"];
    let Err(error) = broker.ctl(&nowhere).await else {
        bail!("there are permissions in a vhost that is not there")
    };
    let message = format!("{error:#}");
    assert!(message.contains("Virtual host nowhere does not exist"), "{message}");
    Ok(())
}
