//! The ways through a service on which its fault points lie, and what it takes to send a message
//! along each.

use e2e::ledger::books::Side;
use shared::fault::Point;

/// A way through a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// A client places an order.
    Place,
    /// A client cancels one.
    Cancel,
    /// The relay publishes.
    Relay,
    /// The consumer applies.
    Effect,
    /// The consumer sends a message to wait.
    Retry,
    /// The consumer parks a message.
    Park,
    /// A person redrives.
    Redrive,
}

/// On which ways a point lies. Of a new point it must be said here.
pub fn routes(point: Point) -> &'static [Route] {
    use Point as P;
    match point {
        P::PlaceOrderBeforeCommit | P::PlaceOrderAfterCommit => &[Route::Place],
        P::CancelOrderBeforeCommit | P::CancelOrderAfterCommit => &[Route::Cancel],
        P::RelayBeforeClaim | P::RelayAfterClaim | P::RelayBeforeMark | P::RelayAfterMark => {
            &[Route::Relay]
        }
        P::PublisherBeforePublish | P::PublisherBeforeConfirm | P::PublisherAfterConfirm => {
            &[Route::Relay, Route::Retry, Route::Park, Route::Redrive]
        }
        P::ConsumerBeforeCommit | P::ConsumerAfterCommit | P::ConsumerAfterAck => &[Route::Effect],
        P::ConsumerBeforeRetryPublish | P::ConsumerAfterRetryConfirm | P::ConsumerAfterRetryAck => {
            &[Route::Retry]
        }
        P::ConsumerBeforeParkPublish | P::ConsumerAfterParkConfirm | P::ConsumerAfterParkAck => {
            &[Route::Park]
        }
        P::RedriveBeforePublish | P::RedriveAfterConfirm | P::RedriveAfterAck => &[Route::Redrive],
    }
}

impl Route {
    /// For the name of a test.
    pub fn name(self) -> &'static str {
        match self {
            Self::Place => "an order",
            Self::Cancel => "a cancellation",
            Self::Relay => "the relay",
            Self::Effect => "an effect",
            Self::Retry => "a retry",
            Self::Park => "parking",
            Self::Redrive => "a redrive",
        }
    }

    /// Which services have it.
    pub fn sides(self) -> &'static [Side] {
        match self {
            Self::Place | Self::Cancel => &[Side::Orders],
            _ => &[Side::Orders, Side::Inventory],
        }
    }

    /// The roles of the process that is struck, and those of the one that does the rest of the
    /// service's work beside it. A redrive is a command: the service runs as a whole beside it.
    pub fn roles(self) -> (Option<&'static str>, Option<&'static str>) {
        match self {
            Self::Place | Self::Cancel => (Some("http,relay,consumer"), None),
            Self::Relay => (Some("relay"), Some("http,consumer")),
            Self::Effect | Self::Retry | Self::Park => (Some("consumer"), Some("http,relay")),
            Self::Redrive => (None, Some("http,relay,consumer")),
        }
    }

    /// Whether clients talk to the process that is struck.
    pub fn serves(self) -> bool {
        matches!(self, Self::Place | Self::Cancel)
    }

    /// With what SQLSTATE the consumer's transaction has to fail, once, for a message to go this way.
    pub fn provocation(self) -> Option<&'static str> {
        match self {
            Self::Retry => Some("40001"),
            Self::Park | Self::Redrive => Some("22012"),
            _ => None,
        }
    }

    /// Connections to the broker of the process that is struck: a consumer's and a redrive's two
    /// carry deliveries and copies.
    pub fn amqp_connections(self) -> usize {
        match self {
            Self::Place | Self::Cancel => 3,
            Self::Relay => 1,
            Self::Effect | Self::Retry | Self::Park | Self::Redrive => 2,
        }
    }
}
