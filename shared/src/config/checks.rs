//! What no field can say alone: values that do not work together are refused at start, before
//! anything is opened. Each refusal says what was wrong and what would be right.
//!
//! That retry delays grow, and so differ, is checked where the topology is made of them
//! ([`crate::topology::Topology::new`]): its commands need that too.

use super::RetryBackend;
use super::values::{Ordering, written};
use crate::http::{CLIENT_GRACE, REQUEST_TIMEOUT};
use crate::roles::ServiceArgs;
use crate::topology::NATIVE_DELIVERY_LIMIT;
use anyhow::ensure;
use std::time::Duration;

impl ServiceArgs {
    /// All checks, in the order of a message's way.
    ///
    /// # Errors
    /// The first thing that cannot work.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.check_database()?;
        self.check_broker()?;
        self.check_relay()?;
        self.check_deliveries()?;
        self.check_retries()?;
        self.check_inbox()?;
        self.check_shutdown()
    }

    /// Waiting for a connection must leave time to use it.
    fn check_database(&self) -> anyhow::Result<()> {
        let acquire = self.database.database_acquire_timeout;
        let handle = self.consumer.consumer_handle_timeout;
        let limit = handle.min(REQUEST_TIMEOUT);
        ensure!(
            acquire < limit,
            "--database-acquire-timeout is {}; it must be shorter than --consumer-handle-timeout, {}, \
             and than a request may take, {}: of which waiting for a connection is only the beginning",
            written(acquire),
            written(handle),
            written(REQUEST_TIMEOUT)
        );
        Ok(())
    }

    /// What AMQP can say.
    fn check_broker(&self) -> anyhow::Result<()> {
        let heartbeat = self.broker.amqp_heartbeat;
        ensure!(
            heartbeat.subsec_nanos() == 0 && u16::try_from(heartbeat.as_secs()).is_ok(),
            "--amqp-heartbeat is {}; AMQP knows whole seconds, from 1s to {}s",
            written(heartbeat),
            u16::MAX
        );
        Ok(())
    }

    /// A healthy relay is neither taken for dead nor for late.
    fn check_relay(&self) -> anyhow::Result<()> {
        /// PostgreSQL's `idle_session_timeout` is an `int` of milliseconds.
        const LONGEST_LEASE: Duration = Duration::from_secs(24 * 24 * 60 * 60);
        let (relay, confirm) = (&self.relay, self.confirm.confirm_timeout);
        let silent = relay.relay_poll.max(relay.relay_standby_poll).max(confirm);
        ensure!(
            silent < relay.relay_lease,
            "--relay-lease is {}; it must be longer than --relay-poll, --relay-standby-poll and \
             --confirm-timeout: a relay is silent for as long as the longest of them, {}",
            written(relay.relay_lease),
            written(silent)
        );
        ensure!(
            relay.relay_lease <= LONGEST_LEASE,
            "--relay-lease is {}; PostgreSQL can watch over a session for at most {}",
            written(relay.relay_lease),
            written(LONGEST_LEASE)
        );
        ensure!(
            relay.relay_poll < self.ops.ready_relay_lag,
            "--ready-relay-lag is {}; it must be longer than --relay-poll, {}, which an event may \
             wait with nothing wrong",
            written(self.ops.ready_relay_lag),
            written(relay.relay_poll)
        );
        ensure!(
            relay.relay_row_backoff_min <= relay.relay_row_backoff_max,
            "--relay-row-backoff-min is {}; it must not be longer than --relay-row-backoff-max, {}",
            written(relay.relay_row_backoff_min),
            written(relay.relay_row_backoff_max)
        );
        Ok(())
    }

    /// What a failing message gets fits into what the broker bears.
    fn check_deliveries(&self) -> anyhow::Result<()> {
        /// The other half is the net for messages that kill the process.
        const MOST: u64 = NATIVE_DELIVERY_LIMIT / 2;
        /// RabbitMQ's consumer_timeout is 30 minutes by default; this leaves some to spare:
        /// <https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout>.
        const LONGEST_UNACKED: Duration = Duration::from_secs(25 * 60);
        let budget = self.consumer.budget(&self.topology);
        let most = budget.most_retries();
        ensure!(
            self.topology.retry_backend == RetryBackend::Buckets || u64::from(most) <= MOST,
            "with --retry-backend native a message may be retried {most} times; more than {MOST} are \
             too close to the queue's delivery limit: make --retry-delays longer, or \
             --retry-not-yet-deadline shorter, or the attempts fewer"
        );
        if self.topology.ordering == Ordering::Gate {
            return Ok(());
        }
        let retries = self.consumer.budget.retry_attempts_transient.get() - 1;
        let in_place = (1..=retries).try_fold(Duration::ZERO, |sum, attempt| {
            // Jitter may take the next delay up.
            let sum =
                sum + budget.steady_delay(attempt + 1) + self.consumer.consumer_handle_timeout;
            (sum < LONGEST_UNACKED).then_some(sum)
        });
        ensure!(
            in_place.is_some(),
            "in a shard a message that fails is held for all its attempts, here longer than {}, and \
             after 30m the broker takes away what is not acked: make --retry-delays shorter, or \
             --retry-attempts-transient less",
            written(LONGEST_UNACKED)
        );
        Ok(())
    }

    /// Each way to parking can be walked to its end: age, which ends them all, comes last.
    fn check_retries(&self) -> anyhow::Result<()> {
        let budget = &self.consumer.budget;
        for (attempts, flag) in [
            (budget.retry_attempts_transient, "--retry-attempts-transient"),
            (budget.retry_attempts_unknown, "--retry-attempts-unknown"),
        ] {
            let waits = self.waits(attempts.get() - 1);
            ensure!(
                waits < budget.retry_max_age,
                "--retry-max-age is {}; it must be longer than the waits between the {attempts} \
                 attempts of {flag}, which are {} by --retry-delays: a message would be too old \
                 before its attempts are used up",
                written(budget.retry_max_age),
                written(waits)
            );
        }
        ensure!(
            budget.retry_not_yet_deadline < budget.retry_max_age,
            "--retry-not-yet-deadline is {}; it must be shorter than --retry-max-age, {}: a message \
             would be too old before its predecessor is given up",
            written(budget.retry_not_yet_deadline),
            written(budget.retry_max_age)
        );
        Ok(())
    }

    /// How long so many retries wait, without jitter. Past the delays that grow, all wait alike.
    fn waits(&self, retries: u32) -> Duration {
        const GROWING: u32 = 1000;
        let budget = self.consumer.budget(&self.topology);
        let grown: Duration = (1..=retries.min(GROWING)).map(|n| budget.steady_delay(n)).sum();
        let alike = budget.steady_delay(GROWING).saturating_mul(retries.saturating_sub(GROWING));
        grown.saturating_add(alike)
    }

    /// The inbox outlasts everything that can come back.
    fn check_inbox(&self) -> anyhow::Result<()> {
        let age = self.consumer.budget.retry_max_age;
        let parking = self.topology.parking_retention;
        let horizon = self.retention.redrive_horizon;
        let longest = age + parking + horizon;
        ensure!(
            self.retention.inbox_retention >= longest,
            "--inbox-retention is {}; it must be at least {}, for so long a message can come back: \
             --retry-max-age {} + --parking-retention {} + --redrive-horizon {}",
            written(self.retention.inbox_retention),
            written(longest),
            written(age),
            written(parking),
            written(horizon)
        );
        Ok(())
    }

    /// What is in hand at SIGTERM can be finished.
    fn check_shutdown(&self) -> anyhow::Result<()> {
        let confirm = self.confirm.confirm_timeout;
        let deadline = self.process.shutdown_deadline;
        for (what, takes) in [
            (
                "a message in hand takes --consumer-handle-timeout and, if it failed, twice \
                 --confirm-timeout: for a channel, and for the copy",
                self.consumer.consumer_handle_timeout + confirm * 2,
            ),
            (
                "a consumer that is connecting takes --amqp-connect-timeout twice",
                self.broker.amqp_connect_timeout * 2,
            ),
            ("a request in hand takes its own time", REQUEST_TIMEOUT + CLIENT_GRACE),
        ] {
            ensure!(
                takes < deadline,
                "--shutdown-deadline is {}; it must be longer than {}, for {what}",
                written(deadline),
                written(takes)
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        service: ServiceArgs,
    }

    /// The defaults with these flags: what is wrong with them, if anything is.
    fn refusal(flags: &str) -> Option<String> {
        let needed = "service --database-url x --amqp-url x --management-url x";
        let line = needed.split(' ').chain(flags.split_whitespace());
        let args = Cli::try_parse_from(line).expect("each value is all right").service;
        args.check().err().map(|error| error.to_string())
    }

    #[test]
    fn what_works_is_not_refused() {
        for flags in [
            "",
            "--inbox-retention 29d",
            "--retry-delays 5s --retry-max-age 15m1s",
            "--retry-max-age 5m36s --retry-not-yet-deadline 5m",
            "--retry-attempts-transient 1 --retry-attempts-unknown 1 --retry-delays 2d,3d",
            "--relay-row-backoff-min 5m --relay-row-backoff-max 5m",
            "--consumer-handle-timeout 14s",
            "--shutdown-deadline 21s",
            "--relay-lease 24d",
            "--retry-backend native",
            "--ordering shards=4",
            "--amqp-heartbeat 1s",
        ] {
            assert_eq!(refusal(flags), None, "{flags}");
        }
    }

    #[test]
    fn what_does_not_work_together_is_refused_with_what_would() {
        for (flags, says) in [
            (
                "--inbox-retention 28d23h",
                "at least 29d, for so long a message can come back: --retry-max-age 1d + \
                 --parking-retention 14d + --redrive-horizon 14d",
            ),
            ("--redrive-horizon 36500d", "at least 36515d"),
            ("--retry-max-age 5m35s", "longer than the waits between the 4 attempts"),
            (
                "--retry-attempts-unknown 400",
                "attempts of --retry-attempts-unknown, which are 1d9h",
            ),
            ("--retry-attempts-transient 4294967295", "--retry-max-age is 1d"),
            ("--retry-not-yet-deadline 1d", "shorter than --retry-max-age, 1d"),
            ("--relay-row-backoff-min 6m", "not be longer than --relay-row-backoff-max, 5m"),
            ("--relay-poll 30s", "as the longest of them, 30s"),
            ("--relay-standby-poll 31s", "as the longest of them, 31s"),
            ("--confirm-timeout 1m", "as the longest of them, 1m"),
            (
                "--retry-backend native --retry-delays 1s,2s",
                "may be retried 451 times; more than 24",
            ),
            ("--ordering shards=4 --retry-delays 5m,10m,15m", "here longer than 25m"),
            ("--ordering shards=4 --retry-attempts-transient 4294967295", "here longer than 25m"),
            ("--relay-lease 25d", "at most 24d"),
            ("--ready-relay-lag 500ms", "longer than --relay-poll, 500ms"),
            ("--consumer-handle-timeout 15s", "must be longer than 25s, for a message in hand"),
            ("--confirm-timeout 15s", "must be longer than 40s, for a message in hand"),
            ("--amqp-connect-timeout 13s", "must be longer than 26s, for a consumer"),
            (
                "--consumer-handle-timeout 4s --confirm-timeout 3s --amqp-connect-timeout 5s \
                 --shutdown-deadline 11s",
                "must be longer than 11s, for a request",
            ),
            ("--database-acquire-timeout 10s", "shorter than --consumer-handle-timeout, 10s"),
            ("--database-acquire-timeout 11s --consumer-handle-timeout 12s", "may take, 10s"),
            ("--amqp-heartbeat 500ms", "whole seconds, from 1s to 65535s"),
            ("--amqp-heartbeat 20h", "AMQP knows whole seconds"),
        ] {
            let said = refusal(flags).unwrap_or_default();
            assert!(said.contains(says), "{flags}: {said:?} does not say {says:?}");
        }
    }
}
