//! Hop 8's other half: what waits in parking, and its way out.
//!
//! A person looks, decides and moves; nothing here happens by itself. [`lot`] looks at the queue
//! without taking anything out of it, [`plan`] chooses what a run moves and in which order, and
//! [`run`] moves it: back to the queue it came from, by a copy that is confirmed before the parked
//! original is acked, or away for good. Who did so, when and how far is in [`audit`].
//!
//! A crash at any point loses nothing: what is not acked is parked as before. What was sent back and
//! not acked is sent back twice, and has one effect.

// What is there.
pub mod lot;
pub mod parked;

// What is meant.
pub mod filter;
pub mod plan;

pub mod task;

// What is done.
pub mod run;

pub mod audit;

// For people: the command line and the operations API.
pub mod api;
pub mod command;
mod screen;
