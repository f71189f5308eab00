//! Pages of the address space that this process shares with its peers.
//!
//! A page of a registered range is *missing* (a touch signals), *protected*
//! (present, a write signals) or *open* (present, writable as far as the
//! mapping is). The engine keeps which; this room only makes it so. Every call
//! takes a start address and a number of pages; a run may cross mappings with
//! different protections (the kernel refuses such a run, which is then done
//! page by page).

use crate::PAGE_SIZE;
use crate::uffd::{Uffd, UffdError};
use syscalls::Sysno;

const ADVICE_DONT_NEED: usize = 4;
/// Attempts at a call that the kernel asks to repeat.
const ATTEMPTS: usize = 1000;
/// Pages asked of the page map in one read.
const PAGE_MAP_BATCH: usize = 512;
const PAGE_MAP_PRESENT: u64 = 1 << 63;
const PAGE_MAP_SWAPPED: u64 = 1 << 62;

/// How a page is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A write signals.
    Protected,
    /// A write goes through.
    Open,
}

/// Pages filled with zeros at a time.
const ZERO_PAGES: usize = 64;

/// Zeros that take no room in the executable.
struct Zeros(core::cell::UnsafeCell<[u8; ZERO_PAGES * PAGE_SIZE]>);

// SAFETY: never written.
unsafe impl Sync for Zeros {}

static ZEROS: Zeros = Zeros(core::cell::UnsafeCell::new([0; ZERO_PAGES * PAGE_SIZE]));

/// A userfaultfd and the process's own views of itself.
#[derive(Debug)]
pub struct Space {
    uffd: Uffd,
    /// `/proc/self/mem`: reads pages that the mapping forbids to read.
    memory_fd: i32,
    /// `/proc/self/pagemap`.
    page_map_fd: i32,
}

impl Space {
    /// Wraps an open userfaultfd and the two descriptors of `/proc/self`.
    pub fn new(uffd: Uffd, memory_fd: i32, page_map_fd: i32) -> Space {
        Space {
            uffd,
            memory_fd,
            page_map_fd,
        }
    }

    /// The userfaultfd's descriptor.
    pub fn fd(&self) -> i32 {
        self.uffd.fd()
    }

    /// Puts a range under the DSM.
    ///
    /// # Safety
    /// As [`Uffd::register`].
    pub unsafe fn register(&self, start: usize, pages: usize) -> Result<(), UffdError> {
        // SAFETY: passed on to the caller.
        unsafe { self.uffd.register(start, pages * PAGE_SIZE) }
    }

    /// Takes a range back: missing pages read as zero, and no write signals.
    pub fn unregister(&self, start: usize, pages: usize) -> Result<(), UffdError> {
        self.uffd.unregister(start, pages * PAGE_SIZE)
    }

    /// Fills missing pages with `pages * PAGE_SIZE` bytes of `content`.
    ///
    /// # Panics
    /// When `content` is shorter than the pages.
    pub fn install(
        &self,
        start: usize,
        pages: usize,
        content: &[u8],
        mode: Mode,
    ) -> Result<(), UffdError> {
        assert!(content.len() >= pages * PAGE_SIZE);
        let protect = mode == Mode::Protected;
        self.run(start, pages, |address, count| {
            let from = content[address - start..].as_ptr();
            // SAFETY: `content` holds the whole run (asserted), and `address`
            // lies in it.
            unsafe { self.uffd.copy(address, from, count * PAGE_SIZE, protect) }
        })
    }

    /// Fills missing pages with zeros. They get memory of their own at once: the
    /// kernel's shared zero page would cost a second fault at the first write,
    /// which is what most first touches are.
    pub fn zero(&self, start: usize, pages: usize, mode: Mode) -> Result<(), UffdError> {
        let protect = mode == Mode::Protected;
        let zeros = ZEROS.0.get().cast::<u8>();
        let mut done = 0;
        while done < pages {
            let step = (pages - done).min(ZERO_PAGES);
            self.run(start + done * PAGE_SIZE, step, |address, count| {
                // SAFETY: ZEROS is ZERO_PAGES long and `count` at most that.
                unsafe { self.uffd.copy(address, zeros, count * PAGE_SIZE, protect) }
            })?;
            done += step;
        }
        Ok(())
    }

    /// Makes present pages signal on a write.
    pub fn protect(&self, start: usize, pages: usize) -> Result<(), UffdError> {
        self.run(start, pages, |address, count| {
            self.uffd.write_protect(address, count * PAGE_SIZE, true)
        })
    }

    /// Lets writes through again.
    pub fn allow(&self, start: usize, pages: usize) -> Result<(), UffdError> {
        self.run(start, pages, |address, count| {
            self.uffd.write_protect(address, count * PAGE_SIZE, false)
        })
    }

    /// Removes pages: a touch signals again. Frees their memory.
    ///
    /// # Safety
    /// Nothing refers to the pages, and every later access expects to find
    /// other contents: they are the program's, under the DSM.
    pub unsafe fn drop(&self, start: usize, pages: usize) -> Result<(), UffdError> {
        let words = [start, pages * PAGE_SIZE, ADVICE_DONT_NEED, 0];
        // SAFETY: the caller gives the pages up.
        match unsafe { raw(Sysno::madvise, words) } {
            Ok(_) => Ok(()),
            Err(12) => Err(UffdError::NotRegistered),
            Err(errno) => Err(UffdError::Bug(errno)),
        }
    }

    /// Copies present pages out although their mapping may forbid reading.
    /// Pages that the kernel cannot read (beyond the end of a mapped file) come
    /// out as zeros.
    pub fn copy_out(&self, start: usize, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let words = [
                self.memory_fd as usize,
                rest.as_mut_ptr() as usize,
                rest.len(),
                start + done,
            ];
            // SAFETY: reads into `rest`, which is as long as the call is told.
            match unsafe { raw(Sysno::pread64, words) } {
                Ok(count) if count > 0 => done += count,
                _ => {
                    let page_end = ((start + done) / PAGE_SIZE + 1) * PAGE_SIZE - start;
                    let end = page_end.min(into.len());
                    into[done..end].fill(0);
                    done = end;
                }
            }
        }
    }

    /// Calls `found(first page address, pages)` for each run of pages that are
    /// present (or swapped out) in the range.
    pub fn present(&self, start: usize, pages: usize, mut found: impl FnMut(usize, usize)) {
        let mut entries = [0u64; PAGE_MAP_BATCH];
        let mut run: Option<(usize, usize)> = None;
        let mut page = 0;
        while page < pages {
            let want = (pages - page).min(PAGE_MAP_BATCH);
            let offset = (start / PAGE_SIZE + page) * 8;
            let buffer = entries.as_mut_ptr() as usize;
            let words = [self.page_map_fd as usize, buffer, want * 8, offset];
            // SAFETY: reads into `entries`, of which `want` are at most all.
            let got = unsafe { raw(Sysno::pread64, words) }.unwrap_or(0) / 8;
            if got == 0 {
                break;
            }
            for entry in &entries[..got] {
                let is_present = entry & (PAGE_MAP_PRESENT | PAGE_MAP_SWAPPED) != 0;
                run = match (run, is_present) {
                    (Some((first, count)), true) => Some((first, count + 1)),
                    (None, true) => Some((start + page * PAGE_SIZE, 1)),
                    (Some((first, count)), false) => {
                        found(first, count);
                        None
                    }
                    (None, false) => None,
                };
                page += 1;
            }
        }
        if let Some((first, count)) = run {
            found(first, count);
        }
    }

    /// A run at once, or page by page where the kernel refuses the run.
    fn run(
        &self,
        start: usize,
        pages: usize,
        mut act: impl FnMut(usize, usize) -> Result<(), UffdError>,
    ) -> Result<(), UffdError> {
        let mut done = 0;
        for _ in 0..ATTEMPTS {
            match act(start + done * PAGE_SIZE, pages - done) {
                Ok(()) => return Ok(()),
                Err(UffdError::Retry) => {}
                Err(UffdError::Present(bytes)) if bytes > 0 => done += bytes / PAGE_SIZE,
                Err(UffdError::NotRegistered) if pages - done > 1 => {
                    return self.each(start + done * PAGE_SIZE, pages - done, |a| act(a, 1));
                }
                Err(other) => return Err(other),
            }
        }
        Err(UffdError::Retry)
    }

    fn each(
        &self,
        start: usize,
        pages: usize,
        mut act: impl FnMut(usize) -> Result<(), UffdError>,
    ) -> Result<(), UffdError> {
        for page in 0..pages {
            let mut result = Err(UffdError::Retry);
            for _ in 0..ATTEMPTS {
                result = act(start + page * PAGE_SIZE);
                if result != Err(UffdError::Retry) {
                    break;
                }
            }
            result?;
        }
        Ok(())
    }
}

/// A system call.
///
/// # Safety
/// It must not change memory that Rust code relies on.
unsafe fn raw(number: Sysno, a: [usize; 4]) -> Result<usize, i32> {
    // SAFETY: the caller vouches for what the call does.
    let result =
        unsafe { syscalls::raw::syscall4(number as usize, a[0], a[1], a[2], a[3]) } as isize;
    if result < 0 {
        Err(-result as i32)
    } else {
        Ok(result as usize)
    }
}
