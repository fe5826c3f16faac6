//! The stage: a system under the eyes of the witnesses, and what a scenario can do to it.
//!
//! A scenario waits for lines of the timeline. So each step of its story is a step that is checked: if
//! one does not come, the scenario has failed.

use super::happening::{Happening, What};
use super::line::Line;
use super::pace::Pace;
use super::timeline::{Timeline, Told};
use super::witness::Witnesses;
use crate::child::lock;
use crate::ledger::books::Side;
use crate::service::Service;
use crate::system::{Options, System};
use crate::wait::{until, until_by};
use anyhow::{Context, Result, ensure};
use lapin::BasicProperties;
use shared::fault::Point;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

const NO_LINE: &str = "the timeline does not say so";

/// Where the play takes place.
pub struct Stage {
    /// How fast.
    pub pace: Pace,
    /// The system.
    pub system: System,
    witnesses: Witnesses,
    told: Told,
    report: UnboundedSender<Happening>,
}

impl Stage {
    /// A system with databases, virtual host and topology, watched from now on; no service runs yet.
    ///
    /// # Errors
    /// When it does not come up.
    pub(super) async fn set(pace: Pace, mut options: Options, timeline: &Timeline) -> Result<Self> {
        let mut env = pace.env();
        env.append(&mut options.env);
        let system = System::start(Options { env, stopped: true, ..options }).await?;
        let report = timeline.report.clone();
        let witnesses = Witnesses::of(&system, report.clone()).await?;
        Ok(Self { pace, system, witnesses, told: timeline.told.clone(), report })
    }

    /// What is left when the play is over.
    pub(super) fn clear(self) -> (System, Witnesses) {
        (self.system, self.witnesses)
    }

    /// Starts both services and puts `available` books on the shelf.
    ///
    /// # Errors
    /// When they do not get ready.
    pub async fn open(&mut self, available: i64) -> Result<()> {
        self.start_inventory().await?;
        self.start_orders().await?;
        self.system.set_stock("book-17", available).await
    }

    /// Starts orders-service.
    ///
    /// # Errors
    /// When it does not get ready.
    pub async fn start_orders(&mut self) -> Result<()> {
        let orders = Service::start("orders-service", &self.system.orders_env).await?;
        self.witnesses.read(Side::Orders, &orders.child);
        orders.wait_ready().await?;
        self.system.orders = Some(orders);
        Ok(())
    }

    /// Starts inventory-service.
    ///
    /// # Errors
    /// When it does not get ready.
    pub async fn start_inventory(&mut self) -> Result<()> {
        let inventory = Service::start("inventory-service", &self.system.inventory_env).await?;
        self.witnesses.read(Side::Inventory, &inventory.child);
        inventory.wait_ready().await?;
        self.system.inventory = Some(inventory);
        Ok(())
    }

    /// Both services, of which the inventory will kill itself with SIGKILL when it gets there.
    ///
    /// # Errors
    /// When they do not get ready.
    pub async fn open_with_a_doomed_inventory(&mut self, available: i64, at: Point) -> Result<()> {
        self.system.inventory_env.insert("FAULT_POINT".into(), at.name().into());
        self.open(available).await?;
        self.system.inventory_env.remove("FAULT_POINT");
        Ok(())
    }

    /// Waits for that.
    ///
    /// # Errors
    /// When it lives, or ends in another way.
    pub async fn inventory_dies(&mut self) -> Result<()> {
        let inventory = self.system.inventory.take().context("the inventory does not run")?;
        let status = inventory.child.wait_exit(self.pace.patience(0)).await?;
        ensure!(status.signal() == Some(9), "it should have been killed, and ended with {status}");
        self.report(Happening::now(None, What::Died { by: Side::Inventory }));
        Ok(())
    }

    /// Orders one book.
    ///
    /// # Errors
    /// When the order is not taken.
    pub async fn order(&self) -> Result<String> {
        self.say("POST /orders: one book-17");
        self.system.place(&[("book-17", 1)]).await
    }

    /// Publishes what is no JSON, as orders-service would an order.
    ///
    /// # Errors
    /// When the broker does not take it.
    pub async fn publish_garbage(&self, id: &str) -> Result<()> {
        self.say(&format!(
            "somebody publishes {{not-json}} to the exchange orders, as message {id}"
        ));
        let properties =
            BasicProperties::default().with_message_id(id.into()).with_delivery_mode(2);
        self.system.broker.publish("orders", "order.created", properties, b"{not-json}").await
    }

    /// Waits until the order has the status.
    ///
    /// # Errors
    /// When it does not come to that.
    pub async fn settled(&self, order: &str, status: &str) -> Result<()> {
        self.system.wait_status(order, status).await?;
        self.say(&format!("GET /orders/…: the order is {status}"));
        Ok(())
    }

    /// A stage direction.
    pub fn say(&self, text: &str) {
        self.report(Happening::direction(text));
    }

    /// What nobody else can have seen.
    pub fn report(&self, happening: Happening) {
        // Nobody listens: the telling has panicked, and its end says so.
        let _ = self.report.send(happening);
    }

    /// Waits for a line of the timeline.
    ///
    /// # Errors
    /// When it does not come in time.
    pub async fn sees(
        &self,
        what: &str,
        within: Duration,
        is: impl Fn(&What) -> bool,
    ) -> Result<Line> {
        self.sees_times(1, what, within, is).await
    }

    /// Waits until so many lines have been like that; returns the last of them.
    ///
    /// # Errors
    /// When they do not come in time.
    pub async fn sees_times(
        &self,
        times: usize,
        what: &str,
        within: Duration,
        is: impl Fn(&What) -> bool,
    ) -> Result<Line> {
        until_by(within, what, async || {
            let told = lock(&self.told);
            let mut like_that = told.iter().filter(|line| is(&line.happening.what));
            like_that.nth(times - 1).cloned().context(NO_LINE).map(Some)
        })
        .await
    }

    /// Waits for a line about a message.
    ///
    /// # Errors
    /// When it does not come in time.
    pub async fn sees_of(
        &self,
        message: &str,
        what: &str,
        within: Duration,
        is: impl Fn(&What) -> bool,
    ) -> Result<Line> {
        until_by(within, what, async || {
            let told = lock(&self.told);
            let about = |line: &&Line| line.happening.message.as_deref() == Some(message);
            let line = told.iter().filter(about).find(|line| is(&line.happening.what));
            line.cloned().context(NO_LINE).map(Some)
        })
        .await
    }

    /// How many lines so far are like that.
    pub fn count(&self, is: impl Fn(&What) -> bool) -> usize {
        lock(&self.told).iter().filter(|line| is(&line.happening.what)).count()
    }

    /// Waits until that many messages are in a queue, ready.
    ///
    /// # Errors
    /// When it does not come to that.
    pub async fn holds(&self, queue: &str, messages: u32, within: Duration) -> Result<()> {
        until_by(within, &format!("{messages} in {queue}"), async || {
            let depth = self.system.broker.depth(queue).await?;
            ensure!(depth == messages, "it holds {depth}");
            Ok(Some(()))
        })
        .await
    }

    /// Makes reserving fail, in the way of two transactions that are in each other's way.
    ///
    /// # Errors
    /// When the database does not let us.
    pub async fn reserving_fails(&self) -> Result<()> {
        self.say("from now on reserving fails, with SQLSTATE 40001: a conflict that time may mend");
        let ddl = "CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN RAISE EXCEPTION 'a conflict' USING ERRCODE = '40001'; END $$;
             CREATE TRIGGER conflict BEFORE INSERT ON reservations
             FOR EACH ROW EXECUTE FUNCTION conflict();";
        sqlx::raw_sql(ddl).execute(&self.system.inventory_db).await?;
        Ok(())
    }

    /// Ends that.
    ///
    /// # Errors
    /// When the database does not let us.
    pub async fn reserving_works(&self) -> Result<()> {
        sqlx::query("DROP FUNCTION conflict() CASCADE").execute(&self.system.inventory_db).await?;
        self.say("reserving works again");
        Ok(())
    }

    /// Waits until of the books so many are reserved.
    ///
    /// # Errors
    /// When it does not come to that.
    pub async fn reserved(&self, count: i64) -> Result<()> {
        until("the stock to be right", async || {
            let (_, reserved) = self.system.stock("book-17").await?;
            ensure!(reserved == count, "{reserved} are reserved, not {count}");
            Ok(Some(()))
        })
        .await
    }
}
