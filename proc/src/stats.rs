//! The page that a slice shares with its launcher or daemon: counters one way,
//! commands the other. Lives in a memfd of [`Shared`]'s size, made by the
//! launcher, mapped by both. Counters only grow, except the gauges, which say so.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Buckets of a latency histogram: eight per power of two of nanoseconds.
pub const BUCKETS: usize = 320;

/// A latency histogram with a relative error of at most 1/8.
#[repr(C)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Histogram {
    fn bucket(ns: u64) -> usize {
        if ns < 8 {
            return ns as usize;
        }
        let exponent = 63 - ns.leading_zeros() as usize;
        let eighth = (ns >> (exponent - 3)) as usize & 7;
        ((exponent - 2) * 8 + eighth).min(BUCKETS - 1)
    }
    /// The lower bound of a bucket, nanoseconds.
    pub fn bound(bucket: usize) -> u64 {
        if bucket < 8 {
            return bucket as u64;
        }
        let exponent = bucket / 8 + 2;
        (8 + (bucket as u64 & 7)) << (exponent - 3)
    }
    /// Counts one latency.
    pub fn record(&self, ns: u64) {
        self.buckets[Self::bucket(ns)].fetch_add(1, Ordering::Relaxed);
    }
    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|b| b.load(Ordering::Relaxed)).sum()
    }
    /// The latency below which `per_mille` thousandths of the counted ones lie,
    /// in nanoseconds; `None` when nothing was counted.
    pub fn percentile(&self, per_mille: u64) -> Option<u64> {
        let total = self.count();
        if total == 0 {
            return None;
        }
        let rank = (total * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count.load(Ordering::Relaxed);
            if seen >= rank {
                return Some(Self::bound(bucket));
            }
        }
        None
    }
}

/// Counters of one slice. `repr(C)`, all-zero is valid.
#[repr(C)]
pub struct NodeStats {
    /// Gauge: the program's pages resident here.
    pub resident_pages: AtomicU64,
    /// Greatest value of `resident_pages`.
    pub resident_pages_max: AtomicU64,
    /// Gauge: pages this node owns according to the directory (home fills this
    /// in for every node it manages).
    pub owned_pages: [AtomicU64; crate::boot::MAX_NODES],
    /// Faults on a page that was elsewhere, for reading.
    pub read_faults: AtomicU64,
    /// Faults on a page that was elsewhere, for writing.
    pub write_faults: AtomicU64,
    /// Faults that made a read-only copy writable.
    pub upgrade_faults: AtomicU64,
    /// First touches (pages that existed nowhere).
    pub first_touch_faults: AtomicU64,
    /// Pages fetched because of a fault.
    pub pulls: AtomicU64,
    /// Pages fetched ahead of a fault.
    pub read_ahead: AtomicU64,
    /// Pages fetched ahead and then used; counted when the fault that would
    /// have followed meets the page present or on its way.
    pub read_ahead_used: AtomicU64,
    /// Pages sent away to make room.
    pub pushes: AtomicU64,
    /// Read-only copies dropped to make room (no traffic).
    pub drops: AtomicU64,
    /// Pages given to a peer that asked.
    pub gives: AtomicU64,
    /// Times the execution left.
    pub jumps_out: AtomicU64,
    /// Times the execution arrived.
    pub jumps_in: AtomicU64,
    /// System calls sent home from here.
    pub forwarded_calls: AtomicU64,
    /// System calls of the program that were intercepted here.
    pub system_calls: AtomicU64,
    /// Bytes sent over all links, framing and sealing included.
    pub bytes_sent: AtomicU64,
    /// Bytes received over all links.
    pub bytes_received: AtomicU64,
    /// Gauge: 1 while the program executes here.
    pub executing: AtomicU32,
    /// Gauge: 1 once the aggregate is stretched.
    pub stretched: AtomicU32,
    /// Gauge: the program's threads here.
    pub threads: AtomicU32,
    /// Grows for as long as a slice's process runs, a few times in each lease; see
    /// [`beat_ns`]. Only slices count.
    pub beats: AtomicU32,
    /// From fault to page installed.
    pub pull_ns: Histogram,
    /// From the decision to jump until the destination said that the execution
    /// is there: one way with the context, one way back.
    pub jump_ns: Histogram,
}

/// How often a slice counts a beat, nanoseconds.
pub const fn beat_ns(lease_ms: u32) -> u64 {
    const BEAT_NS_MAX: u64 = 500_000_000;
    let quarter_ns = lease_ms as u64 * 1_000_000 / 4;
    if quarter_ns < BEAT_NS_MAX {
        quarter_ns
    } else {
        BEAT_NS_MAX
    }
}

/// Command word: nothing.
pub const COMMAND_NONE: u32 = 0;
/// Stretch now, budget or not.
pub const COMMAND_STRETCH: u32 = 1;
/// Leave node `argument`: bring its pages elsewhere and use it no more.
pub const COMMAND_SHRINK: u32 = 2;
/// Node `argument` is lost.
pub const COMMAND_LOST: u32 = 3;
/// Stretch, and send pages away until home has no more than [`Shared::home_budget_wanted`]:
/// what can be sent within [`GIVE_WAY_MS`].
pub const COMMAND_GIVE_WAY: u32 = 4;

/// How long one [`COMMAND_GIVE_WAY`] takes, but for the stretch. The program stands
/// meanwhile; the launcher asks again for what is left.
pub const GIVE_WAY_MS: u32 = 500;

/// The whole shared page range.
#[repr(C)]
pub struct Shared {
    /// [`crate::boot::VERSION`].
    pub version: AtomicU32,
    /// `COMMAND_*`; set by the launcher, reset to none by the runtime when taken.
    pub command: AtomicU32,
    /// Argument of the command.
    pub argument: AtomicU32,
    /// Number of the command, for the answer.
    pub sequence: AtomicU32,
    /// Bit per node: lost, as the launcher says. Never cleared.
    pub lost_nodes: AtomicU64,
    /// The budget that the launcher wants home to have, in pages, never more than the one
    /// of `Boot`; 0: that one. Home follows at once where nothing has to leave for it.
    pub home_budget_wanted: AtomicU64,
    /// Gauge: the budget that home has, in pages; 0 before the stretch.
    pub home_budget: AtomicU64,
    /// The counters.
    pub stats: NodeStats,
}

/// Adds to a counter.
pub fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_its_bound() {
        for bucket in 0..BUCKETS - 1 {
            assert_eq!(Histogram::bucket(Histogram::bound(bucket)), bucket);
            assert_eq!(
                Histogram::bucket(Histogram::bound(bucket + 1) - 1),
                bucket,
                "upper end of {bucket}"
            );
        }
    }
}
