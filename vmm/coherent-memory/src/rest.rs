//! A rest of this slice's memory: it begins nothing, so that no page moves after all slices
//! are found at rest. `weft_dsm::controller` has the rules, and judges them.

use weft_dsm::controller::{Event, RestReport};

use super::shell::SharedMemory;

impl SharedMemory {
    /// Begins nothing about pages until [`SharedMemory::end_rest`]: no request, eviction,
    /// prefetch, drain or pre-copy. What is under way comes to its end, and what users ask
    /// for waits.
    pub fn rest(&self) {
        self.locked(|state| state.step(self, Event::Rest, None));
    }

    /// All goes on.
    pub fn end_rest(&self) {
        self.locked(|state| state.step(self, Event::EndRest, None));
    }

    /// What this slice says of itself, for [`weft_dsm::controller::unrest`].
    pub fn rest_report(&self) -> RestReport {
        self.locked(|state| state.controller.rest_report(self.now()))
    }

    /// The first page about which something is under way here, and what: when all slices are
    /// found at rest, there is none.
    pub fn restless(&self) -> Option<(u64, &'static str)> {
        self.walk()
            .find_map(|pages| self.locked(|state| state.controller.restless(pages)))
    }
}
