//! What the pages point at is there: tests, scenarios, fault points, files.

use anyhow::{Context, Result, ensure};
use e2e::scenario::Scenario;
use shared::fault::Point;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(root().join(path)).with_context(|| path.to_owned())
}

/// Every file below a folder, and what is in it.
fn sources(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else {
            let text = fs::read_to_string(&path)?;
            found.push((path, text));
        }
    }
    Ok(found)
}

/// What is in backquotes.
fn quoted(page: &str) -> impl Iterator<Item = &str> {
    page.split('`').skip(1).step_by(2)
}

/// Whether a test target has a test, or a file of tests, of that name.
fn has_test(target: &str, name: &str) -> Result<bool> {
    let function = format!("fn {name}(");
    let sources = sources(&root().join("e2e/tests").join(target))?;
    Ok(sources.iter().any(|(path, text)| {
        text.contains(&function) || path.file_stem().is_some_and(|stem| stem == name)
    }))
}

/// Whether rows of the kill matrix are chosen by this.
fn in_matrix(name: &str) -> bool {
    name == "orders::" || Point::ALL.iter().any(|point| point.name().starts_with(name))
}

#[test]
fn every_command_in_the_page_of_failures_names_something_that_there_is() -> Result<()> {
    let page = read("docs/failures.md")?;
    for rows in read("ARCHITECTURE.md")?.split("matrix `").skip(1) {
        let name = rows.split('`').next().unwrap_or_default();
        ensure!(in_matrix(name), "ARCHITECTURE.md names {name}, which is not in the matrix");
    }
    let (mut named, mut stories) = (0, Vec::new());
    for (kind, name) in quoted(&page).filter_map(|command| command.split_once(' ')) {
        let there = match kind {
            _ if name == "NAME" => continue,
            "e2e" | "cluster" | "model" => has_test(kind, name)?,
            "matrix" => in_matrix(name),
            "scenario" => {
                stories.push(name);
                Scenario::named(name).is_some()
            }
            _ => continue,
        };
        ensure!(there, "there is no `{kind} {name}`");
        named += 1;
    }
    ensure!(named > 50, "only {named} commands were recognised");
    for (path, text) in sources(&root().join("e2e/tests/cluster"))? {
        // That the harness works is no failure of the system.
        if path.ends_with("harness.rs") {
            continue;
        }
        for test in text.split("#[tokio::test]\nasync fn ").skip(1) {
            let name = test.split('(').next().unwrap_or_default();
            ensure!(page.contains(&format!("`cluster {name}`")), "the page lacks {name}");
        }
    }
    for scenario in Scenario::ALL {
        let name = scenario.about().name;
        ensure!(stories.contains(&name), "the page does not mention the scenario {name}");
    }
    Ok(())
}

#[test]
fn every_link_of_the_pages_leads_to_a_file_and_every_test_to_its_own() -> Result<()> {
    for page in ["README.md", "ARCHITECTURE.md", "docs/failures.md", "docs/runbook.md"] {
        let text = read(page)?;
        let folder = root().join(page).parent().context("no folder")?.to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") {
                continue;
            }
            ensure!(folder.join(path).exists(), "{page} links {path}, which is not there");
        }
        for (before, after) in text.split("](").zip(text.split("](").skip(1)) {
            let (name, path) = (before.rsplit('[').next(), after.split(')').next());
            let (Some(name), Some(path)) = (name, path) else { continue };
            let is_test = name.len() > 20
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            if is_test && path.ends_with(".rs") {
                let file = fs::read_to_string(folder.join(path))?;
                ensure!(file.contains(&format!("fn {name}(")), "{page}: {path} has no {name}");
            }
        }
    }
    Ok(())
}
