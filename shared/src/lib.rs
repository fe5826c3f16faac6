//! The message path that both services run on. Read the modules in this order and you follow one
//! message from a COMMIT in one database to a COMMIT in the other:
//!
//! ```text
//!  one service                       RabbitMQ                        the other service
//!
//!  business rows ┐                ┌─ exchange ── queue Q ─┐       ┌ inbox + gate
//!                ├ COMMIT         │                │  ▲   │       │ business rows
//!  outbox row ───┘                │        dead    │  │   ├──────►│ outbox row
//!      │                          │      lettering │  │   │       └ COMMIT ─► Ack
//!      ▼                          │                ▼  │   │            │
//!    relay ── publish, confirm ───┘        Q.parking  └── Q.retry.D ◄──┴ a failure that
//!      │                                         ▲        (TTL = D)      time may mend
//!      ▼                                         └────────────────────── one that it will not
//!    mark published
//! ```
//!
//! At every moment one side owns the message; ARCHITECTURE.md has the table of owners. Each module
//! that is a hop says which, what it guarantees, and what a crash in it does.

// The blank lines keep rustfmt from sorting the path.

// What is said: the message itself.
pub mod envelope;

pub mod events;

pub mod lines;
pub mod trace_context;

// Out of a database: COMMIT → outbox → relay → confirm → mark.
pub mod outbox;

pub mod relay;

pub mod publisher;

// Through the broker.
pub mod topology;

pub mod policies;

pub mod connection;
pub mod management;

// Into a database: delivery → inbox and gate → COMMIT → Ack, or retry, or parking.
pub mod consumer;

pub mod incoming;

pub mod inbox;

pub mod failure;

pub mod outage;

pub mod retry;

pub mod republish;

// Out of parking again, by a person's hand.
pub mod parking;

// Around the path.
pub mod backoff;
pub mod cli;
pub mod config;
pub mod db;
pub mod fault;
pub mod health;
pub mod http;
pub mod metrics;
pub mod ops;
pub mod pool;
pub mod retention;
pub mod roles;
pub mod service;
pub mod telemetry;
