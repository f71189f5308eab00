//! A thread that sleeps until there is work for it, and threads that wait for a signal.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
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
        let _ = self.thread.set(std::thread::current());
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
            std::thread::park_timeout(patience);
        }
        self.woken.store(false, Ordering::SeqCst);
    }
}

/// Wakes the threads that wait for a step of the controller.
#[derive(Default)]
pub(super) struct Signal {
    given: Mutex<u64>,
    condition: Condvar,
}

impl Signal {
    pub fn give(&self) {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.condition.notify_all();
    }

    /// How often it was given.
    pub fn given(&self) -> u64 {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it was given more often than `before`, `patience` at most.
    pub fn wait(&self, before: u64, patience: Duration) {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |given: &mut u64| *given == before;
        let waited = self.condition.wait_timeout_while(given, patience, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
