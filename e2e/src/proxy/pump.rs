//! Moves the bytes of one connection, as the rules of the moment say.
//!
//! All runs on one thread, and between the look at the rules and the system call that moves bytes
//! nothing is awaited: once a rule is set, no byte passes against it.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, atomic::Ordering},
};

use tokio::{
    io::AsyncWriteExt,
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{Counters, HeldByServer, Lane, Rules};

const CHUNK: usize = 16 * 1024;
/// Bytes under way in a delayed direction, as the buffers of a long wire would hold. Past them the
/// sender has to wait.
const IN_FLIGHT: usize = 64 * 1024 * 1024;

/// Until both sides have said that they will send no more, or either one fails.
pub(super) async fn both_ways(
    client: &mut TcpStream,
    server: &mut TcpStream,
    rules: &watch::Receiver<Rules>,
    counters: &Arc<Counters>,
) -> io::Result<()> {
    let held = HeldByServer::new(counters);
    for stream in [&*client, &*server] {
        stream.set_nodelay(true)?;
    }
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::try_join!(
        Pump::new(from_client, to_server, rules, |rules| rules.to_server, None).run(),
        Pump::new(from_server, to_client, rules, |rules| rules.to_client, Some(held)).run(),
    )?;
    Ok(())
}

/// One direction.
struct Pump<'a> {
    from: ReadHalf<'a>,
    to: WriteHalf<'a>,
    rules: watch::Receiver<Rules>,
    lane: fn(&Rules) -> Lane,
    /// What was read and not yet written, and when it was read.
    queue: VecDeque<(Instant, Vec<u8>)>,
    queued: usize,
    ended: bool,
    /// Of the direction that comes from the server.
    held: Option<HeldByServer>,
}

impl<'a> Pump<'a> {
    fn new(
        from: ReadHalf<'a>,
        to: WriteHalf<'a>,
        rules: &watch::Receiver<Rules>,
        lane: fn(&Rules) -> Lane,
        held: Option<HeldByServer>,
    ) -> Self {
        Self {
            from,
            to,
            rules: rules.clone(),
            lane,
            queue: VecDeque::new(),
            queued: 0,
            ended: false,
            held,
        }
    }

    async fn run(mut self) -> io::Result<()> {
        while !(self.ended && self.queue.is_empty()) {
            let lane = (self.lane)(&self.rules.borrow_and_update());
            if lane.hole {
                self.sit_out_the_hole().await?;
                continue;
            }
            let due = self.queue.front().map(|(read, _)| *read + lane.delay);
            let room = !self.ended && self.queued < IN_FLIGHT;
            tokio::select! {
                _ = self.rules.changed() => {}
                ready = self.from.readable(), if room => { ready?; self.read()?; }
                ready = writable_at(&self.to, due), if due.is_some() => { ready?; self.write()?; }
            }
        }
        self.to.shutdown().await
    }

    /// Nobody reads, so the sender's kernel takes what fits its buffers, and then the sender waits.
    async fn sit_out_the_hole(&mut self) -> io::Result<()> {
        let lane = self.lane;
        if self.rules.wait_for(|rules| !lane(rules).hole).await.is_err() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        self.read()?;
        if self.queue.is_empty() { Ok(()) } else { Err(io::ErrorKind::ConnectionReset.into()) }
    }

    fn read(&mut self) -> io::Result<()> {
        let lane = (self.lane)(&self.rules.borrow());
        if lane.hole {
            return Ok(());
        }
        let mut chunk = vec![0; CHUNK];
        match self.from.try_read(&mut chunk) {
            Ok(0) => {
                self.ended = true;
                self.held = None;
            }
            Ok(_) if lane.loss => {
                if let Some(HeldByServer(counters)) = &self.held {
                    counters.lost_answers.fetch_add(1, Ordering::SeqCst);
                }
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            Ok(n) => {
                chunk.truncate(n);
                self.queued += n;
                self.queue.push_back((Instant::now(), chunk));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        if (self.lane)(&self.rules.borrow()).hole {
            return Ok(());
        }
        let Some((_, chunk)) = self.queue.front_mut() else {
            return Ok(());
        };
        match self.to.try_write(chunk) {
            Ok(n) => {
                chunk.drain(..n);
                self.queued -= n;
                if chunk.is_empty() {
                    self.queue.pop_front();
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

async fn writable_at(to: &WriteHalf<'_>, due: Option<Instant>) -> io::Result<()> {
    match due {
        // Even a sleep until now takes a tick of the timer, a millisecond.
        Some(due) if due > Instant::now() => sleep_until(due).await,
        _ => {}
    }
    to.writable().await
}
