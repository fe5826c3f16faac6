//! The lines of an order: the one rule for them, wherever they come from. The HTTP API and the
//! message contract both build [`Lines`]; past that point nobody checks again.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Most lines of one order.
pub const MAX_LINES: usize = 100;
/// Most pieces of one sku in one order, added up over its lines.
pub const MAX_COUNT: i64 = 10_000;
/// Longest sku in characters, which are bytes here.
pub const MAX_SKU: usize = 64;

/// A stock keeping unit: 1–64 characters of `A-Z a-z 0-9 . _ -`. ASCII alone, so that two skus that
/// look the same are the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Sku(String);

impl Sku {
    /// The sku as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Sku {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Sku {
    type Error = LineError;

    fn try_from(sku: String) -> Result<Self, LineError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if (1..=MAX_SKU).contains(&sku.len()) && sku.chars().all(allowed) {
            Ok(Self(sku))
        } else {
            // Cut: this text may end up in a header or an answer, and the sku came from outside.
            Err(LineError::Sku(sku.chars().take(MAX_SKU).collect()))
        }
    }
}

/// One line as it comes in, unchecked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLine {
    /// See [`Sku`].
    pub sku: String,
    /// Pieces, 1–10 000.
    pub count: i64,
}

/// One checked line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// What.
    pub sku: Sku,
    /// How many, 1–10 000.
    pub count: i32,
}

/// The lines of an order: 1–100 of them, one for each sku, sorted by sku. That order is also the
/// order in which stock rows are locked, so that two orders never wait for each other in a circle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Lines(Vec<Line>);

/// What is wrong with a line, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// Too few or too many lines.
    #[error("an order has 1 to {MAX_LINES} lines, this one has {0}")]
    Lines(usize),
    /// Not a sku.
    #[error("{0:?} is not a sku: 1 to {MAX_SKU} characters of A-Z a-z 0-9 . _ -")]
    Sku(String),
    /// A count out of range.
    #[error("count of {sku} is {count}, must be 1 to {MAX_COUNT}")]
    Count {
        /// Of what.
        sku: Sku,
        /// How many were asked for.
        count: i64,
    },
    /// Lines of one sku that are too much together.
    #[error("the lines of {sku} add up to {sum}, the most is {MAX_COUNT}")]
    Sum {
        /// Of what.
        sku: Sku,
        /// How many were asked for, together.
        sum: i64,
    },
}

impl Lines {
    /// The lines, sorted by sku.
    #[must_use]
    pub fn as_slice(&self) -> &[Line] {
        &self.0
    }

    /// The skus, in order.
    #[must_use]
    pub fn skus(&self) -> Vec<String> {
        self.0.iter().map(|line| line.sku.to_string()).collect()
    }

    /// The counts, in the order of [`Lines::skus`].
    #[must_use]
    pub fn counts(&self) -> Vec<i32> {
        self.0.iter().map(|line| line.count).collect()
    }
}

impl TryFrom<Vec<RawLine>> for Lines {
    type Error = LineError;

    fn try_from(raw: Vec<RawLine>) -> Result<Self, LineError> {
        if !(1..=MAX_LINES).contains(&raw.len()) {
            return Err(LineError::Lines(raw.len()));
        }
        let mut sums: BTreeMap<Sku, i64> = BTreeMap::new();
        for RawLine { sku, count } in raw {
            let sku = Sku::try_from(sku)?;
            if !(1..=MAX_COUNT).contains(&count) {
                return Err(LineError::Count { sku, count });
            }
            *sums.entry(sku).or_default() += count;
        }
        let line = |(sku, sum): (Sku, i64)| match i32::try_from(sum) {
            Ok(count) if sum <= MAX_COUNT => Ok(Line { sku, count }),
            _ => Err(LineError::Sum { sku, sum }),
        };
        sums.into_iter().map(line).collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn raw(lines: &[(&str, i64)]) -> Vec<RawLine> {
        lines.iter().map(|(sku, count)| RawLine { sku: (*sku).into(), count: *count }).collect()
    }

    #[test]
    fn two_lines_of_one_sku_are_one_line_with_the_sum() {
        let lines = Lines::try_from(raw(&[("b", 1), ("a", 2), ("b", 3)])).expect("valid");
        assert_eq!(lines.skus(), ["a", "b"]);
        assert_eq!(lines.counts(), [2, 4]);
    }

    #[test]
    fn what_is_out_of_range_is_refused_with_its_name() {
        let long = "x".repeat(65);
        for (lines, says) in [
            (vec![], "1 to 100 lines"),
            (vec![("a", 1); 101], "this one has 101"),
            (vec![("", 1)], "is not a sku"),
            (vec![(long.as_str(), 1)], "is not a sku"),
            (vec![("café", 1)], "is not a sku"),
            (vec![("a ", 1)], "is not a sku"),
            (vec![("a\u{0}", 1)], "is not a sku"),
            (vec![("a", 0)], "count of a is 0"),
            (vec![("a", -1)], "count of a is -1"),
            (vec![("a", 10_001)], "count of a is 10001"),
            (vec![("a", i64::MAX)], "must be 1 to 10000"),
            (vec![("a", 10_000), ("a", 1)], "add up to 10001"),
        ] {
            let error = Lines::try_from(raw(&lines)).expect_err("out of range").to_string();
            assert!(error.contains(says), "{error:?} does not say {says:?}");
        }
    }

    proptest! {
        #[test]
        fn lines_are_sorted_unique_and_lose_no_piece(
            input in prop::collection::vec(("[a-e]{1,2}", 1..=100i64), 1..=100)
        ) {
            let raw: Vec<RawLine> =
                input.iter().map(|(sku, count)| RawLine { sku: sku.clone(), count: *count }).collect();
            let total: i64 = input.iter().map(|(_, count)| count).sum();
            let lines = Lines::try_from(raw).expect("in range");
            prop_assert!(lines.as_slice().is_sorted_by(|a, b| a.sku < b.sku));
            prop_assert_eq!(lines.as_slice().iter().map(|line| i64::from(line.count)).sum::<i64>(), total);
        }
    }
}
