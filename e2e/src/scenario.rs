//! Seven ways to break the path of a message, two of them in two forms; each is a story that can be
//! watched, and a test.
//!
//! `target/debug/scenario run NAME` (after `make build`) plays one against real servers and prints what
//! happened at which hop, who owned the message from then on, what was repeated and what absorbed it;
//! in the end the ledger ([`crate::ledger`]). The tests in `e2e/tests/e2e/scenarios.rs` play the same
//! with shorter delays ([`Pace`]).
//!
//! Each story is a file in `scenario/play`; [`stage`] is what they are told with. What happens is seen
//! by [`witness`]es, told in order by [`timeline`] and put into words by [`teller`].

pub mod happening;
pub mod line;
pub mod owner;
pub mod pace;
mod play;
pub mod stage;
pub mod teller;
pub mod timeline;
pub mod witness;

pub use happening::What;
pub use line::{HEADLINE, Line, Mark, wrap};
pub use pace::Pace;
pub use play::Scenario;
pub use timeline::Out;

use crate::ledger::Ledger;
use anyhow::{Result, anyhow, ensure};
use stage::Stage;
use timeline::Timeline;

/// A scenario that went as it should.
#[derive(Debug)]
pub struct Played {
    /// What happened.
    pub lines: Vec<Line>,
    /// The books, which balance.
    pub ledger: Ledger,
}

impl Scenario {
    /// Plays it; lines go to `out` as they are told.
    ///
    /// # Errors
    /// When a step does not come as it should, or the ledger does not balance.
    pub async fn run(self, pace: Pace, out: Out) -> Result<Played> {
        let timeline = Timeline::begin(out);
        let mut stage = Stage::set(pace, self.options(pace), &timeline).await?;
        let played = self.play(&mut stage).await;
        let (system, witnesses) = stage.clear();
        let ledger = match played {
            Ok(expect) => system.close(expect).await,
            Err(error) => {
                let services = [&system.orders, &system.inventory];
                let logs = services.into_iter().flatten().map(|service| service.child.report());
                Err(anyhow!("{error:#}\n\n{}", logs.collect::<Vec<_>>().join("\n")))
            }
        };
        witnesses.dismiss().await;
        let lines = timeline.end().await?;
        let played = Played { lines, ledger: ledger? };
        let told = played.count(|what| matches!(what, What::Published { .. }));
        ensure!(told > 0, "RabbitMQ's firehose was silent");
        Ok(played)
    }
}

impl Played {
    /// How many lines are like that.
    pub fn count(&self, is: impl Fn(&What) -> bool) -> usize {
        self.lines.iter().filter(|line| is(&line.happening.what)).count()
    }

    /// What a reader must not miss of the messages of that name (`created v1`), in order: their
    /// repetitions, and what absorbed them.
    #[must_use]
    pub fn marks(&self, name: &str) -> Vec<Mark> {
        self.lines
            .iter()
            .filter(|line| line.label.starts_with(name))
            .filter_map(|l| l.mark)
            .collect()
    }
}
