//! The followers of a slice's vCPUs: clocks, locks and requests around
//! [`weft_jump::follower`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use weft_coherent_memory::{FaultObserver, ServedFault};
use weft_jump::PolicyError;
use weft_jump::follower::{Follower, LUGGAGE_BYTES, OwnFault};
use weft_vcpu::PageRun;

use super::first_pages::FirstPages;

/// Whether vCPUs go by themselves where their remote faults go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Follow {
    /// They stay where they are.
    #[default]
    Never,
    /// They learn where it pays.
    Auto,
    /// After this many remote faults since the last move.
    Faults(u32),
}

/// Most bytes that go along with a vCPU for its follower.
pub const LUGGAGE_MAX: usize = LUGGAGE_BYTES;

/// Asks that a vCPU of this slice goes to another. Must not block.
pub type AskToMove = Box<dyn Fn(u32, usize) + Send + Sync>;

/// A vCPU's follower, and the processor time at the end of its last fault.
struct Followed {
    follower: Follower,
    first_pages: FirstPages,
    worked_until: Option<Duration>,
    busy: Duration,
}

/// The followers of all vCPUs, here or not.
pub struct Followers {
    /// By vCPU. Each is locked for moments, by the vCPU's thread and by the one that reads a
    /// link.
    vcpus: Vec<Mutex<Followed>>,
    start: Instant,
    ask: AskToMove,
}

impl Followers {
    /// Followers on slice `me`; `None` if vCPUs never move by themselves.
    pub fn new(
        follow: Follow,
        (vcpus, me, slices): (u32, usize, usize),
        ask: AskToMove,
    ) -> Option<Arc<Self>> {
        let count = match follow {
            Follow::Never => return None,
            Follow::Auto => None,
            Follow::Faults(count) => Some(count),
        };
        let followed = |_| {
            Mutex::new(Followed {
                follower: Follower::new(count, me, slices),
                first_pages: FirstPages::default(),
                worked_until: None,
                busy: Duration::ZERO,
            })
        };
        Some(Arc::new(Self {
            vcpus: (0..vcpus).map(followed).collect(),
            start: Instant::now(),
            ask,
        }))
    }

    /// What goes along with a vCPU that leaves.
    pub fn leave(&self, vcpu: u32, to: usize) -> Vec<u8> {
        let followed = self.lock(vcpu);
        followed.map_or_else(Vec::new, |mut followed| followed.follower.leave(to).into())
    }

    /// A vCPU comes with this luggage. The pages that it will need first.
    ///
    /// # Errors
    /// Nothing that a follower sends.
    pub fn arrive(&self, vcpu: u32, luggage: &[u8]) -> Result<Vec<PageRun>, PolicyError> {
        let Some(mut followed) = self.lock(vcpu) else {
            return Ok(Vec::new());
        };
        followed.worked_until = None;
        let now = self.start.elapsed();
        followed.follower.arrive(luggage, now)?;
        Ok(followed.first_pages.arrive())
    }

    /// How often a vCPU asked and went from here, keyed by name.
    pub fn counters(&self, vcpu: u32) -> Vec<(&'static str, u64)> {
        let Some(followed) = self.lock(vcpu) else {
            return Vec::new();
        };
        let counts = followed.follower.counts;
        vec![
            ("follow.jumps", counts.jumps),
            ("follow.returns", counts.returns),
            ("follow.refused", counts.refused),
        ]
    }

    fn lock(&self, vcpu: u32) -> Option<MutexGuard<'_, Followed>> {
        let followed = self.vcpus.get(vcpu as usize)?;
        Some(followed.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A handle for the memory of the slice.
pub struct FaultsOfVcpus(pub Arc<Followers>);

impl FaultObserver for FaultsOfVcpus {
    fn waits(&self, vcpu: u32) {
        if let Some(mut followed) = self.0.lock(vcpu) {
            let now = thread_time();
            let since = followed.worked_until.unwrap_or(now);
            followed.busy = now.saturating_sub(since);
        }
    }

    fn served(&self, fault: &ServedFault) -> bool {
        let Some(mut followed) = self.0.lock(fault.vcpu) else {
            return false;
        };
        followed.first_pages.fault(fault.page, fault.access);
        let busy_ns = std::mem::take(&mut followed.busy).as_nanos() as u64;
        let to = followed.follower.fault(OwnFault {
            from: fault.from,
            bytes: fault.bytes,
            busy_ns,
            waited_ns: fault.waited_ns,
            now: self.0.start.elapsed(),
        });
        followed.worked_until = Some(thread_time());
        let stays_away_from = |slice| followed.follower.stays_away_from(slice);
        let may_come = fault.from.is_some_and(stays_away_from);
        drop(followed);
        if let Some(to) = to {
            (self.0.ask)(fault.vcpu, to);
        }
        may_come
    }
}

/// The processor time of this thread: a vCPU that is halted, or waits for its host's
/// processor, does not work.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
