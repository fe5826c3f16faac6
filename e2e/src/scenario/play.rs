//! The stories, one a file.

mod binding_removed;
mod consumer_killed;
mod database_away;
mod malformed_json;
mod order_violated;
mod parking_unavailable;
mod retry_ack_lost;
mod retry_binding_removed;
mod unbound;

use super::pace::Pace;
use super::stage::Stage;
use crate::ledger::Expect;
use crate::system::{Node, Options};
use anyhow::Result;

/// What a scenario is about.
#[derive(Debug)]
pub struct About {
    /// What it is called.
    pub name: &'static str,
    /// What happens, in a sentence.
    pub sentence: &'static str,
    /// What is to be learnt from it.
    pub shows: &'static str,
}

/// One of the stories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// A consumer dies between its COMMIT and its Ack.
    ConsumerKilled,
    /// PostgreSQL is away for longer than a message's retries last.
    DatabaseAwayTooLong,
    /// PostgreSQL is back before the retries end.
    DatabaseBackInTime,
    /// A body that nobody can read.
    MalformedJson,
    /// A consumer dies between the copy for a retry queue and its Ack.
    RetryAckLost,
    /// The events' exchange leads to no queue.
    BindingRemoved,
    /// The retry exchange leads to no queue.
    RetryBindingRemoved,
    /// A later event comes while the earlier one waits.
    OrderViolated,
    /// Parking takes nothing.
    ParkingUnavailable,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::ConsumerKilled,
        Self::DatabaseAwayTooLong,
        Self::DatabaseBackInTime,
        Self::MalformedJson,
        Self::RetryAckLost,
        Self::BindingRemoved,
        Self::RetryBindingRemoved,
        Self::OrderViolated,
        Self::ParkingUnavailable,
    ];

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scenario| scenario.about().name == name)
    }

    /// What it is about.
    #[must_use]
    pub fn about(self) -> &'static About {
        match self {
            Self::ConsumerKilled => &consumer_killed::ABOUT,
            Self::DatabaseAwayTooLong => &database_away::TOO_LONG,
            Self::DatabaseBackInTime => &database_away::BACK_IN_TIME,
            Self::MalformedJson => &malformed_json::ABOUT,
            Self::RetryAckLost => &retry_ack_lost::ABOUT,
            Self::BindingRemoved => &binding_removed::ABOUT,
            Self::RetryBindingRemoved => &retry_binding_removed::ABOUT,
            Self::OrderViolated => &order_violated::ABOUT,
            Self::ParkingUnavailable => &parking_unavailable::ABOUT,
        }
    }

    pub(super) fn options(self, pace: Pace) -> Options {
        let mut options = Options::default();
        match self {
            Self::DatabaseAwayTooLong | Self::DatabaseBackInTime => {
                options.own_inventory_postgres = true;
            }
            Self::ParkingUnavailable if pace == Pace::Real => options.rabbitmq = Node::Unhurried,
            _ => {}
        }
        // Four short attempts may be over before a busy machine has mended what makes them fail.
        if pace == Pace::Short && self != Self::DatabaseAwayTooLong {
            options.env.push(("RETRY_ATTEMPTS_TRANSIENT", "20"));
        }
        options
    }

    pub(super) async fn play(self, stage: &mut Stage) -> Result<Expect> {
        match self {
            Self::ConsumerKilled => consumer_killed::play(stage).await,
            Self::DatabaseAwayTooLong => database_away::too_long(stage).await,
            Self::DatabaseBackInTime => database_away::back_in_time(stage).await,
            Self::MalformedJson => malformed_json::play(stage).await,
            Self::RetryAckLost => retry_ack_lost::play(stage).await,
            Self::BindingRemoved => binding_removed::play(stage).await,
            Self::RetryBindingRemoved => retry_binding_removed::play(stage).await,
            Self::OrderViolated => order_violated::play(stage).await,
            Self::ParkingUnavailable => parking_unavailable::play(stage).await,
        }
    }
}
