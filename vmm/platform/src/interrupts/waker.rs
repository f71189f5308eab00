//! How a vCPU's thread is woken, whether it waits or runs guest code.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Instant;

use weft_vcpu::Kick;

/// One for each vCPU.
///
/// Whoever has news (an interrupt, an order) first leaves it where the vCPU
/// looks, then rings. The vCPU first says that it waits, then looks, then sleeps.
/// So either it sees the news or the bell finds it waiting.
#[derive(Default)]
pub struct VcpuWaker {
    /// The vCPU's thread sleeps, or is about to.
    waiting: AtomicBool,
    /// Rung since the sleep began; held for moments only.
    rung: Mutex<bool>,
    bell: Condvar,
    /// Brings a running vCPU back. Set once, before anybody rings.
    kick: OnceLock<Arc<dyn Kick>>,
    kicks: AtomicU64,
    wakes: AtomicU64,
}

impl VcpuWaker {
    /// Says how a running vCPU is reached.
    pub fn connect(&self, kick: Arc<dyn Kick>) {
        // A second connection is no error: the first is as good.
        let _ = self.kick.set(kick);
    }

    /// Wakes the thread, or brings it back from guest code.
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

    /// Sleeps until `news` or a ring, until `deadline` at most. For the vCPU's
    /// thread alone.
    pub fn wait(&self, deadline: Instant, news: impl Fn() -> bool) {
        self.waiting.store(true, Ordering::SeqCst);
        if !news() {
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
