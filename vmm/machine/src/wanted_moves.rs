//! Moves that vCPUs ask for by themselves. They wait for the owner, on the primary, which
//! drops what is no longer true.

use std::collections::BTreeMap;
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use weft_platform::interrupts::{Locations, VcpuLocation};

use super::shutdown::Input;

/// By vCPU and asking slice, so bounded by their numbers: where the vCPU would go, with the
/// epoch that it would have there. A slice does not displace another's request.
type Wanted = BTreeMap<(u32, usize), VcpuLocation>;

pub(super) struct WantedMoves {
    /// Locked for moments.
    wanted: Mutex<Wanted>,
    owner: SyncSender<Input>,
}

impl WantedMoves {
    pub fn new(owner: SyncSender<Input>) -> Self {
        Self {
            wanted: Mutex::default(),
            owner,
        }
    }

    /// Slice `from` asks that a vCPU goes to `location`. Never blocks; a later request of
    /// the slice takes the place of an earlier one.
    pub fn ask(&self, from: usize, vcpu: u32, location: VcpuLocation) {
        self.lock().insert((vcpu, from), location);
        // With a full queue the owner is awake, and it looks here after each input.
        let _ = self.owner.try_send(Input::Wake);
    }

    /// All that are asked for so far: the vCPU, the slice that asked, and the location.
    pub fn take(&self) -> impl Iterator<Item = (u32, usize, VcpuLocation)> + use<> {
        let wanted = std::mem::take(&mut *self.lock());
        let wanted = wanted.into_iter();
        wanted.map(|((vcpu, from), location)| (vcpu, from, location))
    }

    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether slice `from` has the vCPU that it asks to send to `wanted`, and has had it since
/// it asked: otherwise the request is an old one, or not its own.
pub(super) fn is_current(
    locations: &Locations,
    (vcpu, from): (u32, usize),
    wanted: VcpuLocation,
) -> bool {
    let known = locations.of(vcpu);
    known.is_some_and(|known| known.slice == from && known.epoch + 1 == wanted.epoch)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    fn at(slice: usize, epoch: u64) -> VcpuLocation {
        VcpuLocation { slice, epoch }
    }

    #[test]
    fn a_slice_asks_only_for_a_vcpu_that_it_has() {
        let locations = Locations::new([1, 1, 0]);
        for (from, vcpu, wanted, expected) in [
            (1, 1, at(2, 1), true),
            (0, 1, at(2, 1), false),
            (2, 1, at(2, 1), false),
            (1, 1, at(2, 0), false),
            (1, 1, at(2, 2), false),
            (1, 9, at(2, 1), false),
        ] {
            let current = is_current(&locations, (vcpu, from), wanted);
            assert_eq!(current, expected, "node {from}, vCPU {vcpu} to {wanted:?}");
        }
    }

    #[test]
    fn a_slice_replaces_its_own_request_only() {
        let (owner, inputs) = sync_channel(1);
        let wanted = WantedMoves::new(owner);
        wanted.ask(1, 1, at(0, 1));
        wanted.ask(2, 1, at(2, 1));
        wanted.ask(1, 1, at(2, 1));
        let taken: Vec<_> = wanted.take().collect();
        assert_eq!(taken, [(1, 1, at(2, 1)), (1, 2, at(2, 1))]);
        assert_eq!(wanted.take().count(), 0);
        // The queue was full, and the owner is awake.
        assert!(matches!(inputs.try_recv(), Ok(Input::Wake)));
        assert!(inputs.try_recv().is_err());
    }
}
