//! A slice on another host: what it says, whether it lives, its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use weft_wire::channel::ChannelError;

use super::connection::{CALL_BOUND, Connection};
use crate::error::LaunchError;
use crate::protocol::{DaemonReply, DaemonRequest, HomeRequest};
use crate::said::{BATCH, Said, plain};
use crate::shared::Snapshot;

/// How long daemons may take to start the slices of an aggregate, which they do at the
/// same time: longer than a daemon's own bounds.
pub(super) const START_BOUND: Duration = Duration::from_secs(30);
/// How long the last counters may take after the program's end.
const CLOSE_BOUND: Duration = Duration::from_millis(500);
/// A launcher that did not run for this long (it was stopped) gives every node
/// a fresh lease.
pub(crate) const STALL: Duration = Duration::from_millis(1500);

/// What a slice elsewhere did by itself.
#[derive(Debug)]
pub enum RemoteEvent {
    /// It has something to say to the user.
    Said(String),
    Ended {
        why: String,
        /// As it does when its links close.
        clean: bool,
    },
    /// Its daemon ends.
    Leaving,
    /// Its host's owner wants the memory back.
    WantedBack,
    /// Its daemon expects all links of which it was told, or says why it does not.
    Expects(Result<(), String>),
    /// The reply to a step of the move of node 0's part: where that is, or why it does not
    /// come.
    Home {
        request: u64,
        outcome: Result<HomePlace, String>,
    },
}

/// How far the move of node 0's part to a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HomePlace {
    /// A process is ready for it.
    Ready,
    /// The process has taken the machine's state.
    Taken,
    /// It goes on with the machine.
    Runs,
}

/// Why a node is lost.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// Its daemon cannot be heard, or told.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The kernel refused to wait for it.
    #[error("it cannot be waited for")]
    Wait(#[source] io::Error),
    /// Its daemon did not answer for the lease.
    #[error("it was silent for {} s", .0.as_secs_f32())]
    Silent(Duration),
}

/// See [`crate::remote`].
pub struct RemoteSlice {
    pub(crate) connection: Connection,
    pid: Option<u32>,
    counters: Snapshot,
    heard: Instant,
    /// When the last heartbeat was due, to notice that this process was stopped.
    beaten: Instant,
    /// Pings that were not answered yet.
    waiting: u32,
    /// Links that its daemon was told to expect, and has not answered.
    expecting: u32,
    closed: bool,
    /// What it and its daemon had this process say.
    said: Said,
}

impl RemoteSlice {
    pub(crate) fn new(connection: Connection) -> RemoteSlice {
        RemoteSlice {
            connection,
            pid: None,
            counters: Snapshot::default(),
            heard: Instant::now(),
            beaten: Instant::now(),
            waiting: 0,
            expecting: 0,
            closed: false,
            said: Said::new(Instant::now()),
        }
    }

    /// What the user calls its host.
    pub fn host(&self) -> &str {
        &self.connection.host
    }

    /// Its process id on its host.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Its counters as last heard.
    pub fn counters(&self) -> &Snapshot {
        &self.counters
    }

    /// Readable when an event may have come.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.connection.descriptor.as_fd()
    }

    /// What has come, a batch at most. An error means that the node is lost.
    pub fn receive(&mut self) -> Result<Vec<RemoteEvent>, RemoteError> {
        let rest = self.said.rest(Instant::now());
        let mut events: Vec<RemoteEvent> = rest.map(RemoteEvent::Said).into_iter().collect();
        // What was already read is returned without waiting; the first round
        // reads what the descriptor announced.
        let readable = crate::sys::wait_readable(&[self.descriptor()], Duration::ZERO)
            .map_err(RemoteError::Wait)?[0];
        let mut bound = if readable {
            Duration::from_millis(1)
        } else {
            Duration::ZERO
        };
        for _ in 0..BATCH {
            match self.connection.channel.receive(bound) {
                Ok(reply) => {
                    self.heard = Instant::now();
                    self.waiting = self.waiting.saturating_sub(1);
                    self.take(reply, &mut events);
                }
                Err(ChannelError::Timeout(_)) => return Ok(events),
                // An end that the slice had announced is told as that.
                Err(_) if !events.is_empty() => return Ok(events),
                Err(error) => return Err(error.into()),
            }
            bound = Duration::ZERO;
        }
        Ok(events)
    }

    fn take(&mut self, reply: DaemonReply, events: &mut Vec<RemoteEvent>) {
        match reply {
            DaemonReply::Pong(counters) | DaemonReply::Stopped(counters) => {
                self.counters = *counters
            }
            DaemonReply::Said(text) => {
                let line = self.said.hear(Instant::now(), &text);
                events.extend(line.map(RemoteEvent::Said));
            }
            DaemonReply::Ended { why, clean } => {
                let why = plain(&why);
                events.push(RemoteEvent::Ended { why, clean });
            }
            // It was inherited.
            DaemonReply::Started { pid } if self.pid.is_none() => self.pid = Some(pid),
            DaemonReply::Leaving => events.push(RemoteEvent::Leaving),
            DaemonReply::WantedBack => events.push(RemoteEvent::WantedBack),
            DaemonReply::HomeReady { request } => {
                events.push(home(request, Ok(HomePlace::Ready)));
            }
            DaemonReply::HomeTaken { request } => {
                events.push(home(request, Ok(HomePlace::Taken)));
            }
            DaemonReply::HomeRuns { request } => events.push(home(request, Ok(HomePlace::Runs))),
            DaemonReply::HomeFailed { request, reason } => {
                events.push(home(request, Err(plain(&reason))));
            }
            DaemonReply::Done if self.expecting > 0 => self.expects(Ok(()), events),
            DaemonReply::Failed(why) if self.expecting > 0 => {
                self.expects(Err(plain(&why)), events);
            }
            other => events.push(RemoteEvent::Ended {
                why: format!(
                    "its daemon sent a reply that does not match the request \
                ({other:?})"
                ),
                clean: false,
            }),
        }
    }

    /// An answer to [`RemoteSlice::expect`]. One with others behind it is about a link that
    /// nobody makes any more.
    fn expects(&mut self, answer: Result<(), String>, events: &mut Vec<RemoteEvent>) {
        self.expecting -= 1;
        if self.expecting == 0 {
            events.push(RemoteEvent::Expects(answer));
        }
    }

    /// Has the daemon expect a link for the slice, which runs.
    pub(super) fn expect(&mut self, request: &DaemonRequest) -> Result<(), RemoteError> {
        self.send(request)?;
        self.expecting += 1;
        Ok(())
    }

    /// Sends a Ping; fails when the node has been silent for the lease.
    pub fn heartbeat(&mut self, now: Instant, lease: Duration) -> Result<(), RemoteError> {
        if now.duration_since(self.beaten) > STALL.max(lease / 2) {
            self.heard = now;
        }
        self.beaten = now;
        if now.duration_since(self.heard) > lease {
            return Err(RemoteError::Silent(lease));
        }
        // Unanswered pings would pile up at a daemon that is slow.
        if self.waiting < 8 {
            self.waiting += 1;
            self.send(&DaemonRequest::Ping)?;
        }
        Ok(())
    }

    /// Has the daemon carry out a step of the move of node 0's part.
    pub fn move_home(&mut self, request: HomeRequest) -> Result<(), RemoteError> {
        self.send(&DaemonRequest::Home(Box::new(request)))
    }

    /// The slice is this launcher's from now on, to which its daemon was connected for that.
    pub fn inherit(&mut self) -> Result<(), RemoteError> {
        self.send(&DaemonRequest::Inherit)
    }

    /// Has the daemon send the slice the kick signal.
    pub fn kick(&mut self) -> Result<(), RemoteError> {
        self.send(&DaemonRequest::Kick)
    }

    fn send(&mut self, request: &DaemonRequest) -> Result<(), RemoteError> {
        Ok(self.connection.channel.send(request)?)
    }

    /// Ends the slice and waits, within a bound, for its last counters. The
    /// connection stays, for the next generation; dropped, it gives the host its
    /// memory back.
    pub fn close(&mut self) {
        if self.closed || self.pid.is_none() {
            return;
        }
        self.pid = None;
        if self.send(&DaemonRequest::Stop).is_err() {
            self.closed = true;
            return;
        }
        let deadline = Instant::now() + CLOSE_BOUND;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.connection.channel.receive(left) {
                Ok(DaemonReply::Stopped(counters)) => {
                    self.counters = *counters;
                    self.waiting = 0;
                    return;
                }
                // Another message than the last; one that never stops talking is left.
                Ok(_) if !left.is_zero() => {}
                Ok(_) | Err(_) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }

    /// Waits for the answer to a start, whatever else the daemon says before it.
    pub(super) fn started(&mut self, deadline: Instant) -> Result<(), LaunchError> {
        let connection = &mut self.connection;
        let mut said = Vec::new();
        loop {
            // Looked at before each message: what is here already is received without waiting.
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(connection.too_slow(START_BOUND));
            }
            match connection.receive(left, START_BOUND)? {
                DaemonReply::Started { pid } => {
                    self.pid = Some(pid);
                    self.heard = Instant::now();
                    self.beaten = self.heard;
                    return Ok(());
                }
                DaemonReply::Said(text) => {
                    said.truncate(BATCH);
                    said.push(plain(&text));
                }
                DaemonReply::Failed(why) => {
                    said.push(plain(&why));
                    return Err(connection.failed(said.join(": ")));
                }
                other => return Err(connection.unexpected(&other)),
            }
        }
    }

    /// Ends the slice and gives the host back what it lent, within a bound, so that
    /// the next request finds it free. A host that does not answer gets it back
    /// with the connection.
    pub fn release(&mut self) {
        // A host that is lost already is not waited for.
        let bound = match self.heard.elapsed() > 2 * STALL {
            true => CLOSE_BOUND,
            false => CALL_BOUND,
        };
        let deadline = Instant::now() + bound;
        let mut waits = self.send(&DaemonRequest::Release).is_ok();
        while waits {
            let left = deadline.saturating_duration_since(Instant::now());
            // What else it says, nobody needs any more; an error is the end of the
            // connection, which does the same.
            let reply = self.connection.channel.receive(left);
            waits = !left.is_zero() && !matches!(reply, Ok(DaemonReply::Done) | Err(_));
        }
        self.disconnect();
    }

    /// Ends the connection: the host gets back what it lent.
    pub fn disconnect(&mut self) {
        self.closed = true;
        // It fails only when the connection is gone already.
        let _ = self
            .connection
            .descriptor
            .shutdown(std::net::Shutdown::Both);
    }
}

fn home(request: u64, outcome: Result<HomePlace, String>) -> RemoteEvent {
    RemoteEvent::Home { request, outcome }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    use weft_wire::{handshake, keys, socket};

    use std::thread::{self, JoinHandle};

    const BOUND: Duration = Duration::from_secs(30);

    /// A daemon that answers whatever is asked with the same, for as long as anybody
    /// listens, and a connection to it.
    fn talker() -> (RemoteSlice, JoinHandle<()>) {
        let (ours, theirs) = (keys::generate().unwrap(), keys::generate().unwrap());
        let key = theirs.public();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let thread = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let incoming = handshake::accept(stream.into(), BOUND).unwrap();
            let (mut channel, _) = incoming.control(&theirs, |_| true).unwrap();
            while channel
                .send(&DaemonReply::Said("and another thing".into()))
                .is_ok()
            {}
        });
        let stream = socket::dial(&address, BOUND).unwrap();
        let descriptor = stream.try_clone().unwrap();
        let channel = handshake::dial_control(stream.into(), &ours, &key, BOUND).unwrap();
        let slice = RemoteSlice::new(Connection {
            host: "talker".into(),
            address,
            key,
            channel,
            descriptor,
        });
        (slice, thread)
    }

    #[test]
    fn a_daemon_that_never_stops_talking_does_not_start() {
        let (mut slice, thread) = talker();
        let error = slice.started(Instant::now() + CLOSE_BOUND).unwrap_err();
        assert!(matches!(error, LaunchError::Timeout { .. }), "{error}");
        slice.disconnect();
        thread.join().unwrap();
    }

    #[test]
    fn a_daemon_that_never_stops_talking_is_closed() {
        let (mut slice, thread) = talker();
        slice.pid = Some(1);
        slice.close();
        assert!(slice.closed);
        slice.disconnect();
        thread.join().unwrap();
    }
}
