//! Remote faults as they concern a vCPU: which slice served them.

use std::sync::atomic::{AtomicU64, Ordering};

use weft_vcpu::Access;

use super::counters::MemoryCounters;

/// Most slices of a machine.
const SLICES: usize = 16;
/// Most vCPUs of a machine.
const VCPUS: usize = 256;

/// A vCPU's remote fault, when it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedFault {
    pub vcpu: u32,
    /// Guest-physical page number.
    pub page: u64,
    pub access: Access,
    /// The slice whose message ended the wait; `None` if it is not known, because the message
    /// had to wait in the controller.
    pub from: Option<usize>,
    /// Bytes of the page and of those that were requested together with it; 0 if a copy of
    /// the page was here.
    pub bytes: u64,
    pub waited_ns: u64,
}

/// What is told of the remote faults of vCPUs, on the thread of the vCPU. Neither call waits.
pub trait FaultObserver: Send + Sync {
    /// The vCPU begins to wait.
    fn waits(&self, vcpu: u32);

    /// Its wait is over. Whether blocks of the slice that served it may come here; not if the
    /// vCPU may go there instead.
    fn served(&self, fault: &ServedFault) -> bool;
}

/// Remote faults that one slice served for a vCPU.
#[derive(Default)]
struct Served {
    faults: AtomicU64,
    bytes: AtomicU64,
}

/// By vCPU and serving slice.
pub(super) struct ServedCounts(Box<[[Served; SLICES]]>);

impl Default for ServedCounts {
    fn default() -> Self {
        Self((0..VCPUS).map(|_| Default::default()).collect())
    }
}

impl ServedCounts {
    pub fn count(&self, fault: &ServedFault) {
        let served = self.0.get(fault.vcpu as usize);
        let from = fault.from.and_then(|from| served?.get(from));
        if let Some(served) = from {
            MemoryCounters::add(&served.faults, 1);
            MemoryCounters::add(&served.bytes, fault.bytes);
        }
    }

    /// The counts that are not zero, keyed by name.
    pub fn list(&self, vcpu: u32) -> Vec<(String, u64)> {
        let served = self.0.get(vcpu as usize).into_iter().flatten();
        let named = served.enumerate().flat_map(|(slice, served)| {
            let (faults, bytes) = (&served.faults, &served.bytes);
            [
                (format!("from{slice}.faults"), faults),
                (format!("from{slice}.bytes"), bytes),
            ]
        });
        let counts = named.map(|(name, count)| (name, count.load(Ordering::Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_counted_by_vcpu_and_serving_slice() {
        let counts = ServedCounts::default();
        let fault = |vcpu, from, bytes| ServedFault {
            vcpu,
            page: 0,
            access: Access::Read,
            from,
            bytes,
            waited_ns: 5,
        };
        counts.count(&fault(3, Some(1), 4096));
        counts.count(&fault(3, Some(1), 0));
        counts.count(&fault(3, Some(15), 4096));
        for unknown in [
            fault(3, None, 1),
            fault(3, Some(16), 1),
            fault(256, Some(0), 1),
        ] {
            counts.count(&unknown);
        }
        let named = |name: &str, count| (name.to_owned(), count);
        let expected = [
            named("from1.faults", 2),
            named("from1.bytes", 4096),
            named("from15.faults", 1),
            named("from15.bytes", 4096),
        ];
        assert_eq!(counts.list(3), expected);
        assert!(counts.list(256).is_empty());
    }
}
