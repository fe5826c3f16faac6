//! An attempt to connect that can be called off.
//!
//! A broker that is frozen, or cut off, still has its connections accepted, by its kernel or by a
//! balancer before it, and never says a word. The client library waits for that word on a thread of its
//! own, without a bound; dropping its future leaves thread and socket behind, one more with every
//! attempt. Waiting on is no better: behind a balancer the next attempt would reach another node. So
//! the socket is kept at hand here, and shut down when the attempt is given up: the library sees the
//! connection end, and ends its thread.
//!
//! And where the broker hangs up right after its greeting, as it does on a process that was frozen in
//! the middle of connecting, the library's future never ends at all (lapin 4.12).

use lapin::tcp::{AsyncTcpStream, OwnedTLSConfig};
use lapin::uri::{AMQPAuthority, AMQPScheme, AMQPUri};
use lapin::{Connection, ConnectionProperties};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::lookup_host;
use tokio::time::timeout;

/// Connects, logs in, opens the virtual host. Dropped before the end, it leaves nothing behind;
/// `bound` is for what cannot be called off, finding the host and reaching it.
///
/// # Errors
/// The library's own.
pub(super) async fn connect(
    uri: AMQPUri,
    properties: ConnectionProperties,
    bound: Duration,
) -> lapin::Result<Connection> {
    let attempt = Attempt::default();
    let socket = Arc::clone(&attempt.0);
    let runtime = lapin::runtime::default_runtime()?;
    let connecting = Connection::connector(
        uri,
        runtime,
        async move |uri: AMQPUri, runtime| {
            let AMQPAuthority { host, port, .. } = &uri.authority;
            let reach = async {
                let addresses: Vec<_> = lookup_host((host.as_str(), *port)).await?.collect();
                AsyncTcpStream::connect(&runtime, addresses).await
            };
            let opened = async {
                let stream = timeout(bound, reach).await??;
                if let AsyncTcpStream::Plain(plain) = &stream {
                    keep(&socket, plain.get_ref().as_fd().try_clone_to_owned()?.into())?;
                }
                match uri.scheme {
                    AMQPScheme::AMQP => Ok(stream),
                    AMQPScheme::AMQPS => {
                        stream.into_tls(host, OwnedTLSConfig::default().as_ref()).await
                    }
                }
            };
            Ok(opened.await?)
        },
        properties,
    );
    let connection = connecting.await?;
    attempt.succeeded();
    Ok(connection)
}

/// What became of the attempt's socket so far.
#[derive(Default)]
enum Socket {
    #[default]
    None,
    /// A second handle of the one that the library uses.
    Open(TcpStream),
    CalledOff,
}

#[derive(Default)]
struct Attempt(Arc<Mutex<Socket>>);

impl Attempt {
    /// The socket is the library's alone from here on: a second handle would keep it open.
    fn succeeded(self) {
        set(&self.0, Socket::None);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Socket::Open(socket) = set(&self.0, Socket::CalledOff) {
            // Refused only where the connection has ended already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn set(slot: &Mutex<Socket>, socket: Socket) -> Socket {
    std::mem::replace(&mut *slot.lock().unwrap_or_else(PoisonError::into_inner), socket)
}

/// Reached too late, a broker is let go at once.
fn keep(slot: &Mutex<Socket>, socket: TcpStream) -> io::Result<()> {
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if matches!(*slot, Socket::CalledOff) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    *slot = Socket::Open(socket);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::Mutex;
    use tokio::time::timeout;

    const LATE: Duration = Duration::from_secs(2);
    const DEADLINE: Duration = Duration::from_secs(20);
    /// Threads are counted by name: one test at a time makes some.
    static ALONE: Mutex<()> = Mutex::const_new(());

    /// `Connection.Start`, as the AMQP 0-9-1 specification has it.
    fn greeting() -> Vec<u8> {
        let mut method = vec![0, 10, 0, 10, 0, 9, 0, 0, 0, 0];
        for text in [b"PLAIN", b"en_US"] {
            method.extend([0, 0, 0, 5]);
            method.extend(text);
        }
        let size = u8::try_from(method.len()).unwrap_or_default();
        [&[1, 0, 0, 0, 0, 0, size], &method[..], &[0xce]].concat()
    }

    /// The next client, once it has sent its protocol header.
    async fn client(listener: &TcpListener) -> anyhow::Result<TcpStream> {
        let (mut client, _) = listener.accept().await?;
        client.read_exact(&mut [0; 8]).await?;
        Ok(client)
    }

    async fn attempt(listener: &TcpListener) -> anyhow::Result<lapin::Result<Connection>> {
        let uri = super::super::amqp_uri(&format!("amqp://{}/%2f", listener.local_addr()?))?;
        Ok(timeout(LATE, connect(uri, ConnectionProperties::default(), LATE)).await?)
    }

    /// Threads of the client library in this process, once it is none; an error if it stays more.
    async fn no_thread_is_left() -> anyhow::Result<()> {
        let count = || -> anyhow::Result<usize> {
            let names = fs::read_dir("/proc/self/task")?
                .flatten()
                .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
            Ok(names.filter(|name| name.trim() == "lapin-io-loop").count())
        };
        let none = async {
            while count()? > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(())
        };
        timeout(DEADLINE, none).await?
    }

    #[tokio::test]
    async fn an_attempt_at_a_silent_broker_is_given_up_without_a_trace() -> anyhow::Result<()> {
        let _alone = ALONE.lock().await;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (given_up, heard) = tokio::join!(attempt(&listener), client(&listener));
        assert!(given_up.is_err(), "nobody has answered");
        let ended = timeout(DEADLINE, heard?.read(&mut [0])).await?;
        assert!(matches!(ended, Ok(0) | Err(_)), "the socket is still open");
        no_thread_is_left().await
    }

    #[tokio::test]
    async fn an_attempt_at_a_broker_that_hangs_up_after_its_greeting_ends_and_the_next_is_a_new_one()
    -> anyhow::Result<()> {
        let _alone = ALONE.lock().await;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        for _ in 0..2 {
            let hang_up = async {
                let mut client = client(&listener).await?;
                client.write_all(&greeting()).await?;
                anyhow::Ok(())
            };
            let (failed, greeted) = tokio::join!(attempt(&listener), hang_up);
            greeted?;
            assert!(!matches!(failed, Ok(Ok(_))), "nobody has let it in");
        }
        no_thread_is_left().await
    }
}
