//! The protocol's records of every page of guest RAM. They are sparse: the kernel gives
//! memory for the parts that are touched.

use std::ops::Range;

use weft_dsm::{Entry, Local, Page, Policy, Tables};

/// `count` zeroed values, in memory that the kernel provides at the first touch.
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
    /// Ranges of subscribed pages; few.
    subscribed: Vec<Range<u64>>,
}

impl PageTables {
    /// Records of pages 0 to `pages` - 1, in their default state.
    pub fn new(pages: usize) -> Self {
        // SAFETY: zero bytes are the default of both ("Zero bytes are the default
        // state of both", weft_dsm::state).
        unsafe {
            Self {
                locals: zeroed(pages),
                entries: zeroed(pages),
                subscribed: Vec::new(),
            }
        }
    }

    /// Subscribes to these pages.
    pub fn subscribe(&mut self, pages: Range<u64>) {
        if !self.subscribed.contains(&pages) {
            self.subscribed.push(pages);
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
        match self.subscribed.iter().any(|pages| pages.contains(&page.0)) {
            true => Policy::Update,
            false => Policy::Invalidate,
        }
    }
}
