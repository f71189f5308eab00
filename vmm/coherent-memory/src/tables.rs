//! The protocol's records of every page of guest RAM, and what the vCPUs of this
//! slice may use without asking.
//!
//! All are sparse: the kernel gives memory for the parts that are touched.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use weft_dsm::{Entry, Local, Page, Policy, Tables};
use weft_vcpu::Access;

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

/// Nothing may be done.
const NOTHING: u8 = 0;
const READ: u8 = 1;
const WRITE: u8 = 2;
const RIGHT: u8 = 3;
/// Memory is filled with the page, whoever holds it: it may not be zero bytes.
const USED: u8 = 4;
/// Somebody here looked for the page since the evictor passed it.
const REFERENCED: u8 = 8;
/// The page was here and had to go for want of room.
const EVICTED: u8 = 16;
/// The page came before anybody here asked for it, and nobody has looked for it since.
const UNUSED: u8 = 32;

/// What the evictor finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Nothing that could go.
    None,
    /// Memory that nobody uses any more.
    Vacant,
    /// A page that was used since it was passed last.
    Recent,
    /// A page that was not.
    Old,
}

/// One byte for each page: what this slice's vCPUs may do with it.
///
/// Rights are written only under the shell's lock, and read by anybody. Who takes a
/// right away writes it here first and then has the vCPUs forget what they keep of
/// it. Marks of use are set and cleared by anybody; one may get lost.
pub(super) struct Rights {
    pages: Box<[AtomicU8]>,
    /// Pages of which memory is filled.
    resident: AtomicU64,
    /// Pages that came before anybody asked for them and were looked for then.
    found: AtomicU64,
}

impl Rights {
    /// None.
    pub fn new(pages: usize) -> Self {
        Self {
            // SAFETY: zero bytes are a valid AtomicU8.
            pages: unsafe { zeroed(pages) },
            resident: AtomicU64::new(0),
            found: AtomicU64::new(0),
        }
    }

    /// What may be done with a page; `None` beyond the last page, too.
    pub fn of(&self, page: u64) -> Option<Access> {
        right(self.pages.get(page as usize)?.load(Ordering::SeqCst))
    }

    /// Whether `access` may be done.
    pub fn allow(&self, page: u64, access: Access) -> bool {
        allows(self.of(page), access)
    }

    /// The same, for who is about to do it.
    pub fn allow_use(&self, page: u64, access: Access) -> bool {
        let Some(place) = self.pages.get(page as usize) else {
            return false;
        };
        let byte = place.load(Ordering::SeqCst);
        let allowed = allows(right(byte), access);
        if allowed && byte & REFERENCED == 0 {
            place.fetch_or(REFERENCED, Ordering::Relaxed);
        }
        if allowed && byte & UNUSED != 0 {
            let before = place.fetch_and(!UNUSED, Ordering::Relaxed);
            self.found
                .fetch_add((before & UNUSED != 0).into(), Ordering::Relaxed);
        }
        allowed
    }

    /// Whether a page that left had come before anybody asked for it, and nobody did.
    /// Says so once; under the shell's lock.
    pub fn left_unused(&self, page: u64) -> bool {
        let place = self.pages.get(page as usize);
        place.is_some_and(|place| place.fetch_and(!UNUSED, Ordering::Relaxed) & UNUSED != 0)
    }

    /// How many pages came before anybody asked for them and were looked for then.
    pub fn found(&self) -> u64 {
        self.found.load(Ordering::Relaxed)
    }

    /// From now on this may be done. A page that may be used fills memory.
    pub fn set(&self, page: u64, right: Option<Access>) {
        self.put(page, right, REFERENCED);
    }

    /// From now on a page may be read that nobody has asked for yet.
    pub fn set_unasked(&self, page: u64) {
        self.put(page, Some(Access::Read), UNUSED);
    }

    /// In one store: users look at the page as soon as they may.
    fn put(&self, page: u64, right: Option<Access>, mark: u8) {
        let Some(place) = self.pages.get(page as usize) else {
            return;
        };
        let before = place.load(Ordering::Relaxed);
        let after = match right {
            None => before & (USED | EVICTED | UNUSED),
            Some(Access::Read) => READ | USED | mark,
            Some(Access::Write) => WRITE | USED | mark,
        };
        place.store(after, Ordering::SeqCst);
        if before & USED == 0 && after & USED != 0 {
            self.resident.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether memory is filled with the page: it may not be zero.
    pub fn used(&self, page: u64) -> bool {
        self.byte(page) & USED != 0
    }

    /// Whether it is, and nobody may use the page.
    pub fn is_vacant(&self, page: u64) -> bool {
        self.byte(page) & (USED | RIGHT) == USED
    }

    /// The memory of a vacant page was given back: it is zero again.
    pub fn forget(&self, page: u64) {
        if let (true, Some(place)) = (self.is_vacant(page), self.pages.get(page as usize)) {
            let left = place.load(Ordering::Relaxed) & (EVICTED | UNUSED);
            place.store(left, Ordering::SeqCst);
            self.resident.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A page went for want of room; under the shell's lock.
    pub fn mark_evicted(&self, page: u64) {
        if let (None, Some(place)) = (self.of(page), self.pages.get(page as usize)) {
            place.fetch_or(EVICTED, Ordering::Relaxed);
        }
    }

    /// Whether it did, and did not come back.
    pub fn is_evicted(&self, page: u64) -> bool {
        self.byte(page) & EVICTED != 0
    }

    /// Pages of which memory is filled.
    pub fn resident(&self) -> u64 {
        self.resident.load(Ordering::SeqCst)
    }

    /// The evictor passes a page; `foreign`: which may go while it is used.
    pub fn pass(&self, page: u64, foreign: bool) -> Use {
        let byte = self.byte(page);
        match (byte & USED != 0, right(byte)) {
            (false, _) => Use::None,
            (true, None) => Use::Vacant,
            (true, Some(_)) if !foreign => Use::None,
            (true, Some(_)) if byte & REFERENCED == 0 => Use::Old,
            (true, Some(_)) => {
                if let Some(place) = self.pages.get(page as usize) {
                    place.fetch_and(!REFERENCED, Ordering::Relaxed);
                }
                Use::Recent
            }
        }
    }

    fn byte(&self, page: u64) -> u8 {
        let place = self.pages.get(page as usize);
        place.map_or(NOTHING, |place| place.load(Ordering::Relaxed))
    }
}

fn right(byte: u8) -> Option<Access> {
    match byte & RIGHT {
        NOTHING => None,
        READ => Some(Access::Read),
        _ => Some(Access::Write),
    }
}

fn allows(right: Option<Access>, access: Access) -> bool {
    match (right, access) {
        (Some(Access::Write), _) | (Some(Access::Read), Access::Read) => true,
        (Some(Access::Read), Access::Write) | (None, _) => false,
    }
}
