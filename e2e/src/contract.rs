//! The written contract, `shared/contract/`, and holding messages against it.

use anyhow::{Context, Result, ensure};
use jsonschema::{Registry, Validator};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The validators, by `{type}.v{version}`.
pub struct Contract(BTreeMap<String, Validator>);

/// Where the contract is.
#[must_use]
pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/contract")
}

/// Reads one document of the contract.
///
/// # Errors
/// When it is not there or not JSON.
pub fn document(name: &str) -> Result<Value> {
    let path = folder().join(name);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

impl Contract {
    /// Reads all schemas.
    ///
    /// # Errors
    /// When one of them is not a schema.
    pub fn load() -> Result<Self> {
        let registry = Registry::new()
            .add("json-schema:///envelope.schema.json", document("envelope.schema.json")?)?
            .prepare()?;
        let mut validators = BTreeMap::new();
        for entry in std::fs::read_dir(folder())? {
            let file = entry?.file_name().to_string_lossy().into_owned();
            let Some(name) = file.strip_suffix(".schema.json") else { continue };
            let schema = document(&file)?;
            let validator = jsonschema::options()
                .with_registry(&registry)
                .should_validate_formats(true)
                .build(&schema)
                .map_err(|error| anyhow::anyhow!("{file}: {error}"))?;
            validators.insert(name.to_owned(), validator);
        }
        Ok(Self(validators))
    }

    /// The events that have a schema, by `{type}.v{version}`.
    pub fn events(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str).filter(|name| *name != "envelope")
    }

    /// Holds a message against the schema of its type and version.
    ///
    /// # Errors
    /// When there is no such schema, or the message breaks it.
    pub fn check(&self, message: &Value) -> Result<()> {
        let name =
            format!("{}.v{}", message["type"].as_str().unwrap_or("?"), message["schema_version"]);
        let validator = self.0.get(&name).with_context(|| format!("no schema for {name}"))?;
        let broken: Vec<String> = validator
            .iter_errors(message)
            .map(|error| format!("{} at {}", error, error.instance_path()))
            .collect();
        ensure!(broken.is_empty(), "{name} breaks its schema: {}", broken.join("; "));
        Ok(())
    }
}
