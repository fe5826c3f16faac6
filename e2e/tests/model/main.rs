//! A model check of the protocol, on paper: no broker, no process, no waiting.
//!
//! Both services, the broker between them and their clients are values in memory ([`world`]). Each
//! hop of ARCHITECTURE's table of owners is an atomic step ([`steps`]), and so is whatever can go
//! wrong in between: a crash, a lost answer, a message that comes twice, late, or out of turn. Chance
//! strings steps together, proptest shrinks what goes wrong to the few that matter. What decides in
//! the steps is the code that ships: `retry::decide`, `Status::transition`, `stock::decide`,
//! `Outage`, the headers of the copies (`republish`, `Incoming`), the envelopes. What is SQL in the
//! services ([`gate`], `outbox::due` in [`outbox`]) is stated once more here, and [`reality`] holds
//! the two against each other on a real PostgreSQL. The broker is RabbitMQ 4: what a consumer gives back
//! by a nack does not count as a delivery.
//!
//! | where | is asserted |
//! |---|---|
//! | after every step, [`ledger`] | each fact is with one that can be named; nothing has taken effect twice, or before its predecessor; stock adds up |
//! | at each attempt, [`consumer`] | it had its delay, and has attempts left |
//! | at rest, without and then with an operator, [`rest`] | each fact has taken effect once, or is parked for a reason; all is settled |
//!
//! **Reading a counter-example.** It is a story: a line a step, who did it and what it did to which
//! message; steps that were not possible are left out. Messages go by their ids:
//! `o1.created:reserved` is the inventory's answer to the first order. The last line says what was
//! found broken:
//!
//! ```text
//!      0.0 min  client: places o1, whose transaction draws seq 0
//!      0.0 min  orders: COMMIT of o1.created, seq 0
//!      0.0 min  orders: the process is killed
//! → o1.created is lost: it is in no table, and in no queue
//! ```
//!
//! To keep one, write its script, which is printed below it, into a test by the name of what it shows
//! ([`promise`] has one). proptest's own file of regressions is off: its seeds mean something else as
//! soon as a step is added.
//!
//! [`mutants`] are protocols with one rule broken. For each of them the check must find a
//! counter-example; one that finds none proves nothing. `PROPTEST_CASES=100000` looks longer.

// The world, and what can be done in it.
mod rules;
mod world;

mod client;

mod outbox;
mod relay;

mod broker;

mod gate;

mod consumer;
mod handlers;

mod operator;
mod trouble;

// What must be true of it.
mod ledger;
mod rest;

// How it is tried.
mod check;
mod steps;

// The tests.
mod mutants;
mod promise;
mod reality;
