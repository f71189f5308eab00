//! The guest's RAM as KVM's vCPUs use it: a second mapping of the memory file,
//! which userfaultfd watches.
//!
//! ```text
//!  vCPU in KVM ──touch──▶ watched mapping ──fault──▶ handler thread ──ask──▶ shell
//!                              ▲                                              │
//!                              └────────── map, protect, unmap ───────────────┤
//!                                   memory file ◀──bytes── first mapping ◀────┘
//! ```
//!
//! Invariants:
//!
//! - A page of the watched mapping is mapped only while this slice may read it, and writable
//!   only while it may write it. One thread at a time maps, revokes or hides a page, while the
//!   page is in transition; its right is lowered before it is revoked, and does not change
//!   while it is mapped.
//! - The handler thread waits only for faults, and never touches the watched mapping.
//! - A vCPU that sleeps on a page is woken when the page is mapped, or when the machine ends,
//!   when nothing is watched any more.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_guest_memory::{MemoryError, Ram};
use weft_pager::shared::{FAULTS_MAX, Fault, OpenError, SharedUffd, Watched, Whose};
use weft_pager::uffd::UffdError;
use weft_vcpu::{Access, PAGE_SIZE};

use super::{MmuNotifier, NotifierError, SharedMemory};

const PAGE: usize = PAGE_SIZE as usize;
/// Words of a page.
pub const PAGE_WORDS: usize = PAGE / size_of::<u64>();
/// How often the handler checks whether the machine has ended, or a page is overdue.
const LOOK_MS: u16 = 250;

/// Small numbers look like entries of page tables for this page, so it is mapped only
/// while it is used: see `shadows` of the KVM vCPU.
const FIRST_PAGE: u64 = 0;

/// Why a watched mapping cannot be made.
#[derive(Debug, Error)]
pub enum MappingError {
    /// The kernel has no userfaultfd, or one without a required feature.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The memory file could not be mapped a second time.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel refused to watch the mapping.
    #[error("cannot watch the guest's memory with userfaultfd: {0}")]
    Register(UffdError),
    /// The kernel refused an event descriptor.
    #[error("no event descriptor for the end of the guest's faults")]
    Event(#[source] io::Error),
}

/// The shadow page tables that a KVM derived from the bytes of guest pages.
pub trait Shadows: Send + Sync {
    /// Invalidates what was derived from a page that was revoked. `words` are its bytes, which
    /// no thread changes meanwhile. When this returns, no vCPU uses it any more.
    fn taken(&self, address: u64, words: &[AtomicU64; PAGE_WORDS]) -> io::Result<()>;

    /// Called before a page is mapped.
    fn mapped(&self, _address: u64) {}

    /// Called after a page was unmapped that stays here.
    fn unmapped(&self, _address: u64) {}

    /// Called before a thread that is not a vCPU changes the bytes of a page.
    fn written(&self, address: u64);

    /// Counters that only grow, keyed by name.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// A part of RAM: guest-physical start, bytes, and where both mappings have it.
struct Part {
    start: u64,
    watched: Watched,
    plain: usize,
}

/// A page in both mappings.
struct BothPages<'a> {
    watched: &'a Watched,
    offset: usize,
    /// The page in the mapping that is not watched.
    words: &'a [AtomicU64; PAGE_WORDS],
}

impl BothPages<'_> {
    /// Address in the watched mapping.
    fn address(&self) -> usize {
        self.watched.address(self.offset)
    }
}

/// The watched mapping of guest RAM for the vCPUs in KVM.
pub struct GuestMapping {
    watched: Ram,
    /// Keeps the other mapping alive, through which `places` reads bytes.
    _plain: Ram,
    parts: Vec<Part>,
    uffd: SharedUffd,
    shadows: Option<Arc<dyn Shadows>>,
    over: EventFd,
}

impl GuestMapping {
    /// Maps `ram` a second time and watches that mapping, which has no page mapped yet.
    pub fn new(ram: &Ram, whose: Whose) -> Result<Self, MappingError> {
        let uffd = SharedUffd::open(whose)?;
        let watched = ram.second()?.with_marks();
        let mut parts = Vec::new();
        for ((start, length, watched), (.., plain)) in watched.parts().into_iter().zip(ram.parts())
        {
            // SAFETY: a shared mapping of a file, which lives as long as `parts`. It was made
            // just now, so that nobody touches it yet; the threads that map pages use the
            // other one.
            let watched = unsafe { uffd.register(watched as usize, length as usize) };
            parts.push(Part {
                start,
                watched: watched.map_err(MappingError::Register)?,
                plain: plain as usize,
            });
        }
        Ok(Self {
            watched,
            _plain: ram.clone(),
            parts,
            uffd,
            shadows: None,
            over: EventFd::new(EFD_NONBLOCK).map_err(MappingError::Event)?,
        })
    }

    /// Sets the shadow page tables, which are invalidated when pages are revoked.
    pub fn with_shadows(self, shadows: Arc<dyn Shadows>) -> Self {
        Self {
            shadows: Some(shadows),
            ..self
        }
    }

    /// Counters of the shadow page tables, keyed by name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let shadows = self.shadows.as_ref();
        shadows.map_or_else(Vec::new, |shadows| shadows.counters())
    }

    /// Guest RAM through the watched mapping; only for vCPUs.
    pub fn watched(&self) -> &Ram {
        &self.watched
    }

    /// Handles faults until the machine ends, on a thread of its own.
    pub fn serve(&self, memory: &SharedMemory) {
        // SAFETY: both descriptors live as long as `self`.
        let (faults, over) = unsafe {
            (
                BorrowedFd::borrow_raw(self.uffd.fd()),
                BorrowedFd::borrow_raw(self.over.as_raw_fd()),
            )
        };
        let mut looked = Instant::now();
        while !memory.is_over() {
            let mut polled = [faults, over].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            // The result does not matter: `serve_batch` reads all faults without blocking.
            let _ = poll(&mut polled, PollTimeout::from(LOOK_MS));
            self.serve_batch(memory);
            if looked.elapsed() > Duration::from_millis(LOOK_MS.into()) {
                looked = Instant::now();
                memory.check_overdue();
                memory.hide(FIRST_PAGE);
            }
        }
        for part in &self.parts {
            // A failure leaves vCPUs asleep; the bound of the machine's end covers that.
            let _ = self.uffd.unregister(&part.watched);
        }
    }

    fn serve_batch(&self, memory: &SharedMemory) {
        let mut faults = [Fault::default(); FAULTS_MAX];
        loop {
            let count = self.uffd.read(&mut faults);
            for fault in &faults[..count] {
                let access = match fault.write {
                    true => Access::Write,
                    false => Access::Read,
                };
                if let Some(address) = self.guest_address(fault.address) {
                    memory.ask(address, access);
                }
            }
            if count == 0 {
                return;
            }
        }
    }

    /// The guest-physical address of a page of the watched mapping.
    fn guest_address(&self, watched: usize) -> Option<u64> {
        self.parts.iter().find_map(|part| {
            let offset = watched.wrapping_sub(part.watched.start()) as u64 & !(PAGE_SIZE - 1);
            (offset < part.watched.length() as u64).then(|| part.start + offset)
        })
    }

    /// The page at a guest-physical address.
    fn places(&self, address: u64) -> Option<BothPages<'_>> {
        let holds = |part: &&Part| address.wrapping_sub(part.start) < part.watched.length() as u64;
        let part = self.parts.iter().find(holds)?;
        let offset = (address - part.start) as usize;
        let words = (part.plain + offset) as *const [AtomicU64; PAGE_WORDS];
        // SAFETY: a whole page of the other mapping, which lives as long as `self`;
        // others change it, as atomics may be.
        let words = unsafe { &*words };
        Some(BothPages {
            watched: &part.watched,
            offset,
            words,
        })
    }
}

fn failed(what: &'static str) -> impl Fn(UffdError) -> NotifierError {
    move |source| NotifierError::Mapping { what, source }
}

impl MmuNotifier for Arc<GuestMapping> {
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        _patience: Duration,
    ) -> Result<(), NotifierError> {
        let Some(page) = self.places(address) else {
            return Ok(());
        };
        match kept {
            Some(Access::Write) => Ok(()),
            Some(Access::Read) => self
                .uffd
                .protect(page.address(), true)
                .map_err(failed("protect")),
            None => {
                self.uffd
                    .unmap(page.watched, page.offset, PAGE)
                    .map_err(failed("take a page out of"))?;
                match &self.shadows {
                    Some(shadows) => shadows
                        .taken(address, page.words)
                        .map_err(NotifierError::Shadows),
                    None => Ok(()),
                }
            }
        }
    }

    fn granted(&self, address: u64, right: Access) -> Result<(), NotifierError> {
        let Some(page) = self.places(address) else {
            return Ok(());
        };
        if let Some(shadows) = &self.shadows {
            shadows.mapped(address);
        }
        let writable = right == Access::Write;
        let mapped = match self.uffd.map(page.address(), writable) {
            // The page was never touched: a read adds it to the file.
            Err(UffdError::NoMemory) => {
                std::hint::black_box(page.words[0].load(Ordering::Relaxed));
                self.uffd.map(page.address(), writable)
            }
            mapped => mapped,
        };
        mapped.map_err(failed("put a page into"))
    }

    fn written(&self, address: u64) {
        if let Some(shadows) = &self.shadows {
            shadows.written(address);
        }
    }

    fn hide(&self, address: u64) -> Result<(), NotifierError> {
        if let (Some(shadows), Some(page)) = (&self.shadows, self.places(address)) {
            let unmapped = self.uffd.unmap(page.watched, page.offset, PAGE);
            unmapped.map_err(failed("unmap"))?;
            shadows.unmapped(address);
        }
        Ok(())
    }

    /// With shadow page tables each unmapping costs a search of them, so pages are evicted in
    /// turn, without watching their use.
    fn watch_for_use(&self, address: u64) -> Result<(), NotifierError> {
        if let (None, Some(page)) = (&self.shadows, self.places(address)) {
            let unmapped = self.uffd.unmap(page.watched, page.offset, PAGE);
            unmapped.map_err(failed("unmap"))?;
        }
        Ok(())
    }

    fn end(&self) {
        // If this fails, the handler notices the end within `LOOK_MS`.
        let _ = self.over.write(1);
    }
}

#[cfg(test)]
mod tests;
