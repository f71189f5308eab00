//! What other threads ask of a vCPU, and how they learn that it was done.
//!
//! A vCPU thread is *inside* while it may use its TLB and its blocks, and
//! *outside* while it is stopped, halted, in a device, or waiting for a page.
//!
//! Invariants:
//!
//! - A demand that was posted is answered when the vCPU is outside, or has
//!   drained its queue since. A vCPU that comes inside drains first.
//! - Posting stores the demand before it looks where the vCPU is; coming inside
//!   stores `INSIDE` before it looks for demands. Both in one total order
//!   (SeqCst), so one of the two sees the other.
//! - The queue holds at most [`DEMANDS_MAX`] demands; more become one for
//!   everything.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bits of [`VcpuRequests::request`].
pub mod request {
    /// Come back from `run`.
    pub const KICK: u32 = 1;
    /// The queue of demands is not empty.
    pub const DEMANDS: u32 = 2;
    /// Another vCPU needs all others to be outside.
    pub const EXCLUSIVE: u32 = 4;
    /// Something may have changed that interrupts or the clock depend on; set
    /// by the vCPU's own thread.
    pub const LOOK: u32 = 8;
    /// Memory has deferred work for this vCPU; set by its own thread.
    pub const DEFERRED_WORK: u32 = 16;
    /// Forget translations, so that the next use of each page is seen.
    pub const LOOK_ANEW: u32 = 32;
}

/// Demands that wait, at most.
const DEMANDS_MAX: usize = 64;

/// What a vCPU must give up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The TLB's entries of a guest-physical page, or only the right to write.
    Page {
        /// Its address.
        page: u64,
        /// The right to read may stay.
        keep_read: bool,
    },
    /// The blocks decoded from a guest-physical page.
    Code {
        /// Its address.
        page: u64,
    },
    /// All that it has cached of memory.
    Everything,
}

#[derive(Default)]
struct Queue {
    demands: Vec<Demand>,
    /// Demands posted so far.
    posted: u64,
}

/// One vCPU's side of the protocol.
#[derive(Default)]
pub struct VcpuRequests {
    request: AtomicU32,
    inside: AtomicBool,
    /// Demands answered so far.
    answered: AtomicU64,
    waiters: AtomicU32,
    /// Guards the queue, nothing else; held for a few instructions.
    queue: Mutex<Queue>,
    progress: Condvar,
}

impl VcpuRequests {
    /// The word that the vCPU polls at block boundaries.
    pub fn request(&self) -> &AtomicU32 {
        &self.request
    }

    /// Asks for `bits` of [`request`].
    pub fn ask(&self, bits: u32) {
        self.request.fetch_or(bits, Ordering::SeqCst);
    }

    /// Takes `bits` back; the ones of them that were set.
    pub fn take(&self, bits: u32) -> u32 {
        self.request.fetch_and(!bits, Ordering::SeqCst) & bits
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a demand; its number, for [`VcpuRequests::wait`].
    pub fn post(&self, demand: Demand) -> u64 {
        let number = {
            let mut queue = self.queue();
            if queue.demands.len() >= DEMANDS_MAX {
                queue.demands.clear();
                queue.demands.push(Demand::Everything);
            } else {
                queue.demands.push(demand);
            }
            queue.posted += 1;
            queue.posted
        };
        self.ask(request::DEMANDS);
        number
    }

    /// Whether demand `number` is answered.
    pub fn is_answered(&self, number: u64) -> bool {
        !self.inside.load(Ordering::SeqCst) || self.answered.load(Ordering::SeqCst) >= number
    }

    /// Whether the vCPU is outside.
    pub fn is_outside(&self) -> bool {
        !self.inside.load(Ordering::SeqCst)
    }

    /// Waits until `condition` holds, which must be one of this requests's;
    /// false when it did not by `deadline`.
    pub fn wait(&self, deadline: Instant, condition: impl Fn(&Self) -> bool) -> bool {
        for _ in 0..200 {
            if condition(self) {
                return true;
            }
            std::hint::spin_loop();
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut queue = self.queue();
        let held = loop {
            if condition(self) {
                break true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                break false;
            }
            queue = match self.progress.wait_timeout(queue, left) {
                Ok((queue, _)) => queue,
                Err(poisoned) => poisoned.into_inner().0,
            };
        };
        drop(queue);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        held
    }

    fn tell_waiters(&self) {
        if self.waiters.load(Ordering::SeqCst) != 0 {
            // With the lock taken once, nobody is between looking and waiting.
            drop(self.queue());
            self.progress.notify_all();
        }
    }

    /// The vCPU's thread: from here on it uses nothing it has cached.
    pub fn step_outside(&self) {
        self.inside.store(false, Ordering::SeqCst);
        self.tell_waiters();
    }

    /// The vCPU's thread: from here on it may use what it has cached, once it
    /// has answered the demands, if this says that there are any.
    #[must_use]
    pub fn step_inside(&self) -> bool {
        self.inside.store(true, Ordering::SeqCst);
        self.request.load(Ordering::SeqCst) & (request::DEMANDS | request::EXCLUSIVE) != 0
    }

    /// The vCPU's thread: takes the demands, to be carried out and then
    /// reported with [`VcpuRequests::report`].
    pub fn drain(&self) -> (Vec<Demand>, u64) {
        self.take(request::DEMANDS);
        let mut queue = self.queue();
        (std::mem::take(&mut queue.demands), queue.posted)
    }

    /// The vCPU's thread: demands up to `number` are carried out.
    pub fn report(&self, number: u64) {
        self.answered.store(number, Ordering::SeqCst);
        self.tell_waiters();
    }
}
