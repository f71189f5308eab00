//! A lock that needs no thread-local storage and no allocation.
//!
//! States of the word: 0 free, 1 held, 2 held and someone may wait. A thread
//! never takes a lock that it holds; signal handlers that interrupt the runtime
//! take none (they only queue), so no handler can meet its own thread's lock.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use crate::own_calls;

/// Rounds of busy waiting before a waiter sleeps.
const SPIN_ROUNDS: u32 = 100;
/// A sleeping waiter looks again after this long, nanoseconds: a bound, not a
/// schedule.
const WAIT_NS: u64 = 100_000_000;

/// A value that one thread at a time may use.
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and one guard exists.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Proof that the lock is held.
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Lock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Lock<T> {
        Lock {
            word: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }
    /// Waits for the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        for _ in 0..SPIN_ROUNDS {
            if self.try_take() {
                return Guard { lock: self };
            }
            core::hint::spin_loop();
        }
        while self.word.swap(2, Ordering::Acquire) != 0 {
            own_calls::futex_wait(&self.word, 2, WAIT_NS);
        }
        Guard { lock: self }
    }
    /// Frees the lock for a guard that was forgotten.
    ///
    /// # Safety
    /// The calling thread holds the lock and uses no reference into the value.
    pub unsafe fn unlock(&self) {
        drop(Guard { lock: self });
    }
    fn try_take(&self) -> bool {
        self.word
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard proves that this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.lock.word.swap(0, Ordering::Release) == 2 {
            own_calls::futex_wake(&self.lock.word, 1);
        }
    }
}
