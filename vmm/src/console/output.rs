//! What the guest's console devices wrote and the console thread has not carried
//! away yet.
//!
//! Invariant: at most [`OUTPUT_BYTES_MAX`] bytes wait. A device that writes more
//! waits for room, [`FULL_WAIT`] at most, and then loses what does not fit: a
//! reader that stands still slows the guest's console down, and never stops the
//! guest for good. After one loss nothing is waited for until there is room again.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::virtio::console::ConsoleOutput;

/// Bytes that may wait: some seconds of a fast serial port.
pub const OUTPUT_BYTES_MAX: usize = 256 << 10;
/// Longest that a device is held up.
const FULL_WAIT: Duration = Duration::from_secs(2);

/// The devices' end. Clones write to the same console.
#[derive(Clone)]
pub struct Output {
    shared: Arc<Shared>,
}

struct Shared {
    /// Held to copy bytes only.
    waiting: Mutex<Waiting>,
    /// Bytes were taken.
    room: Condvar,
    /// Bytes wait.
    wake: EventFd,
}

#[derive(Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    /// Thrown away for want of room.
    lost: u64,
    /// The last device had to give up.
    stuck: bool,
}

impl Output {
    /// Nothing waits.
    pub fn new() -> io::Result<Output> {
        Ok(Output {
            shared: Arc::new(Shared {
                waiting: Mutex::default(),
                room: Condvar::new(),
                wake: EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?,
            }),
        })
    }

    /// Has `bytes` carried to the console.
    pub fn push(&self, mut bytes: &[u8]) {
        let deadline = Instant::now() + FULL_WAIT;
        let mut waiting = self.lock();
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

    /// Bytes thrown away so far.
    pub fn lost(&self) -> u64 {
        self.lock().lost
    }

    /// Moves at most `most` waiting bytes to the end of `to`; says how many.
    pub(super) fn take(&self, most: usize, to: &mut Vec<u8>) -> usize {
        let mut waiting = self.lock();
        let count = most.min(waiting.bytes.len());
        to.extend(waiting.bytes.drain(..count));
        if waiting.bytes.is_empty() {
            // Nothing to read: not readable any more is as good.
            let _ = self.shared.wake.read();
        }
        self.shared.room.notify_all();
        count
    }

    /// Makes [`Output::descriptor`] readable.
    pub(super) fn wake(&self) {
        // Fails only when it is readable 2^64 - 2 times over.
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

/// For the serial port.
impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// For the virtio console.
impl ConsoleOutput for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order() {
        let output = Output::new().unwrap();
        output.push(b"hello ");
        output.push(b"world");
        let mut got = Vec::new();
        assert_eq!(output.take(7, &mut got), 7);
        assert_eq!(output.take(100, &mut got), 4);
        assert_eq!(output.take(100, &mut got), 0);
        assert_eq!(got, b"hello world");
    }

    #[test]
    fn a_writer_waits_for_room_and_gives_up_in_the_end() {
        let output = Output::new().unwrap();
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
        assert!(before.elapsed() < FULL_WAIT / 2);
        assert_eq!(output.lost(), 10);
    }
}
