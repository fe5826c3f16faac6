//! The oracle: what must be true of the whole system once it is left alone, whatever was done to it.
//!
//! Every end-to-end test ends with [`System::finish`]. It waits until the system is at rest, stops
//! both services in an orderly way, and then looks at both databases and every queue. What it finds
//! wrong it says for each order and each message.

use crate::contract::Contract;
use crate::system::System;
use crate::wait::until;
use anyhow::{Result, ensure};
use serde_json::Value;
use sqlx::PgPool;
use std::collections::BTreeSet;

const PARKING: &str = ".parking";

/// What a test has done on purpose, so that the oracle does not complain of it.
#[derive(Default)]
pub struct Expect {
    /// Messages left in `inventory.orders.parking`.
    pub parked: u32,
    /// Ids that the test published itself, past the outbox.
    pub injected: Vec<String>,
}

impl System {
    /// The oracle, with nothing out of the ordinary expected.
    ///
    /// # Errors
    /// Everything that does not add up.
    pub async fn finish(self) -> Result<()> {
        self.finish_expecting(Expect::default()).await
    }

    /// The oracle.
    ///
    /// # Errors
    /// Everything that does not add up.
    pub async fn finish_expecting(mut self, expect: Expect) -> Result<()> {
        let rest = until("the system to come to rest", async || {
            let unrest = self.unrest().await?;
            // As an error, so that the last one is told when patience ends.
            ensure!(unrest.is_empty(), "{}", unrest.join("\n"));
            Ok(Some(()))
        })
        .await;
        if let Err(unrest) = rest {
            let logs: String =
                self.orders.iter().chain(&self.inventory).map(|s| s.child.report()).collect();
            return Err(unrest.context(logs));
        }
        // An unacked message is in no depth; once its consumer is gone it is.
        for service in [self.orders.take(), self.inventory.take()].into_iter().flatten() {
            service.stop().await?;
        }
        let mut wrong = self.unrest().await?;
        wrong.extend(self.accounts().await?);
        wrong.extend(self.inboxes(&expect).await?);
        wrong.extend(self.parking(&expect).await?);
        wrong.extend(self.contract().await?);
        ensure!(wrong.is_empty(), "the system does not add up:\n{}", wrong.join("\n"));
        // Idle queues cost the shared broker a tick each, five times a second.
        self.rabbitmq.delete_vhost(self.vhost()?).await
    }

    /// What is still under way: orders without an end, events unpublished or not yet taken in,
    /// messages in a queue or a retry queue.
    async fn unrest(&self) -> Result<Vec<String>> {
        let mut unrest = Vec::new();
        let open = "SELECT format('order %s is still %s', id, status) FROM orders
                    WHERE status = 'created'";
        unrest.extend(texts(&self.orders_db, open).await?);
        let unpublished = "SELECT format('%s (%s %s v%s) is unpublished, attempts %s: %s', id,
                event_type, aggregate_id, aggregate_version, attempts, last_error)
            FROM outbox WHERE published_at IS NULL";
        for db in [&self.orders_db, &self.inventory_db] {
            unrest.extend(texts(db, unpublished).await?);
        }
        for (from, to) in self.flows() {
            let sent = ids(from, "SELECT id FROM outbox").await?;
            let received = ids(to, "SELECT message_id FROM processed_messages").await?;
            let missing = sent.difference(&received);
            unrest.extend(missing.map(|id| format!("{id} is in no inbox")));
        }
        for (queue, depth) in self.depths().await? {
            if depth > 0 && !queue.ends_with(PARKING) {
                unrest.push(format!("{queue} holds {depth} messages"));
            }
        }
        Ok(unrest)
    }

    fn flows(&self) -> [(&PgPool, &PgPool); 2] {
        [(&self.orders_db, &self.inventory_db), (&self.inventory_db, &self.orders_db)]
    }

    /// Stock, reservations and orders agree, to the unit.
    async fn accounts(&self) -> Result<Vec<String>> {
        let mut wrong = texts(
            &self.inventory_db,
            "SELECT format('%s: reserved is %s, the reservations add up to %s', sku, reserved, held)
             FROM (SELECT stock.sku, reserved, coalesce(sum(count)
                       FILTER (WHERE status = 'reserved'), 0) AS held
                   FROM stock LEFT JOIN reservations USING (sku) GROUP BY stock.sku) AS sums
             WHERE reserved <> held",
        )
        .await?;
        let orders: Vec<(String, String, String, i32)> = sqlx::query_as(
            "SELECT id::text, status, sku, count FROM orders JOIN order_lines ON order_id = id",
        )
        .fetch_all(&self.orders_db)
        .await?;
        for (order, status, sku, count) in orders {
            let held: Option<(String, i32)> = sqlx::query_as(
                "SELECT status, count FROM reservations WHERE order_id = $1 AND sku = $2",
            )
            .bind(&order)
            .bind(&sku)
            .fetch_optional(&self.inventory_db)
            .await?;
            let fits = match (status.as_str(), &held) {
                ("confirmed", Some((held, n))) => held == "reserved" && *n == count,
                ("rejected", Some((held, _))) => held == "rejected",
                ("cancelled", Some((held, _))) => held != "reserved",
                _ => false,
            };
            if !fits {
                wrong.push(format!("order {order} is {status}, its {count} {sku} are {held:?}"));
            }
        }
        let histories =
            "SELECT format('order %s is at version %s, its events are %s', o.id, o.version,
                                  array_agg(aggregate_version ORDER BY aggregate_version))
             FROM orders o LEFT JOIN outbox ON aggregate_id = o.id::text
             GROUP BY o.id HAVING array_agg(aggregate_version ORDER BY aggregate_version)
                 IS DISTINCT FROM (SELECT array_agg(v) FROM generate_series(1, o.version) v)";
        wrong.extend(texts(&self.orders_db, histories).await?);
        Ok(wrong)
    }

    /// Nothing was taken in that nobody sent.
    async fn inboxes(&self, expect: &Expect) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (from, to) in self.flows() {
            let mut sent = ids(from, "SELECT id FROM outbox").await?;
            sent.extend(expect.injected.iter().cloned());
            let received = ids(to, "SELECT message_id FROM processed_messages").await?;
            wrong.extend(received.difference(&sent).map(|id| format!("nobody sent {id}")));
        }
        Ok(wrong)
    }

    /// Nothing is parked but what was to be.
    async fn parking(&self, expect: &Expect) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (queue, depth) in self.depths().await? {
            let expected = if queue == "inventory.orders.parking" { expect.parked } else { 0 };
            if queue.ends_with(PARKING) && depth != expected {
                wrong.push(format!("{queue} holds {depth} messages, not {expected}"));
            }
        }
        Ok(wrong)
    }

    /// Every queue, and how many messages are ready in it.
    async fn depths(&self) -> Result<Vec<(String, u32)>> {
        let value = |name: &str| self.orders_env.get(name).map(String::as_str);
        let mut suffixes = vec![String::new(), PARKING.to_owned()];
        if value("RETRY_BACKEND") != Some("native") {
            let delays = value("RETRY_DELAYS").unwrap_or_default().split(',');
            suffixes.extend(delays.map(|delay| format!(".retry.{delay}")));
        }
        let shards = value("ORDERING").and_then(|ordering| ordering.strip_prefix("shards="));
        let shards: u32 = shards.map_or(Ok(0), str::parse)?;
        suffixes.extend((0..shards).map(|shard| format!(".shard.{shard}")));
        let mut depths = Vec::new();
        for queue in ["inventory.orders", "orders.inventory"] {
            for suffix in &suffixes {
                let queue = format!("{queue}{suffix}");
                let depth = self.broker.depth(&queue).await?;
                depths.push((queue, depth));
            }
        }
        Ok(depths)
    }

    /// Every event keeps the written contract.
    async fn contract(&self) -> Result<Vec<String>> {
        let contract = Contract::load()?;
        let mut wrong = Vec::new();
        for db in [&self.orders_db, &self.inventory_db] {
            for event in texts(db, "SELECT payload::text FROM outbox").await? {
                let event: Value = serde_json::from_str(&event)?;
                if let Err(broken) = contract.check(&event) {
                    wrong.push(format!("{}: {broken}", event["id"]));
                }
            }
        }
        Ok(wrong)
    }
}

async fn texts(db: &PgPool, query: &'static str) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar(query).fetch_all(db).await?)
}

async fn ids(db: &PgPool, query: &'static str) -> Result<BTreeSet<String>> {
    Ok(texts(db, query).await?.into_iter().collect())
}
