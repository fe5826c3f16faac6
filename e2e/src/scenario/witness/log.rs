//! The services' logs: what became of each delivery, by the one who decided it.

use super::super::happening::{Happening, What, name};
use super::LOOK;
use crate::child::Follower;
use crate::ledger::books::Side;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;
use tokio_util::sync::CancellationToken;

/// Reports until told to stop; a process that has died has a complete log.
pub async fn watch(
    side: Side,
    mut log: Follower,
    report: UnboundedSender<Happening>,
    done: CancellationToken,
) {
    loop {
        let last = done.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_none();
        for happening in log.new_lines().iter().filter_map(|line| read(side, line)) {
            // Nobody listens any more: then the story is over.
            let _ = report.send(happening);
        }
        if last {
            return;
        }
    }
}

fn read(by: Side, line: &str) -> Option<Happening> {
    let line: Value = serde_json::from_str(line).ok()?;
    let text = |field: &str| line[field].as_str().map(ToOwned::to_owned);
    let number = |field: &str| line[field].as_u64().unwrap_or(0);
    let error = || text("error").unwrap_or_default();
    let what = match line["message"].as_str()? {
        "message handled" => What::Handled { by, outcome: text("outcome")? },
        "message will be retried" => {
            What::Retried { class: text("class")?, delay: text("retry_in")?, error: error() }
        }
        "message is parked" => What::Parked { reason: text("reason")?, error: error() },
        "outbox row refused" => What::Refused {
            refusals: number("refusals"),
            retry_in_ms: number("retry_in_ms"),
            error: error(),
        },
        "session failed" => What::SessionFailed {
            by,
            part: text("part")?,
            retry_in_ms: number("retry_in_ms"),
            error: error(),
        },
        "relay is active" => What::Active { by, part: "relay".into() },
        "consuming" => What::Active { by, part: "consumer".into() },
        _ => return None,
    };
    let event = text("event_type").zip(line["aggregate_version"].as_i64());
    Some(Happening {
        at: text("timestamp")?.parse().ok()?,
        message: text("message_id"),
        name: event.map(|(event_type, version)| name(&event_type, version)),
        what,
    })
}
