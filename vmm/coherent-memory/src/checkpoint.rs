//! Which pages of a slice's own part of RAM a checkpoint must hold.

use std::io;
use std::ops::Range;

use weft_dsm::{Page, Tables};
use weft_guest_memory::Marks;

use super::shell::{PAGE_SHIFT, SharedMemory};

impl SharedMemory {
    /// Numbers of the pages that this slice manages.
    pub fn own_pages(&self) -> Range<u64> {
        self.own.start..self.own.end.min(self.end / weft_dsm::PAGE_BYTES as u64)
    }

    /// Marks the pages that this slice manages and has without memory, because the guest
    /// gave them back: they are zero. While no vCPU runs: then such a page stays here.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn reclaimed(&self) -> io::Result<Marks> {
        let marks = Marks::new(self.end);
        // Before the look at memory: a page that arrives between the two is not marked.
        for page in self
            .own_pages()
            .filter(|page| self.rights.of(*page).is_some())
        {
            marks.set(page << PAGE_SHIFT);
        }
        for range in self.ram().populated()? {
            for address in range.step_by(weft_dsm::PAGE_BYTES) {
                marks.unset(address);
            }
        }
        Ok(marks)
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
