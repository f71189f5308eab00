//! The timer thread: wakes running vCPUs when their APIC timers are due. The thread of a
//! halted vCPU waits for its timer itself.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use weft_confine::ThreadKind;

use super::Clock;

/// The deadline of a vCPU without an alarm.
const NEVER: u64 = u64::MAX;
/// The shortest wait that a timer takes: zero would stop it.
const AT_ONCE: Duration = Duration::from_nanos(1);

/// Wakes a vCPU whose alarm is due. Must not block.
pub type Ring = Box<dyn Fn(u32) + Send + Sync>;

struct Shared {
    clock: Arc<Clock>,
    ring: Ring,
    /// The kernel's timer, for which the thread waits. Setting it wakes no thread, which would
    /// cost more than all other work for a guest's timer.
    timer: TimerFd,
    table: Mutex<Table>,
}

struct Table {
    /// The guest's TSC at which each vCPU is due.
    deadlines: Box<[u64]>,
    /// The guest's TSC for which the timer is set: never later than a deadline.
    armed: u64,
    over: bool,
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
            timer: TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)?,
            table: Mutex::new(Table {
                deadlines: (0..cpus).map(|_| NEVER).collect(),
                armed: NEVER,
                over: false,
            }),
        });
        let work = shared.clone();
        let thread = weft_confine::spawn("weft-timer", ThreadKind::Device, move || work.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Sets a vCPU's alarm to the guest's TSC `deadline`; `None` removes it.
    pub fn set(&self, vcpu: u32, deadline: Option<u64>) {
        let deadline = deadline.unwrap_or(NEVER);
        let mut table = self.shared.table();
        table.deadlines[vcpu as usize] = deadline;
        if deadline < table.armed {
            self.shared.arm(&mut table, deadline);
        }
    }

    /// Sets the timer anew; must be called when guest time continues after a stop.
    pub fn resume(&self) {
        self.shared.wake(&mut self.shared.table());
    }
}

impl Drop for Alarms {
    fn drop(&mut self) {
        let mut table = self.shared.table();
        table.over = true;
        self.shared.wake(&mut table);
        drop(table);
        if let Some(thread) = self.thread.take() {
            // It never panics, and waits only for the timer.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    fn arm(&self, table: &mut Table, deadline: u64) {
        table.armed = deadline;
        let when = self.clock.when(deadline);
        self.set_timer(when.saturating_duration_since(Instant::now()));
    }

    /// Makes the thread check at once, also while guest time is stopped.
    fn wake(&self, table: &mut Table) {
        table.armed = 0;
        self.set_timer(AT_ONCE);
    }

    fn set_timer(&self, wait: Duration) {
        let expiration = Expiration::OneShot(wait.max(AT_ONCE).into());
        // Fails only where the descriptor is no timer or the time no time.
        let set = self.timer.set(expiration, TimerSetTimeFlags::empty());
        debug_assert!(set.is_ok());
    }

    fn run(&self) {
        let mut due = Vec::new();
        loop {
            // Interrupted or not: what is due is in the table.
            let _ = self.timer.wait();
            let mut table = self.table();
            if table.over {
                return;
            }
            let next = table.collect(self.clock.now(), &mut due);
            table.armed = NEVER;
            if next != NEVER {
                self.arm(&mut table, next);
            }
            drop(table);
            for vcpu in due.drain(..) {
                (self.ring)(vcpu);
            }
        }
    }
}

impl Table {
    /// Takes the alarms that are due; returns when the next is.
    fn collect(&mut self, now: u64, due: &mut Vec<u32>) -> u64 {
        let mut next = NEVER;
        for (vcpu, deadline) in self.deadlines.iter_mut().enumerate() {
            if *deadline <= now {
                *deadline = NEVER;
                due.push(vcpu as u32);
            }
            next = next.min(*deadline);
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
        let (ring, rung) = channel();
        let told = clock.clone();
        let ring: Ring = Box::new(move |vcpu| {
            let _ = ring.send((vcpu, told.now()));
        });
        let alarms = Alarms::start(clock.clone(), 3, ring).unwrap();
        let start = clock.now();
        let step = clock.base().ticks(5_000_000);
        for (vcpu, steps) in [(2, 3), (1, 2), (0, 1)] {
            alarms.set(vcpu, Some(start + steps * step));
        }
        // Set again before it rang, since time stands: only the later one counts.
        alarms.set(2, Some(start + 4 * step));
        clock.go();
        alarms.resume();
        // Those that are found due together ring in this order, too.
        for (vcpu, steps) in [(0, 1), (1, 2), (2, 4)] {
            let (who, when) = rung.recv_timeout(Duration::from_secs(10)).unwrap();
            assert_eq!(who, vcpu);
            assert!(when >= start + steps * step);
        }
        alarms.set(1, Some(clock.now() + 20 * step));
        alarms.set(1, None);
        assert!(rung.recv_timeout(Duration::from_millis(150)).is_err());
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
        alarms.resume();
        assert_eq!(rung.recv_timeout(Duration::from_secs(10)), Ok(0));
    }

    #[test]
    fn the_thread_ends_at_once_while_time_stands() {
        let clock = Arc::new(Clock::new(Source::Host, measure_host_tsc()));
        let start = Instant::now();
        for _ in 0..20 {
            drop(Alarms::start(clock.clone(), 1, Box::new(|_| {})).unwrap());
        }
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
