//! Which pages a slice writes to a checkpoint: those that it owns while all slices rest, from
//! its own memory.

use std::io;
use std::ops::Range;

use weft_dsm::{Page, Tables};
use weft_guest_memory::Marks;

use super::shell::{PAGE_SHIFT, SharedMemory};

impl SharedMemory {
    /// Numbers of the pages that this slice manages when the machine starts.
    pub fn first_pages(&self) -> Range<u64> {
        self.own.start..self.own.end.min(self.end / weft_dsm::PAGE_BYTES as u64)
    }

    /// Marks the pages that are here without memory, because the guest gave them back: they
    /// are zero. While no vCPU runs: then such a page stays so.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn reclaimed(&self) -> io::Result<Marks> {
        let marks = Marks::new(self.end);
        // Before the look at memory: a page that arrives between the two is not marked.
        for page in self.walk().flatten() {
            if self.rights.of(page).is_some() {
                marks.set(page << PAGE_SHIFT);
            }
        }
        for range in self.ram().populated()? {
            for address in range.step_by(weft_dsm::PAGE_BYTES) {
                marks.unset(address);
            }
        }
        Ok(marks)
    }

    /// Of `pages`, those that this slice owns and that are not known to be zero; in ascending
    /// order. When all slices rest, each page that was touched is in one of their lists, and
    /// its owner has its bytes.
    pub fn owned(&self, pages: Range<u64>) -> Vec<u64> {
        self.locked(|state| state.controller.owned(pages))
    }

    /// Gives back the memory of all pages that [`SharedMemory::owned`] does not list: then the
    /// memory file has guest memory, and nothing else. While all slices rest.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn keep_owned(&self) -> io::Result<()> {
        let page_bytes = weft_dsm::PAGE_BYTES as u64;
        for range in self.ram().populated()? {
            let mut at = range.start / page_bytes;
            let end = range.end / page_bytes;
            let mut free = |until: u64, next: u64| {
                let length = ((until - at) * page_bytes) as usize;
                let start = std::mem::replace(&mut at, next) * page_bytes;
                match length {
                    0 => Ok(()),
                    _ => self.ram().give_back(start, length),
                }
            };
            for page in self.owned(range.start / page_bytes..end) {
                free(page, page + 1)?;
            }
            free(end, end)?;
        }
        Ok(())
    }

    /// Of `pages`, those that this slice manages and that a slice has written or loaded,
    /// wherever they are now; in ascending order. The others that it manages are zero.
    pub fn touched(&self, pages: Range<u64>) -> Vec<u64> {
        self.locked(|state| {
            let tables = state.controller.tables();
            pages
                .filter(|page| self.homes.manages(*page))
                .filter(|page| {
                    let page = Page(*page);
                    let is_zero = tables.local(page).owner() && tables.local(page).zero();
                    !tables.entry(page).untouched() && !is_zero
                })
                .collect()
        })
    }
}
