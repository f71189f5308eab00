//! The software TLB: where guest pages are in the host's memory, and what may
//! be done there without asking anybody.
//!
//! Invariants:
//!
//! - An access of `size` bytes at `address` hits entry
//!   `(address >> 12) % TLB_ENTRIES` when `address - tag <= 4096 - size`: one
//!   subtraction checks tag and page crossing at once.
//! - An invalid tag lies in a page of another index, so it never hits.
//! - With CR4.SMAP the supervisor's TLB has a user page only while RFLAGS.AC is
//!   set, and as [`OPEN`].
//! - A write tag is there only while the page is held for writing, is dirty in
//!   the guest's page tables, and nobody decoded code from it.

use weft_vcpu::PAGE_SIZE;

use crate::recent::PageUse;

/// Entries of one TLB, a power of two.
pub const TLB_ENTRIES: usize = 1024;

/// In [`TlbEntry::physical`]: the translation is global.
pub const GLOBAL: u64 = 1;

/// In [`TlbEntry::physical`]: the page is the user's, and the supervisor may access
/// it as long as RFLAGS.AC is set.
pub const OPEN: u64 = 2;

/// Open pages that are remembered; more, and closing them looks at all.
const OPEN_MAX: usize = 64;

/// Entries whose refill since the last flush is remembered; more, and a flush
/// looks at all.
const FILLED_MAX: usize = 256;

/// One page.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TlbEntry {
    /// The page's linear address where it may be read, else an invalid tag.
    pub read: u64,
    /// The page's linear address where it may be written, else an invalid tag.
    pub write: u64,
    /// The page's first byte in the host's memory.
    pub host: u64,
    /// The page's guest-physical address, with [`GLOBAL`] and [`OPEN`].
    pub physical: u64,
}

/// A tag that entry `index` never hits.
pub const fn invalid_tag(index: usize) -> u64 {
    if index == 0 { PAGE_SIZE } else { 0 }
}

/// Adds an index to a list; a count of more than its length says that it has not
/// all.
fn remember<const MAX: usize>(list: &mut [u16; MAX], count: &mut usize, index: usize) {
    if let Some(slot) = list.get_mut(*count) {
        *slot = index as u16;
    }
    *count = (*count + 1).min(MAX + 1);
}

/// The entry that may hold `address`.
#[inline(always)]
pub const fn tlb_index(address: u64) -> usize {
    (address >> 12) as usize & (TLB_ENTRIES - 1)
}

/// The TLB of one privilege class.
#[repr(C)]
pub struct Tlb {
    /// Indexed by [`tlb_index`].
    pub entries: [TlbEntry; TLB_ENTRIES],
    /// Entries with translations that are not global, filled since the last flush.
    filled: [u16; FILLED_MAX],
    filled_count: usize,
    /// Entries that are [`OPEN`].
    open: [u16; OPEN_MAX],
    open_count: usize,
}

impl Default for Tlb {
    fn default() -> Self {
        let mut tlb = Self {
            entries: [TlbEntry {
                read: 0,
                write: 0,
                host: 0,
                physical: 0,
            }; TLB_ENTRIES],
            filled: [0; FILLED_MAX],
            filled_count: 0,
            open: [0; OPEN_MAX],
            open_count: 0,
        };
        tlb.flush_all();
        tlb
    }
}

impl Tlb {
    /// Puts a translation in, in place of whatever its entry held.
    pub fn fill(&mut self, address: u64, host: *mut u8, physical: u64, global: bool, write: bool) {
        let page = address & !(PAGE_SIZE - 1);
        let index = tlb_index(address);
        self.entries[index] = TlbEntry {
            read: page,
            write: if write { page } else { invalid_tag(index) },
            host: host as u64,
            physical: physical | if global { GLOBAL } else { 0 },
        };
        if !global {
            remember(&mut self.filled, &mut self.filled_count, index);
        }
    }

    /// Marks the page of `address`, just filled in, as [`OPEN`].
    pub fn open_user_page(&mut self, address: u64) {
        let index = tlb_index(address);
        self.entries[index].physical |= OPEN;
        remember(&mut self.open, &mut self.open_count, index);
    }

    /// Forgets what is [`OPEN`]: RFLAGS.AC is cleared.
    pub fn close_user_pages(&mut self) {
        let known = self.open_count <= OPEN_MAX;
        let count = if known { self.open_count } else { TLB_ENTRIES };
        for slot in 0..count {
            let index = if known { self.open[slot].into() } else { slot };
            if self.entries[index].physical & OPEN != 0 {
                self.drop_entry(index);
            }
        }
        self.open_count = 0;
    }

    /// Puts in what `user`, the user's TLB, has for `address`, if that may be read
    /// and, with `write`, written: the host address of its byte.
    pub fn borrow_user_page(&mut self, user: &Self, address: u64, write: bool) -> Option<*mut u8> {
        let index = tlb_index(address);
        let page = address & !(PAGE_SIZE - 1);
        let entry = user.entries[index];
        if entry.read != page || write && entry.write != page {
            return None;
        }
        let (host, global) = (entry.host as *mut u8, entry.physical & GLOBAL != 0);
        let physical = entry.physical & !GLOBAL;
        self.fill(address, host, physical, global, entry.write == page);
        self.open_user_page(address);
        // SAFETY: the offset is within the page, which is mapped at `host`.
        Some(unsafe { host.add((address - page) as usize) })
    }

    /// Forgets everything.
    pub fn flush_all(&mut self) {
        for index in 0..TLB_ENTRIES {
            self.drop_entry(index);
        }
        self.filled_count = 0;
        self.open_count = 0;
    }

    /// Forgets what is not global: another address space.
    pub fn flush_local(&mut self) {
        if self.filled_count <= FILLED_MAX {
            for slot in 0..self.filled_count {
                let index = self.filled[slot] as usize;
                if self.entries[index].physical & GLOBAL == 0 {
                    self.drop_entry(index);
                }
            }
        } else {
            for index in 0..TLB_ENTRIES {
                if self.entries[index].physical & GLOBAL == 0 {
                    self.drop_entry(index);
                }
            }
        }
        self.filled_count = 0;
    }

    /// Forgets the page of linear `address`.
    pub fn flush_page(&mut self, address: u64) {
        let page = address & !(PAGE_SIZE - 1);
        let index = tlb_index(address);
        let entry = &self.entries[index];
        if entry.read == page || entry.write == page {
            self.drop_entry(index);
        }
    }

    /// The numbers of the pages that may be read, with what may have been done with them.
    pub fn pages(&self) -> impl Iterator<Item = (u64, PageUse)> {
        let entries = self.entries.iter().enumerate();
        let valid = entries.filter(|(index, entry)| entry.read != invalid_tag(*index));
        valid.map(|(_, entry)| {
            let may_write = entry.write == entry.read;
            let used = PageUse::of_access(false, may_write);
            (entry.physical / PAGE_SIZE, used)
        })
    }

    /// Forgets all entries of a guest-physical page, or only their right to
    /// write.
    pub fn revoke(&mut self, physical: u64, keep_read: bool) {
        for index in 0..TLB_ENTRIES {
            let entry = &mut self.entries[index];
            if entry.physical & !(GLOBAL | OPEN) != physical {
                continue;
            }
            entry.write = invalid_tag(index);
            if !keep_read {
                entry.read = invalid_tag(index);
            }
        }
    }

    fn drop_entry(&mut self, index: usize) {
        self.entries[index] = TlbEntry {
            read: invalid_tag(index),
            write: invalid_tag(index),
            host: 0,
            physical: 0,
        };
    }
}
