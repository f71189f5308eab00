//! Handshakes with other switches, each on a thread of its own, since it waits.
//!
//! Invariant: at most [`ACCEPTED_MAX`] connections that came in are under way; a newer one
//! takes the place of the oldest. So strangers that connect and say nothing keep no peer out:
//! its handshake takes milliseconds. Each thread ends within [`handshake::TIMEOUT`], and one that dials also
//! within the time that the host takes to look up a name.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use weft_wire::handshake::{self, HandshakeError, Keyed};
use weft_wire::keys::{PublicKey, StaticKeys};
use weft_wire::socket;

use super::{DIAL_MAX, HANDSHAKE_MAX};

/// Handshakes of connections that came in, at once.
pub const ACCEPTED_MAX: usize = 64;
/// Of a handshake's thread.
const STACK: usize = 256 << 10;

/// How a handshake ended.
pub enum Outcome {
    /// One that came in.
    Accepted {
        number: u64,
        result: Result<(Keyed, PublicKey), String>,
    },
    /// One that was dialled.
    Dialled {
        key: PublicKey,
        result: Result<Keyed, String>,
    },
}

/// Those that are under way.
pub struct Handshakes {
    keys: StaticKeys,
    sender: Sender<Outcome>,
    receiver: Receiver<Outcome>,
    /// A byte for each outcome.
    waker: UnixStream,
    woken: UnixStream,
    accepted: VecDeque<(u64, TcpStream)>,
    next: u64,
}

impl Handshakes {
    /// With none under way.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new(keys: StaticKeys) -> io::Result<Handshakes> {
        let (sender, receiver) = channel();
        let (waker, woken) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        Ok(Handshakes {
            keys,
            sender,
            receiver,
            waker,
            woken,
            accepted: VecDeque::new(),
            next: 0,
        })
    }

    /// What becomes readable when one has ended.
    pub fn woken(&self) -> &UnixStream {
        &self.woken
    }

    /// Those that have ended.
    pub fn outcomes(&mut self) -> Vec<Outcome> {
        let mut bytes = [0; 256];
        // Nothing there is no error: the outcomes are looked at in any case.
        let _ = (&self.woken).read(&mut bytes);
        let outcomes: Vec<Outcome> = self.receiver.try_iter().collect();
        for outcome in &outcomes {
            if let Outcome::Accepted { number, .. } = outcome {
                self.accepted.retain(|(other, _)| other != number);
            }
        }
        outcomes
    }

    /// Dials a peer.
    ///
    /// # Errors
    /// No thread can be made.
    pub fn dial(&self, key: PublicKey, address: String) -> io::Result<()> {
        let keys = self.keys.clone();
        let dial = move || {
            let stream = socket::dial(&address, DIAL_MAX)
                .map_err(|error| format!("cannot connect to {address}: {error}"))?;
            handshake::dial_switch(stream.into(), &keys, &key, HANDSHAKE_MAX)
                .map_err(|error| said(&error))
        };
        self.spawn(move || Outcome::Dialled {
            key,
            result: dial(),
        })
    }

    /// Answers a connection that came in, of a switch with one of these keys.
    ///
    /// # Errors
    /// No thread can be made, or the socket cannot be set up.
    pub fn accept(&mut self, stream: TcpStream, trusted: Vec<PublicKey>) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        socket::tune(&stream)?;
        if self.accepted.len() >= ACCEPTED_MAX
            && let Some((_, oldest)) = self.accepted.pop_front()
        {
            // Its thread wakes and ends. It may have ended by itself.
            let _ = oldest.shutdown(std::net::Shutdown::Both);
        }
        let (number, keys) = (self.next, self.keys.clone());
        self.next += 1;
        self.accepted.push_back((number, stream.try_clone()?));
        let accept = move || {
            handshake::accept(stream.into(), handshake::TIMEOUT)
                .and_then(|incoming| incoming.switch(&keys, |key| trusted.contains(key)))
                .map_err(|error| said(&error))
        };
        let spawned = self.spawn(move || Outcome::Accepted {
            number,
            result: accept(),
        });
        if spawned.is_err() {
            self.accepted.pop_back();
        }
        spawned
    }

    fn spawn(&self, work: impl FnOnce() -> Outcome + Send + 'static) -> io::Result<()> {
        let (sender, waker) = (self.sender.clone(), self.waker.try_clone()?);
        let thread = thread::Builder::new().name("weft-handshake".into());
        thread.stack_size(STACK).spawn(move || {
            // The switch may have ended; a full socket wakes it, too.
            let _ = sender.send(work());
            let _ = (&waker).write(&[1]);
        })?;
        Ok(())
    }
}

/// The error with what caused it.
fn said(error: &HandshakeError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
