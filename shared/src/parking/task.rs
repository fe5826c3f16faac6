//! What a person asks for: what to do, with which messages, on whose behalf.

use super::filter::Filter;
use super::plan::Rate;
use std::num::NonZeroU32;

/// What is done with parked messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They go back to their queue.
    Redrive,
    /// They are gone for good.
    Discard,
}

impl Action {
    /// As it is written in the audit.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
        }
    }

    /// What has been done with messages.
    #[must_use]
    pub fn done(self) -> &'static str {
        match self {
            Self::Redrive => "redriven",
            Self::Discard => "discarded",
        }
    }
}

/// What somebody asks for.
#[derive(Clone, Debug)]
pub struct Task {
    /// What to do,
    pub action: Action,
    /// with which messages,
    pub filter: Filter,
    /// with how many at most,
    pub max: Option<NonZeroU32>,
    /// with how many a second at most,
    pub rate: Option<Rate>,
    /// on whose behalf.
    pub who: String,
}

/// A name that the audit can keep.
///
/// # Errors
/// Says what is wrong with it.
pub fn name(text: &str) -> Result<String, String> {
    if (1..=200).contains(&text.len()) && !text.chars().any(char::is_control) {
        Ok(text.to_owned())
    } else {
        Err("a name has 1 to 200 bytes and no control characters".into())
    }
}
