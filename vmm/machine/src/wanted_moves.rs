//! Moves that vCPUs ask for by themselves. They wait for the owner, on the primary, which
//! drops what is no longer true.

use std::collections::BTreeMap;
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use weft_platform::interrupts::VcpuLocation;

use super::shutdown::Input;

/// By vCPU, so bounded by their number: where it asks to go, with the epoch that it would
/// have there.
pub(super) struct WantedMoves {
    /// Locked for moments.
    wanted: Mutex<BTreeMap<u32, VcpuLocation>>,
    owner: SyncSender<Input>,
}

impl WantedMoves {
    pub fn new(owner: SyncSender<Input>) -> Self {
        Self {
            wanted: Mutex::default(),
            owner,
        }
    }

    /// A vCPU asks to go to `location`. Never blocks; a later request takes the place of an
    /// earlier one.
    pub fn ask(&self, vcpu: u32, location: VcpuLocation) {
        self.lock().insert(vcpu, location);
        // With a full queue the owner is awake, and it looks here after each input.
        let _ = self.owner.try_send(Input::Wake);
    }

    /// All that are asked for so far.
    pub fn take(&self) -> BTreeMap<u32, VcpuLocation> {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, VcpuLocation>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
