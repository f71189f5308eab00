//! The thread that brings running vCPUs back when their APIC timers are due. A
//! halted vCPU's thread waits for its own timer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use super::Clock;
use crate::confine::{self, ThreadKind};

/// No alarm.
const NEVER: u64 = u64::MAX;

/// Says to a vCPU that its time has come. Must not wait.
pub type Ring = Box<dyn Fn(u32) + Send + Sync>;

struct Shared {
    clock: Arc<Clock>,
    ring: Ring,
    /// Guest TSC at which each vCPU wants to be rung.
    deadlines: Box<[AtomicU64]>,
    /// Guest TSC until which the thread sleeps; [`NEVER`] while it looks around,
    /// so that whoever sets an earlier alarm then tells it.
    sleeps_until: AtomicU64,
    over: AtomicBool,
    /// Held by the thread but while it sleeps.
    awake: Mutex<()>,
    changed: Condvar,
}

/// One alarm for each vCPU.
pub struct Alarms {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Alarms {
    /// Starts the thread `weft-timer`.
    pub fn start(clock: Arc<Clock>, cpus: u32, ring: Ring) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            clock,
            ring,
            deadlines: (0..cpus).map(|_| AtomicU64::new(NEVER)).collect(),
            sleeps_until: AtomicU64::new(NEVER),
            over: AtomicBool::new(false),
            awake: Mutex::default(),
            changed: Condvar::new(),
        });
        let work = shared.clone();
        let thread = confine::spawn("weft-timer", ThreadKind::Device, move || work.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Rings the vCPU when the guest's TSC is `deadline`; `None`: not at all.
    pub fn set(&self, vcpu: u32, deadline: Option<u64>) {
        let Some(cell) = self.shared.deadlines.get(vcpu as usize) else {
            return;
        };
        let deadline = deadline.unwrap_or(NEVER);
        cell.store(deadline, Ordering::SeqCst);
        if deadline < self.shared.sleeps_until.load(Ordering::SeqCst) {
            self.shared.look_again();
        }
    }

    /// To be called when time goes on after it stood.
    pub fn look_again(&self) {
        self.shared.look_again();
    }
}

impl Drop for Alarms {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.shared.look_again();
        if let Some(thread) = self.thread.take() {
            // It never panics, and sleeps only where it hears the line above.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn look_again(&self) {
        drop(
            self.awake
                .lock()
                .unwrap_or_else(|poison| poison.into_inner()),
        );
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut due = Vec::with_capacity(self.deadlines.len());
        let mut awake = self
            .awake
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        while !self.over.load(Ordering::SeqCst) {
            self.sleeps_until.store(NEVER, Ordering::SeqCst);
            let next = self.collect(&mut due);
            if !due.is_empty() {
                drop(awake);
                for vcpu in due.drain(..) {
                    (self.ring)(vcpu);
                }
                awake = self
                    .awake
                    .lock()
                    .unwrap_or_else(|poison| poison.into_inner());
                continue;
            }
            self.sleeps_until.store(next, Ordering::SeqCst);
            let wait = self
                .clock
                .when(next)
                .saturating_duration_since(Instant::now());
            awake = self
                .changed
                .wait_timeout(awake, wait)
                .unwrap_or_else(|poison| poison.into_inner())
                .0;
        }
    }

    /// Takes the alarms that are due; says when the next will be.
    fn collect(&self, due: &mut Vec<u32>) -> u64 {
        let now = self.clock.now();
        let mut next = NEVER;
        for (vcpu, cell) in self.deadlines.iter().enumerate() {
            let deadline = cell.load(Ordering::SeqCst);
            if deadline > now {
                next = next.min(deadline);
                continue;
            }
            let taken = cell.compare_exchange(deadline, NEVER, Ordering::SeqCst, Ordering::SeqCst);
            match taken {
                Ok(_) => due.push(vcpu as u32),
                // Set again meanwhile: it is looked at in the next round.
                Err(_) => next = now,
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Source, measure_host_tsc};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn alarms_ring_in_order_and_none_is_early() {
        let clock = Arc::new(Clock::new(Source::Host, measure_host_tsc()));
        clock.go();
        let (ring, rung) = channel();
        let told = clock.clone();
        let ring: Ring = Box::new(move |vcpu| {
            let _ = ring.send((vcpu, told.now()));
        });
        let alarms = Alarms::start(clock.clone(), 3, ring).unwrap();
        let start = clock.now();
        let step = clock.base().ticks(5_000_000);
        for (vcpu, steps) in [(0, 3), (1, 1), (2, 2)] {
            alarms.set(vcpu, Some(start + steps * step));
        }
        // Set again before it rang: only the later one counts.
        alarms.set(0, Some(start + 4 * step));
        for (vcpu, steps) in [(1, 1), (2, 2), (0, 4)] {
            let (who, when) = rung.recv_timeout(Duration::from_secs(10)).unwrap();
            assert_eq!(who, vcpu);
            assert!(when >= start + steps * step);
        }
        alarms.set(1, Some(clock.now() + step));
        alarms.set(1, None);
        assert!(rung.recv_timeout(Duration::from_millis(20)).is_err());
    }

    #[test]
    fn alarms_wait_while_time_stands() {
        let clock = Arc::new(Clock::new(Source::Host, measure_host_tsc()));
        let (ring, rung) = channel();
        let ring: Ring = Box::new(move |vcpu| {
            let _ = ring.send(vcpu);
        });
        let alarms = Alarms::start(clock.clone(), 1, ring).unwrap();
        alarms.set(0, Some(clock.base().ticks(1_000_000)));
        assert!(rung.recv_timeout(Duration::from_millis(20)).is_err());
        clock.go();
        alarms.look_again();
        assert_eq!(rung.recv_timeout(Duration::from_secs(10)), Ok(0));
    }
}
