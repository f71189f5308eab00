//! How often pages were asked for, for the trace and the statistics.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use weft_soft::Access;

/// What one slice's memory did.
#[derive(Default)]
pub struct MemoryCounters {
    /// Faults to read that needed another slice.
    pub reads: AtomicU64,
    /// Faults to write, likewise, where the page was not here.
    pub writes: AtomicU64,
    /// Faults to write where the page was here to be read.
    pub upgrades: AtomicU64,
    /// Faults that were settled here: a first touch, a page of this slice's own.
    pub local: AtomicU64,
    /// Nanoseconds that threads waited for pages of other slices.
    pub waited_ns: AtomicU64,
    /// Pages sent with their bytes.
    pub pages_sent: AtomicU64,
    /// Pages received with their bytes.
    pub pages_received: AtomicU64,
    /// Pages taken from this slice's vCPUs.
    pub taken: AtomicU64,
    /// Nanoseconds that the vCPUs needed to give them up.
    pub taking_ns: AtomicU64,
    /// Takings that waited until a page had been of use here.
    pub held_back: AtomicU64,
}

impl MemoryCounters {
    /// By name.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        [
            ("read-faults", &self.reads),
            ("write-faults", &self.writes),
            ("upgrade-faults", &self.upgrades),
            ("local-faults", &self.local),
            ("waited-ns", &self.waited_ns),
            ("pages-sent", &self.pages_sent),
            ("pages-received", &self.pages_received),
            ("taken", &self.taken),
            ("taking-ns", &self.taking_ns),
            ("held-back", &self.held_back),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
        .to_vec()
    }

    /// One more.
    pub(super) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}

/// How often this slice asked others for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCount {
    /// Guest-physical page number.
    pub page: u64,
    /// To read.
    pub reads: u32,
    /// To write.
    pub writes: u32,
}

/// By page: reads and writes that needed another slice. 8 bytes a page, sparse.
pub(super) struct PageCounts(Box<[[AtomicU32; 2]]>);

impl PageCounts {
    pub fn new(pages: usize) -> Self {
        // SAFETY: zero bytes are valid atomics.
        Self(unsafe { super::tables::zeroed(pages) })
    }

    pub fn count(&self, page: u64, access: Access) {
        if let Some(counts) = self.0.get(page as usize) {
            counts[usize::from(access == Access::Write)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Those that were asked for, in order of pages.
    pub fn list(&self) -> Vec<PageCount> {
        (0..)
            .zip(&self.0)
            .map(|(page, counts)| PageCount {
                page,
                reads: counts[0].load(Ordering::Relaxed),
                writes: counts[1].load(Ordering::Relaxed),
            })
            .filter(|count| count.reads + count.writes > 0)
            .collect()
    }
}
