//! Hops 4 to 8: delivery → inbox, effect and answer in one COMMIT → Ack; or retry; or parking.
//!
//! What a crash does here:
//!
//! | crash | then |
//! |---|---|
//! | before the COMMIT | nothing has happened; the broker delivers again |
//! | after the COMMIT, before the Ack | the broker delivers again; the inbox makes it a no-op |
//! | after the copy to a retry queue or parking, before the Ack | two copies; the inbox makes them one effect |
//!
//! All three follow from one rule: a message is acked only after its next owner has it, the database
//! by COMMIT or another queue by confirm.
//!
//! Each worker has a channel of its own to consume and one to publish, on two connections: a broker
//! in distress blocks connections that publish, and acks must not be stuck behind that.

mod lane;
mod session;
mod settle;
mod worker;

use crate::config::{BrokerArgs, ConfirmArgs, ConsumerArgs};
use crate::connection::{self, Connector};
use crate::envelope::{ContractError, Envelope};
use crate::failure::Failure;
use crate::fault::{self, Point};
use crate::health::Part;
use crate::inbox::{self, Admission};
use crate::incoming::Incoming;
use crate::management::Management;
use crate::metrics::Metrics;
use crate::outage::Outage;
use crate::pool::Pool;
use crate::retry::{Budget, Outcome};
use crate::topology::Topology;
use crate::trace_context::TraceContext;
use futures_util::FutureExt;
use sqlx::{Connection, PgConnection};
use std::panic::AssertUnwindSafe;
use tokio_util::sync::CancellationToken;

/// The business side of a consumer.
pub trait Handler: Send + Sync + 'static {
    /// Names this consumer in the inbox. Never change it: the old rows would be forgotten.
    const NAME: &'static str;

    /// What it understands.
    type Event: Send + Sync;

    /// Reads the event. Needs no database, and comes first: what will never be understood is parked
    /// at once, even while a predecessor is missing or the database is away.
    ///
    /// # Errors
    /// [`ContractError`], which no retry mends.
    fn decode(envelope: &Envelope) -> Result<Self::Event, ContractError>;

    /// Applies one event inside the open transaction, which also holds the inbox row. Whatever it
    /// wants to tell others it appends to the outbox of the same transaction. It neither commits
    /// nor publishes.
    fn handle(
        &self,
        message: Message<'_, Self::Event>,
        tx: &mut PgConnection,
    ) -> impl Future<Output = Result<Outcome, Failure>> + Send;

    /// Called after a COMMIT that may have appended to the outbox.
    fn committed(&self) {}
}

/// What a handler gets.
pub struct Message<'a, E> {
    /// What it says.
    pub event: E,
    /// The envelope that it came in.
    pub envelope: &'a Envelope,
    /// Whose trace it belongs to, to be passed on with the answer.
    pub trace: TraceContext,
}

/// A consumer, ready to be run.
pub struct Consumer<H> {
    /// The business side.
    pub handler: H,
    /// Where the effects go.
    pub pool: Pool,
    /// Where messages come from.
    pub broker: BrokerArgs,
    /// Where policies are checked.
    pub management: Management,
    /// The queue and what surrounds it.
    pub topology: Topology,
    /// Workers, prefetch, bounds.
    pub args: ConsumerArgs,
    /// How long a copy waits for its confirm.
    pub confirm: ConfirmArgs,
    /// This consumer's place in `/health/ready`.
    pub part: Part,
    /// The topology's place in `/health/ready`.
    pub topology_part: Part,
    /// Counters.
    pub metrics: Metrics,
    /// Whether the database is away.
    pub outage: Outage,
}

/// The two connections of a consumer.
struct Connectors {
    consuming: Connector,
    publishing: Connector,
}

impl<H: Handler> Consumer<H> {
    /// Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let brokers = Connectors {
            consuming: Connector::new(self.broker.clone(), "consumer"),
            publishing: Connector::new(self.broker.clone(), "consumer (retries, parking)"),
        };
        let session = || self.session(&brokers, &shutdown);
        connection::supervise(self.part.clone(), shutdown.clone(), session).await;
    }

    fn budget(&self) -> Budget {
        self.args.budget(&self.topology.args)
    }

    /// Asks whether the database takes messages.
    async fn probe_database(&self) -> Result<(), Failure> {
        let probe = async {
            let mut db = self.pool.borrow().await?;
            inbox::probe(&mut db, H::NAME).await?;
            db.give_back();
            Ok(())
        };
        let limit = self.args.consumer_handle_timeout;
        let late = || Failure::database_away(anyhow::anyhow!("no answer within {limit:?}"));
        tokio::time::timeout(limit, probe).await.unwrap_or_else(|_| Err(late()))
    }

    /// Gives a message its effect, once, or says why not. Bounded in time; a panic of the handler
    /// is a failure like another.
    async fn apply_bounded(&self, message: &Incoming) -> Result<Outcome, Failure> {
        let limit = self.args.consumer_handle_timeout;
        let applied = AssertUnwindSafe(self.apply(message)).catch_unwind();
        match tokio::time::timeout(limit, applied).await {
            Ok(Ok(result)) => result,
            Ok(Err(_panic)) => Err(Failure::unknown(anyhow::anyhow!("the handler panicked"))),
            // It may be committed or not; either way the inbox knows when it comes again.
            Err(_) => Err(Failure::database_away(anyhow::anyhow!("not handled within {limit:?}"))),
        }
    }

    /// The transaction: inbox, gate, effect, answer, COMMIT.
    async fn apply(&self, message: &Incoming) -> Result<Outcome, Failure> {
        let envelope = match &message.envelope {
            Ok(envelope) => envelope,
            Err(broken) => return Err(Failure::permanent(anyhow::anyhow!("{broken}"))),
        };
        let event = H::decode(envelope)?;
        let mut loan = self.pool.borrow().await?;
        let mut tx = loan.begin().await?;
        let outcome = match inbox::admit(&mut tx, H::NAME, envelope).await? {
            Admission::Admitted => {
                let trace = message.trace_context().or_new();
                self.handler.handle(Message { event, envelope, trace }, &mut tx).await?
            }
            Admission::Duplicate => Outcome::Duplicate,
            Admission::Stale => Outcome::Stale,
            Admission::Gap { last } => {
                tx.rollback().await?;
                loan.give_back();
                return Err(gap(envelope, last));
            }
            Admission::ReusedId => {
                return Err(Failure::permanent(anyhow::anyhow!(
                    "message_id {:?} was used before by another message",
                    envelope.id
                )));
            }
        };
        fault::point(Point::ConsumerBeforeCommit);
        tx.commit().await?;
        loan.give_back();
        fault::point(Point::ConsumerAfterCommit);
        self.handler.committed();
        Ok(outcome)
    }
}

fn gap(envelope: &Envelope, last: Option<i64>) -> Failure {
    let aggregate = &envelope.aggregate;
    let applied = last.map_or_else(|| "none".to_owned(), |last| format!("version {last}"));
    Failure::not_yet(anyhow::anyhow!(
        "version gap: this is version {} of {} {}, applied so far: {applied}",
        aggregate.version,
        aggregate.kind,
        aggregate.id,
    ))
}
