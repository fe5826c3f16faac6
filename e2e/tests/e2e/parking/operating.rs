//! With the rights that a service has, and on the screen of whoever runs it.

use super::*;
use anyhow::Context;
use e2e::ledger::Expect;
use e2e::servers::binary;
use e2e::system::Options;
use nix::pty::openpty;
use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};

#[tokio::test]
async fn the_rights_of_the_services_broker_user_are_enough_for_its_own_parking() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    system.start_services().await?;
    park_garbage(&system, "a").await?;
    // The user of deploy/, in this virtual host.
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/rabbitmq/definitions.json");
    let definitions: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let permissions = definitions["permissions"].as_array().context("permissions")?;
    let inventory = permissions.iter().find(|entry| entry["user"] == "inventory");
    let inventory = inventory.context("the inventory's user")?;
    let url = system.inventory_env["AMQP_URL"].clone();
    let vhost = url.rsplit('/').next().context("a vhost")?;
    let user = format!("inventory-of-{vhost}");
    let put = async |path: String, body: Value| {
        let url = format!("{}/api/{path}", system.rabbitmq.management_url());
        let request = system.http.put(url).basic_auth("guest", Some("guest")).json(&body);
        request.send().await?.error_for_status()
    };
    put(format!("users/{user}"), json!({"password": "secret", "tags": "management"})).await?;
    let rights = json!({"configure": inventory["configure"], "write": inventory["write"],
                        "read": inventory["read"]});
    put(format!("permissions/{vhost}/{user}"), rights).await?;
    let env = &mut system.inventory_env;
    env.insert("AMQP_URL".into(), url.replace("guest:guest", &format!("{user}:secret")));

    assert_eq!(ids(&parking_json(&system, &["list"]).await?), ["a"]);
    parking_ok(&system, &["redrive", "--id", "a"]).await?;
    let again = async || Ok(parking_json(&system, &["list"]).await?.len() == 1);
    until_true("it to be parked again", again).await?;
    parking_ok(&system, &["discard", "--id", "a", "--yes"]).await?;
    wait_depth(&system, PARKING, 0).await?;
    system.inventory_env.insert("AMQP_URL".into(), url);
    system.finish().await
}

#[tokio::test]
async fn progress_is_a_bar_on_a_terminal_and_plain_lines_elsewhere() -> Result<()> {
    let mut system = System::start(Options { stopped: true, ..Options::default() }).await?;
    system.start_services().await?;
    if let Some(inventory) = system.inventory.take() {
        inventory.stop().await?;
    }
    for id in ["a", "b", "c"] {
        park_garbage(&system, id).await?;
    }
    // 1 a second: there is more than one line to be said.
    let arguments = ["parking", "redrive", "--rate", "0.9"];
    let env = system.inventory_env.clone();
    let run = || {
        let mut command = Command::new(binary("inventory-service")?);
        command.args(arguments).envs(&env).stdin(Stdio::null());
        anyhow::Ok(command)
    };
    let mut plain = run()?;
    let plain = tokio::task::spawn_blocking(move || plain.output()).await??;
    let (out, err) = (String::from_utf8(plain.stdout)?, String::from_utf8(plain.stderr)?);
    assert_eq!(out, "3 of 3 matching messages are redriven (run 1)\n", "{err}");
    assert!(err.lines().any(|line| line == "redriven 2 of 3"), "{err:?}");
    assert!(!err.contains('\u{1b}') && !err.contains('\r'), "{err:?}");

    system.start_services().await?;
    wait_depth(&system, PARKING, 3).await?;
    let pty = openpty(None, None)?;
    let mut command = run()?;
    command.stdout(Stdio::piped()).stderr(Stdio::from(pty.slave)).env("TERM", "xterm");
    let child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
    let screen = tokio::task::spawn_blocking(move || {
        let mut seen = Vec::new();
        // Ends with an error when the last who has the terminal open closes it.
        let _ = File::from(pty.master).read_to_end(&mut seen);
        String::from_utf8_lossy(&seen).into_owned()
    });
    let output = child.wait_with_output().await?;
    assert!(output.status.success());
    assert_eq!(output.stdout, b"3 of 3 matching messages are redriven (run 2)\n");
    let screen = screen.await?;
    assert!(screen.contains("1/3") && screen.contains('\u{2588}'), "{screen:?}");
    assert!(!screen.contains("redriven 1 of 3"), "{screen:?}");
    wait_depth(&system, PARKING, 3).await?;
    system.finish_expecting(Expect { parked: 3, ..Expect::default() }).await
}
