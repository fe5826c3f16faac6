//! The tables: what is committed. A process that is killed after its COMMIT says nothing of it; its
//! inbox row does.

use super::super::happening::{Happening, What, name};
use super::LOOK;
use crate::ledger::books::{Mail, Side, mail};
use chrono::{DateTime, Utc};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio_util::sync::CancellationToken;

/// A database may be away: that is part of some stories.
const PATIENCE: Duration = Duration::from_millis(500);

/// A connection of our own, opened when first used.
///
/// # Errors
/// When the URL is none.
pub fn open(url: &str) -> sqlx::Result<PgPool> {
    PgPoolOptions::new().max_connections(1).acquire_timeout(PATIENCE).connect_lazy(url)
}

/// Reports until told to stop.
pub async fn watch(
    side: Side,
    db: PgPool,
    report: UnboundedSender<Happening>,
    done: CancellationToken,
) {
    let mut known = Mail::default();
    loop {
        let last = done.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_none();
        // Not there yet, or away: what is committed will be seen when it is back.
        if let Ok(Ok(now)) = tokio::time::timeout(PATIENCE, mail(&db)).await {
            for happening in news(side, &known, &now) {
                // Nobody listens any more: then the story is over.
                let _ = report.send(happening);
            }
            known = now;
        }
        if last {
            return;
        }
    }
}

fn news(by: Side, known: &Mail, now: &Mail) -> Vec<Happening> {
    let mut news = Vec::new();
    let mut add = |at: DateTime<Utc>, id: &str, name: Option<String>, what| {
        news.push(Happening { at, message: Some(id.to_owned()), name, what });
    };
    for (id, at) in now.received.iter().filter(|(id, _)| !known.received.contains_key(*id)) {
        add(*at, id, None, What::Committed { by });
    }
    for (id, event) in &now.sent {
        let name = Some(name(&event.event_type, event.aggregate_version));
        let before = known.sent.get(id);
        if before.is_none() {
            add(event.created_at, id, name.clone(), What::Written { by });
        }
        if let Some(at) = event.published_at
            && before.is_none_or(|event| event.published_at.is_none())
        {
            add(at, id, name, What::Marked { by });
        }
    }
    news
}
