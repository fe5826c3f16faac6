//! What can be promised, apart from where it is kept and told: the part of inventory-service that
//! needs no I/O. A library of its own, so that the model check (`e2e/tests/model`) drives the code
//! that ships.

pub mod stock;
