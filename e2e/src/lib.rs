//! The harness: real servers, real processes, real failures.
//!
//! A test starts a [`system::System`]: both services as processes, with databases and a virtual host
//! of their own on shared private servers. It does something to it, and ends with
//! [`system::System::finish`], the oracle that looks at everything and wants it to add up.

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
pub mod contract;
pub mod oracle;
pub mod service;
pub mod system;
pub mod wait;
