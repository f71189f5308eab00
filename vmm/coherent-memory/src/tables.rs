//! The protocol's records of every page of guest RAM. They are sparse: the kernel gives
//! memory for the parts that are touched.

use std::ops::Range;

use weft_dsm::{Entry, Local, Page, Policy, Tables};

/// `count` values of a type whose zero bytes are a value, untouched.
///
/// # Safety
/// Zero bytes are a valid `T`.
pub(super) unsafe fn zeroed<T>(count: usize) -> Box<[T]> {
    // SAFETY: zero bytes are valid by the caller's word.
    unsafe { Box::new_zeroed_slice(count).assume_init() }
}

/// The protocol's records, by page number.
pub(super) struct PageTables {
    locals: Box<[Local]>,
    entries: Box<[Entry]>,
    /// Pages of policy `Update`; few.
    updated: Vec<Range<u64>>,
}

impl PageTables {
    /// For pages 0 to `pages` - 1, of which nothing is known.
    pub fn new(pages: usize) -> Self {
        // SAFETY: zero bytes are the default of both ("Zero bytes are the default
        // state of both", weft_dsm::state).
        unsafe {
            Self {
                locals: zeroed(pages),
                entries: zeroed(pages),
                updated: Vec::new(),
            }
        }
    }

    /// These pages are kept up to date from now on.
    pub fn update(&mut self, pages: Range<u64>) {
        if !self.updated.contains(&pages) {
            self.updated.push(pages);
        }
    }
}

impl Tables for PageTables {
    fn local(&mut self, page: Page) -> &mut Local {
        &mut self.locals[page.0 as usize]
    }

    fn entry(&mut self, page: Page) -> &mut Entry {
        &mut self.entries[page.0 as usize]
    }

    fn policy(&self, page: Page) -> Policy {
        match self.updated.iter().any(|pages| pages.contains(&page.0)) {
            true => Policy::Update,
            false => Policy::Invalidate,
        }
    }
}
