//! What is done to whom and when: a function of the seed alone, so that a run can be had again.
//!
//! What is had again is the plan: the same blows to the same targets in the same order, at the same
//! times where a target is up again by then. How processes and networks take it differs from run to run, as it
//! does in life; a bug that needs a coincidence may take a few runs of its seed.

use crate::ledger::books::Side;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shared::fault::Point;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// A replica of a service, the first or the second, or its ways to its servers.
    Replica(Side, u8),
    /// The server of a service's database.
    Postgres(Side),
    /// RabbitMQ.
    Broker,
}

impl Target {
    /// Everything that there is.
    pub const ALL: [Self; 7] = [
        Self::Replica(Side::Orders, 1),
        Self::Replica(Side::Orders, 2),
        Self::Replica(Side::Inventory, 1),
        Self::Replica(Side::Inventory, 2),
        Self::Postgres(Side::Orders),
        Self::Postgres(Side::Inventory),
        Self::Broker,
    ];
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replica(side, n) => write!(f, "{}, replica {n}", side.service()),
            Self::Postgres(side) => write!(f, "PostgreSQL of {side}"),
            Self::Broker => f.write_str("RabbitMQ"),
        }
    }
}

/// One of a replica's two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To its database.
    Postgres,
    /// To the broker.
    Amqp,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// SIGKILL; started again after a while.
    Kill,
    /// SIGSTOP; SIGCONT after a while.
    Freeze,
    /// SIGTERM, as in a deploy; started again at once. Replicas only.
    Restart,
    /// Restarted so that it kills itself when it first comes by this point; then started as usual.
    DieAt(Point),
    /// Connections are reset and refused for a while.
    Cut(Way),
    /// Nothing is heard or said for a while.
    BlackHole(Way),
    /// What is asked arrives, and the answer does not, for a while.
    LoseAnswers(Way),
    /// Every byte is late for a while.
    Delay(Way),
}

impl Blow {
    /// The kind, for counting.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Freeze => "freeze",
            Self::Restart => "restart",
            Self::DieAt(_) => "die at a fault point",
            Self::Cut(_) => "cut",
            Self::BlackHole(_) => "black hole",
            Self::LoseAnswers(_) => "lose answers",
            Self::Delay(_) => "delay",
        }
    }
}

impl fmt::Display for Blow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())?;
        match self {
            Self::DieAt(point) => write!(f, ", {}", point.name()),
            Self::Cut(way) | Self::BlackHole(way) | Self::LoseAnswers(way) | Self::Delay(way) => f
                .write_str(match way {
                    Way::Postgres => " towards PostgreSQL",
                    Way::Amqp => " towards RabbitMQ",
                }),
            Self::Kill | Self::Freeze | Self::Restart => Ok(()),
        }
    }
}

/// One blow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Since the beginning.
    pub at: Duration,
    /// Who is struck.
    pub target: Target,
    /// With what.
    pub blow: Blow,
    /// For how long.
    pub lasts: Duration,
}

/// The time a target is left in peace after a blow: without it the broker, which takes its time to
/// start, would be down all the while.
const PEACE: Duration = Duration::from_secs(4);

/// The plan for a seed. Blows to several targets overlap; blows to one follow each other.
#[must_use]
pub fn plan(seed: u64, length: Duration) -> Vec<Step> {
    let mut luck = StdRng::seed_from_u64(seed);
    let mut free_at = BTreeMap::new();
    let mut steps = Vec::new();
    let mut at = Duration::ZERO;
    loop {
        at += Duration::from_millis(luck.random_range(200..2000));
        if at >= length {
            return steps;
        }
        let target = draw_target(&mut luck);
        if free_at.get(&target).is_some_and(|free_at| *free_at > at) {
            continue;
        }
        let (blow, lasts) = draw_blow(&mut luck, target);
        // What lasts beyond the end is ended there: everything is healed then.
        let lasts = lasts.min(length - at);
        free_at.insert(target, at + lasts + PEACE);
        steps.push(Step { at, target, blow, lasts });
    }
}

/// The servers take everything along: they are struck less often than the replicas.
fn draw_target(luck: &mut StdRng) -> Target {
    const REPLICAS: usize = 4;
    let index = match luck.random_range(0..12) {
        n if n < 9 => n % REPLICAS,
        n => n - 9 + REPLICAS,
    };
    Target::ALL[index]
}

fn draw_blow(luck: &mut StdRng, target: Target) -> (Blow, Duration) {
    let way = if luck.random_bool(0.5) { Way::Postgres } else { Way::Amqp };
    let blow = match (target, luck.random_range(0..10)) {
        (Target::Postgres(_) | Target::Broker, n) => {
            if n < 5 {
                Blow::Kill
            } else {
                Blow::Freeze
            }
        }
        (Target::Replica(..), 0 | 1) => Blow::Kill,
        (Target::Replica(..), 2) => Blow::Freeze,
        (Target::Replica(..), 3) => Blow::Restart,
        (Target::Replica(side, _), 4 | 5) => Blow::DieAt(draw_point(luck, side)),
        (Target::Replica(..), 6) => Blow::Cut(way),
        (Target::Replica(..), 7) => Blow::BlackHole(way),
        (Target::Replica(..), 8) => Blow::LoseAnswers(way),
        (Target::Replica(..), _) => Blow::Delay(way),
    };
    let longest = match blow {
        Blow::Kill | Blow::LoseAnswers(_) => 3_000,
        Blow::Restart => 1,
        // Past the time-outs, sometimes.
        _ => 9_000,
    };
    (blow, Duration::from_millis(luck.random_range(0..longest)))
}

/// One that the service comes by: a redrive is a command, and clients talk to orders alone.
fn draw_point(luck: &mut StdRng, side: Side) -> Point {
    let elsewhere: &[&str] = match side {
        Side::Orders => &["redrive."],
        Side::Inventory => &["redrive.", "place_order.", "cancel_order."],
    };
    loop {
        let point = Point::ALL[luck.random_range(0..Point::ALL.len())];
        if !elsewhere.iter().any(|path| point.name().starts_with(path)) {
            return point;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const LENGTH: Duration = Duration::from_secs(600);

    #[test]
    fn a_seed_is_a_plan() {
        assert_eq!(plan(7, LENGTH), plan(7, LENGTH));
        assert_ne!(plan(7, LENGTH), plan(8, LENGTH));
    }

    #[test]
    fn in_ten_minutes_everybody_is_struck_and_in_every_way() {
        let steps = plan(7, LENGTH);
        let targets: BTreeSet<_> = steps.iter().map(|step| step.target).collect();
        assert_eq!(targets, BTreeSet::from(Target::ALL));
        let kinds: BTreeSet<_> = steps.iter().map(|step| step.blow.kind()).collect();
        assert_eq!(kinds.len(), 8, "{kinds:?}");
    }

    #[test]
    fn blows_to_one_target_follow_each_other_and_end_in_time() {
        for target in Target::ALL {
            let mut free_at = Duration::ZERO;
            for step in plan(7, LENGTH).into_iter().filter(|step| step.target == target) {
                assert!(step.at >= free_at);
                free_at = step.at + step.lasts;
                assert!(free_at <= LENGTH);
            }
        }
    }
}
