//! Guest memory in which every page stands alone: an access that leaves its page
//! without asking for the next one ends the process.

use std::ptr::NonNull;
use std::sync::Arc;

use weft_vcpu::{Access, Memory, PAGE_SIZE, Unbacked};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Pages of memory.
pub const PAGES: u64 = 64;
/// Bytes of memory.
pub const SIZE: u64 = PAGES * PAGE_SIZE;
/// Host bytes from one page to the next: behind each is one that is not there.
const STRIDE: usize = 2 * PAGE_SIZE as usize;
const MAPPED: usize = STRIDE * PAGES as usize + PAGE_SIZE as usize;

/// The memory.
pub struct Scattered(NonNull<u8>);

// SAFETY: all users of the pages access them as guest memory, by host accesses.
unsafe impl Send for Scattered {}
// SAFETY: all users of the pages access them as guest memory, by host accesses.
unsafe impl Sync for Scattered {}

impl Scattered {
    /// All zero.
    pub fn new() -> Arc<Self> {
        // SAFETY: new pages, which nothing else knows.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                MAPPED,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )
        };
        let start = NonNull::new(start.expect("address space").cast()).expect("no page 0");
        let memory = Self(start);
        for page in 0..PAGES {
            let rights = MprotectFlags::READ | MprotectFlags::WRITE;
            // SAFETY: within the pages mapped just now.
            let done = unsafe { mprotect(memory.page(page).cast(), PAGE_SIZE as usize, rights) };
            done.expect("memory");
        }
        Arc::new(memory)
    }

    fn page(&self, number: u64) -> *mut u8 {
        assert!(number < PAGES);
        let place = STRIDE * number as usize + PAGE_SIZE as usize;
        // SAFETY: within the mapping.
        unsafe { self.0.as_ptr().add(place) }
    }

    /// Replaces all of it.
    pub fn fill(&self, bytes: &[u8]) {
        for (number, page) in bytes.chunks_exact(PAGE_SIZE as usize).enumerate() {
            let to = self.page(number as u64);
            // SAFETY: a whole page; the vCPU is not running.
            unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), to, page.len()) };
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        for (number, page) in bytes.chunks_exact_mut(PAGE_SIZE as usize).enumerate() {
            let from = self.page(number as u64);
            // SAFETY: a whole page; the vCPU is not running.
            unsafe { std::ptr::copy_nonoverlapping(from, page.as_mut_ptr(), page.len()) };
        }
        bytes
    }
}

impl Drop for Scattered {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; nobody uses it any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), MAPPED) };
    }
}

impl Memory for Scattered {
    fn acquire(&self, page: u64, _: Access) -> Result<*mut u8, Unbacked> {
        if page < SIZE {
            Ok(self.page(page / PAGE_SIZE))
        } else {
            Err(Unbacked(page))
        }
    }

    // Every fourth page has to be asked for the long way.
    fn held(&self, page: u64, access: Access) -> Option<*mut u8> {
        let at_once = page / PAGE_SIZE % 4 != 3;
        self.acquire(page, access).ok().filter(|_| at_once)
    }

    fn end(&self) -> u64 {
        SIZE
    }
}
