//! How often a vCPU left the guest, why, and what each kind took of our time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_vcpu::BackEndCounters;

/// Why KVM_RUN came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum ExitKind {
    /// IN, INS.
    PortRead,
    /// OUT, OUTS.
    PortWrite,
    /// A load from a device.
    MmioRead,
    /// A store to a device.
    MmioWrite,
    /// HLT.
    Halt,
    /// RDMSR of a register that is not the vCPU's own.
    MsrRead,
    /// WRMSR of the same registers.
    MsrWrite,
    /// The guest accepts interrupts again.
    InterruptWindow,
    /// A kick, or another signal.
    Interrupted,
    /// An instruction that this KVM cannot execute, done by a quirk.
    Quirk,
    /// A change of CR8.
    TaskPriority,
    /// All that ends `run` with an error, and triple faults.
    Other,
}

/// With the names of its two numbers: exits, and nanoseconds of handling.
const KINDS: [(ExitKind, &str, &str); 12] = [
    (ExitKind::PortRead, "exits-port-read", "exits-port-read-ns"),
    (
        ExitKind::PortWrite,
        "exits-port-write",
        "exits-port-write-ns",
    ),
    (ExitKind::MmioRead, "exits-mmio-read", "exits-mmio-read-ns"),
    (
        ExitKind::MmioWrite,
        "exits-mmio-write",
        "exits-mmio-write-ns",
    ),
    (ExitKind::Halt, "exits-halt", "exits-halt-ns"),
    (ExitKind::MsrRead, "exits-msr-read", "exits-msr-read-ns"),
    (ExitKind::MsrWrite, "exits-msr-write", "exits-msr-write-ns"),
    (
        ExitKind::InterruptWindow,
        "exits-interrupt-window",
        "exits-interrupt-window-ns",
    ),
    (
        ExitKind::Interrupted,
        "exits-interrupted",
        "exits-interrupted-ns",
    ),
    (ExitKind::Quirk, "exits-quirk", "exits-quirk-ns"),
    (
        ExitKind::TaskPriority,
        "exits-task-priority",
        "exits-task-priority-ns",
    ),
    (ExitKind::Other, "exits-other", "exits-other-ns"),
];

/// Exits of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitCount {
    /// How many.
    pub exits: u64,
    /// From KVM_RUN's return until the vCPU was ready to enter again, in
    /// nanoseconds, all together.
    pub handling_ns: u64,
}

/// A vCPU's numbers; they only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitCounters {
    /// By kind, those that happened.
    pub kinds: BTreeMap<String, ExitCount>,
    /// In KVM_RUN: the guest, and what the kernel does for it.
    pub inside_ns: u64,
    /// Interrupts injected.
    pub interrupts: u64,
    /// Non-maskable ones.
    pub nmis: u64,
}

/// Where a vCPU counts. Written by its thread, read by any.
#[derive(Default)]
pub struct Meter {
    kinds: [(AtomicU64, AtomicU64); KINDS.len()],
    inside_ns: AtomicU64,
    interrupts: AtomicU64,
    nmis: AtomicU64,
}

impl Meter {
    pub(super) fn exit(&self, kind: ExitKind, handling: Duration) {
        // In bounds: the array has one place for each kind.
        let (exits, handling_ns) = &self.kinds[kind as usize];
        add(exits, 1);
        add(handling_ns, handling.as_nanos() as u64);
    }

    pub(super) fn inside(&self, time: Duration) {
        add(&self.inside_ns, time.as_nanos() as u64);
    }

    pub(super) fn interrupt(&self) {
        add(&self.interrupts, 1);
    }

    pub(super) fn nmi(&self) {
        add(&self.nmis, 1);
    }

    /// The numbers now.
    pub fn read(&self) -> ExitCounters {
        let kinds = KINDS
            .iter()
            .filter_map(|(kind, name, _)| {
                let (exits, handling_ns) = &self.kinds[*kind as usize];
                let count = ExitCount {
                    exits: exits.load(Ordering::Relaxed),
                    handling_ns: handling_ns.load(Ordering::Relaxed),
                };
                let name = name.strip_prefix("exits-").unwrap_or(name);
                (count.exits > 0).then(|| (name.to_owned(), count))
            })
            .collect();
        ExitCounters {
            kinds,
            inside_ns: self.inside_ns.load(Ordering::Relaxed),
            interrupts: self.interrupts.load(Ordering::Relaxed),
            nmis: self.nmis.load(Ordering::Relaxed),
        }
    }
}

impl BackEndCounters for Meter {
    fn list(&self) -> Vec<(&'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut numbers = vec![
            ("inside-ns", read(&self.inside_ns)),
            ("injected-interrupts", read(&self.interrupts)),
            ("injected-nmis", read(&self.nmis)),
        ];
        for (kind, exits, nanoseconds) in KINDS {
            let (count, handling) = &self.kinds[kind as usize];
            if read(count) > 0 {
                numbers.extend([(exits, read(count)), (nanoseconds, read(handling))]);
            }
        }
        numbers
    }
}

/// One writer, so no locked instruction is needed.
fn add(counter: &AtomicU64, by: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(by),
        Ordering::Relaxed,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_own_place() {
        for (place, (kind, ..)) in KINDS.iter().enumerate() {
            assert_eq!(*kind as usize, place);
        }
        let meter = Meter::default();
        meter.exit(ExitKind::Halt, Duration::from_nanos(5));
        meter.exit(ExitKind::Halt, Duration::from_nanos(6));
        meter.exit(ExitKind::Other, Duration::ZERO);
        let counters = meter.read();
        let halt = counters.kinds["halt"];
        assert_eq!((halt.exits, halt.handling_ns), (2, 11));
        assert_eq!(counters.kinds.len(), 2);
        assert!(meter.list().contains(&("exits-halt-ns", 11)));
        let text = serde_json::to_string(&counters).unwrap();
        assert_eq!(
            serde_json::from_str::<ExitCounters>(&text).unwrap(),
            counters
        );
    }
}
