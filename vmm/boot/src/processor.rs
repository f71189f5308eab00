//! The first CPU as the boot protocols want it: long mode with the first 4 GiB
//! mapped to themselves, or protected mode without paging.

use weft_vcpu::paging::{LARGE, PRESENT, WRITABLE};
use weft_vcpu::{CpuState, DescriptorTable, Segment};

use super::layout::{GDT, GDT_BYTES, PAGE_TABLES, STACK_TOP, write};
use super::{BootError, Ram};

/// Numbers of registers in [`CpuState::registers`].
pub const RAX: usize = 0;
/// See [`RAX`].
pub const RBX: usize = 3;
/// See [`RAX`].
pub const RSP: usize = 4;
/// See [`RAX`].
pub const RSI: usize = 6;

const PAGE: u64 = 4096;
/// Of an entry that leads to a table, and of one that maps 2 MiB.
const TABLE: u64 = PRESENT | WRITABLE;
const LARGE_PAGE: u64 = TABLE | LARGE;

const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TASK_SELECTOR: u16 = 0x20;

/// Execute and read, accessed; present; 64-bit; limit in pages.
const CODE_64: u16 = 0xa09b;
/// The same, 32-bit.
const CODE_32: u16 = 0xc09b;
/// Read and write, accessed; present; 32-bit; limit in pages.
const DATA: u16 = 0xc093;
/// A busy task state segment.
const TASK: u16 = 0x008b;

const CR0_PROTECTED: u64 = 1;
const CR0_EXTENSION_TYPE: u64 = 1 << 4;
const CR0_NUMERIC_ERROR: u64 = 1 << 5;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
const EFER_LONG_MODE_ENABLE: u64 = 1 << 8;
const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;

/// 64-bit mode at `entry` (Documentation/arch/x86/boot.rst, "64-bit Boot
/// Protocol"): code selector 0x10, data 0x18, interrupts off.
pub fn long_mode(ram: &Ram, entry: u64) -> Result<CpuState, BootError> {
    write_page_tables(ram)?;
    let mut state = flat(ram, CODE_64, GDT)?;
    state.rip = entry;
    state.cr0 |= CR0_PAGING | CR0_NUMERIC_ERROR;
    state.cr3 = PAGE_TABLES;
    state.cr4 = CR4_PHYSICAL_ADDRESS_EXTENSION;
    state.efer = EFER_LONG_MODE_ENABLE | EFER_LONG_MODE_ACTIVE;
    Ok(state)
}

/// 32-bit mode at `entry`, no paging (PVH: Xen's docs/misc/pvh.pandoc; Multiboot
/// 0.6.96, 3.2): flat segments, interrupts off, all else of CR0 and CR4 clear. The
/// descriptor table lies at `gdt`.
pub fn protected_mode(ram: &Ram, entry: u32, gdt: u64) -> Result<CpuState, BootError> {
    let mut state = flat(ram, CODE_32, gdt)?;
    state.rip = u64::from(entry);
    Ok(state)
}

fn flat(ram: &Ram, code: u16, gdt: u64) -> Result<CpuState, BootError> {
    let segment = |selector, limit, rights| Segment {
        selector,
        base: 0,
        limit,
        rights,
    };
    let code = segment(CODE_SELECTOR, u32::MAX, code);
    let data = segment(DATA_SELECTOR, u32::MAX, DATA);
    let task = segment(TASK_SELECTOR, 0x67, TASK);
    let descriptors = [0, 0, encode(&code), encode(&data), encode(&task), 0];
    let bytes: Vec<u8> = descriptors.iter().flat_map(|d| d.to_le_bytes()).collect();
    debug_assert_eq!(bytes.len() as u64, GDT_BYTES);
    write(ram, gdt, &bytes)?;

    let mut state = CpuState::with_segments(code, data);
    state.tr = task;
    state.gdtr = DescriptorTable {
        base: gdt,
        limit: bytes.len() as u16 - 1,
    };
    state.idtr = DescriptorTable::default();
    state.cr0 = CR0_PROTECTED | CR0_EXTENSION_TYPE;
    state.registers[RSP] = STACK_TOP;
    Ok(state)
}

/// A descriptor as it lies in memory (Intel SDM volume 3, figure 3-8).
fn encode(segment: &Segment) -> u64 {
    let pages = segment.rights & 0x8000 != 0;
    let limit = u64::from(if pages {
        segment.limit >> 12
    } else {
        segment.limit
    });
    let base = segment.base;
    (limit & 0xffff)
        | (base & 0xff_ffff) << 16
        | u64::from(segment.rights & 0xf0ff) << 40
        | (limit & 0xf_0000) << 32
        | (base & 0xff00_0000) << 32
}

/// The first 4 GiB, mapped to themselves by pages of 2 MiB.
fn write_page_tables(ram: &Ram) -> Result<(), BootError> {
    let mut tables = vec![0_u64; 6 * 512];
    tables[0] = (PAGE_TABLES + PAGE) | TABLE;
    for directory in 0..4 {
        tables[512 + directory] = (PAGE_TABLES + (2 + directory as u64) * PAGE) | TABLE;
    }
    for (number, entry) in tables[2 * 512..].iter_mut().enumerate() {
        *entry = (number as u64) << 21 | LARGE_PAGE;
    }
    let bytes: Vec<u8> = tables.iter().flat_map(|e| e.to_le_bytes()).collect();
    write(ram, PAGE_TABLES, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    fn read(ram: &Ram, address: u64) -> u64 {
        ram.guest().read_obj(GuestAddress(address)).unwrap()
    }

    #[test]
    fn the_descriptors_are_linux_own() {
        let ram = Ram::new(4 << 20).unwrap();
        let state = long_mode(&ram, 0x100_0000).unwrap();
        // GDT_ENTRY(0xa09b, 0, 0xfffff) and so on of arch/x86/boot/pm.c.
        assert_eq!(read(&ram, GDT + 0x10), 0x00af_9b00_0000_ffff);
        assert_eq!(read(&ram, GDT + 0x18), 0x00cf_9300_0000_ffff);
        assert_eq!(read(&ram, GDT + 0x20), 0x0000_8b00_0000_0067);
        assert_eq!(state.gdtr.limit, 47);
        assert_eq!(state.efer, 0x500);
        protected_mode(&ram, 0x10_0000, GDT).unwrap();
        assert_eq!(read(&ram, GDT + 0x10), 0x00cf_9b00_0000_ffff);
    }

    #[test]
    fn every_address_below_4_gib_maps_to_itself() {
        let ram = Ram::new(4 << 20).unwrap();
        let state = long_mode(&ram, 0).unwrap();
        for address in [0, 0x7000, 0x1234_5678, 0xffff_f000_u64] {
            let index = |shift: u32| (address >> shift & 511) * 8;
            let upper = read(&ram, state.cr3 + index(39)) & !0xfff;
            let directory = read(&ram, upper + index(30)) & !0xfff;
            let entry = read(&ram, directory + index(21));
            assert_eq!(entry & 0xfff, 0x83);
            assert_eq!(entry & !0xfff, address & !0x1f_ffff);
        }
    }
}
