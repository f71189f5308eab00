//! A link that is slow on purpose, for tests: each frame waits for a random time
//! before it is sent, behind those that came before it.
//!
//! Nothing but time changes: frames keep their order, none is lost, and what still
//! waits when the machine ends is sent before the link is closed.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weft_wire::halves::{BACKLOG_MAX, Sender};
use weft_wire::{Header, LinkError};

/// Longest wait for the end to be seen.
const LOOK: Duration = Duration::from_millis(500);

/// Sends over one link, late.
pub(super) struct DelayedSender {
    sender: Sender,
    max: Duration,
    held: Mutex<Held>,
    /// A frame came, or the end.
    changed: Condvar,
}

struct Held {
    frames: VecDeque<Frame>,
    /// Bytes of payload in `frames`.
    bytes: usize,
    random: u64,
    over: bool,
}

struct Frame {
    due: Instant,
    header: Header,
    payload: Vec<u8>,
}

impl DelayedSender {
    /// Holds each frame for less than `max`, which is not zero.
    pub fn new(sender: Sender, max: Duration) -> Self {
        Self {
            sender,
            max,
            held: Mutex::new(Held {
                frames: VecDeque::new(),
                bytes: 0,
                // Another sequence each time; zero would repeat itself.
                random: RandomState::new().hash_one(()) | 1,
                over: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Takes a frame, which is sent later.
    pub fn send(&self, header: &Header, parts: &[&[u8]]) -> Result<(), LinkError> {
        let mut held = self.lock();
        if held.over {
            return self.sender.send(header, parts);
        }
        let payload = parts.concat();
        held.bytes += payload.len();
        if held.bytes > BACKLOG_MAX {
            return Err(LinkError::Backlog { bytes: held.bytes });
        }
        let due = Instant::now() + held.below(self.max);
        held.frames.push_back(Frame {
            due,
            header: *header,
            payload,
        });
        drop(held);
        self.changed.notify_one();
        Ok(())
    }

    /// Sends what is due, until the end.
    pub fn send_until_over(&self) -> Result<(), LinkError> {
        let mut held = self.lock();
        while !held.over {
            let now = Instant::now();
            let left = match held.frames.front() {
                None => LOOK,
                Some(frame) => frame.due.saturating_duration_since(now),
            };
            if left.is_zero() {
                // Under the lock, which keeps the order; it never waits for the peer.
                held.send_first(&self.sender)?;
                continue;
            }
            let waited = self.changed.wait_timeout(held, left);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Sends all that waits, now; frames that come later are not held.
    pub fn end(&self) {
        let mut held = self.lock();
        held.over = true;
        // A link that ended needs nothing more.
        while !held.frames.is_empty() && held.send_first(&self.sender).is_ok() {}
        drop(held);
        self.changed.notify_all();
    }

    /// The link itself, which delays nothing.
    pub fn sender(&self) -> &Sender {
        &self.sender
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    fn send_first(&mut self, sender: &Sender) -> Result<(), LinkError> {
        let Some(frame) = self.frames.pop_front() else {
            return Ok(());
        };
        self.bytes -= frame.payload.len();
        sender.send(&frame.header, &[&frame.payload])
    }

    /// A time below `max`, by xorshift64.
    fn below(&mut self, max: Duration) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        max.mul_f64((self.random >> 11) as f64 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use weft_wire::halves::{HalvesConfig, Receiver, open};

    fn half(socket: UnixStream) -> (Sender, Receiver) {
        let config = HalvesConfig {
            socket: socket.into(),
            keys: None,
            lease: Duration::from_secs(20),
            spin: Duration::ZERO,
            name: "test".into(),
        };
        open(config).unwrap()
    }

    #[test]
    fn frames_come_late_whole_and_in_order() {
        // So few that the socket takes them: nobody flushes here.
        const FRAMES: u64 = 100;
        let (near, far) = UnixStream::pair().unwrap();
        let ((sender, _near), (_far, mut receiver)) = (half(near), half(far));
        let delayed = Arc::new(DelayedSender::new(sender, Duration::from_micros(500)));
        let thread = {
            let delayed = delayed.clone();
            std::thread::spawn(move || delayed.send_until_over())
        };
        let started = Instant::now();
        for number in 0..FRAMES {
            let header = Header {
                words: [number, 0, 0, 0, 0],
                ..Header::new(136)
            };
            let bytes = number.to_le_bytes();
            delayed.send(&header, &[&bytes[..3], &bytes[3..]]).unwrap();
            // Some wait when the end comes.
            if number == FRAMES - 20 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        delayed.end();
        assert_eq!(thread.join().unwrap(), Ok(()));
        for number in 0..FRAMES {
            let frame = receiver.receive(Duration::from_secs(20)).unwrap().unwrap();
            assert_eq!(frame.header.words[0], number);
            assert_eq!(frame.payload, number.to_le_bytes());
        }
        assert!(started.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn waits_are_below_the_most() {
        let (near, _far) = UnixStream::pair().unwrap();
        let (sender, _receiver) = half(near);
        let delayed = DelayedSender::new(sender, Duration::from_millis(2));
        let mut held = delayed.lock();
        let waits: Vec<Duration> = (0..1000).map(|_| held.below(delayed.max)).collect();
        assert!(waits.iter().all(|wait| *wait < delayed.max));
        let mean = waits.iter().sum::<Duration>() / 1000;
        assert!((800..1200).contains(&mean.as_micros()), "{mean:?}");
    }
}
