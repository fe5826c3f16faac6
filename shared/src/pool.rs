//! The pool that HTTP handlers and consumers share, lent out with a condition: a connection comes
//! back only if all went well.
//!
//! A connection that was dropped in the middle of something (a time-out, a panic, a client that
//! left) is closed instead. The server rolls back, nobody inherits half a conversation, and a
//! connection whose other end has gone silent does not hold its place in the pool: returning it would
//! mean to ask it whether it is well, and to wait for an answer that may never come.

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres};
use std::ops::{Deref, DerefMut};

/// See the module.
#[derive(Clone)]
pub struct Pool(pub(crate) PgPool);

/// A connection on loan.
pub struct Loan {
    connection: PoolConnection<Postgres>,
    sound: bool,
}

impl Pool {
    /// Takes a connection, waiting for one as long as is configured.
    ///
    /// # Errors
    /// `PoolTimedOut` when there is none in time: the database is away, or the pool too small.
    pub async fn borrow(&self) -> sqlx::Result<Loan> {
        Ok(Loan { connection: self.0.acquire().await?, sound: false })
    }
}

impl Loan {
    /// Gives the connection back. To be called where everything asked of it was answered, and no
    /// transaction is open; whoever does not call it closes the connection.
    pub fn give_back(mut self) {
        self.sound = true;
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.sound {
            self.connection.close_on_drop();
        }
    }
}

impl Deref for Loan {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for Loan {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}
