//! The vCPU waker: wakes a vCPU's thread, whether it sleeps or runs guest code.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Instant;

use weft_vcpu::Kick;

/// Wakes the thread of one vCPU.
///
/// A thread that has an event for the vCPU (an interrupt, a command) first posts it, then
/// rings. The vCPU's thread first sets `waiting`, then checks for events, then sleeps. So
/// either it finds the event, or the ring finds it waiting.
#[derive(Default)]
pub struct VcpuWaker {
    /// The vCPU's thread sleeps, or is about to.
    waiting: AtomicBool,
    /// Whether it was rung since the sleep began.
    rung: Mutex<bool>,
    bell: Condvar,
    /// Makes a running vCPU leave guest code. Set once, before the first ring.
    kick: OnceLock<Arc<dyn Kick>>,
    kicks: AtomicU64,
    wakes: AtomicU64,
}

impl VcpuWaker {
    /// Sets how a running vCPU is kicked.
    pub fn connect(&self, kick: Arc<dyn Kick>) {
        // Only the first kick counts.
        let _ = self.kick.set(kick);
    }

    /// Wakes the thread, or kicks it out of guest code.
    pub fn ring(&self) {
        if self.waiting.load(Ordering::SeqCst) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            *self
                .rung
                .lock()
                .unwrap_or_else(|poison| poison.into_inner()) = true;
            self.bell.notify_one();
        } else if let Some(kick) = self.kick.get() {
            self.kicks.fetch_add(1, Ordering::Relaxed);
            kick.kick();
        }
    }

    /// Sleeps until a ring, until `deadline` at most; not at all if `has_events`. Only for the
    /// vCPU's thread.
    pub fn wait(&self, deadline: Instant, has_events: impl Fn() -> bool) {
        self.waiting.store(true, Ordering::SeqCst);
        if !has_events() {
            let mut rung = self
                .rung
                .lock()
                .unwrap_or_else(|poison| poison.into_inner());
            while !*rung {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                rung = self
                    .bell
                    .wait_timeout(rung, left)
                    .unwrap_or_else(|poison| poison.into_inner())
                    .0;
            }
        }
        self.waiting.store(false, Ordering::SeqCst);
        *self
            .rung
            .lock()
            .unwrap_or_else(|poison| poison.into_inner()) = false;
    }

    /// How often a running vCPU was kicked, and a waiting one woken.
    pub fn counts(&self) -> (u64, u64) {
        (
            self.kicks.load(Ordering::Relaxed),
            self.wakes.load(Ordering::Relaxed),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    /// Longer than any wait that is rung for: a wait that lasts so long was not.
    const LOST: Duration = Duration::from_secs(60);

    /// What one thread says to another.
    #[derive(Default)]
    struct Mailbox {
        waker: VcpuWaker,
        news: AtomicU32,
    }

    impl Mailbox {
        fn post(&self, round: u32) {
            self.news.store(round, Ordering::SeqCst);
            self.waker.ring();
        }

        fn wait_for(&self, round: u32) {
            let came = || self.news.load(Ordering::SeqCst) == round;
            let deadline = Instant::now() + LOST;
            // A late ring of the round before ends a wait early.
            while !came() {
                self.waker.wait(deadline, came);
                assert!(Instant::now() < deadline, "round {round} was not rung for");
            }
        }
    }

    /// Each side waits for the other in each round, so no later ring makes up for one that
    /// was lost.
    #[test]
    fn no_ring_is_lost() {
        const ROUNDS: u32 = 50_000;
        let sides = Arc::new([Mailbox::default(), Mailbox::default()]);
        let far = sides.clone();
        let echo = std::thread::spawn(move || {
            for round in 1..=ROUNDS {
                far[1].wait_for(round);
                far[0].post(round);
            }
        });
        for round in 1..=ROUNDS {
            sides[1].post(round);
            sides[0].wait_for(round);
        }
        echo.join().unwrap();
    }
}
