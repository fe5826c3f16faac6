//! Nothing is left behind, whatever happens to the test process.
//!
//! Destructors do not run on `kill -9`, on Ctrl-C, or for the servers that tests share in a
//! `static`. So one `sh` per test process, out of reach of the terminal's signals, holds the read
//! end of a pipe whose only write end is ours. The kernel closes that end when we die, however we
//! die; the reaper then kills every process group it was told of, with all descendants
//! (PostgreSQL's children leave the group by `setsid`), and removes the directories.
//!
//! What it does not cover: the few microseconds between a spawn and [`watch_group`], and somebody
//! killing the reaper itself. The latter is noticed by the next call, which then fails.

use std::{
    fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{ChildStdin, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, ensure};

/// POSIX sh and awk, as the reaper must outlive us and cannot be a thread or a fork of ours.
///
/// All of a tree is stopped before any of it is killed: a tree walk over running processes misses
/// those forked during the walk, and after the first kill the orphans' lineage is lost. The shared
/// memory segment that a killed PostgreSQL leaves in the kernel is named in its `postmaster.pid`;
/// there are just 4096 on a machine.
const SCRIPT: &str = r#"
trap '' INT TERM HUP
set -f
IFS='
'
export groups=
dirs=
without() {
  for item in $1; do [ "$item" = "$2" ] || printf '%s\n' "$item"; done
}
while read -r line; do
  arg=${line#* }
  case $line in
    group\ *) groups="$groups$IFS$arg" ;;
    forget\ *) groups=$(without "$groups" "$arg") ;;
    dir\ *) dirs="$dirs$IFS$arg" ;;
    undir\ *) dirs=$(without "$dirs" "$arg") ;;
  esac
done
trees() {
  set +f
  cat /proc/[0-9]*/stat | awk '
    BEGIN { n = split(ENVIRON["groups"], list, "\n"); for (i = 1; i <= n; i++) wanted[list[i]] = 1 }
    { pid = $1; sub(/^.*\) /, "") }
    $1 !~ /[ZX]/ { parent[pid] = $2; if ($3 in wanted) tree[pid] = 1 }
    END {
      do {
        grown = 0
        for (p in parent) if (!(p in tree) && parent[p] in tree) grown = tree[p] = 1
      } while (grown)
      for (p in tree) print p
    }' | sort
  set -f
}
round=0
while pids=$(trees); [ -n "$pids" ] && [ "$round" -lt 100 ]; do
  kill -STOP $pids
  [ "$pids" = "$(trees)" ] && kill -KILL $pids
  round=$((round + 1))
  sleep 0.05
done
for dir in $dirs; do
  segment=$(awk 'NR == 7 { print $2 }' "$dir/data/postmaster.pid")
  [ -n "$segment" ] && ipcrm -m "$segment"
  round=0
  until rm -rf -- "$dir" || [ "$round" -ge 50 ]; do round=$((round + 1)); sleep 0.1; done
done
"#;

/// The write end of the pipe. std opens it CLOEXEC, so no child of ours keeps it open after us.
static PIPE: Mutex<Option<ChildStdin>> = Mutex::new(None);

/// From now on the process group, and all that descends from it, dies with us.
pub fn watch_group(pgid: i32) -> Result<()> {
    tell(&format!("group {pgid}"))
}

/// The group is gone: its number may soon be another's.
pub fn forget_group(pgid: i32) -> Result<()> {
    tell(&format!("forget {pgid}"))
}

/// From now on the directory is removed when we die, after the processes that might write into it.
pub fn watch_dir(path: &Path) -> Result<()> {
    tell(&format!("dir {}", line_of(path)?))
}

/// The directory is removed, or is to stay.
pub fn forget_dir(path: &Path) -> Result<()> {
    tell(&format!("undir {}", line_of(path)?))
}

/// The protocol is lines, and `rm -rf` must not depend on somebody's working directory.
fn line_of(path: &Path) -> Result<&str> {
    let line = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    ensure!(path.is_absolute() && !line.contains('\n'), "the reaper cannot watch {path:?}");
    Ok(line)
}

fn tell(line: &str) -> Result<()> {
    let mut pipe = PIPE.lock().unwrap_or_else(PoisonError::into_inner);
    let pipe = match &mut *pipe {
        Some(pipe) => pipe,
        empty => empty.insert(start()?),
    };
    pipe.write_all(format!("{line}\n").as_bytes())
        .context("the reaper, which cleans up after this process, was killed")
}

fn start() -> Result<ChildStdin> {
    let mut reaper = Command::new("sh")
        .args(["-c", SCRIPT, "e2e-reaper"])
        .current_dir("/")
        .stdin(Stdio::piped())
        // Not ours: `cargo test | less` would wait for the reaper to let go of them.
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Ctrl-C goes to the terminal's foreground group.
        .process_group(0)
        .spawn()
        .context("cannot start sh, the reaper")?;
    reaper.stdin.take().context("the reaper has no stdin")
}

/// A temporary directory that goes with its owner, or else with the process.
#[derive(Debug)]
pub struct ScratchDir(PathBuf);

impl ScratchDir {
    /// Makes one below `TMPDIR`, its name starting with `prefix`.
    pub fn new(prefix: &str) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix(prefix)
            .tempdir()
            .context("cannot make a temporary directory")?;
        watch_dir(dir.path())?;
        Ok(Self(dir.keep()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        // What cannot be removed now stays the reaper's; a dead reaper is told of by the next
        // `watch_*`.
        if fs::remove_dir_all(&self.0).is_ok() {
            let _ = forget_dir(&self.0);
        }
    }
}
