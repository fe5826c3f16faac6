//! Which broker the tests run on, and where its programs are.
//!
//! One variable says it: `E2E_RABBITMQ=4.3` is the one that `e2e/scripts/rabbitmq-4.3.sh` has set up;
//! without it, it is the distribution's. Both have Debian's layout below a root of their own.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

const VARIABLE: &str = "E2E_RABBITMQ";

/// The programs of one broker.
#[derive(Debug)]
pub(super) struct Programs {
    root: PathBuf,
}

impl Programs {
    /// Those of the broker that the environment asks for.
    ///
    /// # Errors
    /// When it asks for one that is unknown or not there; with what to do about it.
    pub(super) fn find() -> Result<Self> {
        let root = root(&env::var_os(VARIABLE).unwrap_or_default(), cache)?;
        let programs = Self { root };
        let server = programs.script("rabbitmq-server");
        ensure!(
            server.exists(),
            "no RabbitMQ, {} is missing: apt-get install rabbitmq-server",
            server.display()
        );
        Ok(programs)
    }

    /// One of RabbitMQ's scripts. Not Debian's `/usr/sbin/rabbitmq-server` and its like: those are
    /// wrappers that change user.
    pub(super) fn script(&self, name: &str) -> PathBuf {
        self.root.join("usr/lib/rabbitmq/bin").join(name)
    }

    pub(super) fn epmd(&self) -> PathBuf {
        self.erlang().join("epmd")
    }

    /// A search path on which the scripts find their own Erlang first.
    pub(super) fn path(&self) -> Result<OsString> {
        let path = env::var_os("PATH").unwrap_or_default();
        env::join_paths([self.erlang()].into_iter().chain(env::split_paths(&path)))
            .with_context(|| format!("{} cannot stand in PATH", self.root.display()))
    }

    fn erlang(&self) -> PathBuf {
        self.root.join("usr/lib/erlang/bin")
    }
}

/// The root of the broker that a value of the variable asks for.
fn root(asked: &OsStr, cache: impl Fn() -> Result<PathBuf>) -> Result<PathBuf> {
    match asked.to_str() {
        Some("") => Ok("/".into()),
        Some("4.3") => {
            let root = cache()?.join("e2e-rabbitmq-4.3");
            // Written last: without it, the rest is what a killed run of the script left.
            ensure!(
                root.join("ready").exists(),
                "RabbitMQ 4.3 is not set up in {}: run e2e/scripts/rabbitmq-4.3.sh",
                root.display()
            );
            Ok(root)
        }
        _ => bail!(
            "{VARIABLE}={} is no broker that the tests know: 4.3, or nothing for the distribution's",
            asked.display()
        ),
    }
}

/// As in `e2e/scripts/rabbitmq-4.3.sh`.
fn cache() -> Result<PathBuf> {
    let dir = |name: &str| env::var_os(name).filter(|dir| !dir.is_empty());
    dir("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&dir("HOME")?).join(".cache")))
        .context("no place for RabbitMQ 4.3: set HOME or XDG_CACHE_HOME")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(asked: &str, cache: &Path) -> String {
        let root = root(asked.as_ref(), || Ok(cache.into()));
        root.map_or_else(|error| error.to_string(), |root| root.display().to_string())
    }

    #[test]
    fn a_broker_that_is_unknown_or_half_set_up_is_refused_with_what_would_be_right() -> Result<()> {
        let cache = tempfile::tempdir()?;
        let unknown = message("4.2", cache.path());
        assert!(unknown.contains("E2E_RABBITMQ=4.2") && unknown.contains("4.3, or"), "{unknown}");

        let root = cache.path().join("e2e-rabbitmq-4.3");
        std::fs::create_dir_all(root.join("usr/lib/rabbitmq/bin"))?;
        let half = message("4.3", cache.path());
        assert!(half.contains("run e2e/scripts/rabbitmq-4.3.sh"), "{half}");
        std::fs::write(root.join("ready"), "4.3.6\n")?;
        assert_eq!(message("4.3", cache.path()), root.display().to_string());

        assert_eq!(message("", cache.path()), "/");
        Ok(())
    }
}
