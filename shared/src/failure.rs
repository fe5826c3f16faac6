//! What a failure is decides what happens next; this module says what it is.
//!
//! The class comes from the error's own source (a SQLSTATE, a contract rule), never from its text.
//! Business outcomes are not here: "out of stock" is an answer, not a failure.

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
    /// What happened.
    pub source: anyhow::Error,
}

impl Failure {
    /// The same bytes will fail again.
    pub fn permanent(source: impl Into<anyhow::Error>) -> Self {
        Self { class: Class::Permanent, source: source.into() }
    }

    /// Time may mend it.
    pub fn transient(source: impl Into<anyhow::Error>) -> Self {
        Self { class: Class::Transient, source: source.into() }
    }

    /// A predecessor may still come.
    pub fn not_yet(source: impl Into<anyhow::Error>) -> Self {
        Self { class: Class::NotYet, source: source.into() }
    }

    /// Nobody thought of it.
    pub fn unknown(source: impl Into<anyhow::Error>) -> Self {
        Self { class: Class::Unknown, source: source.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.source)
    }
}

impl From<ContractError> for Failure {
    fn from(error: ContractError) -> Self {
        Self::permanent(error)
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self { class: classify(&error), source: error.into() }
    }
}

/// SQLSTATEs by prefix; the longest that matches counts. Codes:
/// <https://www.postgresql.org/docs/current/errcodes-appendix.html>.
const SQLSTATES: &[(&str, Class)] = &[
    ("08", Class::Transient),    // connection exception
    ("0A", Class::Permanent),    // feature not supported
    ("21", Class::Permanent),    // cardinality violation
    ("22", Class::Permanent),    // data exception: out of range, bad text
    ("23", Class::Permanent),    // integrity constraint violation
    ("25006", Class::Transient), // read-only transaction: a failover left us on a standby
    ("25P03", Class::Transient), // idle-in-transaction time-out: this process was frozen
    ("28", Class::Transient),    // invalid authorization: who we are, not what the message is
    ("3D000", Class::Transient), // database does not exist (yet): likewise
    ("40001", Class::Transient), // serialization failure
    ("40003", Class::Transient), // statement completion unknown: the inbox absorbs it
    ("40P01", Class::Transient), // deadlock detected
    ("42", Class::Permanent),    // syntax error, unknown column: broken code
    ("53", Class::Transient),    // insufficient resources: connections, memory, disk
    ("55P03", Class::Transient), // lock not available: lock_timeout
    ("57014", Class::Transient), // query cancelled: statement_timeout. Bounded by the attempts
    ("57P", Class::Transient),   // shutdown, crash, cannot connect now
];

/// The class of a database error, a failed COMMIT's included. A COMMIT whose answer was lost is
/// transient although it may have happened: the message comes again, and the inbox absorbs it.
#[must_use]
pub fn classify(error: &sqlx::Error) -> Class {
    use sqlx::Error as E;
    match error {
        E::Database(error) => {
            error.code().map_or(Class::Unknown, |sqlstate| classify_sqlstate(&sqlstate))
        }
        // No answer, or none that can be read: the connection, the pool, the protocol.
        E::Io(_)
        | E::Tls(_)
        | E::Protocol(_)
        | E::PoolTimedOut
        | E::PoolClosed
        | E::WorkerCrashed => Class::Transient,
        // The statement and the schema do not fit: broken code.
        E::RowNotFound
        | E::TypeNotFound { .. }
        | E::ColumnIndexOutOfBounds { .. }
        | E::ColumnNotFound(_)
        | E::ColumnDecode { .. }
        | E::Encode(_)
        | E::InvalidArgument(_)
        | E::Decode(_) => Class::Permanent,
        _ => Class::Unknown,
    }
}

fn classify_sqlstate(sqlstate: &str) -> Class {
    SQLSTATES
        .iter()
        .filter(|(prefix, _)| sqlstate.starts_with(prefix))
        .max_by_key(|(prefix, _)| prefix.len())
        .map_or(Class::Unknown, |(_, class)| *class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sqlstate_has_its_class() {
        for (sqlstate, class) in [
            ("08006", Class::Transient),
            ("40001", Class::Transient),
            ("40P01", Class::Transient),
            ("53300", Class::Transient),
            ("55P03", Class::Transient),
            ("57P01", Class::Transient),
            ("57P03", Class::Transient),
            ("57014", Class::Transient),
            ("22003", Class::Permanent),
            ("23505", Class::Permanent),
            ("23514", Class::Permanent),
            ("42P01", Class::Permanent),
            ("XX000", Class::Unknown),
            ("P0001", Class::Unknown),
            ("40002", Class::Unknown),
        ] {
            assert_eq!(classify_sqlstate(sqlstate), class, "{sqlstate}");
        }
    }

    #[test]
    fn trouble_with_the_pool_is_transient_and_trouble_with_the_code_is_not() {
        assert_eq!(classify(&sqlx::Error::PoolTimedOut), Class::Transient);
        assert_eq!(classify(&sqlx::Error::RowNotFound), Class::Permanent);
    }
}
