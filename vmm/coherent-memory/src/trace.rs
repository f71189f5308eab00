//! The trace: records of single faults, while a reader wants them.
//!
//! Invariants: while tracing is off nothing is recorded, which costs one atomic load; the ring
//! holds the latest faults, [`RING`] at most; the faults of a slice are numbered without gaps,
//! so that a late reader knows how many it missed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_vcpu::{Asker, Purpose};

/// Faults that a slice keeps: as many as a boot has, some 6 MB.
pub const RING: usize = 1 << 16;
/// Most faults in one reply of a slice: their JSON fits into a frame.
pub const FAULTS_MAX: usize = 1024;
/// How long tracing stays on after each read.
pub const READERS_PATIENCE: Duration = Duration::from_secs(10);
/// The value of `until_ns` if tracing never ends.
const FOREVER: u64 = u64::MAX;

/// What the slice lacked at a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum FaultKind {
    /// The page, to read it.
    Read = 0,
    /// The page, to write it.
    Write = 1,
    /// The right to write to a page that was here.
    Upgrade = 2,
}

/// What the page was needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultPurpose {
    /// A load or a store.
    Data,
    /// A page table.
    Table,
    /// Instructions.
    Code,
    /// Weft itself: a device, the paravirtual clock.
    Device,
}

/// One fault that needed another slice. Addresses are text in JSON (`0x…`), where
/// numbers have 53 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultRecord {
    /// The end of the fault, in nanoseconds since the slice was made.
    pub time_ns: u64,
    /// The duration of the fault, in nanoseconds.
    pub waited_ns: u64,
    /// Guest-physical page number.
    pub page: u64,
    pub kind: FaultKind,
    pub purpose: FaultPurpose,
    /// `None` for a device.
    pub vcpu: Option<u32>,
    /// Whether the vCPU was at privilege level 3.
    pub user: bool,
    /// The linear address; for a page table, the address that was translated.
    #[serde(with = "hexadecimal")]
    pub address: u64,
    /// The first instruction of the translated block.
    #[serde(with = "hexadecimal")]
    pub rip: u64,
    /// The base of GS outside privilege level 3, else 0.
    #[serde(with = "hexadecimal")]
    pub gs_base: u64,
}

/// Recorded faults of one slice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceFaults {
    pub slice: usize,
    /// The number of the first fault after these.
    pub next: u64,
    /// Requested faults that the ring no longer has.
    pub missed: u64,
    /// In order of their numbers; [`FAULTS_MAX`] at most.
    pub faults: Vec<FaultRecord>,
}

/// The faults that a slice has recorded.
pub(super) struct Trace {
    start: Instant,
    /// Nanoseconds after `start` until which faults are recorded; 0: never yet.
    until_ns: AtomicU64,
    /// Locked for microseconds, to add or copy records.
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    records: VecDeque<FaultRecord>,
    /// The number of the first record.
    first: u64,
}

impl Default for Trace {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            until_ns: AtomicU64::new(0),
            ring: Mutex::default(),
        }
    }
}

impl Trace {
    /// Records every fault from now on.
    pub fn always(&self) {
        self.until_ns.store(FOREVER, Ordering::Relaxed);
    }

    /// Records every fault for at least `time` from now on.
    pub fn keep_on(&self, time: Duration) {
        let until = (self.start.elapsed() + time).as_nanos() as u64;
        self.until_ns.fetch_max(until, Ordering::Relaxed);
    }

    /// A fault that began at `start` is settled. Recorded, if tracing is on.
    pub fn record(
        &self,
        page: u64,
        kind: FaultKind,
        asker: Option<&Asker>,
        start: Instant,
        waited: Duration,
    ) {
        let until = self.until_ns.load(Ordering::Relaxed);
        if until == 0 {
            return;
        }
        let time = start.saturating_duration_since(self.start) + waited;
        let time_ns = time.as_nanos() as u64;
        if time_ns > until {
            return;
        }
        let record = FaultRecord {
            time_ns,
            waited_ns: waited.as_nanos() as u64,
            page,
            kind,
            purpose: asker.map_or(FaultPurpose::Device, |asker| match asker.purpose {
                Purpose::Data => FaultPurpose::Data,
                Purpose::Table => FaultPurpose::Table,
                Purpose::Code => FaultPurpose::Code,
            }),
            vcpu: asker.map(|asker| asker.vcpu),
            user: asker.is_some_and(|asker| asker.user),
            address: asker.map_or(0, |asker| asker.address),
            rip: asker.map_or(0, |asker| asker.rip),
            gs_base: asker.map_or(0, |asker| asker.gs_base),
        };
        let mut ring = self.lock();
        if ring.records.len() == RING {
            ring.records.pop_front();
            ring.first += 1;
        }
        ring.records.push_back(record);
    }

    /// The faults from number `from` on; without a number, those that will come.
    pub fn read(&self, slice: usize, from: Option<u64>) -> SliceFaults {
        let ring = self.lock();
        let end = ring.first + ring.records.len() as u64;
        let from = from.unwrap_or(end).min(end);
        let missed = ring.first.saturating_sub(from);
        let skipped = from.saturating_sub(ring.first);
        let records = ring.records.iter().skip(skipped as usize);
        let faults: Vec<FaultRecord> = records.take(FAULTS_MAX).copied().collect();
        SliceFaults {
            slice,
            next: from + missed + faults.len() as u64,
            missed,
            faults,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// 64-bit numbers as text.
mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:#x}"))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.strip_prefix("0x")
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .ok_or_else(|| D::Error::custom(format!("{text:?} is no address like 0x1000")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const ASKER: Asker = Asker {
        vcpu: 254,
        user: false,
        purpose: Purpose::Table,
        address: u64::MAX,
        rip: u64::MAX - 1,
        gs_base: u64::MAX - 2,
    };

    fn record(trace: &Trace, page: u64) {
        let start = Instant::now();
        trace.record(
            page,
            FaultKind::Upgrade,
            Some(&ASKER),
            start,
            Duration::ZERO,
        );
    }

    #[test]
    fn nothing_is_recorded_until_somebody_wants_it() {
        let trace = Trace::default();
        record(&trace, 1);
        trace.keep_on(Duration::from_secs(100));
        assert_eq!(trace.read(0, None).next, 0);
        record(&trace, 2);
        trace.record(3, FaultKind::Read, None, Instant::now(), Duration::ZERO);
        let read = trace.read(4, Some(0));
        assert_eq!((read.slice, read.next, read.missed), (4, 2, 0));
        assert_eq!(read.faults[0].page, 2);
        assert_eq!(read.faults[1].purpose, FaultPurpose::Device);
        assert!(trace.read(4, Some(2)).faults.is_empty());
    }

    #[test]
    fn tracing_ends_by_itself() {
        let trace = Trace::default();
        trace.keep_on(Duration::ZERO);
        let later = Instant::now() + Duration::from_secs(1);
        trace.record(1, FaultKind::Read, None, later, Duration::ZERO);
        assert_eq!(trace.read(0, Some(0)).next, 0);
    }

    #[test]
    fn the_ring_is_bounded_and_says_what_is_missed() {
        let trace = Trace::default();
        trace.always();
        let extra = 5;
        for page in 0..RING as u64 + extra {
            record(&trace, page);
        }
        let mut from = 0;
        let mut pages = Vec::new();
        let mut missed = 0;
        loop {
            let read = trace.read(0, Some(from));
            assert!(read.faults.len() <= FAULTS_MAX);
            if read.faults.is_empty() {
                break;
            }
            (from, missed) = (read.next, missed + read.missed);
            pages.extend(read.faults.iter().map(|fault| fault.page));
        }
        assert_eq!(missed, extra);
        assert!(pages.into_iter().eq(extra..RING as u64 + extra));
    }

    #[test]
    fn many_threads_record_and_one_reads_without_gaps() {
        let trace = Arc::new(Trace::default());
        trace.always();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let trace = trace.clone();
                std::thread::spawn(move || (0..500).for_each(|page| record(&trace, page)))
            })
            .collect();
        let (mut from, mut seen) = (0, 0);
        let deadline = Instant::now() + Duration::from_secs(20);
        while seen < 2000 && Instant::now() < deadline {
            let read = trace.read(0, Some(from));
            assert_eq!(
                (read.missed, read.next),
                (0, from + read.faults.len() as u64)
            );
            (from, seen) = (read.next, seen + read.faults.len());
        }
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(seen, 2000);
    }

    #[test]
    fn an_answer_fits_into_a_frame() {
        let record = FaultRecord {
            time_ns: u64::MAX,
            waited_ns: u64::MAX,
            page: 1 << 34,
            kind: FaultKind::Upgrade,
            purpose: FaultPurpose::Device,
            vcpu: Some(254),
            user: false,
            address: u64::MAX,
            rip: u64::MAX,
            gs_base: u64::MAX,
        };
        let text = serde_json::to_string(&vec![record; FAULTS_MAX]).unwrap();
        assert!(
            text.len() + 1024 < weft_wire::frame::MAX_PAYLOAD,
            "{}",
            text.len()
        );
        let back: Vec<FaultRecord> = serde_json::from_str(&text).unwrap();
        assert_eq!(back[0], record);
    }
}
