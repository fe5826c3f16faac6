//! What a failure is decides what happens next; this module says what it is.
//!
//! The class comes from the error's own source (a SQLSTATE, a contract rule), never from its text.
//! Business outcomes are not here: "out of stock" is an answer, not a failure.
//!
//! A transient failure says one thing more: whether it speaks of this message (a deadlock) or of the
//! database as a whole (it is away). The second kind, several times in a row, is an outage
//! ([`crate::outage`]).

use crate::envelope::ContractError;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The four kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Class {
    /// Time may mend it: the database is away, a deadlock, a time-out.
    Transient,
    /// The same bytes will fail again: broken contract, broken rule, broken code.
    Permanent,
    /// Something that this message builds on is not here yet, and may still come.
    NotYet,
    /// Nobody thought of it. A few careful attempts, then a person.
    Unknown,
}

impl Class {
    /// As it is written in headers, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::Permanent => "permanent",
            Self::NotYet => "not_yet",
            Self::Unknown => "unknown",
        }
    }
}

/// A failure with its class.
#[derive(Debug)]
pub struct Failure {
    /// What kind.
    pub class: Class,
    /// Whether the database as a whole is away, so that any other message would fail as well.
    pub database_away: bool,
    /// What happened.
    pub source: anyhow::Error,
}

impl Failure {
    fn new(class: Class, source: impl Into<anyhow::Error>) -> Self {
        Self { class, database_away: false, source: source.into() }
    }

    /// The same bytes will fail again.
    pub fn permanent(source: impl Into<anyhow::Error>) -> Self {
        Self::new(Class::Permanent, source)
    }

    /// The database does not answer. Time may mend that.
    pub fn database_away(source: impl Into<anyhow::Error>) -> Self {
        Self { database_away: true, ..Self::new(Class::Transient, source) }
    }

    /// A predecessor may still come.
    pub fn not_yet(source: impl Into<anyhow::Error>) -> Self {
        Self::new(Class::NotYet, source)
    }

    /// Nobody thought of it.
    pub fn unknown(source: impl Into<anyhow::Error>) -> Self {
        Self::new(Class::Unknown, source)
    }
}

impl fmt::Display for Failure {
    /// With its causes, except where the one before has said the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = String::new();
        for cause in self.source.chain() {
            let text = cause.to_string();
            if !said.contains(&text) {
                let colon = if said.is_empty() { "" } else { ": " };
                write!(f, "{colon}{text}")?;
                said = text;
            }
        }
        Ok(())
    }
}

impl From<ContractError> for Failure {
    fn from(error: ContractError) -> Self {
        Self::permanent(error)
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        let meaning = meaning(&error);
        Self {
            class: meaning.map_or(Class::Unknown, Meaning::class),
            database_away: meaning == Some(Meaning::Away),
            source: error.into(),
        }
    }
}

/// What an error of the database says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// The data or the code is wrong: the same statement will fail again.
    Wrong,
    /// Something was in this transaction's way.
    Busy,
    /// The server, or the way to it, is out of order: any other transaction would fail too.
    Away,
}

impl Meaning {
    fn class(self) -> Class {
        match self {
            Self::Wrong => Class::Permanent,
            Self::Busy | Self::Away => Class::Transient,
        }
    }
}

/// SQLSTATEs by prefix; the longest that matches counts, and what is not here is unknown. Codes and
/// their names: <https://www.postgresql.org/docs/current/errcodes-appendix.html>. What a COMMIT
/// reports is read here like what any other statement reports.
const SQLSTATES: &[(&str, Meaning)] = &[
    ("08", Meaning::Away),    // connection exception
    ("0A", Meaning::Wrong),   // feature not supported
    ("21", Meaning::Wrong),   // cardinality violation
    ("22", Meaning::Wrong),   // data exception: out of range, bad text
    ("23", Meaning::Wrong),   // integrity constraint violation, a deferred one at COMMIT included
    ("25006", Meaning::Away), // read-only transaction: a failover left us on a standby
    ("25P03", Meaning::Busy), // idle-in-transaction time-out: this process was frozen
    ("28", Meaning::Away),    // invalid authorization: who we are, not what the message is
    ("3D000", Meaning::Away), // database does not exist (yet): likewise
    ("40001", Meaning::Busy), // serialization failure
    ("40003", Meaning::Busy), // statement completion unknown: the inbox absorbs it
    ("40P01", Meaning::Busy), // deadlock detected
    ("42", Meaning::Wrong),   // syntax error, unknown column, missing privilege: broken code
    ("53", Meaning::Away),    // insufficient resources: connections, memory, disk
    ("55P03", Meaning::Busy), // lock not available: lock_timeout
    ("57014", Meaning::Busy), // query cancelled: statement_timeout. Bounded by the attempts
    ("57P", Meaning::Away),   // shutdown, crash, cannot connect now
];

/// The class of a database error, a failed COMMIT's included. A COMMIT whose answer was lost is
/// transient although it may have happened: the message comes again, and the inbox absorbs it.
#[must_use]
pub fn classify(error: &sqlx::Error) -> Class {
    meaning(error).map_or(Class::Unknown, Meaning::class)
}

fn meaning(error: &sqlx::Error) -> Option<Meaning> {
    use sqlx::Error as E;
    match error {
        E::Database(error) => error.code().and_then(|sqlstate| meaning_of_sqlstate(&sqlstate)),
        // No answer, or none that can be read: the connection, the pool, the protocol.
        E::Io(_)
        | E::Tls(_)
        | E::Protocol(_)
        | E::PoolTimedOut
        | E::PoolClosed
        | E::WorkerCrashed => Some(Meaning::Away),
        // The statement and the schema do not fit: broken code.
        E::RowNotFound
        | E::TypeNotFound { .. }
        | E::ColumnIndexOutOfBounds { .. }
        | E::ColumnNotFound(_)
        | E::ColumnDecode { .. }
        | E::Encode(_)
        | E::InvalidArgument(_)
        | E::Decode(_) => Some(Meaning::Wrong),
        _ => None,
    }
}

fn meaning_of_sqlstate(sqlstate: &str) -> Option<Meaning> {
    SQLSTATES
        .iter()
        .filter(|(prefix, _)| sqlstate.starts_with(prefix))
        .max_by_key(|(prefix, _)| prefix.len())
        .map(|(_, meaning)| *meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sqlstate_has_its_meaning() {
        for (sqlstate, meaning) in [
            ("08006", Some(Meaning::Away)),
            ("53100", Some(Meaning::Away)),
            ("53300", Some(Meaning::Away)),
            ("57P01", Some(Meaning::Away)),
            ("57P03", Some(Meaning::Away)),
            ("25006", Some(Meaning::Away)),
            ("40001", Some(Meaning::Busy)),
            ("40P01", Some(Meaning::Busy)),
            ("55P03", Some(Meaning::Busy)),
            ("57014", Some(Meaning::Busy)),
            ("22003", Some(Meaning::Wrong)),
            ("23505", Some(Meaning::Wrong)),
            ("23514", Some(Meaning::Wrong)),
            ("42P01", Some(Meaning::Wrong)),
            ("XX000", None),
            ("P0001", None),
            ("40002", None),
            ("25001", None),
        ] {
            assert_eq!(meaning_of_sqlstate(sqlstate), meaning, "{sqlstate}");
        }
    }

    #[test]
    fn a_failure_tells_its_causes_and_nothing_twice() {
        let cause = anyhow::anyhow!("disk full").context("error: disk full").context("COMMIT");
        assert_eq!(Failure::unknown(cause).to_string(), "COMMIT: error: disk full");
    }

    #[test]
    fn trouble_with_the_pool_is_transient_and_trouble_with_the_code_is_not() {
        assert_eq!(classify(&sqlx::Error::PoolTimedOut), Class::Transient);
        assert_eq!(classify(&sqlx::Error::RowNotFound), Class::Permanent);
    }
}
