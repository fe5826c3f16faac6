//! A delivery, read with suspicion: everything on it came from outside.
//!
//! Headers are hints for retries and for people. A hint that is missing, of another type, negative
//! or absurd counts as absent. None of them can make a message be acked, and none can make it be
//! tried for ever: its age counts from its first failure too or, where the broker counts, its
//! deliveries have a limit.

use crate::config::RetryBackend;
use crate::envelope::{ContractError, Envelope};
use crate::failure::Class;
use crate::trace_context::TraceContext;
use chrono::{DateTime, TimeDelta, Utc};
use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable};
use std::time::Duration;

/// Attempts so far, of whatever class they failed.
pub const ATTEMPT: &str = "x-retry-attempt";
/// The class of the last failure.
pub const CLASS: &str = "x-failure-class";
/// Failures of that class in a row.
pub const CLASS_ATTEMPT: &str = "x-failure-class-attempt";
/// When the first of them failed, RFC 3339.
pub const FIRST_FAILED_AT: &str = "x-first-failed-at";
/// How often the broker has handed it out before, where each time counts: the broker's own header,
/// absent on a first delivery by RabbitMQ 4.
const DELIVERIES: &str = "x-delivery-count";
/// The exchange that it was first published to.
pub const ORIGINAL_EXCHANGE: &str = "x-original-exchange";
/// The key that it was first published with.
pub const ORIGINAL_ROUTING_KEY: &str = "x-original-routing-key";
/// The deadline that the producer's `expiration` set, RFC 3339. The property itself is not copied:
/// in a retry queue it would cut the delay short.
pub const PRODUCER_DEADLINE: &str = "x-producer-deadline";
/// What it failed with last.
pub const LAST_ERROR: &str = "x-last-error";
/// Why it was parked.
pub const PARK_REASON: &str = "x-park-reason";
/// When, RFC 3339.
pub const PARKED_AT: &str = "x-parked-at";
/// By which consumer.
pub const CONSUMER: &str = "x-consumer";
/// By which version of its code.
pub const CONSUMER_VERSION: &str = "x-consumer-version";
/// Who published the event.
pub const PRODUCER: &str = "x-producer";
/// How often it was sent back from parking.
pub const REDRIVE_COUNT: &str = "x-redrive-count";
/// When last, RFC 3339: its retries count from then.
pub const REDRIVEN_AT: &str = "x-redriven-at";

/// Nobody tries a message this often: a header that says so is not believed.
const ABSURD_ATTEMPTS: i64 = 1_000_000;
/// Nor is a time further ahead of our clock.
const CLOCKS_DIFFER: TimeDelta = TimeDelta::minutes(5);

/// One delivery and what could be read of it.
pub struct Incoming {
    /// As the client library gave it.
    pub delivery: Delivery,
    /// The body, or why it is none of ours.
    pub envelope: Result<Envelope, ContractError>,
    /// When it came, or was last tried again in place.
    pub received_at: DateTime<Utc>,
    /// What counts attempts between deliveries.
    backend: RetryBackend,
    /// Failures since it came, all of them transient, and when the first was.
    in_place: Option<(u32, DateTime<Utc>)>,
}

impl Incoming {
    /// Reads a delivery. Who counts attempts depends on where failed messages wait: our own headers on
    /// the copies, or the broker on the message itself.
    #[must_use]
    pub fn new(delivery: Delivery, backend: RetryBackend) -> Self {
        let envelope = Envelope::parse(&delivery.data).and_then(|envelope| {
            let message_id = delivery.properties.message_id().as_ref();
            envelope.check_message_id(message_id.map(|id| id.as_str()))?;
            Ok(envelope)
        });
        Self { delivery, envelope, received_at: Utc::now(), backend, in_place: None }
    }

    /// Notes a transient failure after which it is tried again in place.
    pub fn failed_in_place(&mut self) {
        let (failures, first) = self.in_place.unwrap_or((0, self.received_at));
        self.in_place = Some((failures.saturating_add(1), first));
    }

    /// It is being tried again.
    pub fn tried_again(&mut self) {
        self.received_at = Utc::now();
    }

    /// The AMQP property, for logs and copies; inbox and outbox use the envelope's id.
    #[must_use]
    pub fn message_id(&self) -> Option<&str> {
        self.delivery.properties.message_id().as_ref().map(|id| id.as_str())
    }

    /// Its type: the envelope's, or else what the AMQP property says.
    #[must_use]
    pub fn event_type(&self) -> Option<&str> {
        match &self.envelope {
            Ok(envelope) => Some(&envelope.event_type),
            Err(_) => self.delivery.properties.kind().as_ref().map(|kind| kind.as_str()),
        }
    }

    /// How often the broker handed it out before, lost deliveries included. More than none says that
    /// somebody may have died of it.
    #[must_use]
    pub fn redeliveries(&self) -> u32 {
        self.count(DELIVERIES)
    }

    /// How often it was tried, this time included.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        let here = self.in_place.map_or(0, |(failures, _)| failures);
        self.count(ATTEMPT).saturating_add(self.broker_counted()).saturating_add(here + 1)
    }

    /// How often in a row it has failed with this class, this time included. The broker, where it
    /// counts, does not tell classes apart.
    #[must_use]
    pub fn attempts_of(&self, class: Class) -> u32 {
        let same = self.text(CLASS) == Some(class.as_str());
        let earlier = if same { self.count(CLASS_ATTEMPT) } else { 0 };
        let here = match (class, self.in_place) {
            (Class::Transient, Some((failures, _))) => failures,
            _ => 0,
        };
        earlier.saturating_add(self.broker_counted()).saturating_add(here + 1)
    }

    fn broker_counted(&self) -> u32 {
        match self.backend {
            RetryBackend::Buckets => 0,
            RetryBackend::Native => self.redeliveries(),
        }
    }

    /// How often it was sent back from parking.
    #[must_use]
    pub fn redrives(&self) -> u32 {
        self.count(REDRIVE_COUNT)
    }

    /// When it was last sent back from parking, if it was. Not in the future, by more than clocks may
    /// differ: it was set on the operator's machine, a moment ago.
    #[must_use]
    pub fn redriven_at(&self) -> Option<DateTime<Utc>> {
        let at = self.text(REDRIVEN_AT).and_then(time)?;
        (at <= self.received_at + CLOCKS_DIFFER).then_some(at)
    }

    pub(crate) fn count(&self, header: &str) -> u32 {
        self.header(header).and_then(integer).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
    }

    /// When it first failed, if it has. Not in the future.
    #[must_use]
    pub fn first_failed_at(&self) -> Option<DateTime<Utc>> {
        self.past(FIRST_FAILED_AT).or(self.in_place.map(|(_, first)| first))
    }

    /// A time in a header. One that has not come yet is none.
    pub(crate) fn past(&self, header: &str) -> Option<DateTime<Utc>> {
        self.text(header).and_then(time).filter(|at| *at <= self.received_at)
    }

    /// Where it was first published: exchange and key.
    #[must_use]
    pub fn origin(&self) -> (String, String) {
        self.noted_origin().unwrap_or_else(|| {
            (self.delivery.exchange.to_string(), self.delivery.routing_key.to_string())
        })
    }

    /// Where it was first published, as an earlier copy has noted it.
    pub(crate) fn noted_origin(&self) -> Option<(String, String)> {
        let header = |name| self.text(name).map(str::to_owned);
        Some((header(ORIGINAL_EXCHANGE)?, header(ORIGINAL_ROUTING_KEY)?))
    }

    /// Time since it occurred, by the envelope or else by AMQP's timestamp, or since it was sent back
    /// from parking, where it may have waited for days; or since it first failed, if that is longer
    /// ago. A clock that is ahead of ours cannot keep a message young for ever.
    #[must_use]
    pub fn age(&self) -> Duration {
        let began = self.redriven_at().or_else(|| match &self.envelope {
            Ok(envelope) => Some(envelope.occurred_at),
            Err(_) => self.timestamp(),
        });
        let since = |at: DateTime<Utc>| (self.received_at - at).to_std().unwrap_or_default();
        began.into_iter().chain(self.first_failed_at()).map(since).max().unwrap_or_default()
    }

    /// The producer's own deadline, where it set AMQP's `expiration`: not a matter of queues but of
    /// the business, read as such and kept in a header over retries.
    #[must_use]
    pub fn producer_deadline(&self) -> Option<DateTime<Utc>> {
        let kept = self.text(PRODUCER_DEADLINE).and_then(time);
        kept.or_else(|| {
            let expiration = self.delivery.properties.expiration().as_ref()?;
            let millis = expiration.as_str().parse().ok()?;
            let from = match &self.envelope {
                Ok(envelope) => envelope.occurred_at,
                Err(_) => self.timestamp()?,
            };
            from.checked_add_signed(TimeDelta::try_milliseconds(millis)?)
        })
    }

    /// Whose trace it belongs to.
    #[must_use]
    pub fn trace_context(&self) -> TraceContext {
        TraceContext::extract(|name| self.text(name))
    }

    /// All headers.
    #[must_use]
    pub fn headers(&self) -> FieldTable {
        self.delivery.properties.headers().clone().unwrap_or_default()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&AMQPValue> {
        self.delivery.properties.headers().as_ref()?.inner().get(name)
    }

    pub(crate) fn text(&self, header: &str) -> Option<&str> {
        self.header(header).and_then(text)
    }

    fn timestamp(&self) -> Option<DateTime<Utc>> {
        let seconds = (*self.delivery.properties.timestamp())?;
        DateTime::from_timestamp(i64::try_from(seconds).ok()?, 0)
    }
}

/// An integer header. Clients write them in every width that AMQP has.
fn integer(value: &AMQPValue) -> Option<i64> {
    let number = match value {
        AMQPValue::ShortShortInt(n) => i64::from(*n),
        AMQPValue::ShortShortUInt(n) => i64::from(*n),
        AMQPValue::ShortInt(n) => i64::from(*n),
        AMQPValue::ShortUInt(n) => i64::from(*n),
        AMQPValue::LongInt(n) => i64::from(*n),
        AMQPValue::LongUInt(n) => i64::from(*n),
        AMQPValue::LongLongInt(n) => *n,
        _ => return None,
    };
    (0..=ABSURD_ATTEMPTS).contains(&number).then_some(number)
}

pub(crate) fn text(value: &AMQPValue) -> Option<&str> {
    match value {
        AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok(),
        AMQPValue::ShortString(text) => Some(text.as_str()),
        _ => None,
    }
}

fn time(text: &str) -> Option<DateTime<Utc>> {
    DateTime::parse_from_rfc3339(text).ok().map(|time| time.to_utc())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_count_is_read_in_every_width() {
        for value in [
            AMQPValue::ShortShortInt(3),
            AMQPValue::ShortShortUInt(3),
            AMQPValue::ShortInt(3),
            AMQPValue::ShortUInt(3),
            AMQPValue::LongInt(3),
            AMQPValue::LongUInt(3),
            AMQPValue::LongLongInt(3),
        ] {
            assert_eq!(integer(&value), Some(3), "{value:?}");
        }
    }

    /// A delivery with these headers, whose envelope occurred at this time.
    fn incoming(occurred_at: &str, headers: &[(&str, AMQPValue)]) -> Incoming {
        let body = serde_json::json!({
            "id": "id", "type": "order.created", "schema_version": 3, "occurred_at": occurred_at,
            "producer": "orders", "correlation_id": "c", "causation_id": "d",
            "aggregate": {"type": "order", "id": "42", "version": 1}, "data": {}
        });
        let mut table = FieldTable::default();
        for (name, value) in headers {
            table.insert((*name).into(), value.clone());
        }
        let mut delivery =
            Delivery::mock(1, "".into(), "q".into(), false, body.to_string().into_bytes());
        delivery.properties =
            lapin::BasicProperties::default().with_message_id("id".into()).with_headers(table);
        Incoming::new(delivery, RetryBackend::Buckets)
    }

    #[test]
    fn a_time_in_the_future_does_not_keep_a_failing_message_young() {
        let failed_at = (Utc::now() - TimeDelta::hours(1)).to_rfc3339();
        let first = (FIRST_FAILED_AT, AMQPValue::LongString(failed_at.as_str().into()));
        assert!(incoming("2999-01-01T00:00:00Z", &[first]).age() >= Duration::from_secs(3600));
        let forged = (FIRST_FAILED_AT, AMQPValue::LongString("2999-01-01T00:00:00Z".into()));
        assert_eq!(incoming("2999-01-01T00:00:00Z", &[forged]).age(), Duration::ZERO);
    }

    #[test]
    fn the_age_of_a_redriven_message_counts_from_the_redrive() {
        let at = |ago| {
            let time = (Utc::now() - TimeDelta::seconds(ago)).to_rfc3339();
            AMQPValue::LongString(time.into())
        };
        let redriven = incoming("2020-01-01T00:00:00Z", &[(REDRIVEN_AT, at(60))]).age();
        assert!((60..3600).contains(&redriven.as_secs()), "{redriven:?}");
        let failed_since = [(REDRIVEN_AT, at(10)), (FIRST_FAILED_AT, at(7200))];
        assert!(incoming("2020-01-01T00:00:00Z", &failed_since).age().as_secs() >= 7200);
        // A time that has not come yet, or is none, makes nothing young.
        for bad in [at(-3600), AMQPValue::LongString("soon".into()), AMQPValue::LongInt(7)] {
            let age = incoming("2020-01-01T00:00:00Z", &[(REDRIVEN_AT, bad)]).age();
            assert!(age.as_secs() > 5 * 365 * 86_400, "{age:?}");
        }
    }

    #[test]
    fn attempts_are_counted_for_each_class_apart() {
        let headers = [
            (ATTEMPT, AMQPValue::LongInt(5)),
            (CLASS, AMQPValue::LongString("not_yet".into())),
            (CLASS_ATTEMPT, AMQPValue::LongInt(5)),
        ];
        let message = incoming("2026-01-01T00:00:00Z", &headers);
        assert_eq!(message.attempts(), 6);
        assert_eq!(message.attempts_of(Class::NotYet), 6);
        assert_eq!(message.attempts_of(Class::Transient), 1);
    }

    #[test]
    fn the_brokers_count_counts_where_the_broker_delays_and_nowhere_else() {
        let headers = [(DELIVERIES, AMQPValue::LongLongInt(3))];
        let mut message = incoming("2026-01-01T00:00:00Z", &headers);
        assert_eq!((message.attempts(), message.redeliveries()), (1, 3));
        message.backend = RetryBackend::Native;
        assert_eq!((message.attempts(), message.attempts_of(Class::NotYet)), (4, 4));
    }

    #[test]
    fn what_failed_in_place_counts_as_transient() {
        let mut message = incoming("2026-01-01T00:00:00Z", &[]);
        message.failed_in_place();
        message.failed_in_place();
        assert_eq!(message.attempts(), 3);
        assert_eq!(message.attempts_of(Class::Transient), 3);
        assert_eq!(message.attempts_of(Class::Unknown), 1);
        assert!(message.first_failed_at().is_some());
    }

    #[test]
    fn an_attempt_count_that_makes_no_sense_counts_as_absent() {
        for value in [
            AMQPValue::LongInt(-1),
            AMQPValue::LongLongInt(i64::MAX),
            AMQPValue::LongString("3".into()),
            AMQPValue::Double(3.0),
            AMQPValue::Boolean(true),
            AMQPValue::Void,
        ] {
            assert_eq!(integer(&value), None, "{value:?}");
        }
    }
}
