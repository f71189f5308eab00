//! A thread that sleeps until there is something to do.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// A thread that is called when there is something to do.
#[derive(Default)]
pub(super) struct Called {
    thread: OnceLock<Thread>,
    /// It was called and has not looked yet.
    called: AtomicBool,
}

impl Called {
    /// The calling thread serves from now on.
    pub fn serve(&self) {
        let _ = self.thread.set(std::thread::current());
    }

    /// Has it look.
    pub fn call(&self) {
        if !self.called.swap(true, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Its wait to be called, `patience` at most.
    pub fn wait(&self, patience: Duration) {
        if !self.called.load(Ordering::SeqCst) {
            std::thread::park_timeout(patience);
        }
        self.called.store(false, Ordering::SeqCst);
    }
}
