//! Counters of the message path, through the OpenTelemetry API; `/metrics` serves them.
//!
//! Labels come from this code alone, never from a message: their number is bounded.

use crate::failure::Class;
use crate::retention::Round;
use crate::retry::{Outcome, ParkReason};
use anyhow::Context;
use opentelemetry::KeyValue;
use opentelemetry::metrics::{Counter, Gauge, Histogram, MeterProvider};
use opentelemetry_sdk::metrics::SdkMeterProvider;
use prometheus::{Registry, TextEncoder};
use std::time::Duration;

/// The instruments.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    /// Dropped, it would shut the exporter down, and the registry would be empty.
    _provider: SdkMeterProvider,
    published: Counter<u64>,
    publish_seconds: Histogram<f64>,
    outbox_refused: Counter<u64>,
    handled: Counter<u64>,
    retried: Counter<u64>,
    parked: Counter<u64>,
    outage: Gauge<u64>,
    retention_rounds: Counter<u64>,
    pruned: Counter<u64>,
}

impl Metrics {
    /// Makes the instruments and the registry that [`Metrics::encode`] reads.
    ///
    /// # Errors
    /// When the exporter cannot be registered.
    pub fn new() -> anyhow::Result<Self> {
        let registry = Registry::new();
        let exporter = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .build()
            .context("cannot register the Prometheus exporter")?;
        let provider = SdkMeterProvider::builder().with_reader(exporter).build();
        let meter = provider.meter("message_path");
        Ok(Self {
            registry,
            _provider: provider,
            published: meter
                .u64_counter("messaging.client.sent.messages")
                .with_description("Outbox rows that the broker confirmed")
                .build(),
            publish_seconds: meter
                .f64_histogram("messaging.client.operation.duration")
                .with_unit("s")
                .with_description("A relay batch, from its first publish to the mark")
                .build(),
            outbox_refused: meter
                .u64_counter("outbox.refused")
                .with_description("Refusals of single outbox rows, by whether the row was parked")
                .build(),
            handled: meter
                .u64_counter("messaging.client.consumed.messages")
                .with_description("Messages acked, by outcome")
                .build(),
            retried: meter
                .u64_counter("consumer.retried")
                .with_description("Failed messages that will be tried again, by failure class")
                .build(),
            parked: meter
                .u64_counter("consumer.parked")
                .with_description("Messages sent to parking, by reason")
                .build(),
            outage: meter
                .u64_gauge("consumer.outage")
                .with_description("1 while messages are left alone because the database is away")
                .build(),
            retention_rounds: meter
                .u64_counter("retention.rounds")
                .with_description(
                    "Looks for old rows, by what became of them. Of all replicas together, one is \
                      done again and again, or the tables grow",
                )
                .build(),
            pruned: meter
                .u64_counter("retention.pruned")
                .with_description("Old rows that were deleted, by table")
                .build(),
        })
    }

    /// The text that Prometheus scrapes.
    ///
    /// # Errors
    /// When a metric family is inconsistent.
    pub fn encode(&self) -> anyhow::Result<String> {
        TextEncoder::new()
            .encode_to_string(&self.registry.gather())
            .context("cannot encode the metrics")
    }

    pub(crate) fn published(&self, rows: usize, took: Duration) {
        self.published.add(u64::try_from(rows).unwrap_or(u64::MAX), &[]);
        self.publish_seconds.record(took.as_secs_f64(), &[]);
    }

    pub(crate) fn outbox_refused(&self, parked: bool) {
        self.outbox_refused.add(1, &[KeyValue::new("parked", parked)]);
    }

    pub(crate) fn handled(&self, consumer: &'static str, outcome: Outcome) {
        let labels =
            [KeyValue::new("consumer", consumer), KeyValue::new("outcome", outcome.as_str())];
        self.handled.add(1, &labels);
    }

    pub(crate) fn retried(&self, consumer: &'static str, class: Class) {
        let labels = [KeyValue::new("consumer", consumer), KeyValue::new("class", class.as_str())];
        self.retried.add(1, &labels);
    }

    pub(crate) fn parked(&self, consumer: &'static str, reason: ParkReason) {
        let labels =
            [KeyValue::new("consumer", consumer), KeyValue::new("reason", reason.as_str())];
        self.parked.add(1, &labels);
    }

    pub(crate) fn outage(&self, consumer: &'static str, on: bool) {
        self.outage.record(u64::from(on), &[KeyValue::new("consumer", consumer)]);
    }

    pub(crate) fn retention_round(&self, round: Round) {
        self.retention_rounds.add(1, &[KeyValue::new("outcome", round.as_str())]);
    }

    pub(crate) fn pruned(&self, table: &'static str, rows: u64) {
        self.pruned.add(rows, &[KeyValue::new("table", table)]);
    }
}
