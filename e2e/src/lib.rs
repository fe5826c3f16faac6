//! The harness: real servers, real processes, real failures.
//!
//! A test starts a [`system::System`]: both services as processes, with databases and a virtual host
//! of their own on shared private servers. It does something to it, and ends with
//! [`system::System::finish`], the ledger ([`ledger`]), in which everything must add up.

// Servers and processes.
pub mod child;
pub mod ports;
pub mod postgres;
pub mod proxy;
pub mod rabbitmq;
pub mod reaper;
pub mod servers;

// The system under test.
pub mod broker;
pub mod chaos;
pub mod contract;
pub mod ledger;
pub mod scenario;
pub mod service;
pub mod system;
pub mod trickle;
pub mod wait;
