//! Which pages of a slice's own part of RAM a checkpoint must hold.

use std::ops::Range;

use weft_dsm::{Page, Tables};

use super::shell::SharedMemory;

impl SharedMemory {
    /// Numbers of the pages that this slice manages.
    pub fn own_pages(&self) -> Range<u64> {
        self.own.start..self.own.end.min(self.end / weft_dsm::PAGE_BYTES as u64)
    }

    /// Of `pages`, which this slice manages, those that a slice has written or loaded,
    /// wherever they are now; in ascending order. The others are zero.
    pub fn touched(&self, pages: Range<u64>) -> Vec<u64> {
        self.locked(|state| {
            let tables = state.controller.tables();
            pages
                .filter(|page| {
                    let page = Page(*page);
                    let is_zero = tables.local(page).owner() && tables.local(page).zero();
                    !tables.entry(page).untouched() && !is_zero
                })
                .collect()
        })
    }
}
