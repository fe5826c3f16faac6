//! What an order is, apart from where it is kept and told: the part of orders-service that needs no
//! I/O. A library of its own, so that the model check (`e2e/tests/model`) drives the code that ships.

pub mod order;
