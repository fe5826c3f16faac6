//! What is done to a process at a fault point.

/// A blow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// SIGKILL, as a power cut would. Started again at once.
    Kill,
    /// SIGSTOP. A replacement does the work, until all is settled without the frozen process and the
    /// broker has given it up; then SIGCONT, and it goes on as if nothing had been.
    Freeze,
    /// A panic of the thread that is there.
    Panic,
    /// What the process asks of PostgreSQL next, the COMMIT say, is done; the answer never arrives,
    /// and the connection is cut.
    LoseDatabaseAnswer,
    /// The same with RabbitMQ: what is published arrives, its confirm does not.
    LoseBrokerAnswer,
    /// Neither server says or hears anything any more, until the process has given a connection up
    /// and says that it is not well.
    BlackHole,
}

impl Blow {
    /// Each of them is done at each point.
    pub const ALL: &[Self] = &[
        Self::Kill,
        Self::Freeze,
        Self::Panic,
        Self::LoseDatabaseAnswer,
        Self::LoseBrokerAnswer,
        Self::BlackHole,
    ];

    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "SIGKILL",
            Self::Freeze => "SIGSTOP past every time-out, then SIGCONT",
            Self::Panic => "a panic",
            Self::LoseDatabaseAnswer => "PostgreSQL's answer lost",
            Self::LoseBrokerAnswer => "RabbitMQ's answer lost",
            Self::BlackHole => "a black hole",
        }
    }

    /// `FAULT_ACTION`. What happens outside the process happens while it stands still.
    pub fn action(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Panic => "panic",
            _ => "stop",
        }
    }
}
