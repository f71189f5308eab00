//! A client and its connection.
//!
//! States of a connection: connecting → open → ended. Within *open* both directions end for
//! themselves: the client's end becomes FIN when all before it is in the stack, the machine's
//! FIN becomes `shutdown` when the client has taken all before it.
//!
//! A client that has gone is not polled any more, since the kernel would report it without
//! pause. What it wrote is still sent. What comes for it is dropped until then; afterwards it
//! ends the connection.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddrV4};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use smoltcp::socket::tcp::State;

use crate::caller::{Request, refuse, welcome};
use crate::card::is_wait;
use crate::output::Output;
use crate::stack::{Face, Tcp};
use crate::{BUFFER, SILENCE_MAX};

/// How long a machine may leave its direction open after the client has gone.
const LINGER: Duration = Duration::from_secs(60);

/// Both ends, and how far they are.
pub struct Connection {
    client: UnixStream,
    /// The client's descriptor is closed at its end, or both directions have ended.
    hung_up: Option<Instant>,
    /// Its socket takes nothing for now.
    blocked: bool,
    tcp: Tcp,
    to: SocketAddrV4,
    port: u16,
    state: Progress,
    /// Its machine was heard, at that time or when it began.
    heard: Instant,
    is_heard: bool,
    patience: Duration,
}

#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// Until the machine has answered; then these bytes are its first.
    Connecting {
        until: Instant,
        early: Vec<u8>,
    },
    Open {
        /// The client's end is in the stack.
        client_ended: bool,
        /// The machine's end was passed on.
        machine_ended: bool,
    },
    Ended,
}

impl Connection {
    /// Begins to connect from this port of the gateway.
    pub fn new(
        client: UnixStream,
        request: Request,
        (face, port, seed): (&Face, u16, u64),
        now: Instant,
    ) -> Connection {
        let Request {
            to,
            patience,
            early,
        } = request;
        Connection {
            client,
            hung_up: None,
            blocked: false,
            tcp: Tcp::connect(face, port, to, seed, now),
            to,
            port,
            state: Progress::Connecting {
                until: now + patience,
                early,
            },
            heard: now,
            is_heard: false,
            patience,
        }
    }

    /// The machine's end.
    pub fn to(&self) -> SocketAddrV4 {
        self.to
    }

    /// The gateway's end.
    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn has_ended(&self) -> bool {
        self.state == Progress::Ended
    }

    /// Whether both sides have ended, and only late frames are waited for.
    pub fn is_late(&self) -> bool {
        self.tcp.state() == State::TimeWait && self.hung_up.is_some()
    }

    /// What the client's socket is polled for.
    pub fn polled(&mut self) -> Option<(&UnixStream, PollFlags)> {
        if self.hung_up.is_some() || self.has_ended() {
            return None;
        }
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::POLLIN, self.takes());
        flags.set(PollFlags::POLLOUT, self.blocked);
        Some((&self.client, flags))
    }

    /// Whether there is room for what the client writes.
    fn takes(&mut self) -> bool {
        let Progress::Open { client_ended, .. } = self.state else {
            return false;
        };
        !client_ended && self.tcp.socket().send_queue() < BUFFER
    }

    /// The next moment at which [`Connection::step`] has something to do by itself.
    pub fn due(&mut self, now: Instant) -> Instant {
        let mut due = self.deadline();
        if let Some(stack) = self.tcp.due(now) {
            due = due.min(stack);
        }
        due
    }

    /// When it is given up, whatever the stack does.
    pub fn deadline(&self) -> Instant {
        match (&self.state, self.hung_up) {
            (Progress::Connecting { until, .. }, _) => *until,
            (_, Some(since)) if !self.tcp.owes() => since.max(self.heard) + LINGER,
            _ => self.heard + SILENCE_MAX,
        }
    }

    /// A frame of its machine.
    pub fn receive(&mut self, frame: &[u8], output: &mut Output, now: Instant) {
        (self.heard, self.is_heard) = (now, true);
        self.tcp.receive(frame, output, now);
    }

    /// What poll(2) has said of the client.
    pub fn note(&mut self, flags: PollFlags, now: Instant) {
        if flags.intersects(PollFlags::POLLOUT) {
            self.blocked = false;
        }
        if flags.intersects(PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL) {
            self.hung_up.get_or_insert(now);
        }
    }

    /// Moves bytes both ways, as far as they go.
    pub fn step(&mut self, now: Instant) {
        self.answer(now);
        if let Progress::Open { .. } = self.state {
            self.take_from_client();
            self.give_to_client();
            self.pass_ends_on();
        }
        if now >= self.deadline() && !self.has_ended() {
            self.abort();
        }
    }

    /// Sends what is due; of a connection that has ended, its reset.
    pub fn send(&mut self, output: &mut Output, now: Instant) {
        self.tcp.send(output, now);
    }

    /// Resets the connection.
    pub fn abort(&mut self) {
        self.tcp.socket().abort();
        self.state = Progress::Ended;
    }

    /// Tells the client when the machine has accepted or refused, or has said nothing for too
    /// long.
    fn answer(&mut self, now: Instant) {
        let Progress::Connecting { until, early } = &mut self.state else {
            return;
        };
        let (to, patience) = (self.to, self.patience.as_millis());
        let why = match self.tcp.state() {
            _ if self.hung_up.is_some() => return self.abort(),
            State::SynSent | State::SynReceived if now < *until => return,
            State::SynSent | State::SynReceived if self.is_heard => format!(
                "{to} did not answer within {patience} ms, although its machine is there: look \
                whether it drops what comes for that port"
            ),
            State::SynSent | State::SynReceived => format!(
                "no machine has answered for {to} within {patience} ms: look whether it runs and \
                is connected"
            ),
            State::Closed => {
                format!("{to} refuses the connection: look whether a server listens there")
            }
            _ => {
                // The buffers are empty: both take it whole.
                let sent = self.tcp.socket().send_slice(early);
                if sent != Ok(early.len()) || welcome(&self.client).is_err() {
                    return self.abort();
                }
                self.state = Progress::Open {
                    client_ended: false,
                    machine_ended: false,
                };
                return;
            }
        };
        refuse(&self.client, &why);
        self.abort();
    }

    /// Reads until the stack has no room, the client has no more, or has ended.
    fn take_from_client(&mut self) {
        while self.takes() {
            let client = &mut self.client;
            let sent = self.tcp.socket().send(|room| match client.read(room) {
                Ok(count) => (count, Ok(count)),
                Err(error) => (0, Err(error)),
            });
            match sent {
                Ok(Ok(0)) => return self.end_client(),
                Ok(Ok(_)) => {}
                Ok(Err(error)) if is_wait(&error) => return,
                // It closed its socket before it had read all. What it wrote is sent.
                Ok(Err(_)) => return self.end_client(),
                // The machine has reset the connection.
                Err(_) => return,
            }
        }
    }

    fn end_client(&mut self) {
        if let Progress::Open { client_ended, .. } = &mut self.state {
            *client_ended = true;
            self.tcp.socket().close();
        }
    }

    /// Writes until the client takes nothing, or there is no more.
    fn give_to_client(&mut self) {
        if self.hung_up.is_some() {
            return self.drop_received();
        }
        while !self.blocked && self.tcp.socket().recv_queue() > 0 {
            let client = &mut self.client;
            let given = self.tcp.socket().recv(|bytes| match client.write(bytes) {
                Ok(count) => (count, Ok(())),
                Err(error) => (0, Err(error)),
            });
            match given {
                Ok(Ok(())) => {}
                Ok(Err(error)) if is_wait(&error) => self.blocked = true,
                // It reads no more.
                Ok(Err(_)) => return self.abort(),
                Err(_) => return,
            }
        }
    }

    /// Nobody reads it.
    fn drop_received(&mut self) {
        let owes = self.tcp.owes() || self.takes();
        let socket = self.tcp.socket();
        let received = socket.recv_queue() > 0;
        while socket.recv_queue() > 0 && socket.recv(|bytes| (bytes.len(), ())).is_ok() {}
        if received && !owes {
            self.abort();
        }
    }

    fn pass_ends_on(&mut self) {
        let all_given = self.tcp.socket().recv_queue() == 0;
        let Progress::Open { machine_ended, .. } = &mut self.state else {
            return;
        };
        match self.tcp.state() {
            // After a reset, or after both ends.
            State::Closed if all_given || self.hung_up.is_some() => self.state = Progress::Ended,
            State::CloseWait | State::LastAck | State::Closing | State::TimeWait
                if all_given && !*machine_ended =>
            {
                *machine_ended = true;
                // A client that has gone is noticed by the next poll.
                let _ = self.client.shutdown(Shutdown::Write);
            }
            _ => {}
        }
    }
}
