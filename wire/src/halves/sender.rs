//! The half that sends, from any number of threads, and its flusher.

use super::outgoing::{Outgoing, send_now};
use crate::LinkError;
use crate::error::{Class, class};
use crate::frame::{Header, MAX_PAYLOAD};
use crate::seal::KEY_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The half that sends. Clones send on the same link.
#[derive(Clone)]
pub struct Sender(pub(super) Arc<Shared>);

/// What all clones and the receiver share.
pub(super) struct Shared {
    socket: OwnedFd,
    lease_ms: u32,
    name: String,
    sent_bytes: AtomicU64,
    /// Orders the frames. Under it only calls that never wait are made: a
    /// `sendmsg` that takes what fits now, and `shutdown`.
    outgoing: Mutex<Outgoing>,
    /// There is a backlog again, or the link ended.
    changed: Condvar,
}

impl Shared {
    pub fn new(
        socket: OwnedFd,
        send_key: Option<&[u8; KEY_BYTES]>,
        lease_ms: u32,
        name: String,
    ) -> Shared {
        Shared {
            socket,
            lease_ms,
            name,
            sent_bytes: AtomicU64::new(0),
            outgoing: Mutex::new(Outgoing::new(send_key)),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the link, unless it has ended; gives the first reason.
    fn end(&self, outgoing: &mut Outgoing, error: LinkError) -> LinkError {
        if let Some(first) = outgoing.ended {
            return first;
        }
        outgoing.ended = Some(error);
        outgoing.backlog.clear();
        // It fails only when the peer did it first, which is as good.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        self.changed.notify_all();
        error
    }

    fn count(&self, bytes: usize) {
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Sender {
    /// Sends a frame whose payload is `parts`, one after the other, whole and
    /// in order with all others. The header's `length` is filled in. Never
    /// waits for the peer: what the kernel does not take at once waits in the
    /// backlog.
    ///
    /// # Errors
    /// [`LinkError::TooLong`] and the link goes on; [`LinkError::Backlog`] when
    /// more than [`super::BACKLOG_MAX`] bytes would wait, and all others: why
    /// the link ended.
    pub fn send(&self, header: &Header, parts: &[&[u8]]) -> Result<(), LinkError> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length > MAX_PAYLOAD {
            return Err(LinkError::TooLong { length });
        }
        let header = Header {
            length: length as u32,
            ..*header
        };
        let shared = &*self.0;
        let mut outgoing = shared.lock();
        if let Some(error) = outgoing.ended {
            return Err(error);
        }
        let idle = outgoing.backlog.is_idle();
        match outgoing.put(&shared.socket, &header.encode(), parts) {
            Err(error) => return Err(shared.end(&mut outgoing, error)),
            Ok(taken) => shared.count(taken),
        }
        let wake = idle && !outgoing.backlog.is_idle();
        drop(outgoing);
        if wake {
            shared.changed.notify_all();
        }
        Ok(())
    }

    /// Hands backlogs to the kernel until the link ends; gives why it ended.
    /// For one thread of its own, whatever keeps the process's threads.
    ///
    /// # Errors
    /// A second flusher is refused with [`LinkError::Configuration`].
    pub fn flush_forever(&self) -> LinkError {
        let shared = &*self.0;
        let mut outgoing = shared.lock();
        if std::mem::replace(&mut outgoing.flusher, true) {
            return LinkError::Configuration("it has a flusher already");
        }
        loop {
            if let Some(error) = outgoing.ended {
                outgoing.flusher = false;
                return error;
            }
            let Some(block) = outgoing.backlog.take() else {
                let waited = shared.changed.wait_timeout(outgoing, shared.lease());
                outgoing = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            drop(outgoing);
            let flushed = shared.flush(&block);
            outgoing = shared.lock();
            outgoing.backlog.finish();
            if let Err(error) = flushed {
                shared.end(&mut outgoing, error);
            }
        }
    }

    /// Bytes that wait for the peer.
    pub fn waiting(&self) -> usize {
        self.0.lock().backlog.waiting()
    }

    /// Bytes handed to the kernel so far, framing and sealing included.
    pub fn traffic(&self) -> u64 {
        self.0.sent_bytes.load(Ordering::Relaxed)
    }

    /// The link's name, as configured.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Ends both directions at once; waiting threads return. What still waits in
    /// the backlog is lost. Does nothing when the link has ended.
    pub fn close(&self) {
        self.end(LinkError::ClosedHere);
    }

    /// Ends the link, unless it has ended; gives the first reason.
    pub(super) fn end(&self, error: LinkError) -> LinkError {
        self.0.end(&mut self.0.lock(), error)
    }
}

impl Shared {
    fn lease(&self) -> Duration {
        Duration::from_millis(u64::from(self.lease_ms))
    }

    /// Hands a block to the kernel, waiting for room as long as the peer takes
    /// anything within a lease. Holds no lock.
    fn flush(&self, mut block: &[u8]) -> Result<(), LinkError> {
        let mut stalled_since = None;
        while !block.is_empty() {
            let taken = send_now(&self.socket, std::iter::once(block))?;
            self.count(taken);
            block = &block[taken..];
            if taken > 0 {
                stalled_since = None;
                continue;
            }
            let since = *stalled_since.get_or_insert_with(Instant::now);
            match self.lease().checked_sub(since.elapsed()) {
                None | Some(Duration::ZERO) => {
                    let lease_ms = self.lease_ms;
                    return Err(LinkError::Stalled { lease_ms });
                }
                Some(left) => self.wait_for_room(left)?,
            }
        }
        Ok(())
    }

    /// Waits until the kernel takes more, the link ends or the time passes.
    fn wait_for_room(&self, timeout: Duration) -> Result<(), LinkError> {
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut watched = [PollFd::new(&self.socket, PollFlags::OUT)];
        match poll(&mut watched, Some(&timeout)) {
            Ok(_) => Ok(()),
            Err(errno) => match class(errno.raw_os_error()) {
                Class::Interrupted => Ok(()),
                _ => Err(LinkError::from_errno("poll", errno.raw_os_error())),
            },
        }
    }
}
