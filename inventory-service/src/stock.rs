//! The decision whether an order can be had: pure, so that it can be read and tested alone.

use shared::events::{Refusal, RefusalReason};
use shared::lines::Lines;
use std::collections::HashMap;

/// All lines or none. `free` is what is left of each sku that exists. The refusal names the first
/// line, in sku order, that cannot be served.
///
/// # Errors
/// The refusal: a "no" that is an answer like any other.
pub fn decide(lines: &Lines, free: &HashMap<String, i64>) -> Result<(), Refusal> {
    for line in lines.as_slice() {
        let reason = match free.get(line.sku.as_str()) {
            None => RefusalReason::UnknownSku,
            Some(free) if *free < i64::from(line.count) => RefusalReason::OutOfStock,
            Some(_) => continue,
        };
        return Err(Refusal { reason, sku: line.sku.clone() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::lines::RawLine;

    fn lines(lines: &[(&str, i64)]) -> Lines {
        let raw = |(sku, count): &(&str, i64)| RawLine { sku: (*sku).into(), count: *count };
        Lines::try_from(lines.iter().map(raw).collect::<Vec<_>>()).expect("valid lines")
    }

    #[test]
    fn all_lines_are_served_or_the_first_that_cannot_be_is_named() {
        let free = HashMap::from([("a".to_owned(), 5), ("b".to_owned(), 0)]);
        assert_eq!(decide(&lines(&[("a", 5)]), &free), Ok(()));
        for (wanted, reason, sku) in [
            (vec![("a", 6)], RefusalReason::OutOfStock, "a"),
            (vec![("a", 1), ("b", 1)], RefusalReason::OutOfStock, "b"),
            (vec![("c", 1), ("b", 1)], RefusalReason::OutOfStock, "b"),
            (vec![("a", 1), ("c", 1)], RefusalReason::UnknownSku, "c"),
        ] {
            let refusal = decide(&lines(&wanted), &free).expect_err("cannot be served");
            assert_eq!((refusal.reason, refusal.sku.as_str()), (reason, sku), "{wanted:?}");
        }
    }
}
