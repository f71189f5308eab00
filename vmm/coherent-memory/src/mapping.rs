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
//! - A page of the watched mapping is mapped to be written only while this slice may
//!   write it, and mapped at all only while it may read it. A page is mapped, taken
//!   or hidden by one thread at a time, while it is in transition; its right is lowered
//!   before it is taken, and does not change while it is mapped.
//! - The handler thread waits for faults and for nothing else; it never touches the
//!   watched mapping.
//! - A vCPU that sleeps on a page is woken when the page is mapped, or when the
//!   machine is over: then nothing is watched any more.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_guest_memory::{MemoryError, Ram};
use weft_pager::shared::{FAULTS_MAX, Fault, OpenError, SharedUffd, Whose};
use weft_pager::uffd::UffdError;
use weft_vcpu::{Access, PAGE_SIZE};

use super::{SharedMemory, UseError, Users};

const PAGE: usize = PAGE_SIZE as usize;
/// Words of a page.
pub const PAGE_WORDS: usize = PAGE / size_of::<u64>();
/// How often the handler looks whether the machine is over, or a page overdue.
const LOOK_MS: u16 = 250;

/// Small numbers look like entries of page tables for this page, so it is mapped only
/// while it is used: see `shadows` of the KVM vCPU.
const FIRST_PAGE: u64 = 0;

/// Why there is no watched mapping.
#[derive(Debug, Error)]
pub enum MappingError {
    /// No userfaultfd, or not one that will do.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No second mapping.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel does not watch it.
    #[error("cannot watch the guest's memory with userfaultfd: {0}")]
    Register(UffdError),
    /// No event descriptor.
    #[error("no event descriptor for the end of the guest's faults")]
    Event(#[source] io::Error),
}

/// What a KVM derived from the bytes of pages and uses in their place: shadows of
/// the guest's page tables.
pub trait Shadows: Send + Sync {
    /// A page was taken from the vCPUs; its bytes, which nobody changes meanwhile.
    /// When this returns, no vCPU uses what was derived from them, nor will it.
    fn taken(&self, address: u64, words: &[AtomicU64; PAGE_WORDS]) -> io::Result<()>;

    /// A page is about to be mapped.
    fn mapped(&self, _address: u64) {}

    /// A page was unmapped that stays here.
    fn unmapped(&self, _address: u64) {}

    /// Somebody who is no vCPU changes the bytes of a page that is here.
    fn written(&self, address: u64);

    /// Counters that only grow, keyed by name.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// A part of RAM: guest-physical start, bytes, and where both mappings have it.
#[derive(Clone, Copy)]
struct Part {
    start: u64,
    length: u64,
    watched: usize,
    plain: usize,
}

pub struct GuestMapping {
    watched: Ram,
    /// Its bytes are reached through it; must not go before.
    _plain: Ram,
    parts: Vec<Part>,
    uffd: SharedUffd,
    shadows: Option<Arc<dyn Shadows>>,
    over: EventFd,
}

impl GuestMapping {
    /// Maps `ram` once more and watches that mapping, nothing of which is mapped then.
    pub fn new(ram: &Ram, whose: Whose) -> Result<Self, MappingError> {
        let uffd = SharedUffd::open(whose)?;
        let watched = ram.second()?.with_marks();
        let parts: Vec<Part> = watched
            .parts()
            .into_iter()
            .zip(ram.parts())
            .map(|((start, length, watched), (.., plain))| Part {
                start,
                length,
                watched: watched as usize,
                plain: plain as usize,
            })
            .collect();
        for part in &parts {
            // SAFETY: the mapping was made just now, so that nobody touches it yet;
            // the threads that map pages use the other one.
            unsafe { uffd.register(part.watched, part.length as usize) }
                .map_err(MappingError::Register)?;
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

    /// Says what has to be made void when pages go.
    pub fn with_shadows(self, shadows: Arc<dyn Shadows>) -> Self {
        Self {
            shadows: Some(shadows),
            ..self
        }
    }

    /// How often what happened, by name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let shadows = self.shadows.as_ref();
        shadows.map_or_else(Vec::new, |shadows| shadows.counters())
    }

    /// The memory through the watched mapping: for vCPUs only.
    pub fn watched(&self) -> &Ram {
        &self.watched
    }

    /// Handles faults until the machine is over, on a thread of its own.
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
            // Whatever it says: what there is, is read.
            let _ = poll(&mut polled, PollTimeout::from(LOOK_MS));
            self.serve_batch(memory);
            if looked.elapsed() > Duration::from_millis(LOOK_MS.into()) {
                looked = Instant::now();
                memory.look_for_overdue();
                memory.hide(FIRST_PAGE);
            }
        }
        for part in &self.parts {
            // What fails here leaves vCPUs asleep, which the machine's end bounds.
            let _ = self.uffd.unregister(part.watched, part.length as usize);
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

    /// Of the page at a place in the watched mapping.
    fn guest_address(&self, watched: usize) -> Option<u64> {
        self.parts.iter().find_map(|part| {
            let offset = watched.wrapping_sub(part.watched) as u64 & !(PAGE_SIZE - 1);
            (offset < part.length).then(|| part.start + offset)
        })
    }

    /// Where both mappings have the page at a guest-physical address.
    fn places(&self, address: u64) -> Option<(usize, &[AtomicU64; PAGE_WORDS])> {
        let part = self
            .parts
            .iter()
            .find(|part| address.wrapping_sub(part.start) < part.length)?;
        let offset = (address - part.start) as usize;
        let words = (part.plain + offset) as *const [AtomicU64; PAGE_WORDS];
        // SAFETY: a whole page of the other mapping, which lives as long as `self`;
        // others change it, as atomics may be.
        Some((part.watched + offset, unsafe { &*words }))
    }
}

fn failed(what: &'static str) -> impl Fn(UffdError) -> UseError {
    move |source| UseError::Mapping { what, source }
}

impl Users for Arc<GuestMapping> {
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        _patience: Duration,
    ) -> Result<(), UseError> {
        let Some((watched, words)) = self.places(address) else {
            return Ok(());
        };
        match kept {
            Some(Access::Write) => Ok(()),
            Some(Access::Read) => self.uffd.protect(watched, true).map_err(failed("protect")),
            None => {
                self.uffd
                    .unmap(watched, PAGE)
                    .map_err(failed("take a page out of"))?;
                match &self.shadows {
                    Some(shadows) => shadows.taken(address, words).map_err(UseError::Shadows),
                    None => Ok(()),
                }
            }
        }
    }

    fn granted(&self, address: u64, right: Access) -> Result<(), UseError> {
        let Some((watched, words)) = self.places(address) else {
            return Ok(());
        };
        if let Some(shadows) = &self.shadows {
            shadows.mapped(address);
        }
        let writable = right == Access::Write;
        let mapped = match self.uffd.map(watched, writable) {
            // Nobody touched the page yet: a look at it makes the file have it.
            Err(UffdError::NoMemory) => {
                std::hint::black_box(words[0].load(Ordering::Relaxed));
                self.uffd.map(watched, writable)
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

    fn hide(&self, address: u64) -> Result<(), UseError> {
        if let (Some(shadows), Some((watched, _))) = (&self.shadows, self.places(address)) {
            self.uffd.unmap(watched, PAGE).map_err(failed("unmap"))?;
            shadows.unmapped(address);
        }
        Ok(())
    }

    /// Where KVM shadows page tables every unmapped page costs a look at the shadows:
    /// there, pages are evicted in turn.
    fn watch_for_use(&self, address: u64) -> Result<(), UseError> {
        if let (None, Some((watched, _))) = (&self.shadows, self.places(address)) {
            self.uffd.unmap(watched, PAGE).map_err(failed("unmap"))?;
        }
        Ok(())
    }

    fn end(&self) {
        // The handler looks now and then, should this fail.
        let _ = self.over.write(1);
    }
}

#[cfg(test)]
#[path = "mapping_tests.rs"]
mod tests;
