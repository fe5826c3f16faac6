//! The guarantees, each a test by that name, against real servers and real processes. Each test of
//! the whole system ends with the ledger ([`e2e::ledger`]).

mod modes;
mod support;

// The path of an order.
mod cancelling;
mod concurrency;
mod reserving;

// Its failures, hop by hop.
mod broker_trouble;
mod classes;
mod duplicates;
mod forgotten;
mod nowhere_to_go;
mod ordering;
mod outages;
mod outbox_rows;
mod parking;
mod relays;
mod retention;
mod retrying;
mod sharding;

// The same as stories that can be watched.
mod scenarios;

// Its edges.
mod draining;
mod http_edge;
mod lifecycle;
mod stopping;
mod topology;
mod written_contract;

// What is said of it all.
mod pages;

// The harness itself.
mod harness;
