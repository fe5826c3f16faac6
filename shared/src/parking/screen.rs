//! What the commands print. Standard output has what was asked for, a table or one JSON object a line,
//! and nothing else; progress goes to standard error, as a bar where that is a terminal.
//!
//! Texts of messages are shown with their control characters escaped: they came from outside, and a
//! terminal obeys some.

use super::lot::Found;
use super::parked::{About, Parked};
use super::run::{Plan, Report};
use super::task::Action;
use crate::failure::Class;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

/// As much as our own copies carry. `show` has all that anybody's does.
const MOST_ERROR_CHARS: usize = 512;
/// Without a terminal: the time between two lines about progress.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// One object, one line.
pub(super) fn json_line(value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    let mut out = stdout().lock();
    out.write_all(&line)?;
    // Before whatever comes next: a discarded message may be nowhere else.
    out.flush()
}

/// What `list` has found.
pub(super) fn found(found: &Found, queue: &str, json: bool) -> io::Result<()> {
    let Found { messages, matched, looked_at, .. } = found;
    list(messages, json)?;
    if json {
        return Ok(());
    }
    let shown = messages.len();
    let mut line = match (looked_at, matched) {
        (0, _) => nothing(queue),
        (_, 0) => format!("none of the {looked_at} parked messages match"),
        _ => format!("{matched} of {looked_at} parked messages match"),
    };
    if shown < usize::try_from(*matched).unwrap_or(usize::MAX) {
        let _ = write!(line, "; these are the first {shown}, --limit shows more");
    }
    writeln!(stdout().lock(), "{line}")
}

/// What a run would do.
pub(super) fn plan(plan: &Plan, action: Action, queue: &str, json: bool) -> io::Result<()> {
    list(&plan.messages, json)?;
    if json {
        return Ok(());
    }
    let line = match plan.looked_at {
        0 => nothing(queue),
        _ => format!(
            "{} of {} matching messages would be {}, in this order; nothing was moved",
            plan.messages.len(),
            plan.matched,
            action.done()
        ),
    };
    writeln!(stdout().lock(), "{line}")
}

/// How a run ended. In a line of its own, and apart from JSON.
pub(super) fn report(
    report: &Report,
    run: i64,
    action: Action,
    queue: &str,
    json: bool,
) -> io::Result<()> {
    let Report { done, matched, ready, interrupted } = report;
    let word = action.done();
    let left = i64::from(*matched) - i64::from(*done);
    let line = match (ready, matched) {
        (0, _) => nothing(queue),
        (_, 0) => format!("none of the {ready} parked messages match"),
        _ if *interrupted => format!(
            "interrupted: {done} of {matched} matching messages are {word}, the rest is as before"
        ),
        _ if left > 0 => format!(
            "{done} of {matched} matching messages are {word}; run it again for the other {left}"
        ),
        _ => format!("{done} of {matched} matching messages are {word}"),
    };
    let line = format!("{line} (run {run})\n");
    if json {
        io::stderr().lock().write_all(line.as_bytes())
    } else {
        stdout().lock().write_all(line.as_bytes())
    }
}

fn nothing(queue: &str) -> String {
    format!("nothing is in {queue}, or somebody else looks at it in this moment")
}

fn list(messages: &[Parked], json: bool) -> io::Result<()> {
    if json {
        return messages.iter().try_for_each(|parked| json_line(&parked.about));
    }
    if messages.is_empty() {
        return Ok(());
    }
    let head = ["message", "type", "aggregate", "reason", "class", "tried", "redriven", "parked"];
    let rows = messages.iter().map(|parked| row(&parked.about));
    let table: Vec<[String; 8]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; 8] = std::array::from_fn(|column| width(column).unwrap_or_default());
    // An error is as long as it is: it has the next line to itself.
    let errors = std::iter::once(None).chain(messages.iter().map(|m| m.about.error.as_ref()));
    let mut out = stdout().lock();
    for (row, error) in table.iter().zip(errors) {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        if let Some(error) = error {
            let beginning: String = error.chars().take(MOST_ERROR_CHARS).collect();
            writeln!(out, "    {}", escaped(&beginning))?;
        }
    }
    Ok(())
}

fn row(about: &About) -> [String; 8] {
    let text = |text: &Option<String>| text.as_deref().map_or_else(|| "-".into(), escaped);
    let aggregate = match (&about.aggregate_type, &about.aggregate_id, about.aggregate_version) {
        (Some(kind), Some(id), Some(version)) => escaped(&format!("{kind} {id} v{version}")),
        (_, id, _) => text(id),
    };
    [
        text(&about.message_id),
        text(&about.event_type),
        aggregate,
        text(&about.reason),
        about.class.map_or("-", Class::as_str).into(),
        about.attempts.to_string(),
        about.redrives.to_string(),
        about.parked_at.map_or_else(|| "-".into(), |at| at.format("%F %TZ").to_string()),
    ]
}

/// All of one message, for people.
pub(super) fn details(parked: &Parked) -> io::Result<()> {
    let full = parked.in_full();
    let mut out = String::new();
    for (section, indent) in [("about", ""), ("properties", "  "), ("headers", "  ")] {
        if section != "about" {
            let _ = writeln!(out, "{section}");
        }
        for (name, value) in full[section].as_object().into_iter().flatten() {
            let value = match value {
                Value::Null => continue,
                Value::String(text) => escaped(text),
                other => other.to_string(),
            };
            let _ = writeln!(out, "{indent}{:<24} {value}", escaped(name));
        }
    }
    let (body, form) = match full["body"].as_str() {
        Some(body) => (body, ""),
        None => (full["body_hex"].as_str().unwrap_or_default(), ", not text: in hexadecimal"),
    };
    let _ = writeln!(out, "body ({} bytes{form})", parked.about.bytes);
    for line in body.lines() {
        let _ = writeln!(out, "  {}", escaped(line));
    }
    let mut screen = stdout().lock();
    writeln!(screen, "{out}")
}

fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// How far a run has come.
pub(super) enum Progress {
    /// On a terminal.
    Bar(ProgressBar),
    /// Elsewhere.
    Lines { action: Action, total: usize, done: usize, said_at: Instant },
}

impl Progress {
    pub(super) fn new(action: Action, total: usize) -> Self {
        if !io::stderr().is_terminal() {
            return Self::Lines { action, total, done: 0, said_at: Instant::now() };
        }
        let bar = ProgressBar::new(u64::try_from(total).unwrap_or(u64::MAX));
        // A template that cannot be read would leave the library's own style.
        if let Ok(style) =
            ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}, {per_sec}, {eta} left")
        {
            bar.set_style(style);
        }
        bar.set_message(action.done());
        Self::Bar(bar)
    }

    /// Another one has left.
    pub(super) fn advance(&mut self) {
        match self {
            Self::Bar(bar) => bar.inc(1),
            Self::Lines { action, total, done, said_at } => {
                *done += 1;
                if said_at.elapsed() >= LINE_INTERVAL {
                    *said_at = Instant::now();
                    eprintln!("{} {done} of {total}", action.done());
                }
            }
        }
    }

    /// Prints something else without spoiling the bar.
    pub(super) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        match self {
            Self::Bar(bar) => bar.suspend(print),
            Self::Lines { .. } => print(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_told_nothing_by_a_message() {
        assert_eq!(escaped("a\u{1b}[2Jb\r\n\u{9b}c é"), "a\\u{1b}[2Jb\\r\\n\\u{9b}c é");
    }
}
