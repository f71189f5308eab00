//! Who waits for which page, and who was just given one.
//!
//! A page that comes for a vCPU is *pinned* until that vCPU is at work with it:
//! else two nodes that want the same page could hand it to each other for ever,
//! and neither get anything done. A pin lasts from the moment the right is there
//! until the vCPU's thread is back inside guest code; nobody who holds one waits
//! for a page, or for another vCPU. (Who copies much pins a few pages at once, if all
//! of them are there.) Where nobody can tell when that is, a pin ends
//! by itself.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use weft_vcpu::Access;

/// Pins that there may be at a time: one for every vCPU that there may be, and for
/// more threads of devices than any machine has, some of which hold a few at once.
const PINS: usize = 2048;
/// Pins that end by themselves: one for each page that a vCPU of KVM was just given.
/// Without a free place such a page may be taken before it was of use: slower, not wrong.
const TIMED: usize = 64;
const FREE: u64 = u64::MAX;
/// How long a thread looks for its page before it sleeps: its processor has nothing
/// else to do, and to be woken takes as long as the page on a good network.
const SPIN: Duration = Duration::from_micros(50);

/// Pages that must not be taken at the moment.
pub(super) struct Pins {
    places: Box<[AtomicU64]>,
    /// Places from here on were never used.
    end: AtomicUsize,
    /// Pages with the nanoseconds since `start` when their pins end. Written under
    /// the shell's lock.
    timed: [(AtomicU64, AtomicU64); TIMED],
    start: Instant,
}

impl Default for Pins {
    fn default() -> Self {
        Self {
            places: (0..PINS).map(|_| AtomicU64::new(FREE)).collect(),
            end: AtomicUsize::new(0),
            timed: [const { (AtomicU64::new(FREE), AtomicU64::new(0)) }; TIMED],
            start: Instant::now(),
        }
    }
}

impl Pins {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Pins `page` for a while, if there is a place; under the shell's lock.
    pub fn add_for(&self, page: u64, time: Duration) {
        let now = self.now();
        let free = |(other, end): &&(AtomicU64, AtomicU64)| {
            other.load(Ordering::SeqCst) == page || end.load(Ordering::SeqCst) <= now
        };
        if let Some((pinned, end)) = self.timed.iter().find(free) {
            end.store(0, Ordering::SeqCst);
            pinned.store(page, Ordering::SeqCst);
            end.store(now + time.as_nanos() as u64, Ordering::SeqCst);
        }
    }

    /// How long until the next of the pins ends that end by themselves.
    pub fn next_end(&self) -> Option<Duration> {
        let now = self.now();
        let left = |(_, end): &(AtomicU64, AtomicU64)| {
            let end = end.load(Ordering::SeqCst);
            (end > now).then(|| Duration::from_nanos(end - now))
        };
        self.timed.iter().filter_map(left).min()
    }

    /// Pins `page`, under the shell's lock; false when there is no place.
    pub fn add(&self, page: u64) -> bool {
        let free = |pin: &AtomicU64| pin.load(Ordering::Relaxed) == FREE;
        let Some(place) = self.places.iter().position(free) else {
            return false;
        };
        self.end.fetch_max(place + 1, Ordering::SeqCst);
        self.places[place].store(page, Ordering::SeqCst);
        true
    }

    fn used(&self) -> &[AtomicU64] {
        &self.places[..self.end.load(Ordering::SeqCst)]
    }

    /// Whether somebody has pinned `page`.
    pub fn hold(&self, page: u64) -> bool {
        let now = self.now();
        let is_held = |pin: &AtomicU64| pin.load(Ordering::SeqCst) == page;
        self.used().iter().any(is_held)
            || self
                .timed
                .iter()
                .any(|(pin, end)| is_held(pin) && end.load(Ordering::SeqCst) > now)
    }

    /// Gives one pin of `page` back, without a lock.
    pub fn remove(&self, page: u64) {
        for pin in self.used() {
            let mine = pin.load(Ordering::Relaxed) == page
                && pin
                    .compare_exchange(page, FREE, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok();
            if mine {
                return;
            }
        }
    }
}

/// A thread that waits for a page.
pub(super) struct Waiter {
    pub page: u64,
    pub access: Access,
    thread: Thread,
    woken: AtomicBool,
    granted: OnceLock<Instant>,
}

impl Waiter {
    /// The calling thread.
    pub fn new(page: u64, access: Access) -> Arc<Self> {
        Arc::new(Self {
            page,
            access,
            thread: std::thread::current(),
            woken: AtomicBool::new(false),
            granted: OnceLock::new(),
        })
    }

    /// Has it look again. `granted`: it has the page, pinned.
    pub fn wake(&self, granted: bool) {
        if granted {
            // The page was given once already, if it has a time.
            let _ = self.granted.set(Instant::now());
        }
        self.woken.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }

    /// Whether it was given the page.
    pub fn granted(&self) -> bool {
        self.granted.get().is_some()
    }

    /// How long ago.
    pub fn since_granted(&self) -> Duration {
        self.granted.get().map(Instant::elapsed).unwrap_or_default()
    }

    /// Waits to be woken, `patience` at most; whether it was.
    pub fn wait(&self, patience: Duration) -> bool {
        let start = Instant::now();
        loop {
            if self.woken.swap(false, Ordering::SeqCst) {
                return true;
            }
            if start.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return false;
            }
            std::thread::park_timeout(left);
        }
    }
}
