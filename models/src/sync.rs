//! What production takes from `std::sync`: locks of loom; and of the standard library what
//! no model lets threads race for.

pub use loom::sync::{Condvar, Mutex};
pub use std::sync::{Arc, OnceLock};

/// Threads that park. loom's own `park` shares its mark with `join`. A sleep has no bound
/// here: a wake-up that is lost is a deadlock.
pub mod thread {
    use super::{Arc, Condvar, Mutex};

    /// What `unpark` and the next `park` of a thread share.
    #[derive(Clone)]
    pub struct Thread(Arc<(Mutex<bool>, Condvar)>);

    loom::thread_local! {
        static CURRENT: Thread = Thread(Arc::new((Mutex::new(false), Condvar::new())));
    }

    impl Thread {
        /// Ends the thread's sleep, or its next one.
        pub fn unpark(&self) {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_one();
        }
    }

    /// The calling thread.
    pub fn current() -> Thread {
        CURRENT.with(Thread::clone)
    }

    /// Sleeps until it is woken.
    pub fn park_timeout(_patience: std::time::Duration) {
        let Thread(shared) = current();
        let mut woken = shared.0.lock().unwrap();
        while !*woken {
            woken = shared.1.wait(woken).unwrap();
        }
        *woken = false;
    }
}
