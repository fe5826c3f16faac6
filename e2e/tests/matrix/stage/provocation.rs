//! Making a message fail, once, so that it is retried or parked.

use super::Stage;
use anyhow::Result;
use e2e::ledger::books::Side;
use e2e::system::System;

impl Stage {
    /// The next message that the service applies fails, once.
    pub(super) async fn provoke(&self) -> Result<()> {
        if self.route.provocation().is_some() {
            let again = "ALTER SEQUENCE provoked RESTART";
            sqlx::query(again).execute(self.system.db(self.side)).await?;
        }
        Ok(())
    }
}

/// What every message's effect goes through fails as often as a sequence allows: it is not rolled
/// back with the transaction, and so knows.
pub(super) async fn prepare(system: &System, side: Side, sqlstate: &str) -> Result<()> {
    let trigger = match side {
        Side::Orders => {
            "BEFORE UPDATE ON orders FOR EACH ROW WHEN (NEW.status IN ('confirmed', 'rejected'))"
        }
        Side::Inventory => "BEFORE INSERT ON reservations FOR EACH ROW",
    };
    let ddl = format!(
        "CREATE SEQUENCE provoked;
         CREATE FUNCTION provoke() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN
             IF nextval('provoked') <= 1 THEN
                 RAISE EXCEPTION 'provoked' USING ERRCODE = '{sqlstate}';
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER provoke {trigger} EXECUTE FUNCTION provoke();"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(ddl)).execute(system.db(side)).await?;
    Ok(())
}
