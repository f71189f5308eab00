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
//! - Two pages of one index would push each other out. A page that was pushed out is a *victim*
//!   (Jouppi 1990). The last [`VICTIMS`] are kept. All of these invariants hold for victims, too,
//!   but generated code does not look at them.
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

/// Victims that are kept: more than pages of one index that a loop uses.
const VICTIMS: usize = 8;

/// No victim: no page has this address.
const NO_VICTIM: TlbEntry = TlbEntry {
    read: 1,
    write: 1,
    host: 0,
    physical: 0,
};

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
    /// Each may be read, at least.
    victims: [TlbEntry; VICTIMS],
    /// The oldest one.
    next_victim: usize,
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
            victims: [NO_VICTIM; VICTIMS],
            next_victim: 0,
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
        let before = self.entries[index];
        self.drop_victims(|victim| victim.read == page);
        if before.read != invalid_tag(index) && before.read != page {
            self.victims[self.next_victim] = before;
            self.next_victim = (self.next_victim + 1) % VICTIMS;
        }
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

    /// Puts a victim back, if there is one for `address` that may be read and, with `write`,
    /// written: the host address of its byte.
    pub fn recall(&mut self, address: u64, write: bool) -> Option<*mut u8> {
        let page = address & !(PAGE_SIZE - 1);
        let wanted = |victim: &TlbEntry| victim.read == page && (!write || victim.write == page);
        let place = self.victims.iter().position(wanted)?;
        let index = tlb_index(address);
        let victim = self.victims[place];
        let before = self.entries[index];
        self.victims[place] = match before.read == invalid_tag(index) || before.read == page {
            true => NO_VICTIM,
            false => before,
        };
        self.entries[index] = victim;
        // SAFETY: the offset is within the page, which is mapped at `host`.
        Some(unsafe { (victim.host as *mut u8).add((address - page) as usize) })
    }

    fn drop_victims(&mut self, goes: impl Fn(&TlbEntry) -> bool) {
        let victims = self.victims.iter_mut().filter(|victim| goes(victim));
        victims.for_each(|victim| *victim = NO_VICTIM);
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
        if self.open_count > 0 {
            self.drop_victims(|victim| victim.physical & OPEN != 0);
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
        self.victims = [NO_VICTIM; VICTIMS];
        self.filled_count = 0;
        self.open_count = 0;
    }

    /// Forgets what is not global: another address space.
    pub fn flush_local(&mut self) {
        self.drop_victims(|victim| victim.physical & GLOBAL == 0);
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
        self.drop_victims(|victim| victim.read == page);
    }

    /// The numbers of the pages that may be read, with what may have been done with them.
    pub fn pages(&self) -> impl Iterator<Item = (u64, PageUse)> {
        let entries = self.entries.iter().enumerate();
        let valid = entries.filter(|(index, entry)| entry.read != invalid_tag(*index));
        let victims = self.victims.iter();
        let victims = victims.filter(|victim| victim.read != NO_VICTIM.read);
        let valid = valid.map(|(_, entry)| entry).chain(victims);
        valid.map(|entry| {
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
        for victim in &mut self.victims {
            if victim.physical & !(GLOBAL | OPEN) != physical {
                continue;
            }
            match keep_read {
                // As an entry has it, since it may be one again.
                true => victim.write = invalid_tag(tlb_index(victim.read)),
                false => *victim = NO_VICTIM,
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A page's number, where it is, and whether it is global, written, open.
        Fill(u64, u64, bool, bool, bool),
        Recall(u64, bool),
        FlushPage(u64),
        FlushLocal,
        FlushAll,
        Revoke(u64, bool),
        Close,
    }

    /// Few pages, most of them of two indices.
    fn page() -> impl Strategy<Value = u64> {
        (0_u64..12, 0_u64..2).prop_map(|(high, low)| high * TLB_ENTRIES as u64 + low)
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let fill = (
            page(),
            0_u64..6,
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
        );
        let event = prop_oneof![
            12 => fill.prop_map(|(page, at, global, write, open)| Event::Fill(page, at, global, write, open)),
            12 => (page(), any::<bool>()).prop_map(|(page, write)| Event::Recall(page, write)),
            2 => page().prop_map(Event::FlushPage),
            1 => Just(Event::FlushLocal),
            1 => Just(Event::FlushAll),
            2 => (0_u64..6, any::<bool>()).prop_map(|(at, keep)| Event::Revoke(at, keep)),
            1 => Just(Event::Close),
        ];
        proptest::collection::vec(event, 0..200)
    }

    /// What was filled in and not forgotten: where it is, and the rights.
    #[derive(Clone, Copy)]
    struct Known {
        at: u64,
        global: bool,
        write: bool,
        open: bool,
    }

    proptest! {
        /// Entries and victims may know less than what was filled in, and never more.
        #[test]
        fn nothing_is_known_that_was_forgotten(events in events()) {
            let mut memory = vec![0_u8; 6 * PAGE_SIZE as usize];
            let host = |at: u64, memory: &mut Vec<u8>| &raw mut memory[(at * PAGE_SIZE) as usize];
            let mut tlb = Box::<Tlb>::default();
            let mut known: HashMap<u64, Known> = HashMap::new();
            for event in events {
                match event {
                    Event::Fill(page, at, global, write, open) => {
                        let address = page * PAGE_SIZE + 5;
                        tlb.fill(address, host(at, &mut memory), at * PAGE_SIZE, global, write);
                        if open {
                            tlb.open_user_page(address);
                        }
                        known.insert(page, Known { at, global, write, open });
                        let entry = tlb.entries[tlb_index(address)];
                        prop_assert_eq!(entry.read, page * PAGE_SIZE);
                    }
                    Event::Recall(page, write) => {
                        let address = page * PAGE_SIZE + 7;
                        if let Some(found) = tlb.recall(address, write) {
                            let right = known.get(&page).filter(|it| it.write || !write);
                            let at = right.map(|it| it.at);
                            prop_assert!(at.is_some(), "page {page} was forgotten");
                            let begin = host(at.unwrap_or_default(), &mut memory);
                            prop_assert_eq!(found as u64, begin as u64 + 7);
                            prop_assert_eq!(tlb.entries[tlb_index(address)].read, page * PAGE_SIZE);
                        }
                    }
                    Event::FlushPage(page) => {
                        tlb.flush_page(page * PAGE_SIZE + 9);
                        known.remove(&page);
                    }
                    Event::FlushLocal => {
                        tlb.flush_local();
                        known.retain(|_, it| it.global);
                    }
                    Event::FlushAll => {
                        tlb.flush_all();
                        known.clear();
                    }
                    Event::Revoke(at, keep_read) => {
                        tlb.revoke(at * PAGE_SIZE, keep_read);
                        known.retain(|_, it| keep_read || it.at != at);
                        known.values_mut().filter(|it| it.at == at).for_each(|it| it.write = false);
                    }
                    Event::Close => {
                        tlb.close_user_pages();
                        known.retain(|_, it| !it.open);
                    }
                }
                for (index, entry) in tlb.entries.iter().enumerate().take(2) {
                    if entry.read == invalid_tag(index) {
                        prop_assert_eq!(entry.write, invalid_tag(index));
                        continue;
                    }
                    let right = known.get(&(entry.read / PAGE_SIZE));
                    prop_assert!(right.is_some(), "{entry:?} was forgotten");
                    let may_write = right.is_some_and(|it| it.write);
                    let write = if may_write { [entry.read; 2] } else { [invalid_tag(index); 2] };
                    prop_assert!(write.contains(&entry.write), "{entry:?}");
                }
                let used: Vec<u64> = tlb.pages().map(|(page, _)| page).collect();
                let all = known.values().map(|it| it.at);
                let all: Vec<u64> = all.collect();
                prop_assert!(used.iter().all(|at| all.contains(at)), "{used:?}, {all:?}");
            }
        }
    }

    #[test]
    fn pages_of_one_index_do_not_push_each_other_out_for_good() {
        let mut memory = vec![0_u8; PAGE_SIZE as usize];
        let mut tlb = Box::<Tlb>::default();
        let pages = (1..=VICTIMS as u64 + 1).map(|n| n * TLB_ENTRIES as u64 * PAGE_SIZE);
        for page in pages.clone() {
            tlb.fill(page, memory.as_mut_ptr(), page, false, true);
        }
        for page in pages.clone().take(VICTIMS) {
            assert!(tlb.recall(page, true).is_some(), "{page:#x}");
        }
        assert_eq!(tlb.pages().count(), VICTIMS + 1);
    }
}
