//! The steps, by name. A step that is not possible in a state does nothing there.

use crate::consumer::Luck;
use crate::relay::Fate;
use crate::rules::Side;
use crate::world::World;
use anyhow::Result;
use proptest::prelude::*;

/// What happens, on which side, and to which of those it may happen to.
#[derive(Clone, Copy, Debug)]
pub struct Step(pub Kind, pub Side, pub u8);

macro_rules! kinds {
    ($($kind:ident $weight:literal => $do:expr;)*) => {
        /// The kinds of step.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($kind,)* }

        impl Kind {
            /// All of them with their weights, the harmless ones first.
            pub const ALL: &[(Self, usize)] = &[$((Self::$kind, $weight),)*];

            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => stringify!($kind),)* }
            }
        }

        impl World {
            /// Does it, if it is possible, and looks whether all is still as it must be.
            pub fn step(&mut self, Step(kind, side, pick): Step) -> Result<bool> {
                type Do = fn(&mut World, Side, u8) -> Result<bool>;
                let done = match kind {
                    $(Kind::$kind => { let act: Do = $do; act(self, side, pick) })*
                };
                // Of work, the step that it turned out to be has noted itself.
                if kind == Kind::Work {
                    return done;
                }
                if !matches!(done, Ok(false)) {
                    self.note(Step(kind, side, pick));
                    self.ledger.saw(kind.name());
                }
                if done? {
                    self.check()?;
                    return Ok(true);
                }
                Ok(false)
            }
        }
    };
}

kinds! {
    // What is to be done next, whatever that is: most of a story.
    Work 250 => |world, side, pick| world.work_on(side, pick);
    // What is meant to happen.
    Place 6 => |world, _, pick| world.place(pick);
    CommitOrder 6 => |world, _, pick| world.commit_order(pick, true);
    Cancel 5 => |world, _, pick| world.cancel(pick);
    Claim 5 => |world, side, _| world.claim(side);
    Publish 5 => |world, side, _| world.publish(side, Fate::Confirmed);
    Mark 5 => |world, side, _| world.mark(side);
    Deliver 12 => |world, side, pick| world.deliver(side, pick);
    Attempt 8 => |world, side, pick| world.attempt(side, pick, Luck::Good);
    Ack 5 => |world, side, pick| world.ack(side, pick);
    Copy 5 => |world, side, pick| world.copy(side, pick, Fate::Confirmed);
    Expire 8 => |world, side, pick| world.expire(side, pick);
    DeadLetter 3 => |world, side, _| world.dead_letter(side);
    Redrive 5 => |world, side, pick| world.redrive(side, pick, Fate::Confirmed);
    RetryOutbox 5 => |world, side, _| Ok(world.retry_outbox(side));
    Mend 3 => |world, _, _| Ok(world.mend());
    Probe 3 => |world, side, _| Ok(world.probe(side));
    DatabaseReturns 8 => |world, side, _| Ok(world.database_returns(side));
    Wait 2 => |world, _, pick| Ok(world.wait(pick));
    // What goes wrong.
    AnswerLost 3 => |world, _, pick| world.commit_order(pick, false);
    PublishReturned 5 => |world, side, _| world.publish(side, Fate::Returned);
    PublishNacked 5 => |world, side, _| world.publish(side, Fate::Nacked);
    PublishLost 5 => |world, side, _| world.publish(side, Fate::Lost);
    ConfirmLost 5 => |world, side, _| world.publish(side, Fate::ConfirmLost);
    LoseTheLead 5 => |world, side, _| world.lose_the_lead(side);
    PublishLate 5 => |world, side, _| world.publish_late(side);
    Duplicate 5 => |world, side, pick| world.duplicate(side, pick);
    Deadlock 14 => |world, side, pick| world.attempt(side, pick, Luck::Deadlock);
    Panic 5 => |world, side, pick| world.attempt(side, pick, Luck::Panic);
    CommitAnswerLost 8 => |world, side, pick| world.attempt(side, pick, Luck::AnswerLost);
    CopyReturned 4 => |world, side, pick| world.copy(side, pick, Fate::Returned);
    CopyNacked 4 => |world, side, pick| world.copy(side, pick, Fate::Nacked);
    CopyLost 4 => |world, side, pick| world.copy(side, pick, Fate::Lost);
    CopyConfirmLost 6 => |world, side, pick| world.copy(side, pick, Fate::ConfirmLost);
    SessionEnds 5 => |world, side, pick| Ok(world.end_session(side, pick));
    Crash 3 => |world, side, pick| Ok(world.crash(side, pick));
    DatabaseGoes 3 => |world, side, _| Ok(world.database_goes(side));
    RedriveReturned 3 => |world, side, pick| world.redrive(side, pick, Fate::Returned);
    RedriveConfirmLost 4 => |world, side, pick| world.redrive(side, pick, Fate::ConfirmLost);
    Curse 8 => |world, _, pick| Ok(world.curse(pick));
    Unbind 2 => |world, side, _| Ok(world.unbind(side));
    Forget 5 => |world, side, pick| Ok(world.forget(side, pick));
    BrokenMessage 1 => |world, side, _| world.broken_message(side);
    ReusedId 4 => |world, side, pick| world.reused_id(side, pick);
}

/// What there is to do, in the order of the path.
pub const WORK: [Kind; 12] = [
    Kind::Probe,
    Kind::Place,
    Kind::CommitOrder,
    Kind::Claim,
    Kind::Publish,
    Kind::Mark,
    Kind::PublishLate,
    Kind::Deliver,
    Kind::Attempt,
    Kind::Copy,
    Kind::Ack,
    Kind::DeadLetter,
];

impl World {
    /// The next thing that is to be done from some place of the path on, on this side or the other.
    fn work_on(&mut self, side: Side, pick: u8) -> Result<bool> {
        for kind in WORK.iter().cycle().skip(usize::from(pick) % WORK.len()).take(WORK.len()) {
            for side in [side, side.other()] {
                if self.step(Step(*kind, side, 0))? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// A step, likelier one that is meant to happen.
pub fn any_step() -> impl Strategy<Value = Step> {
    let kinds: Vec<Kind> =
        Kind::ALL.iter().flat_map(|(kind, weight)| std::iter::repeat_n(*kind, *weight)).collect();
    let side = prop::sample::select(Side::BOTH.to_vec());
    // A step is left out or kept; `check` makes it simpler.
    (prop::sample::select(kinds), side, any::<u8>())
        .prop_map(|(kind, side, pick)| Step(kind, side, pick))
        .no_shrink()
}
