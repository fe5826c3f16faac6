//! Taking bindings away.

use crate::broker::Broker;
use crate::scenario::stage::Stage;
use crate::system::System;
use anyhow::Result;
use lapin::types::FieldTable;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Takes a binding away, once.
pub(super) async fn unbind(stage: &Stage, queue: &str, exchange: &str, key: &str) -> Result<()> {
    take_away(&stage.system.broker, queue, exchange, key).await?;
    stage.say(&format!("the binding {exchange} ─{key}→ {queue} is removed"));
    Ok(())
}

async fn take_away(broker: &Broker, queue: &str, exchange: &str, key: &str) -> Result<()> {
    let none = FieldTable::default();
    broker.channel.queue_unbind(queue.into(), exchange.into(), key.into(), none).await?;
    Ok(())
}

/// A binding that stays away, although a service declares it anew with every session.
pub(super) struct Unbound {
    end: CancellationToken,
    // Dropped, it ends as well.
    task: JoinSet<Result<()>>,
}

impl Unbound {
    /// Takes it away, and from now on again and again.
    pub(super) async fn keep(
        system: &System,
        queue: &str,
        exchange: &str,
        key: &str,
    ) -> Result<Self> {
        let broker = Broker::connect(&system.orders_env["AMQP_URL"]).await?;
        take_away(&broker, queue, exchange, key).await?;
        let (end, mut task) = (CancellationToken::new(), JoinSet::new());
        let ended = end.clone();
        let names = [queue, exchange, key].map(ToOwned::to_owned);
        task.spawn(async move {
            let [queue, exchange, key] = &names;
            while !ended.is_cancelled() {
                take_away(&broker, queue, exchange, key).await?;
                // A session that declares it anew is that much slower; others use this broker too.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(())
        });
        Ok(Self { end, task })
    }

    /// Lets go of it.
    pub(super) async fn end(mut self) -> Result<()> {
        self.end.cancel();
        self.task.join_next().await.unwrap_or(Ok(Ok(())))?
    }
}
