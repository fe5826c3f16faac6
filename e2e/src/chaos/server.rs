//! A server under fire.

use super::plan::{Blow, Step};
use super::{Diary, sleep_until};
use crate::postgres::Postgres;
use crate::rabbitmq::RabbitMq;
use anyhow::Result;
use tokio::time::Instant;

/// One of the servers that everybody shares.
pub(super) enum Server<'a> {
    Postgres(&'a Postgres),
    Broker(&'a RabbitMq),
}

impl Server<'_> {
    /// Lives through its part of the plan.
    pub(super) async fn play(&self, steps: Vec<Step>, diary: &Diary<'_>) -> Result<()> {
        for step in steps {
            sleep_until(diary.at(step.at)).await;
            diary.note(&step);
            let until = Instant::now() + step.lasts;
            if step.blow == Blow::Kill {
                self.sigkill()?;
                diary.count(step.blow.kind());
                sleep_until(until).await;
                self.start_again().await?;
            } else {
                self.sigstop()?;
                diary.count(step.blow.kind());
                sleep_until(until).await;
                self.sigcont()?;
            }
        }
        Ok(())
    }

    fn sigkill(&self) -> Result<()> {
        match self {
            Self::Postgres(postgres) => postgres.sigkill(),
            Self::Broker(rabbitmq) => rabbitmq.sigkill(),
        }
    }

    fn sigstop(&self) -> Result<()> {
        match self {
            Self::Postgres(postgres) => postgres.sigstop(),
            Self::Broker(rabbitmq) => rabbitmq.sigstop(),
        }
    }

    fn sigcont(&self) -> Result<()> {
        match self {
            Self::Postgres(postgres) => postgres.sigcont(),
            Self::Broker(rabbitmq) => rabbitmq.sigcont(),
        }
    }

    async fn start_again(&self) -> Result<()> {
        match self {
            Self::Postgres(postgres) => postgres.start_again().await,
            Self::Broker(rabbitmq) => rabbitmq.start_again().await,
        }
    }
}
