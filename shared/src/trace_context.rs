//! W3C trace context, carried from the request that started it all to the last message that follows.
//!
//! The context is stored with the outbox row, in the transaction: a relay that publishes the row an
//! hour and two crashes later still says whose trace it is. A context that is missing or malformed
//! is replaced or dropped, and never a reason to hold a message back.
//! Format: <https://www.w3.org/TR/trace-context/>.

use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};
use serde::Serialize;

/// Headers longer than this are somebody else's problem; W3C asks to carry 512 and 8 192 bytes.
const MAX_TRACESTATE_BYTES: usize = 512;
const MAX_BAGGAGE_BYTES: usize = 8192;

/// The three W3C headers as they travel: HTTP → outbox row → AMQP → outbox row → AMQP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TraceContext {
    /// `00-{trace id}-{span id}-{flags}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// Vendor data that goes with the parent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
    /// Application data that goes with the trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baggage: Option<String>,
}

struct One<'a>(&'a str);

impl Extractor for One<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == "traceparent").then_some(self.0)
    }
    fn keys(&self) -> Vec<&str> {
        vec!["traceparent"]
    }
}

impl TraceContext {
    /// Reads the three headers through `get`. What is malformed or over-long is left out.
    pub fn extract<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Self {
        // Nothing else is allowed in such a header, and PostgreSQL's jsonb would refuse a NUL.
        let get = |name| {
            get(name).filter(|value| value.bytes().all(|b| matches!(b, b'\t' | b' '..=b'~')))
        };
        let traceparent = get("traceparent").filter(|value| is_valid_traceparent(value));
        // `tracestate` means nothing without the parent that it belongs to.
        let tracestate = traceparent
            .and_then(|_| get("tracestate"))
            .filter(|value| !value.is_empty() && value.len() <= MAX_TRACESTATE_BYTES);
        let baggage =
            get("baggage").filter(|value| !value.is_empty() && value.len() <= MAX_BAGGAGE_BYTES);
        Self {
            traceparent: traceparent.map(str::to_owned),
            tracestate: tracestate.map(str::to_owned),
            baggage: baggage.map(str::to_owned),
        }
    }

    /// This context, or the start of a new trace where there is none.
    #[must_use]
    pub fn or_new(mut self) -> Self {
        self.traceparent.get_or_insert_with(|| {
            let ids = RandomIdGenerator::default();
            format!("00-{}-{}-01", ids.new_trace_id(), ids.new_span_id())
        });
        self
    }

    /// The headers that are there, by name.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [
            ("traceparent", &self.traceparent),
            ("tracestate", &self.tracestate),
            ("baggage", &self.baggage),
        ]
        .into_iter()
        .filter_map(|(name, value)| value.as_deref().map(|value| (name, value)))
    }
}

fn is_valid_traceparent(value: &str) -> bool {
    TraceContextPropagator::new().extract(&One(value)).span().span_context().is_valid()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_context_is_carried_unchanged() {
        let context = TraceContext::extract(|name| match name {
            "traceparent" => Some(PARENT),
            "tracestate" => Some("a=b"),
            "baggage" => Some("user=7"),
            _ => None,
        });
        let headers: Vec<_> = context.headers().collect();
        assert_eq!(
            headers,
            [("traceparent", PARENT), ("tracestate", "a=b"), ("baggage", "user=7")]
        );
    }

    #[test]
    fn control_characters_are_left_out() {
        let context = TraceContext::extract(|name| match name {
            "traceparent" => Some(PARENT),
            _ => Some("a=\0"),
        });
        assert_eq!(context.headers().collect::<Vec<_>>(), [("traceparent", PARENT)]);
    }

    #[test]
    fn garbage_starts_a_new_trace() {
        for garbage in ["", "00-0-0-01", "00-00000000000000000000000000000000-b7ad6b7169203331-01"]
        {
            let context = TraceContext::extract(|_| Some(garbage)).or_new();
            let parent = context.traceparent.unwrap_or_default();
            assert!(is_valid_traceparent(&parent) && parent != garbage, "{garbage:?} → {parent:?}");
        }
    }
}
