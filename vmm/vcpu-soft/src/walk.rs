//! Address translation: the guest's page tables (Intel SDM volume 3, chapter 4).
//!
//! Accessed and dirty bits are set by compare-exchange; when an entry changed
//! meanwhile, the walk starts again. Tables that are not in memory raise a page
//! fault as if a reserved bit were set.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use weft_vcpu::paging::{
    ACCESSED, ADDRESS, DIRTY, GLOBAL, LARGE, NO_EXECUTE, PRESENT, USER, WRITABLE, fault as error,
};
use weft_vcpu::{Access, PAGE_SIZE, Purpose};

use crate::cpu::{Cpu, Fault, Faulted, cr0, cr4, efer, rflags, vector};

/// Bits of a physical address; CPUID says so too.
pub const PHYSICAL_BITS: u32 = 46;

/// What to do at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Load.
    Read,
    /// Store.
    Write,
    /// Instruction fetch.
    Execute,
}

/// On whose behalf memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// An instruction outside level 3.
    Supervisor,
    /// An instruction at level 3.
    User,
    /// The processor itself, at any level: descriptor tables and the like.
    Processor,
}

impl Party {
    /// 1 for what goes by the user's rights, else 0.
    pub fn class(self) -> usize {
        usize::from(self == Self::User)
    }
}

/// A translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walked {
    /// Guest-physical address of the 4 KiB page.
    pub page: u64,
    /// Stores may go there without another walk: it is allowed, and the page is
    /// dirty already.
    pub writable: bool,
    /// In every address space.
    pub global: bool,
    /// The user may access it.
    pub user: bool,
}

/// How a kind of paging lays out its tables.
struct Format {
    /// Index of the highest level; 0 is the page table.
    top: u32,
    /// Address bits that a level translates.
    bits: u32,
    /// Bytes of an entry.
    entry_size: u64,
}

const FOUR_LEVELS: Format = Format {
    top: 3,
    bits: 9,
    entry_size: 8,
};
const PAE: Format = Format {
    top: 2,
    bits: 9,
    entry_size: 8,
};
const LEGACY: Format = Format {
    top: 1,
    bits: 10,
    entry_size: 4,
};

/// Rights gathered on the way down.
struct Rights {
    writable: bool,
    user: bool,
    execute: bool,
}

/// One access that is being translated.
struct Walk {
    address: u64,
    need: Need,
    user: bool,
    /// User pages are refused (SMAP).
    closed: bool,
}

/// Why one attempt at a walk gave no translation.
enum Stop {
    /// An entry changed under way.
    Again,
    /// Page fault with these bits.
    Fault(u32),
}

impl Cpu {
    /// Whether the supervisor's instructions may access user pages only because
    /// RFLAGS.AC is set.
    pub fn user_pages_are_open(&self) -> bool {
        self.cr4 & cr4::SMAP != 0 && self.rflags_system & rflags::AC != 0
    }

    /// Translates linear `address`, as the guest's tables say.
    pub fn walk(&mut self, address: u64, need: Need, by: Party) -> Result<Walked, Faulted> {
        if self.cr0 & cr0::PG == 0 {
            return Ok(Walked {
                page: address & 0xffff_f000,
                writable: true,
                global: true,
                user: false,
            });
        }
        let open = by == Party::Supervisor && self.rflags_system & rflags::AC != 0;
        let walk = Walk {
            address,
            need,
            user: by == Party::User,
            closed: self.cr4 & cr4::SMAP != 0 && by != Party::User && !open,
        };
        loop {
            match self.attempt(&walk) {
                Ok(walked) => return Ok(walked),
                Err(Stop::Again) => {}
                Err(Stop::Fault(bits)) => return Err(self.page_fault(&walk, bits)),
            }
        }
    }

    #[cold]
    fn page_fault(&mut self, walk: &Walk, bits: u32) -> Faulted {
        let mut error = bits;
        if walk.need == Need::Write {
            error |= error::WRITE;
        }
        if walk.user {
            error |= error::USER;
        }
        let fetch_bit =
            self.efer & efer::NXE != 0 && self.cr4 & cr4::PAE != 0 || self.cr4 & cr4::SMEP != 0;
        if walk.need == Need::Execute && fetch_bit {
            error |= error::FETCH;
        }
        self.fault = Fault {
            address: walk.address,
            error,
            vector: vector::PAGE_FAULT,
            has_error: true,
            abort: false,
        };
        Faulted
    }

    fn attempt(&mut self, walk: &Walk) -> Result<Walked, Stop> {
        let format = if self.efer & efer::LMA != 0 {
            &FOUR_LEVELS
        } else if self.cr4 & cr4::PAE != 0 {
            &PAE
        } else {
            &LEGACY
        };
        let mut table = match format.top {
            3 => self.cr3 & ADDRESS,
            2 => self.cr3 & 0xffff_ffe0,
            _ => self.cr3 & 0xffff_f000,
        };
        let mut rights = Rights {
            writable: true,
            user: true,
            execute: true,
        };
        let mut level = format.top;
        loop {
            let shift = 12 + level * format.bits;
            let index = walk.address >> shift & ((1 << format.bits) - 1);
            // The four entries of PAE's top level have neither rights nor bits
            // to set.
            let pointer_table = format.top == 2 && level == 2;
            let index = if pointer_table { index & 3 } else { index };
            let place = table + index * format.entry_size;
            let entry = self.read_entry(walk, place, format.entry_size)?;
            if entry & PRESENT == 0 {
                return Err(Stop::Fault(0));
            }
            let leaf = !pointer_table
                && (level == 0 || entry & LARGE != 0 && self.may_be_large(format, level));
            let reserved = self.reserved_bits(format, level, leaf, entry, pointer_table);
            if entry & reserved != 0 {
                return Err(Stop::Fault(error::PROTECTION | error::RESERVED));
            }
            if !pointer_table {
                rights.writable &= entry & WRITABLE != 0;
                rights.user &= entry & USER != 0;
                rights.execute &=
                    format.entry_size == 4 || entry & NO_EXECUTE == 0 || self.efer & efer::NXE == 0;
            }
            if leaf {
                return self.reach(walk, format, level, place, entry, &rights);
            }
            if !pointer_table && entry & ACCESSED == 0 {
                self.update_entry(walk, place, format.entry_size, (entry, entry | ACCESSED))?;
            }
            table = entry & ADDRESS;
            level -= 1;
        }
    }

    fn may_be_large(&self, format: &Format, level: u32) -> bool {
        match format.top {
            3 => level <= 2,
            2 => level == 1,
            _ => level == 1 && self.cr4 & cr4::PSE != 0,
        }
    }

    fn reserved_bits(
        &self,
        format: &Format,
        level: u32,
        leaf: bool,
        entry: u64,
        pointer_table: bool,
    ) -> u64 {
        if format.entry_size == 4 {
            // Bit 21 of a 4 MiB page; its bits 13 to 20 are address bits 32 to 39.
            return if leaf && level == 1 { 1 << 21 } else { 0 };
        }
        let mut reserved = ADDRESS & !((1 << PHYSICAL_BITS) - 1);
        if self.efer & efer::NXE == 0 {
            reserved |= NO_EXECUTE;
        }
        if format.top == 2 {
            reserved |= 0x7ff0_0000_0000_0000;
        }
        if pointer_table {
            reserved |= 0x1e6 | NO_EXECUTE;
        } else if leaf && level > 0 {
            // Address bits below the page's size, but for the PAT bit.
            reserved |= ((1 << (12 + level * format.bits)) - 1) & ADDRESS & !(1 << 12);
        } else if format.top == 3 && level == 3 && entry & LARGE != 0 {
            reserved |= LARGE;
        }
        reserved
    }

    fn reach(
        &mut self,
        walk: &Walk,
        format: &Format,
        level: u32,
        place: u64,
        entry: u64,
        rights: &Rights,
    ) -> Result<Walked, Stop> {
        let protected = walk.user || self.cr0 & cr0::WP != 0;
        let refused = walk.user && !rights.user
            || walk.need == Need::Write && !rights.writable && protected
            || walk.need != Need::Execute && walk.closed && rights.user
            || walk.need == Need::Execute
                && (!rights.execute || !walk.user && rights.user && self.cr4 & cr4::SMEP != 0);
        if refused {
            return Err(Stop::Fault(error::PROTECTION));
        }
        let mut wanted = entry | ACCESSED;
        if walk.need == Need::Write {
            wanted |= DIRTY;
        }
        if wanted != entry {
            self.update_entry(walk, place, format.entry_size, (entry, wanted))?;
        }
        let within = (1_u64 << (12 + level * format.bits)) - 1;
        let base = if format.entry_size == 4 && level == 1 {
            (entry & 0xffc0_0000) | (entry & 0x1f_e000) << 19
        } else {
            entry & ADDRESS & !within
        };
        Ok(Walked {
            page: base | walk.address & within & !(PAGE_SIZE - 1),
            writable: wanted & DIRTY != 0 && (rights.writable || !protected),
            global: entry & GLOBAL != 0 && self.cr4 & cr4::PGE != 0,
            user: rights.user,
        })
    }

    fn entry_pointer(&mut self, walk: &Walk, place: u64, access: Access) -> Result<*mut u8, Stop> {
        let page = place & !(PAGE_SIZE - 1);
        match self.acquire(page, access, Purpose::Table, walk.address) {
            // SAFETY: the offset is within the page.
            Ok(host) => Ok(unsafe { host.add((place - page) as usize) }),
            Err(_) => Err(Stop::Fault(error::PROTECTION | error::RESERVED)),
        }
    }

    fn read_entry(&mut self, walk: &Walk, place: u64, size: u64) -> Result<u64, Stop> {
        let pointer = self.entry_pointer(walk, place, Access::Read)?;
        // SAFETY: an entry lies within one page, aligned to its size, in memory
        // that is held; it is only ever accessed atomically.
        Ok(unsafe {
            if size == 8 {
                AtomicU64::from_ptr(pointer.cast()).load(Ordering::Acquire)
            } else {
                u64::from(AtomicU32::from_ptr(pointer.cast()).load(Ordering::Acquire))
            }
        })
    }

    fn update_entry(
        &mut self,
        walk: &Walk,
        place: u64,
        size: u64,
        (old, new): (u64, u64),
    ) -> Result<(), Stop> {
        let page = place & !(PAGE_SIZE - 1);
        let pointer = self.entry_pointer(walk, place, Access::Write)?;
        if self.machine.holds_code(page) {
            self.code_page_written(page);
        }
        // SAFETY: as in `read_entry`, and the page is held for writing.
        let done = unsafe {
            if size == 8 {
                AtomicU64::from_ptr(pointer.cast())
                    .compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            } else {
                AtomicU32::from_ptr(pointer.cast())
                    .compare_exchange(old as u32, new as u32, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            }
        };
        if done { Ok(()) } else { Err(Stop::Again) }
    }
}
