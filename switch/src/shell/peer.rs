//! The link to another switch: messages in sealed records.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use weft_wire::handshake::Keyed;
use weft_wire::seal::{LENGTH_BYTES, Opener, RECORD_MAX, RECORD_PLAIN_MAX, Sealer};
use weft_wire::socket::Socket;

use super::machine::{BATCH, is_wait};
use super::{KEEPALIVE, SILENCE_MAX, STALL_MAX};
use crate::core::{PortId, Switch};
use crate::frames::{LENGTH, Message, Way, first};

/// Bytes that are read at once: a few records.
const INPUT: usize = 4 * RECORD_MAX;

/// A link that is up.
pub struct Link {
    stream: TcpStream,
    sealer: Sealer,
    opener: Opener,
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// What records held, up to the first message that is not whole.
    plain: Vec<u8>,
    /// Where in `plain` the next message begins.
    next: usize,
    /// How the next frame comes.
    way: Way,
    /// Messages that no record holds yet.
    messages: Vec<u8>,
    /// The record that is under way, and how much of it was sent.
    record: Box<[u8]>,
    record_end: usize,
    sent: usize,
    /// The socket takes nothing for now, since then.
    blocked: Option<Instant>,
    heard: Instant,
    said: Instant,
}

impl Link {
    /// Over a connection whose handshake is done.
    ///
    /// # Errors
    /// It is no TCP socket, or cannot be made not to wait.
    pub fn new(keyed: Keyed, now: Instant) -> io::Result<Link> {
        let Socket::Tcp(stream) = keyed.socket else {
            return Err(ErrorKind::Unsupported.into());
        };
        stream.set_nonblocking(true)?;
        Ok(Link {
            stream,
            sealer: Sealer::new(&keyed.send_key),
            opener: Opener::new(&keyed.receive_key),
            input: vec![0; INPUT].into(),
            start: 0,
            end: 0,
            plain: Vec::new(),
            next: 0,
            way: Way::Directed,
            messages: Vec::new(),
            record: vec![0; RECORD_MAX].into(),
            record_end: 0,
            sent: 0,
            blocked: None,
            heard: now,
            said: now,
        })
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Whether the socket takes nothing for now.
    pub fn is_blocked(&self) -> bool {
        self.blocked.is_some()
    }

    /// Reads once.
    ///
    /// # Errors
    /// It is closed, or fails.
    pub fn fill(&mut self, now: Instant) -> io::Result<()> {
        self.input.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match self.stream.read(&mut self.input[self.end..]) {
            Ok(0) => Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                "it closed the connection",
            )),
            Ok(count) => {
                self.end += count;
                self.heard = now;
                Ok(())
            }
            Err(error) if is_wait(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Passes up to [`BATCH`] messages on; whether there may be more.
    ///
    /// # Errors
    /// A record that was altered, a message that no switch sends.
    pub fn pass_on(&mut self, port: PortId, switch: &mut Switch, now: u64) -> io::Result<bool> {
        for _ in 0..BATCH {
            let Some(bytes) = first(&self.plain[self.next..]).map_err(invalid)? else {
                if !self.open_record()? {
                    return Ok(false);
                }
                continue;
            };
            match Message::parse(bytes).map_err(invalid)? {
                Message::KeepAlive => {}
                Message::Way(way) => self.way = way,
                Message::Frame(frame) => {
                    let way = std::mem::take(&mut self.way);
                    switch.receive(port, frame, way, now);
                }
                Message::Here { address, age_ms } => {
                    switch.receive_here(port, address, age_ms, now);
                }
                Message::Gone(address) => switch.receive_gone(port, address),
            }
            self.next += LENGTH + bytes.len();
        }
        Ok(true)
    }

    /// Opens the next record, if it is here whole.
    fn open_record(&mut self) -> io::Result<bool> {
        let waiting = &mut self.input[self.start..self.end];
        let Some((length, rest)) = waiting.split_first_chunk_mut::<LENGTH_BYTES>() else {
            return Ok(false);
        };
        let bytes = Opener::announced(*length).map_err(invalid)?;
        let Some(record) = rest.get_mut(..bytes) else {
            return Ok(false);
        };
        let plain = self.opener.open(record).map_err(invalid)?;
        self.plain.drain(..self.next);
        self.next = 0;
        self.plain.extend_from_slice(&record[..plain]);
        self.start += LENGTH_BYTES + bytes;
        Ok(true)
    }

    /// Writes what waits, as far as the socket takes it.
    ///
    /// # Errors
    /// It is closed, or fails.
    pub fn flush(
        &mut self,
        port: PortId,
        switch: &mut Switch,
        (time, now): (Instant, u64),
    ) -> io::Result<()> {
        loop {
            while self.sent < self.record_end {
                match self.stream.write(&self.record[self.sent..self.record_end]) {
                    Ok(count) => {
                        self.sent += count;
                        self.said = time;
                        self.blocked = None;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.blocked.get_or_insert(time);
                        return Ok(());
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            self.blocked = None;
            if !self.seal_record(port, switch, now)? {
                return Ok(());
            }
        }
    }

    /// Makes a record of what waits; false where nothing does.
    fn seal_record(&mut self, port: PortId, switch: &mut Switch, now: u64) -> io::Result<bool> {
        while self.messages.len() < RECORD_PLAIN_MAX
            && let Some(outgoing) = switch.next(port, now)
        {
            outgoing.write(&mut self.messages);
        }
        let bytes = self.messages.len().min(RECORD_PLAIN_MAX);
        if bytes == 0 {
            return Ok(false);
        }
        self.record[LENGTH_BYTES..LENGTH_BYTES + bytes].copy_from_slice(&self.messages[..bytes]);
        self.messages.drain(..bytes);
        self.record_end = self.sealer.seal(&mut self.record, bytes).map_err(invalid)?;
        self.sent = 0;
        Ok(true)
    }

    /// Says that this switch lives, if it said nothing for a while.
    ///
    /// # Errors
    /// The peer is silent, or takes nothing.
    pub fn tick(&mut self, now: Instant) -> io::Result<()> {
        let silent = now.saturating_duration_since(self.heard);
        if silent >= SILENCE_MAX {
            let silent = format!("it was silent for {:.1} s", silent.as_secs_f32());
            return Err(io::Error::new(ErrorKind::TimedOut, silent));
        }
        let since = self.blocked.unwrap_or(now);
        if now.saturating_duration_since(since) >= STALL_MAX {
            let stalled = format!("it took nothing for {} s", STALL_MAX.as_secs());
            return Err(io::Error::new(ErrorKind::TimedOut, stalled));
        }
        let quiet = now.saturating_duration_since(self.said) >= KEEPALIVE;
        if quiet && self.messages.is_empty() && self.sent == self.record_end {
            Message::KeepAlive.write(&mut self.messages);
            self.said = now;
        }
        Ok(())
    }

    /// Whether something waits that is not in the core any more.
    pub fn has_rest(&self) -> bool {
        !self.messages.is_empty() || self.sent < self.record_end
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}
