//! The access history of pages goes along with them, so that a later split knows it.

use weft_coherent_memory::{HistoryRun, SharedMemory};
use weft_dsm::NodeId;

use super::Membership;
use crate::commands::DrainShare;
use crate::message::SliceMessage;
use crate::page_history;

impl Membership {
    /// Before a drain: tells each of the slices that take pages how these were used. One that
    /// takes a part which is not known yet is told of all.
    pub(super) fn tell_targets(&self, memory: &SharedMemory, shares: &[DrainShare]) {
        for share in shares.iter().filter(|share| share.pages > 0) {
            let runs = memory.history_for(NodeId(share.slice as u8));
            self.tell(share.slice, &runs);
        }
    }

    /// Tells the slices that manage pages of this one how these were used.
    pub(super) fn tell_managers(&self, memory: &SharedMemory) {
        for (manager, runs) in memory.history_of_others() {
            self.tell(manager.index(), &runs);
        }
    }

    fn tell(&self, slice: usize, runs: &[HistoryRun]) {
        for pages in &page_history::encode(runs) {
            self.peers.send(slice, &SliceMessage::History { pages });
        }
    }
}
