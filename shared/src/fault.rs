//! Named points at which a test can kill this process, compiled in by the feature `fault-points`
//! alone: in a shipped build [`point`] is nothing.
//!
//! `FAULT_POINT=consumer.after_commit` in the environment makes the process kill itself with
//! SIGKILL, as a power cut would, the first time it passes there: no destructor runs, no buffer is
//! flushed, no socket is closed in an orderly way. With `FAULT_ACTION=stop` it freezes there instead,
//! until somebody sends SIGCONT; with `FAULT_ACTION=panic` it panics.

/// Where. Each name is `{module}.{before|after}_{what}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Order, key and event are written, not committed.
    PlaceOrderBeforeCommit,
    /// They are committed, the client does not know.
    PlaceOrderAfterCommit,
    /// The batch is read, nothing is sent.
    RelayAfterClaim,
    /// A batch has left for the broker, its confirms have not been looked at.
    PublisherBeforeConfirm,
    /// The broker has the batch, the table does not know.
    RelayBeforeMark,
    /// The table knows.
    RelayAfterMark,
    /// The effect is written, not committed.
    ConsumerBeforeCommit,
    /// The effect is committed, the broker does not know.
    ConsumerAfterCommit,
    /// The retry copy is in its queue, the original is not acked.
    ConsumerAfterRetryConfirm,
    /// The parking copy is in its queue, the original is not acked.
    ConsumerAfterParkConfirm,
    /// A parked message is about to be sent back to its queue.
    RedriveBeforePublish,
    /// Its copy is in the queue, the parked original is not acked.
    RedriveAfterConfirm,
}

impl Point {
    /// Every point there is.
    pub const ALL: &[Self] = &[
        Self::PlaceOrderBeforeCommit,
        Self::PlaceOrderAfterCommit,
        Self::RelayAfterClaim,
        Self::PublisherBeforeConfirm,
        Self::RelayBeforeMark,
        Self::RelayAfterMark,
        Self::ConsumerBeforeCommit,
        Self::ConsumerAfterCommit,
        Self::ConsumerAfterRetryConfirm,
        Self::ConsumerAfterParkConfirm,
        Self::RedriveBeforePublish,
        Self::RedriveAfterConfirm,
    ];

    /// As it is written in `FAULT_POINT`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PlaceOrderBeforeCommit => "place_order.before_commit",
            Self::PlaceOrderAfterCommit => "place_order.after_commit",
            Self::RelayAfterClaim => "relay.after_claim",
            Self::PublisherBeforeConfirm => "publisher.before_confirm",
            Self::RelayBeforeMark => "relay.before_mark",
            Self::RelayAfterMark => "relay.after_mark",
            Self::ConsumerBeforeCommit => "consumer.before_commit",
            Self::ConsumerAfterCommit => "consumer.after_commit",
            Self::ConsumerAfterRetryConfirm => "consumer.after_retry_confirm",
            Self::ConsumerAfterParkConfirm => "consumer.after_park_confirm",
            Self::RedriveBeforePublish => "redrive.before_publish",
            Self::RedriveAfterConfirm => "redrive.after_confirm",
        }
    }
}

const ACTIONS: &[&str] = &["kill", "stop", "panic"];

/// Dies, freezes or panics here if the environment says so.
///
/// # Panics
/// When it is asked to.
#[cfg(feature = "fault-points")]
pub fn point(here: Point) {
    use nix::sys::signal::{Signal, raise};
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicBool, Ordering};
    static CHOSEN: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("FAULT_POINT").ok());
    static ACTION: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("FAULT_ACTION").ok());
    static DONE: AtomicBool = AtomicBool::new(false);
    if CHOSEN.as_deref() != Some(here.name()) || DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let signal = match ACTION.as_deref() {
        #[allow(clippy::panic)]
        Some("panic") => panic!("asked to panic at {}", here.name()),
        Some("stop") => Signal::SIGSTOP,
        _ => Signal::SIGKILL,
    };
    // Fails only for a signal or a process that does not exist.
    let _ = raise(signal);
}

/// Nothing: fault points are not compiled in.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub fn point(_here: Point) {}

/// Refuses a `FAULT_POINT` that this build would silently not honour.
///
/// # Errors
/// When the name is unknown, or fault points are not compiled in.
pub fn check_environment() -> anyhow::Result<()> {
    let Ok(name) = std::env::var("FAULT_POINT") else { return Ok(()) };
    anyhow::ensure!(
        cfg!(feature = "fault-points"),
        "FAULT_POINT is set, but this build has no fault points (cargo feature `fault-points`)"
    );
    anyhow::ensure!(
        Point::ALL.iter().any(|point| point.name() == name),
        "FAULT_POINT={name} is unknown; there are: {}",
        Point::ALL.iter().map(|point| point.name()).collect::<Vec<_>>().join(", ")
    );
    let action = std::env::var("FAULT_ACTION").unwrap_or_else(|_| "kill".to_owned());
    anyhow::ensure!(
        ACTIONS.contains(&action.as_str()),
        "FAULT_ACTION={action} is unknown; there are: {}",
        ACTIONS.join(", ")
    );
    Ok(())
}
