//! A line of the timeline, and how it looks in a terminal of 110 columns.

use super::happening::Happening;
use chrono::TimeDelta;
use std::fmt;

/// What a reader must not miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// It has happened before.
    Repeated,
    /// A repetition that made no difference, thanks to this.
    Absorbed(&'static str),
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated => f.write_str("(repeated)"),
            Self::Absorbed(by) => write!(f, "(absorbed by {by})"),
        }
    }
}

/// One line.
#[derive(Clone, Debug)]
pub struct Line {
    /// Since the story began.
    pub offset: TimeDelta,
    /// Which of ARCHITECTURE.md's hops.
    pub hop: Option<u8>,
    /// Which message.
    pub label: String,
    /// What happened.
    pub text: String,
    /// What is special about it.
    pub mark: Option<Mark>,
    /// Who owns the message from then on.
    pub owner: Option<String>,
    /// What it tells of.
    pub happening: Happening,
}

/// Above the first line.
pub const HEADLINE: &str =
    "      time  hop  message             what happened                                 owner now";

const INDENT: usize = 37;
const TEXT: usize = 44;
const WIDE: usize = 93;

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.offset.num_milliseconds();
        write!(f, "{:>+4}.{:03} s", ms / 1000, (ms % 1000).abs())?;
        let text = match self.mark {
            Some(mark) => format!("{} {mark}", self.text),
            None => self.text.clone(),
        };
        let Some(owner) = &self.owner else {
            // Of no message: across the columns.
            let mut lines = wrap(&text, WIDE).into_iter();
            write!(f, "  ── {}", lines.next().unwrap_or_default())?;
            return lines.try_for_each(|line| write!(f, "\n               {line}"));
        };
        let hop = self.hop.map_or_else(String::new, |hop| hop.to_string());
        let mut lines = wrap(&text, TEXT).into_iter();
        let first = lines.next().unwrap_or_default();
        write!(f, "  {hop:>3}  {:<18}  {first:<TEXT$}  {owner}", self.label)?;
        lines.try_for_each(|line| write!(f, "\n{:INDENT$}{line}", ""))
    }
}

/// Breaks a text between words.
#[must_use]
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
