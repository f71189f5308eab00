//! A mapping of the page range that a runtime shares with its launcher or daemon, and
//! snapshots of its counters.
//!
//! The memfd is sealed at its size and the mapping is never moved, so a `&Shared`
//! stays valid for as long as the [`SharedMemory`] lives, whatever the runtime
//! does. Its values are the runtime's word and nothing more: they are shown,
//! never trusted.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use serde::{Deserialize, Serialize};
use weft_proc::boot::{self, MAX_NODES};
use weft_proc::stats::{Histogram, Shared};

/// One runtime's [`Shared`], mapped here.
pub struct SharedMemory {
    fd: OwnedFd,
    address: NonNull<Shared>,
}

// SAFETY: the mapping belongs to the value and `Shared` consists of atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; every access through `&Shared` is atomic.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes and maps a fresh range, all counters zero.
    pub fn new() -> io::Result<SharedMemory> {
        let bytes = size_of::<Shared>();
        let fd = crate::sys::sealed_memfd(c"weft-shared", bytes as u64)?;
        let length = NonZeroUsize::new(bytes).expect("Shared is not empty");
        // SAFETY: a new shared mapping at an address the kernel chooses; it
        // aliases nothing.
        let address = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                &fd,
                0,
            )
        }?;
        let shared = SharedMemory {
            fd,
            address: address.cast(),
        };
        shared.version.store(boot::VERSION, Ordering::Relaxed);
        Ok(shared)
    }

    /// The memfd, to hand to the runtime.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Sets the gauges to zero, before the same range serves a new runtime.
    pub fn reset_gauges(&self) {
        let stats = &self.stats;
        stats.resident_pages.store(0, Ordering::Relaxed);
        for owned in &stats.owned_pages {
            owned.store(0, Ordering::Relaxed);
        }
        stats.executing.store(0, Ordering::Relaxed);
        stats.stretched.store(0, Ordering::Relaxed);
        stats.threads.store(0, Ordering::Relaxed);
        self.home_budget.store(0, Ordering::Relaxed);
    }

    /// Writes a command for the runtime; the caller then sends it the signal.
    /// Refused while an earlier command has not been taken.
    pub fn command(&self, command: u32, argument: u32, sequence: u32) -> bool {
        use weft_proc::stats::COMMAND_NONE;
        if self.command.load(Ordering::Acquire) != COMMAND_NONE {
            return false;
        }
        self.argument.store(argument, Ordering::Relaxed);
        self.sequence.store(sequence, Ordering::Relaxed);
        self.command.store(command, Ordering::Release);
        true
    }
}

impl std::ops::Deref for SharedMemory {
    type Target = Shared;
    fn deref(&self) -> &Shared {
        // SAFETY: `address` maps `size_of::<Shared>()` bytes of a memfd sealed at
        // that size until `drop`; page aligned; every bit pattern is valid.
        unsafe { self.address.as_ref() }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; no reference outlives self.
        // A failure leaves the mapping until the process ends.
        let _ = unsafe { munmap(self.address.cast(), size_of::<Shared>()) };
    }
}

/// Percentiles of a latency, nanoseconds; `None` when nothing was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Percentiles {
    /// How many were measured.
    pub count: u64,
    /// Half were at most this long.
    pub p50_ns: Option<u64>,
    /// Nine of ten.
    pub p90_ns: Option<u64>,
    /// Ninety-nine of a hundred.
    pub p99_ns: Option<u64>,
    pub max_ns: Option<u64>,
}

impl Percentiles {
    fn of(histogram: &Histogram) -> Percentiles {
        Percentiles {
            count: histogram.count(),
            p50_ns: histogram.percentile(500),
            p90_ns: histogram.percentile(900),
            p99_ns: histogram.percentile(990),
            max_ns: histogram.percentile(1000),
        }
    }
}

/// One node's counters at one moment. Field for field
/// [`weft_proc::stats::NodeStats`], with latencies as percentiles.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub resident_pages: u64,
    pub resident_pages_max: u64,
    /// Only home's is filled: pages owned by each node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub owned_pages_by_node: Vec<u64>,
    pub read_faults: u64,
    pub write_faults: u64,
    pub upgrade_faults: u64,
    pub first_touch_faults: u64,
    pub pulls: u64,
    pub read_ahead: u64,
    pub read_ahead_used: u64,
    pub pushes: u64,
    pub drops: u64,
    pub gives: u64,
    pub jumps_out: u64,
    pub jumps_in: u64,
    pub forwarded_calls: u64,
    pub system_calls: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub executing: bool,
    pub stretched: bool,
    pub threads: u32,
    /// For the launcher alone: not in a report.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub beats: u32,
    pub pull_latency: Percentiles,
    pub jump_latency: Percentiles,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Snapshot {
    /// Reads all counters. Not one atomic picture: the runtime goes on counting.
    pub fn of(shared: &Shared) -> Snapshot {
        let stats = &shared.stats;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let owned: Vec<u64> = stats.owned_pages.iter().map(read).collect();
        debug_assert_eq!(owned.len(), MAX_NODES);
        Snapshot {
            resident_pages: read(&stats.resident_pages),
            resident_pages_max: read(&stats.resident_pages_max),
            owned_pages_by_node: owned,
            read_faults: read(&stats.read_faults),
            write_faults: read(&stats.write_faults),
            upgrade_faults: read(&stats.upgrade_faults),
            first_touch_faults: read(&stats.first_touch_faults),
            pulls: read(&stats.pulls),
            read_ahead: read(&stats.read_ahead),
            read_ahead_used: read(&stats.read_ahead_used),
            pushes: read(&stats.pushes),
            drops: read(&stats.drops),
            gives: read(&stats.gives),
            jumps_out: read(&stats.jumps_out),
            jumps_in: read(&stats.jumps_in),
            forwarded_calls: read(&stats.forwarded_calls),
            system_calls: read(&stats.system_calls),
            bytes_sent: read(&stats.bytes_sent),
            bytes_received: read(&stats.bytes_received),
            executing: stats.executing.load(Ordering::Relaxed) != 0,
            stretched: stats.stretched.load(Ordering::Relaxed) != 0,
            threads: stats.threads.load(Ordering::Relaxed),
            beats: stats.beats.load(Ordering::Relaxed),
            pull_latency: Percentiles::of(&stats.pull_ns),
            jump_latency: Percentiles::of(&stats.jump_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_proc::stats::{COMMAND_SHRINK, add};

    #[test]
    fn a_snapshot_reads_what_was_counted() {
        let shared = SharedMemory::new().unwrap();
        add(&shared.stats.pulls, 7);
        shared.stats.pull_ns.record(1000);
        shared.stats.executing.store(1, Ordering::Relaxed);
        let snapshot = Snapshot::of(&shared);
        assert_eq!(snapshot.pulls, 7);
        assert!(snapshot.executing);
        assert_eq!(snapshot.pull_latency.count, 1);
        assert_eq!(snapshot.jump_latency, Percentiles::default());
        shared.reset_gauges();
        assert!(!Snapshot::of(&shared).executing);
        assert_eq!(Snapshot::of(&shared).pulls, 7);
    }

    #[test]
    fn a_command_waits_for_the_one_before() {
        let shared = SharedMemory::new().unwrap();
        assert!(shared.command(COMMAND_SHRINK, 1, 1));
        assert!(!shared.command(COMMAND_SHRINK, 2, 2));
        assert_eq!(shared.argument.load(Ordering::Relaxed), 1);
    }
}
