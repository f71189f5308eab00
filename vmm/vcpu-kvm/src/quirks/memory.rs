//! Guest memory by linear address, as kernel code in long mode sees it (Intel SDM
//! volume 3, 4.5 and 4.6): the emulation of an instruction must fault where the
//! processor would, or it would write to a page that is shared on purpose.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::{Bytes, GuestAddress};
use weft_guest_memory::Ram;
use weft_vcpu::paging::{ACCESSED, ADDRESS, DIRTY, LARGE, PRESENT, USER, WRITABLE, fault};
use weft_vcpu::{Access, Memory};

const PAGE: u64 = 4096;
/// CR0.WP, CR4.SMAP, CR4.LA57, EFER.LMA, RFLAGS.AC.
const WRITE_PROTECT: u64 = 1 << 16;
const SMAP: u64 = 1 << 21;
const FIVE_LEVELS: u64 = 1 << 12;
const LONG_MODE_ACTIVE: u64 = 1 << 10;
pub(super) const ALIGNMENT_CHECK: u64 = 1 << 18;

/// Why an access did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// #PF: for CR2, and the error code.
    Page { address: u64, code: u32 },
    /// Not canonical: #GP(0).
    Address,
    /// A device's register, or no memory at all: not ours to do.
    NotMemory,
}

/// The registers that decide how an address is translated.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Control {
    pub(super) cr0: u64,
    pub(super) cr3: u64,
    pub(super) cr4: u64,
    pub(super) efer: u64,
    pub(super) rflags: u64,
}

impl Control {
    /// Whether this walker knows the mode: long mode with four levels.
    pub(super) fn is_known(&self) -> bool {
        self.efer & LONG_MODE_ACTIVE != 0 && self.cr4 & FIVE_LEVELS == 0
    }
}

/// The memory of a guest whose kernel is stopped at an instruction.
pub(super) struct GuestMemory<'a> {
    pub(super) ram: &'a Ram,
    pub(super) control: Control,
}

impl GuestMemory<'_> {
    pub(super) fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Fault> {
        for (linear, part) in pages(address, data.len()) {
            let physical = self.translate(linear, Access::Read)?;
            self.ram
                .guest()
                .read_slice(&mut data[part], GuestAddress(physical))
                .map_err(|_| Fault::NotMemory)?;
        }
        Ok(())
    }

    pub(super) fn read_word(&self, address: u64) -> Result<u64, Fault> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes all or, on a fault, nothing.
    pub(super) fn write(&self, address: u64, data: &[u8]) -> Result<(), Fault> {
        self.writable(address, data.len())?;
        for (linear, part) in pages(address, data.len()) {
            let physical = self.translate(linear, Access::Write)?;
            // KVM does not see this.
            self.ram.mark(physical, part.len());
            self.ram
                .guest()
                .write_slice(&data[part], GuestAddress(physical))
                .map_err(|_| Fault::NotMemory)?;
        }
        Ok(())
    }

    /// Whether all of it may be written.
    pub(super) fn writable(&self, address: u64, length: usize) -> Result<(), Fault> {
        for (linear, _) in pages(address, length) {
            self.translate(linear, Access::Write)?;
        }
        Ok(())
    }

    /// Where `length` bytes that cross no page are in this process, for an atomic
    /// access.
    pub(super) fn host(&self, address: u64, access: Access) -> Result<*mut u8, Fault> {
        let physical = self.translate(address, access)?;
        if access == Access::Write {
            self.ram.mark(physical, 1);
        }
        let page = self
            .ram
            .acquire(physical & !(PAGE - 1), access)
            .map_err(|_| Fault::NotMemory)?;
        Ok(page.wrapping_add((physical % PAGE) as usize))
    }

    /// Guest-physical address; sets accessed and dirty bits as the processor does.
    fn translate(&self, linear: u64, access: Access) -> Result<u64, Fault> {
        let upper = linear as i64 >> 47;
        if upper != 0 && upper != -1 {
            return Err(Fault::Address);
        }
        let wants_write = access == Access::Write;
        let code = if wants_write { fault::WRITE } else { 0 };
        let refused = |code| Fault::Page {
            address: linear,
            code,
        };
        let (mut writable, mut user) = (true, true);
        let mut table = self.control.cr3 & ADDRESS;
        for level in (0..4).rev() {
            let shift = 12 + 9 * level;
            let entry = self.entry(table + (linear >> shift & 511) * 8)?;
            let value = entry.load(Ordering::Relaxed);
            if value & PRESENT == 0 {
                return Err(refused(code));
            }
            writable &= value & WRITABLE != 0;
            user &= value & USER != 0;
            let is_last = level == 0 || (level <= 2 && value & LARGE != 0);
            if is_last {
                if wants_write && !writable && self.control.cr0 & WRITE_PROTECT != 0 {
                    return Err(refused(code | fault::PROTECTION));
                }
                if user && self.is_user_forbidden() {
                    return Err(refused(code | fault::PROTECTION));
                }
                let dirty = if wants_write { DIRTY } else { 0 };
                mark(entry, ACCESSED | dirty);
                let offset = (1 << shift) - 1;
                return Ok(value & ADDRESS & !offset | linear & offset);
            }
            mark(entry, ACCESSED);
            table = value & ADDRESS;
        }
        Err(refused(code))
    }

    fn is_user_forbidden(&self) -> bool {
        self.control.cr4 & SMAP != 0 && self.control.rflags & ALIGNMENT_CHECK == 0
    }

    fn entry(&self, physical: u64) -> Result<&AtomicU64, Fault> {
        let page = self
            .ram
            .acquire(physical & !(PAGE - 1), Access::Write)
            .map_err(|_| Fault::NotMemory)?;
        let entry = page.wrapping_add((physical % PAGE) as usize);
        // SAFETY: inside a page of guest RAM, which lives as long as `self.ram`;
        // aligned, as tables and their entries are; others may change it, atomically.
        Ok(unsafe { AtomicU64::from_ptr(entry.cast()) })
    }
}

fn mark(entry: &AtomicU64, bits: u64) {
    if entry.load(Ordering::Relaxed) & bits != bits {
        entry.fetch_or(bits, Ordering::Relaxed);
    }
}

/// The parts of an access by page: linear address, and range of the data.
fn pages(address: u64, length: usize) -> impl Iterator<Item = (u64, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= length {
            return None;
        }
        let linear = address.wrapping_add(done as u64);
        let here = ((PAGE - linear % PAGE) as usize).min(length - done);
        let part = done..done + here;
        done += here;
        Some((linear, part))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// 4 MiB whose first is mapped 1:1 in 4 KiB pages, read-only at 0x6000, not
    /// present at 0x7000, a user's at 0x8000; tables from 0x1000 on.
    pub(in super::super) fn mapped() -> (Ram, Control) {
        let ram = Ram::new(4 << 20).unwrap();
        let set = |address: u64, value: u64| {
            ram.guest().write_obj(value, GuestAddress(address)).unwrap();
        };
        set(0x1000, 0x2000 | PRESENT | WRITABLE | USER);
        set(0x2000, 0x3000 | PRESENT | WRITABLE | USER);
        set(0x3000, 0x4000 | PRESENT | WRITABLE | USER);
        for page in 0..256 {
            set(0x4000 + page * 8, (page * PAGE) | PRESENT | WRITABLE);
        }
        set(0x4000 + 6 * 8, 0x6000 | PRESENT);
        set(0x4000 + 7 * 8, 0);
        set(0x4000 + 8 * 8, 0x8000 | PRESENT | WRITABLE | USER);
        // 2 MiB at 0x20_0000 as one page, and beyond the RAM at 0x40_0000.
        set(0x3008, 0x20_0000 | PRESENT | WRITABLE | LARGE);
        set(0x3010, 0x4000_0000 | PRESENT | WRITABLE | LARGE);
        let control = Control {
            cr0: WRITE_PROTECT | 1 | 1 << 31,
            cr3: 0x1000,
            cr4: 0x20,
            efer: LONG_MODE_ACTIVE,
            rflags: 2,
        };
        (ram, control)
    }

    #[test]
    fn an_access_may_cross_pages() {
        let (ram, control) = mapped();
        let memory = GuestMemory { ram: &ram, control };
        memory.write(0x9ffe, &[1, 2, 3, 4]).unwrap();
        let mut data = [0; 4];
        memory.read(0x9ffe, &mut data).unwrap();
        assert_eq!(data, [1, 2, 3, 4]);
        memory.write(0x20_1234, &[9]).unwrap();
        let large: u8 = ram.guest().read_obj(GuestAddress(0x20_1234)).unwrap();
        assert_eq!(large, 9);
        let entry: u64 = ram.guest().read_obj(GuestAddress(0x4000 + 9 * 8)).unwrap();
        assert_eq!(entry & (ACCESSED | DIRTY), ACCESSED | DIRTY);
    }

    #[test]
    fn faults_are_the_processors() {
        let (ram, mut control) = mapped();
        let page = |address, code| Err(Fault::Page { address, code });
        let memory = GuestMemory { ram: &ram, control };
        assert_eq!(memory.write(0x6010, &[1]), page(0x6010, 3));
        assert_eq!(memory.read(0x7010, &mut [0]), page(0x7010, 0));
        assert_eq!(memory.write(0x7010, &[1]), page(0x7010, 2));
        assert_eq!(memory.read(1 << 47, &mut [0]), Err(Fault::Address));
        assert_eq!(memory.read(0x40_0000, &mut [0]), Err(Fault::NotMemory));
        // The first byte may be written, the second not: nothing is.
        assert_eq!(memory.write(0x5fff, &[7, 7]), page(0x6000, 3));
        let kept: u8 = ram.guest().read_obj(GuestAddress(0x5fff)).unwrap();
        assert_eq!(kept, 0);
        control.cr0 &= !WRITE_PROTECT;
        let unprotected = GuestMemory { ram: &ram, control };
        assert_eq!(unprotected.write(0x6010, &[1]), Ok(()));
    }

    #[test]
    fn a_users_page_needs_ac_with_smap() {
        let (ram, mut control) = mapped();
        control.cr4 |= SMAP;
        let check = |control| GuestMemory { ram: &ram, control }.read(0x8000, &mut [0]);
        assert_eq!(
            check(control),
            Err(Fault::Page {
                address: 0x8000,
                code: 1
            })
        );
        control.rflags |= ALIGNMENT_CHECK;
        assert_eq!(check(control), Ok(()));
    }
}
