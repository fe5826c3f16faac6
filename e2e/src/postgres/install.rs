//! What PostgreSQL needs around it: its binaries, a user that is not root, a data directory, and no
//! trace in the kernel.

use std::{
    fs,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use anyhow::{Context, Result, ensure};
use nix::unistd::{User, geteuid};

use crate::{child::lock, reaper::ScratchDir};

/// Makes `data`, an empty server's directory, inside of `dir`.
pub(super) fn new_data_dir(bin: &Path, dir: &Path, data: &Path) -> Result<()> {
    give_to_server_user(dir)?;
    let mut copy = Command::new("cp");
    copy.arg("-a").arg(template(bin)?).arg(data);
    run(copy, dir)
}

/// `initdb` takes most of a start: done once per process, for all servers.
fn template(bin: &Path) -> Result<PathBuf> {
    static TEMPLATE: Mutex<Option<ScratchDir>> = Mutex::new(None);
    let mut template = lock(&TEMPLATE);
    if template.is_none() {
        let scratch = ScratchDir::new("e2e-postgres-template-")?;
        give_to_server_user(scratch.path())?;
        let mut initdb = Command::new(bin.join("initdb"));
        initdb
            .args([
                "--username=postgres",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
                "--no-sync",
            ])
            .arg("--no-instructions")
            .arg("-D")
            .arg(scratch.path().join("data"));
        run(initdb, scratch.path())?;
        *template = Some(scratch);
    }
    let scratch = template.as_ref().context("no template")?;
    Ok(scratch.path().join("data"))
}

fn run(mut command: Command, dir: &Path) -> Result<()> {
    let program = command.get_program().to_owned();
    become_server_user(command.current_dir(dir))?;
    let output = command.output().with_context(|| format!("cannot run {program:?}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program:?} failed ({}):\n{stderr}", output.status);
    Ok(())
}

/// PostgreSQL refuses to run as root, so root runs it as Debian's `postgres`.
fn server_user() -> Result<Option<User>> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let user = User::from_name("postgres")?;
    user.context(
        "PostgreSQL does not run as root, and there is no user `postgres` (Debian: postgresql)",
    )
    .map(Some)
}

pub(super) fn become_server_user(command: &mut Command) -> Result<()> {
    if let Some(user) = server_user()? {
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    Ok(())
}

fn give_to_server_user(dir: &Path) -> Result<()> {
    if let Some(user) = server_user()? {
        chown(dir, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
            .with_context(|| format!("cannot give {} to postgres", dir.display()))?;
    }
    Ok(())
}

/// A killed server leaves its System V segment in the kernel, and the file that says which; a clean
/// shutdown leaves neither. A server that lives keeps both: it is another owner's.
pub(super) fn remove_shared_memory(data: &Path) {
    let Ok(pid_file) = fs::read_to_string(data.join("postmaster.pid")) else {
        return;
    };
    let lines: Vec<&str> = pid_file.lines().map(str::trim).collect();
    if let [pid, _, _, _, _, _, key_and_id, ..] = lines[..]
        && let Some((_, id)) = key_and_id.split_once(' ')
        && !Path::new("/proc").join(pid).exists()
    {
        // At worst 56 bytes stay; nothing to fail a test for.
        let _ = Command::new("ipcrm").args(["-m", id.trim()]).output();
    }
}

/// `E2E_PG_BIN`, else the newest version that Debian's packages left, else wherever PATH finds it.
pub(super) fn find_bin() -> Result<PathBuf> {
    let has_server = |dir: &PathBuf| dir.join("initdb").exists() && dir.join("postgres").exists();
    if let Some(dir) = std::env::var_os("E2E_PG_BIN") {
        // Absolute, as the servers run in directories of their own.
        return fs::canonicalize(dir)
            .ok()
            .filter(has_server)
            .context("E2E_PG_BIN is not a directory with initdb and postgres in it");
    }
    let version = |dir: &PathBuf| dir.parent()?.file_name()?.to_str()?.parse::<u32>().ok();
    let installed = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let path = std::env::var_os("PATH").unwrap_or_default();
    installed
        .map(|entry| entry.path().join("bin"))
        .filter(has_server)
        .max_by_key(version)
        .or_else(|| std::env::split_paths(&path).find(has_server))
        .context("no PostgreSQL server: apt-get install postgresql, or set E2E_PG_BIN to its bin")
}
