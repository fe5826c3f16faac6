//! Protocols with one rule broken. The check must find out each of them, or it proves nothing.
//!
//! The switches are in the model alone. The scripts come from a fixed seed, so that a mutant is found
//! in every run or in none.

use crate::check::{Chance, Protocol};
use crate::steps::Kind;
use anyhow::{Context, Result, ensure};

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    AckBeforeCommit,
    MarkBeforeConfirm,
    ReturnCountsAsPublished,
    CursorOverSeq,
    OutboxInMemory,
    NoInbox,
    NoGate,
    NothingRemembers,
    InboxCommitsAlone,
    AckBeforeTheCopysConfirm,
    RetryAtOnce,
    CopyForgetsAttempts,
}

/// The cases within which each mutant must be found.
const CASES: u32 = 3000;

/// Expects a counter-example that ends with one of these complaints.
fn is_caught(mutation: Mutation, complaints: &[&str]) -> Result<()> {
    is_caught_by(|_| true, mutation, complaints)
}

/// Likewise, with the `allowed` steps alone.
fn is_caught_by(allowed: fn(Kind) -> bool, mutation: Mutation, complaints: &[&str]) -> Result<()> {
    let found = Protocol::new(Some(mutation))?.check(Chance::Fixed, CASES, allowed);
    let story = found.err().with_context(|| format!("{mutation:?} is not found out"))?.to_string();
    println!("{mutation:?}:{story}");
    // Words of a complaint may be in the story too.
    let verdict = story.lines().find(|line| line.starts_with("→ ")).context("no verdict")?;
    let as_expected = complaints.iter().any(|complaint| verdict.contains(complaint));
    ensure!(as_expected, "{mutation:?} is found out, but not by {complaints:?}:{story}");
    Ok(())
}

#[test]
fn a_protocol_that_acks_before_the_commit_is_caught_losing_a_message() -> Result<()> {
    is_caught(Mutation::AckBeforeCommit, &["is lost"])
}

#[test]
fn a_protocol_that_marks_before_the_confirm_is_caught_losing_a_message() -> Result<()> {
    is_caught(Mutation::MarkBeforeConfirm, &["is lost"])
}

#[test]
fn a_protocol_that_counts_a_return_as_published_is_caught_losing_a_message() -> Result<()> {
    is_caught(Mutation::ReturnCountsAsPublished, &["is lost"])
}

#[test]
fn a_protocol_that_remembers_how_far_it_got_is_caught_leaving_a_row_behind() -> Result<()> {
    // A row that is refused would be left behind as well; here it is to be one that commits late.
    let late: fn(Kind) -> bool =
        |kind| !matches!(kind, Kind::PublishReturned | Kind::PublishNacked | Kind::Unbind);
    is_caught_by(late, Mutation::CursorOverSeq, &["is left behind"])
}

#[test]
fn a_protocol_whose_outbox_is_in_memory_is_caught_losing_a_message() -> Result<()> {
    is_caught(Mutation::OutboxInMemory, &["is lost"])
}

#[test]
fn a_protocol_whose_inbox_row_commits_before_the_effect_is_caught_losing_a_message() -> Result<()> {
    is_caught(Mutation::InboxCommitsAlone, &["is lost"])
}

#[test]
fn a_protocol_without_an_inbox_is_caught_by_an_id_that_is_used_twice() -> Result<()> {
    is_caught(Mutation::NoInbox, &["has taken effect twice"])
}

#[test]
fn a_protocol_without_a_gate_is_caught_applying_out_of_turn() -> Result<()> {
    // Where the inbox forgets, the gate is missed for what comes twice as well.
    is_caught_by(|kind| kind != Kind::Forget, Mutation::NoGate, &["out of its turn"])
}

/// Four things remember what was done: the inbox, the gate, the business key, and the id of the answer,
/// which follows from the message's. Any of them keeps a message from reserving twice, so all have to be
/// missing.
#[test]
fn a_protocol_in_which_nothing_remembers_is_caught_applying_twice() -> Result<()> {
    let in_turn: fn(Kind) -> bool = |kind| !matches!(kind, Kind::ReusedId | Kind::Cancel);
    is_caught_by(in_turn, Mutation::NothingRemembers, &["has taken effect twice"])
}

#[test]
fn a_protocol_that_acks_before_the_copys_confirm_is_caught_losing_a_message() -> Result<()> {
    is_caught(Mutation::AckBeforeTheCopysConfirm, &["is lost"])
}

#[test]
fn a_protocol_that_requeues_what_failed_is_caught_retrying_without_a_delay() -> Result<()> {
    is_caught(Mutation::RetryAtOnce, &["is retried without its delay"])
}

#[test]
fn a_protocol_whose_copies_forget_their_attempts_is_caught_retrying_without_a_limit() -> Result<()>
{
    is_caught(Mutation::CopyForgetsAttempts, &["is retried beyond its limit"])
}

/// The gate alone keeps an event from taking effect twice; what the inbox adds is to tell a duplicate
/// from another message under the same id.
#[test]
fn without_an_inbox_the_gate_still_lets_nothing_through_twice() -> Result<()> {
    let protocol = Protocol::new(Some(Mutation::NoInbox))?;
    protocol.check(Chance::Fixed, 300, |kind| kind != Kind::ReusedId).map(drop)
}
