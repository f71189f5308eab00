//! A thread that sleeps until there is work for it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

/// Wakes one thread of a slice's memory when there is work for it.
#[derive(Default)]
pub(super) struct Wakeup {
    thread: OnceLock<Thread>,
    /// The thread was woken and has not checked for work since.
    woken: AtomicBool,
}

impl Wakeup {
    /// Makes the calling thread the one that is woken. Once.
    pub fn serve(&self) {
        let _ = self.thread.set(thread::current());
    }

    /// Wakes the thread, or makes its next sleep end at once.
    pub fn wake(&self) {
        if !self.woken.swap(true, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Sleeps until it is woken, `patience` at most. Only for the thread that serves.
    pub fn sleep(&self, patience: Duration) {
        if !self.woken.load(Ordering::SeqCst) {
            thread::park_timeout(patience);
        }
        self.woken.store(false, Ordering::SeqCst);
    }
}
