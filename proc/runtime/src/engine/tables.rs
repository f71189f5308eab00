//! The coherence protocol's records, in sparse arrays over the whole managed
//! address range. The kernel gives memory for the parts that are touched: 4 and
//! 24 bytes for each page of the program, and a byte for its policy.

use core::ops::Range;

use weft_dsm::{Entry, Local, PAGES_MAX, Page, Policy, Tables};
use weft_proc::layout::PAGE;

use crate::own_calls::{Result, zeroes};

/// Records indexed by page number, up to `PAGES_MAX`.
pub struct FlatTables {
    locals: &'static mut [Local],
    /// Empty where no directory is kept.
    entries: &'static mut [Entry],
    policies: &'static mut [u8],
}

impl FlatTables {
    /// Reserves the arrays; `manages` says whether this node keeps a directory.
    pub fn new(manages: bool) -> Result<FlatTables> {
        let pages = PAGES_MAX as usize;
        Ok(FlatTables {
            locals: zeroes(pages)?,
            entries: if manages { zeroes(pages)? } else { &mut [] },
            policies: zeroes(pages)?,
        })
    }

    /// This node's record, to look at.
    pub fn look(&self, page: u64) -> Local {
        self.locals[page as usize]
    }

    /// The directory's record, to look at; only at the manager.
    pub fn look_entry(&self, page: u64) -> Entry {
        self.entries[page as usize]
    }

    /// How the pages of a range are kept coherent from now on.
    pub fn set_policy(&mut self, first: u64, count: u64, policy: Policy) {
        let byte = u8::from(policy == Policy::ReadOnly);
        self.policies[range(first, count)].fill(byte);
    }

    /// The records of `count` pages follow the pages to another place; the old
    /// place becomes untouched. Generations belong to places: messages from
    /// before name them.
    pub fn relocate(&mut self, from: u64, to: u64, count: u64) {
        assert!(from + count <= to || to + count <= from);
        for offset in 0..count {
            let moved = self.local(Page(from + offset)).take();
            *self.local(Page(to + offset)) = moved.at(self.look(to + offset));
            if !self.entries.is_empty() {
                let entry = core::mem::take(self.entry(Page(from + offset)));
                *self.entry(Page(to + offset)) = entry;
            }
        }
        self.policies.copy_within(range(from, count), to as usize);
        self.policies[range(from, count)].fill(0);
    }
}

impl Tables for FlatTables {
    fn local(&mut self, page: Page) -> &mut Local {
        &mut self.locals[page.0 as usize]
    }
    fn entry(&mut self, page: Page) -> &mut Entry {
        &mut self.entries[page.0 as usize]
    }
    fn policy(&self, page: Page) -> Policy {
        match self.policies[page.0 as usize] {
            0 => Policy::Invalidate,
            _ => Policy::ReadOnly,
        }
    }
}

fn range(first: u64, count: u64) -> Range<usize> {
    first as usize..(first + count) as usize
}

/// Page number of an address.
pub fn page_of(address: usize) -> u64 {
    address as u64 / PAGE
}
