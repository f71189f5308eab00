//! The coherence protocol's records, in sparse arrays over the whole managed
//! address range. The kernel gives memory for the parts that are touched: 4 and
//! 24 bytes for each page of the program, and a byte for its policy.

use weft_dsm::{Entry, Local, PAGES_MAX, Page, Policy, Tables};
use weft_proc::layout::PAGE;

use crate::kernel::{self, Result};

/// Records indexed by page number. Copies refer to the same arrays; the
/// engine's lock guards them all.
#[derive(Clone, Copy)]
pub struct FlatTables {
    locals: *mut Local,
    entries: *mut Entry,
    policies: *mut u8,
}

// SAFETY: the arrays belong to the engine, whose lock guards every access.
unsafe impl Send for FlatTables {}

impl FlatTables {
    /// Reserves the arrays; `manages` says whether this node keeps a directory.
    pub fn new(manages: bool) -> Result<FlatTables> {
        let pages = PAGES_MAX as usize;
        let entries = if manages {
            kernel::reserve(pages * size_of::<Entry>())?
        } else {
            core::ptr::null_mut()
        };
        Ok(FlatTables {
            locals: kernel::reserve(pages * size_of::<Local>())?.cast(),
            entries: entries.cast(),
            policies: kernel::reserve(pages)?,
        })
    }

    /// This node's record, to look at.
    pub fn look(&self, page: u64) -> Local {
        assert!(page < PAGES_MAX);
        // SAFETY: in bounds (asserted); zero bytes are a valid record.
        unsafe { *self.locals.add(page as usize) }
    }

    /// The directory's record, to look at; only at the manager.
    pub fn look_entry(&self, page: u64) -> Entry {
        assert!(page < PAGES_MAX && !self.entries.is_null());
        // SAFETY: in bounds (asserted); zero bytes are a valid record.
        unsafe { *self.entries.add(page as usize) }
    }

    /// How the pages of a range are kept coherent from now on.
    pub fn set_policy(&mut self, first: u64, count: u64, policy: Policy) {
        assert!(first + count <= PAGES_MAX);
        let byte = u8::from(policy == Policy::ReadOnly);
        // SAFETY: in bounds (asserted).
        unsafe { core::ptr::write_bytes(self.policies.add(first as usize), byte, count as usize) };
    }

    /// The records of `count` pages follow the pages to another place; the old
    /// place becomes untouched. Generations belong to places: messages from
    /// before name them.
    pub fn relocate(&mut self, from: u64, to: u64, count: u64) {
        assert!(from + count <= PAGES_MAX && to + count <= PAGES_MAX);
        assert!(from + count <= to || to + count <= from);
        for offset in 0..count {
            let moved = self.local(Page(from + offset)).take();
            *self.local(Page(to + offset)) = moved.at(self.look(to + offset));
            if !self.entries.is_null() {
                let entry = core::mem::take(self.entry(Page(from + offset)));
                *self.entry(Page(to + offset)) = entry;
            }
        }
        // SAFETY: all ranges are in bounds (asserted).
        unsafe {
            let (old, new) = (
                self.policies.add(from as usize),
                self.policies.add(to as usize),
            );
            core::ptr::copy_nonoverlapping(old, new, count as usize);
            core::ptr::write_bytes(old, 0, count as usize);
        }
    }
}

impl Tables for FlatTables {
    fn local(&mut self, page: Page) -> &mut Local {
        assert!(page.0 < PAGES_MAX);
        // SAFETY: in bounds (asserted); the engine's lock makes it exclusive.
        unsafe { &mut *self.locals.add(page.0 as usize) }
    }
    fn entry(&mut self, page: Page) -> &mut Entry {
        assert!(page.0 < PAGES_MAX && !self.entries.is_null());
        // SAFETY: as above.
        unsafe { &mut *self.entries.add(page.0 as usize) }
    }
    fn policy(&self, page: Page) -> Policy {
        assert!(page.0 < PAGES_MAX);
        // SAFETY: in bounds (asserted).
        match unsafe { *self.policies.add(page.0 as usize) } {
            0 => Policy::Invalidate,
            _ => Policy::ReadOnly,
        }
    }
}

/// Page number of an address.
pub fn page_of(address: usize) -> u64 {
    address as u64 / PAGE
}
