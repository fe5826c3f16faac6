//! The guarantees on a cluster of three RabbitMQ nodes, two of which are a majority: each a test by
//! that name. Orders are placed all the while, and each test ends with the ledger ([`e2e::ledger`]).
//!
//! A target of its own, as clusters are heavy: cargo runs it when the others are done, and it runs one
//! cluster at a time.

mod support;

// A node is gone, cut off, silent.
mod killed;
mod partitioned;
mod silent;

// And in good times.
mod upkeep;

// The harness itself.
mod harness;
