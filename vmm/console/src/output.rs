//! The output of the guest's console devices that waits for the console thread.
//!
//! Invariant: at most [`OUTPUT_BYTES_MAX`] bytes wait. A device that writes more blocks until
//! there is room, for a bounded time, and then drops the bytes that do not fit. So a reader
//! that stops slows the guest's console down, and never stops the guest. After a loss devices
//! do not block until there is room again.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use weft_virtio::console::ConsoleOutput;

use crate::socket::SCROLLBACK_BYTES;

/// Bytes that may wait: some seconds of a fast serial port.
pub const OUTPUT_BYTES_MAX: usize = 256 << 10;
/// Longest time that a device blocks.
pub const FULL_WAIT_MAX: Duration = Duration::from_secs(2);

/// A device that the guest's console may be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Port {
    /// The 16550 (ttyS0).
    Serial,
    /// The virtio console (hvc0).
    Virtio,
}

/// The devices' side of the console. Clones write to the same console.
#[derive(Clone)]
pub struct Output {
    shared: Arc<Shared>,
}

struct Shared {
    /// How long a device blocks at most.
    full_wait: Duration,
    /// Locked only to copy bytes.
    waiting: Mutex<Waiting>,
    /// Signalled when bytes were taken.
    room: Condvar,
    /// Readable while bytes wait.
    wake: EventFd,
    /// The [`Port`] that was written to last.
    latest: AtomicU8,
}

#[derive(Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    /// The last bytes that were written, whether they wait or not.
    last: VecDeque<u8>,
    /// Bytes dropped because the buffer was full.
    lost: u64,
    /// The last write dropped bytes: the next one does not block.
    stuck: bool,
    watch: Option<Watch>,
}

impl Output {
    /// An empty buffer. A device blocks for `full_wait` at most, and for
    /// [`FULL_WAIT_MAX`].
    pub fn new(full_wait: Duration) -> io::Result<Output> {
        Ok(Output {
            shared: Arc::new(Shared {
                full_wait: full_wait.min(FULL_WAIT_MAX),
                waiting: Mutex::default(),
                room: Condvar::new(),
                wake: EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?,
                latest: AtomicU8::new(Port::Serial as u8),
            }),
        })
    }

    /// Remembers when the console first showed `text`; see [`Output::seen`].
    pub fn expect(&self, text: &str) {
        self.lock().watch = Some(Watch {
            text: text.as_bytes().to_vec(),
            tail: Vec::new(),
            seen: None,
        });
    }

    /// When the console first showed the text that was expected.
    pub fn seen(&self) -> Option<Instant> {
        self.lock().watch.as_ref().and_then(|watch| watch.seen)
    }

    /// The writer for the device at `port`.
    pub fn port(&self, port: Port) -> PortOutput {
        PortOutput {
            output: self.clone(),
            port,
        }
    }

    /// The port that the guest wrote to last, which most likely reads keys.
    pub fn latest(&self) -> Port {
        match self.shared.latest.load(Ordering::Relaxed) {
            virtio if virtio == Port::Virtio as u8 => Port::Virtio,
            _ => Port::Serial,
        }
    }

    /// Queues bytes for the console.
    pub fn push(&self, mut bytes: &[u8]) {
        let deadline = Instant::now() + self.shared.full_wait;
        let mut waiting = self.lock();
        if let Some(watch) = &mut waiting.watch {
            watch.pass(bytes);
        }
        waiting.last.extend(bytes);
        let old = waiting.last.len().saturating_sub(SCROLLBACK_BYTES);
        waiting.last.drain(..old);
        while !bytes.is_empty() {
            let room = OUTPUT_BYTES_MAX.saturating_sub(waiting.bytes.len());
            let (fits, rest) = bytes.split_at(room.min(bytes.len()));
            bytes = rest;
            if !fits.is_empty() {
                waiting.stuck = false;
                let sleeping = waiting.bytes.is_empty();
                waiting.bytes.extend(fits);
                if sleeping {
                    self.wake();
                }
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if waiting.stuck || left.is_zero() {
                waiting.stuck = true;
                waiting.lost += bytes.len() as u64;
                return;
            }
            waiting = match self.shared.room.wait_timeout(waiting, left) {
                Ok((waiting, _)) => waiting,
                Err(poison) => poison.into_inner().0,
            };
        }
    }

    /// The last bytes that devices wrote, at most [`SCROLLBACK_BYTES`].
    pub fn last(&self) -> Vec<u8> {
        self.lock().last.iter().copied().collect()
    }

    /// Bytes dropped so far.
    pub fn lost(&self) -> u64 {
        self.lock().lost
    }

    /// Moves at most `most` waiting bytes to the end of `to`; returns how many.
    pub(super) fn take(&self, most: usize, to: &mut Vec<u8>) -> usize {
        let mut waiting = self.lock();
        let count = most.min(waiting.bytes.len());
        to.extend(waiting.bytes.drain(..count));
        if waiting.bytes.is_empty() {
            // An error means that it is not readable already.
            let _ = self.shared.wake.read();
        }
        self.shared.room.notify_all();
        count
    }

    /// Makes [`Output::descriptor`] readable.
    pub(super) fn wake(&self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = self.shared.wake.write(1);
    }

    /// Readable when bytes wait.
    pub(super) fn descriptor(&self) -> &EventFd {
        &self.shared.wake
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.shared
            .waiting
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

/// A device's way to the console.
pub struct PortOutput {
    output: Output,
    port: Port,
}

impl PortOutput {
    fn push(&self, bytes: &[u8]) {
        let shared = &self.output.shared;
        shared.latest.store(self.port as u8, Ordering::Relaxed);
        self.output.push(bytes);
    }
}

/// For the serial port.
impl io::Write for PortOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// For the virtio console.
impl ConsoleOutput for PortOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }
}

/// Looks for a text in what passes.
struct Watch {
    text: Vec<u8>,
    /// The end of what passed: as much as could be the beginning of the text.
    tail: Vec<u8>,
    seen: Option<Instant>,
}

impl Watch {
    fn pass(&mut self, bytes: &[u8]) {
        if self.seen.is_some() || self.text.is_empty() {
            return;
        }
        self.tail.extend(bytes);
        if self
            .tail
            .windows(self.text.len())
            .any(|piece| piece == self.text)
        {
            self.seen = Some(Instant::now());
        }
        let old = self.tail.len().saturating_sub(self.text.len() - 1);
        self.tail.drain(..old);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order() {
        let output = Output::new(FULL_WAIT_MAX).unwrap();
        output.push(b"hello ");
        output.push(b"world");
        let mut got = Vec::new();
        assert_eq!(output.take(7, &mut got), 7);
        assert_eq!(output.take(100, &mut got), 4);
        assert_eq!(output.take(100, &mut got), 0);
        assert_eq!(got, b"hello world");
    }

    #[test]
    fn a_text_is_seen_wherever_it_is_cut() {
        for cut in 0..=5 {
            let output = Output::new(FULL_WAIT_MAX).unwrap();
            output.expect("login");
            output.push(b"log in, lo");
            assert_eq!(output.seen(), None);
            output.push(&b"login"[..cut]);
            output.push(&b"login: "[cut..]);
            assert!(output.seen().is_some(), "{cut}");
        }
    }

    #[test]
    fn the_last_bytes_are_kept_whoever_took_them() {
        let output = Output::new(FULL_WAIT_MAX).unwrap();
        output.push(b"first ");
        output.take(100, &mut Vec::new());
        output.push(b"then");
        assert_eq!(output.last(), b"first then");
        output.push(&vec![b'x'; SCROLLBACK_BYTES - 2]);
        let last = output.last();
        assert_eq!(last.len(), SCROLLBACK_BYTES);
        assert_eq!(&last[..4], b"enxx");
    }

    #[test]
    fn keys_go_where_output_came_from() {
        let output = Output::new(FULL_WAIT_MAX).unwrap();
        assert_eq!(output.latest(), Port::Serial);
        output.port(Port::Virtio).push(b"x");
        assert_eq!(output.latest(), Port::Virtio);
        output.port(Port::Serial).push(b"x");
        assert_eq!(output.latest(), Port::Serial);
    }

    #[test]
    fn a_writer_waits_for_room_and_gives_up_in_the_end() {
        let output = Output::new(FULL_WAIT_MAX).unwrap();
        output.push(&vec![1; OUTPUT_BYTES_MAX]);
        let writer = output.clone();
        let thread = std::thread::spawn(move || writer.push(&[2; 10]));
        let mut got = Vec::new();
        output.take(4, &mut got);
        std::thread::sleep(Duration::from_millis(20));
        output.take(6, &mut got);
        thread.join().unwrap();
        assert_eq!(output.lost(), 0);
        // Nobody reads: the first waits, the second does not.
        output.push(&[3; 5]);
        assert_eq!(output.lost(), 5);
        let before = Instant::now();
        output.push(&[3; 5]);
        assert!(before.elapsed() < FULL_WAIT_MAX / 2);
        assert_eq!(output.lost(), 10);
    }

    #[test]
    fn a_writer_that_must_not_wait_gives_up_at_once() {
        let output = Output::new(Duration::ZERO).unwrap();
        output.push(&vec![1; OUTPUT_BYTES_MAX]);
        output.push(&[2; 5]);
        assert_eq!(output.lost(), 5);
    }
}
