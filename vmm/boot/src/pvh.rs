//! PVH: an entry in 32-bit mode, told by an ELF note; EBX points to
//! `hvm_start_info` (Xen: docs/misc/pvh.pandoc, public/arch-x86/hvm/start_info.h).

use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::ByteValued;
use weft_vcpu::CpuState;

use super::layout::{BOOT_INFORMATION, COMMAND_LINE, GDT, write};
use super::memory_map::memory_map;
use super::processor::{RBX, protected_mode};
use super::{BootError, Placed, Ram};

/// Modules, after the start information.
const MODULES: u64 = BOOT_INFORMATION + 0x100;
/// Map of memory, after the modules.
const MEMORY_MAP: u64 = BOOT_INFORMATION + 0x200;

/// Writes the start information.
pub fn start(ram: &Ram, entry: u32, placed: &Placed) -> Result<CpuState, BootError> {
    let map: Vec<u8> = memory_map(ram, placed.acpi_tables())
        .iter()
        .flat_map(|line| {
            let entry = hvm_memmap_table_entry {
                addr: line.range.start,
                size: line.range.end - line.range.start,
                type_: line.kind as u32,
                reserved: 0,
            };
            entry.as_slice().to_vec()
        })
        .collect();
    write(ram, MEMORY_MAP, &map)?;
    let mut information = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        cmdline_paddr: COMMAND_LINE,
        rsdp_paddr: placed.rsdp(),
        memmap_paddr: MEMORY_MAP,
        memmap_entries: (map.len() / size_of::<hvm_memmap_table_entry>()) as u32,
        ..Default::default()
    };
    if let Some(initrd) = &placed.initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.end - initrd.start,
            ..Default::default()
        };
        write(ram, MODULES, module.as_slice())?;
        information.nr_modules = 1;
        information.modlist_paddr = MODULES;
    }
    write(ram, BOOT_INFORMATION, information.as_slice())?;
    let mut state = protected_mode(ram, entry, GDT)?;
    state.registers[RBX] = BOOT_INFORMATION;
    Ok(state)
}
