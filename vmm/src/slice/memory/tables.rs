//! The protocol's records of every page of guest RAM, and what the vCPUs of this
//! slice may use without asking.
//!
//! All are sparse: the kernel gives memory for the parts that are touched.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::sync::atomic::{AtomicU8, Ordering};

use weft_dsm::{Entry, Local, Page, Policy, Tables};
use weft_soft::Access;

/// `count` values of a type whose zero bytes are a value, untouched.
///
/// # Safety
/// Zero bytes are a valid `T`.
pub(super) unsafe fn zeroed<T>(count: usize) -> Box<[T]> {
    let layout = Layout::array::<T>(count).unwrap_or(Layout::new::<T>());
    if count == 0 || layout.size() == 0 {
        return Box::new([]);
    }
    // SAFETY: the layout is not empty.
    let pointer = unsafe { alloc_zeroed(layout) };
    if pointer.is_null() {
        handle_alloc_error(layout);
    }
    let slice = std::ptr::slice_from_raw_parts_mut(pointer.cast::<T>(), count);
    // SAFETY: allocated just now with the layout of that slice; zero bytes are
    // valid by the caller's word.
    unsafe { Box::from_raw(slice) }
}

/// The protocol's records, by page number.
pub(super) struct PageTables {
    locals: Box<[Local]>,
    entries: Box<[Entry]>,
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
            }
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

    fn policy(&self, _: Page) -> Policy {
        Policy::Invalidate
    }
}

/// Nothing may be done.
const NOTHING: u8 = 0;
const READ: u8 = 1;
const WRITE: u8 = 2;
const RIGHT: u8 = 3;
/// What lies in memory is not zero bytes any more, whoever holds the page.
const USED: u8 = 4;

/// One byte for each page: what this slice's vCPUs may do with it.
///
/// Written only under the shell's lock; read by anybody. Who takes a right away
/// writes it here first and then has the vCPUs forget what they keep of it.
pub(super) struct Rights(Box<[AtomicU8]>);

impl Rights {
    /// None.
    pub fn new(pages: usize) -> Self {
        // SAFETY: zero bytes are a valid AtomicU8.
        Self(unsafe { zeroed(pages) })
    }

    /// What may be done with a page; `None` beyond the last page, too.
    pub fn of(&self, page: u64) -> Option<Access> {
        let byte = self.0.get(page as usize)?.load(Ordering::SeqCst);
        match byte & RIGHT {
            NOTHING => None,
            READ => Some(Access::Read),
            _ => Some(Access::Write),
        }
    }

    /// Whether `access` may be done.
    pub fn allow(&self, page: u64, access: Access) -> bool {
        match (self.of(page), access) {
            (Some(Access::Write), _) | (Some(Access::Read), Access::Read) => true,
            (Some(Access::Read), Access::Write) | (None, _) => false,
        }
    }

    /// From now on this may be done, and the page is not untouched any more.
    pub fn set(&self, page: u64, right: Option<Access>) {
        let right = match right {
            None => NOTHING,
            Some(Access::Read) => READ,
            Some(Access::Write) => WRITE,
        };
        if let Some(byte) = self.0.get(page as usize) {
            byte.store(right | USED, Ordering::SeqCst);
        }
    }

    /// Whether the page was here before: its memory may not be zero.
    pub fn used(&self, page: u64) -> bool {
        self.0
            .get(page as usize)
            .is_some_and(|byte| byte.load(Ordering::Relaxed) & USED != 0)
    }
}
