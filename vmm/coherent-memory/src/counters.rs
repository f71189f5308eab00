//! Counters of a slice's memory, of its vCPUs' waits, and of the faults of each page.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::trace::FaultKind;

/// Counters of one slice's memory; they only grow.
#[derive(Default)]
pub struct MemoryCounters {
    /// Read faults that needed another slice.
    pub reads: AtomicU64,
    /// Write faults that needed another slice, on a page that was not here.
    pub writes: AtomicU64,
    /// Write faults that needed another slice, on a page of which a read-only copy was here.
    pub upgrades: AtomicU64,
    /// Faults that needed no other slice: the first touch of a page that this slice manages.
    pub local: AtomicU64,
    /// Nanoseconds that threads waited for pages of other slices.
    pub waited_ns: AtomicU64,
    /// Part of `waited_ns`: until the request was sent.
    pub asking_ns: AtomicU64,
    /// Part of `waited_ns`: from the page's arrival until the waiting thread ran, or until the
    /// page was in the guest's mapping.
    pub installing_ns: AtomicU64,
    /// Pages sent with their bytes.
    pub pages_sent: AtomicU64,
    /// Pages received with their bytes.
    pub pages_received: AtomicU64,
    /// Pages revoked from this slice's vCPUs.
    pub taken: AtomicU64,
    /// Nanoseconds that these revocations took.
    pub taking_ns: AtomicU64,
    /// Revocations that were deferred, because the page was pinned.
    pub deferred: AtomicU64,
    /// Pages of subscriptions that were requested again after an invalidation.
    pub subscription_requests: AtomicU64,
    /// Pages that were copied for a save before they changed.
    pub saved_first: AtomicU64,
    /// Pages that were requested because a vCPU came which had used them elsewhere.
    pub prefetched: AtomicU64,
    /// Pages that came, with their management, because vCPUs here had fetched some of them.
    pub exchanged_in: AtomicU64,
    /// Pages that went for others.
    pub exchanged_out: AtomicU64,
    /// Evicted read-only copies.
    pub evicted_dropped: AtomicU64,
    /// Evicted pages that were sent to their home slice.
    pub evicted_sent: AtomicU64,
    /// Evicted pages that their home slice refused for the moment.
    pub evictions_denied: AtomicU64,
    /// Pages whose memory was given back to the host.
    pub given_back: AtomicU64,
    /// Pages that the guest gave back.
    pub reclaimed: AtomicU64,
    /// Faults that waited at the memory pressure gate.
    pub room_waits: AtomicU64,
    /// Wake-ups of threads that did not get their page, since it had left already.
    pub retries: AtomicU64,
    /// The most of one fault.
    pub retries_max: AtomicU64,
}

impl MemoryCounters {
    /// The counters with their names.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        [
            ("read-faults", &self.reads),
            ("write-faults", &self.writes),
            ("upgrade-faults", &self.upgrades),
            ("local-faults", &self.local),
            ("waited-ns", &self.waited_ns),
            ("asking-ns", &self.asking_ns),
            ("installing-ns", &self.installing_ns),
            ("pages-sent", &self.pages_sent),
            ("pages-received", &self.pages_received),
            ("taken", &self.taken),
            ("taking-ns", &self.taking_ns),
            ("deferred", &self.deferred),
            ("subscription-requests", &self.subscription_requests),
            ("prefetched", &self.prefetched),
            ("exchanged-in", &self.exchanged_in),
            ("exchanged-out", &self.exchanged_out),
            ("saved-first", &self.saved_first),
            ("evicted-dropped", &self.evicted_dropped),
            ("evicted-sent", &self.evicted_sent),
            ("evictions-denied", &self.evictions_denied),
            ("given-back", &self.given_back),
            ("reclaimed", &self.reclaimed),
            ("room-waits", &self.room_waits),
            ("retries", &self.retries),
            ("retries-max", &self.retries_max),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
        .to_vec()
    }

    /// Adds a wait for another slice, with its first and its last part.
    pub(super) fn count_wait(&self, waited: Duration, asking: Duration, installing: Duration) {
        for (counter, time) in [
            (&self.waited_ns, waited),
            (&self.asking_ns, asking),
            (&self.installing_ns, installing),
        ] {
            Self::add(counter, time.as_nanos() as u64);
        }
    }

    /// Adds the wake-ups of one fault that did not bring its page.
    pub(super) fn count_retries(&self, retries: u64) {
        if retries > 0 {
            Self::add(&self.retries, retries);
            self.retries_max.fetch_max(retries, Ordering::Relaxed);
        }
    }

    /// Adds to a counter.
    pub(super) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}

/// Most pages in one [`SlicePages`].
pub const PAGES_MAX: usize = 2048;
/// Most vCPUs of a machine.
const VCPUS: usize = 256;

/// How often a slice requested a page from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCount {
    /// Guest-physical page number.
    pub page: u64,
    pub reads: u32,
    /// Write faults on a page that was not here.
    pub writes: u32,
    /// Write faults on a page of which a read-only copy was here.
    pub upgrades: u32,
}

impl PageCount {
    /// Faults of all three kinds.
    pub fn faults(&self) -> u64 {
        u64::from(self.reads) + u64::from(self.writes) + u64::from(self.upgrades)
    }
}

/// The pages that a slice requested most often from others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlicePages {
    pub slice: usize,
    /// The pages with most faults, in falling order; [`PAGES_MAX`] at most.
    pub pages: Vec<PageCount>,
    /// Further pages with faults.
    pub more_pages: u64,
    /// Faults on the further pages.
    pub more_faults: u64,
}

/// A vCPU's faults that needed another slice, and the nanoseconds it waited.
#[derive(Default)]
struct VcpuFaults {
    faults: AtomicU64,
    waited_ns: AtomicU64,
}

/// The faults of each vCPU.
pub(super) struct VcpuCounts(Box<[VcpuFaults]>);

impl Default for VcpuCounts {
    fn default() -> Self {
        Self((0..VCPUS).map(|_| VcpuFaults::default()).collect())
    }
}

impl VcpuCounts {
    pub fn count(&self, vcpu: u32, waited_ns: u64) {
        if let Some(counts) = self.0.get(vcpu as usize) {
            MemoryCounters::add(&counts.faults, 1);
            MemoryCounters::add(&counts.waited_ns, waited_ns);
        }
    }

    pub fn list(&self, vcpu: u32) -> [(&'static str, u64); 2] {
        let zero = VcpuFaults::default();
        let counts = self.0.get(vcpu as usize).unwrap_or(&zero);
        [
            ("faults", counts.faults.load(Ordering::Relaxed)),
            ("waited-ns", counts.waited_ns.load(Ordering::Relaxed)),
        ]
    }
}

/// By page: reads, writes and upgrades that needed another slice. 12 bytes for each page, in
/// sparse memory.
pub(super) struct PageCounts(Box<[[AtomicU32; 3]]>);

impl PageCounts {
    pub fn new(pages: usize) -> Self {
        // SAFETY: zero bytes are valid atomics.
        Self(unsafe { super::tables::zeroed(pages) })
    }

    pub fn count(&self, page: u64, kind: FaultKind) {
        if let Some(counts) = self.0.get(page as usize) {
            counts[kind as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The pages with most faults.
    pub fn hottest(&self, slice: usize) -> SlicePages {
        let mut pages = self.list();
        pages.sort_by_key(|count| (std::cmp::Reverse(count.faults()), count.page));
        let more = pages.split_off(pages.len().min(PAGES_MAX));
        SlicePages {
            slice,
            pages,
            more_pages: more.len() as u64,
            more_faults: more.iter().map(PageCount::faults).sum(),
        }
    }

    /// The pages with faults, in order.
    fn list(&self) -> Vec<PageCount> {
        (0..)
            .zip(&self.0)
            .map(|(page, counts)| PageCount {
                page,
                reads: counts[0].load(Ordering::Relaxed),
                writes: counts[1].load(Ordering::Relaxed),
                upgrades: counts[2].load(Ordering::Relaxed),
            })
            .filter(|count| count.faults() > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_pages_come_first_and_the_rest_is_summed() {
        let counts = PageCounts::new(PAGES_MAX + 10);
        for page in 0..PAGES_MAX as u64 + 2 {
            counts.count(page, FaultKind::Read);
        }
        counts.count(7, FaultKind::Write);
        counts.count(9, FaultKind::Upgrade);
        counts.count(9, FaultKind::Upgrade);
        counts.count(u64::MAX, FaultKind::Read);
        let hottest = counts.hottest(3);
        assert_eq!(hottest.pages.len(), PAGES_MAX);
        assert_eq!((hottest.more_pages, hottest.more_faults), (2, 2));
        let first = PageCount {
            page: 9,
            reads: 1,
            writes: 0,
            upgrades: 2,
        };
        assert_eq!(hottest.pages[0], first);
        assert_eq!((hottest.pages[1].page, hottest.pages[1].faults()), (7, 2));
    }

    #[test]
    fn vcpus_are_counted_one_by_one() {
        let counts = VcpuCounts::default();
        counts.count(3, 10);
        counts.count(3, 5);
        counts.count(u32::MAX, 5);
        assert_eq!(counts.list(3), [("faults", 2), ("waited-ns", 15)]);
        assert_eq!(counts.list(u32::MAX), [("faults", 0), ("waited-ns", 0)]);
    }
}
