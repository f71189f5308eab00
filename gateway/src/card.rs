//! The gateway's card: its connection to the switch, which may end and come back.
//!
//! States: up ⇄ down. A card that is down tries again after 0.1 to 2 s, and announces itself
//! when it is up again.

use std::io::{self, ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use weft_switch::frames::{FRAME_MAX, LENGTH, first};

use crate::output::Output;

/// Bytes that are read at once: a few of the largest frames.
const INPUT: usize = 4 * FRAME_MAX;
/// How long to wait before the switch is tried again, at first and at most.
const AGAIN: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];
/// A connection that lasted as long was to a switch that works.
const WORKS: Duration = Duration::from_secs(2);

/// The card, and what is between it and the stacks.
pub struct Card {
    path: PathBuf,
    announcement: Vec<u8>,
    link: Link,
    /// How long to wait before the next attempt.
    again: Duration,
    input: Box<[u8]>,
    /// What of `input` was read and not yet passed on.
    start: usize,
    end: usize,
    pub output: Output,
}

enum Link {
    Up {
        socket: UnixStream,
        since: Instant,
    },
    /// The next attempt.
    Down(Instant),
}

impl Card {
    /// Connected, with an announcement that is sent first.
    ///
    /// # Errors
    /// The switch does not run.
    pub fn open(path: PathBuf, announcement: Vec<u8>, now: Instant) -> io::Result<Card> {
        let mut card = Card {
            path,
            announcement,
            link: Link::Down(now),
            again: AGAIN[0],
            input: vec![0; INPUT].into(),
            start: 0,
            end: 0,
            output: Output::default(),
        };
        card.plug(now)?;
        Ok(card)
    }

    fn plug(&mut self, now: Instant) -> io::Result<()> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let made = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(made.as_raw_fd(), &UnixAddr::new(&self.path)?)?;
        let socket = UnixStream::from(made);
        self.link = Link::Up { socket, since: now };
        (self.start, self.end) = (0, 0);
        self.output.restart(&self.announcement);
        Ok(())
    }

    /// The socket, if there is a switch.
    pub fn socket(&self) -> Option<&UnixStream> {
        match &self.link {
            Link::Up { socket, .. } => Some(socket),
            Link::Down(_) => None,
        }
    }

    /// When it tries again.
    pub fn tries_at(&self) -> Option<Instant> {
        match self.link {
            Link::Up { .. } => None,
            Link::Down(at) => Some(at),
        }
    }

    /// Connects again, if it is time.
    pub fn tick(&mut self, now: Instant) {
        if self.tries_at().is_some_and(|at| at <= now) && self.plug(now).is_err() {
            self.link = Link::Down(now + self.again);
            self.again = (2 * self.again).min(AGAIN[1]);
        }
    }

    fn unplug(&mut self, now: Instant) {
        if let Link::Up { since, .. } = self.link {
            self.again = match now.saturating_duration_since(since) >= WORKS {
                true => AGAIN[0],
                false => (2 * self.again).min(AGAIN[1]),
            };
            self.link = Link::Down(now + self.again);
        }
    }

    /// Reads once, and gives each frame that is whole to `take`. A switch that has ended, or
    /// sends what is no frame, unplugs the card.
    pub fn read(&mut self, now: Instant, mut take: impl FnMut(&[u8], &mut Output)) {
        let Link::Up { socket, .. } = &mut self.link else {
            return;
        };
        self.input.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match socket.read(&mut self.input[self.end..]) {
            Ok(0) => return self.unplug(now),
            Ok(count) => self.end += count,
            Err(error) if is_wait(&error) => return,
            Err(_) => return self.unplug(now),
        }
        loop {
            match first(&self.input[self.start..self.end]) {
                Ok(Some(frame)) => {
                    take(frame, &mut self.output);
                    self.start += LENGTH + frame.len();
                }
                Ok(None) => return,
                Err(_) => return self.unplug(now),
            }
        }
    }

    /// Writes what waits, as far as the switch takes it.
    pub fn flush(&mut self, now: Instant) {
        if let Link::Up { socket, .. } = &self.link
            && self.output.flush(socket).is_err()
        {
            self.unplug(now);
        }
    }
}

/// Whether to try again later.
pub fn is_wait(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
