//! Named points at which a test can kill this process, compiled in by the feature `fault-points`
//! alone: in a shipped build [`point`] is nothing.
//!
//! `FAULT_POINT=consumer.after_commit` in the environment makes the process kill itself with
//! SIGKILL, as a power cut would, the first time it passes there: no destructor runs, no buffer is
//! flushed, no socket is closed in an orderly way. With `FAULT_ACTION=stop` it freezes there instead,
//! until somebody sends SIGCONT; with `FAULT_ACTION=panic` it panics.

/// Declares [`Point`] with its names and the list of all, so that none can be missing from the list.
macro_rules! points {
    ($($(#[doc = $doc:literal])+ $point:ident = $name:literal,)+) => {
        /// Where. Each name is `{module}.{before|after}_{what}`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Point {
            $($(#[doc = $doc])+ $point,)+
        }

        impl Point {
            /// Every point there is, in the order of a message's path.
            pub const ALL: &[Self] = &[$(Self::$point),+];

            /// As it is written in `FAULT_POINT`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)+
                }
            }
        }
    };
}

points! {
    /// Order, key and event are written, not committed.
    PlaceOrderBeforeCommit = "place_order.before_commit",
    /// They are committed, the client does not know.
    PlaceOrderAfterCommit = "place_order.after_commit",
    /// The order's end and its event are written, not committed.
    CancelOrderBeforeCommit = "cancel_order.before_commit",
    /// They are committed, the client does not know.
    CancelOrderAfterCommit = "cancel_order.after_commit",
    /// The relay leads and has not looked yet.
    RelayBeforeClaim = "relay.before_claim",
    /// The batch is read, nothing is sent.
    RelayAfterClaim = "relay.after_claim",
    /// A batch (of a relay, or one copy of a consumer or of a redrive) is about to leave.
    PublisherBeforePublish = "publisher.before_publish",
    /// It has left for the broker, its confirms have not been looked at.
    PublisherBeforeConfirm = "publisher.before_confirm",
    /// Its confirms are in, nobody has drawn a consequence.
    PublisherAfterConfirm = "publisher.after_confirm",
    /// The broker has the batch, the table does not know.
    RelayBeforeMark = "relay.before_mark",
    /// The table knows.
    RelayAfterMark = "relay.after_mark",
    /// The effect is written, not committed.
    ConsumerBeforeCommit = "consumer.before_commit",
    /// The effect is committed, the broker does not know.
    ConsumerAfterCommit = "consumer.after_commit",
    /// The broker has been told, as far as this process can tell.
    ConsumerAfterAck = "consumer.after_ack",
    /// The message has failed and is to be tried again, nothing is sent.
    ConsumerBeforeRetryPublish = "consumer.before_retry_publish",
    /// The retry copy is in its queue, the original is not acked.
    ConsumerAfterRetryConfirm = "consumer.after_retry_confirm",
    /// The original is acked too.
    ConsumerAfterRetryAck = "consumer.after_retry_ack",
    /// The message is to be parked, nothing is sent.
    ConsumerBeforeParkPublish = "consumer.before_park_publish",
    /// The parking copy is in its queue, the original is not acked.
    ConsumerAfterParkConfirm = "consumer.after_park_confirm",
    /// The original is acked too.
    ConsumerAfterParkAck = "consumer.after_park_ack",
    /// A parked message is about to be sent back to its queue.
    RedriveBeforePublish = "redrive.before_publish",
    /// Its copy is in the queue, the parked original is not acked.
    RedriveAfterConfirm = "redrive.after_confirm",
    /// The parked original is acked, the audit row does not count it.
    RedriveAfterAck = "redrive.after_ack",
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
