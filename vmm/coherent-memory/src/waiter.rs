//! A thread that waits for a page.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::trace::FaultKind;

/// How long a thread spins for its page before it sleeps. Its processor has nothing else to
/// do, and a wake-up takes as long as the page on a fast network.
const SPIN: Duration = Duration::from_micros(50);

/// What the thread and those that wake it share.
pub(super) struct Waiter {
    thread: Thread,
    woken: AtomicBool,
    granted: OnceLock<Instant>,
    /// The kind of fault, if another slice was asked for the page.
    remote: OnceLock<FaultKind>,
    /// The slice whose message granted the page.
    server: OnceLock<usize>,
}

impl Waiter {
    /// A waiter for the calling thread.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            thread: std::thread::current(),
            woken: AtomicBool::new(false),
            granted: OnceLock::new(),
            remote: OnceLock::new(),
            server: OnceLock::new(),
        })
    }

    /// Wakes the thread. `granted`: it has the page, pinned.
    pub fn wake(&self, granted: bool) {
        if granted {
            // The page was given once already, if it has a time.
            let _ = self.granted.set(Instant::now());
        }
        self.woken.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }

    /// Records that another slice was asked for the page. Only the first call counts.
    pub fn asked_for(&self, kind: FaultKind) {
        let _ = self.remote.set(kind);
    }

    /// The kind of fault; `None` if no other slice was asked for the page.
    pub fn remote(&self) -> Option<FaultKind> {
        self.remote.get().copied()
    }

    /// Records the slice whose message grants the page. Only the first call counts.
    pub fn served_by(&self, slice: usize) {
        let _ = self.server.set(slice);
    }

    /// The slice whose message granted the page.
    pub fn server(&self) -> Option<usize> {
        self.server.get().copied()
    }

    /// Whether the thread was given the page.
    pub fn granted(&self) -> bool {
        self.granted.get().is_some()
    }

    /// How long ago the thread was given the page.
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
