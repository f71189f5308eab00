//! The 64-bit boot protocol of Linux: RSI points to `boot_params`, the "zero
//! page" (Documentation/arch/x86/boot.rst and zero-page.rst).

use linux_loader::bootparam::{SETUP_RNG_SEED, boot_e820_entry, boot_params, setup_header};
use vm_memory::ByteValued;
use weft_vcpu::CpuState;

use super::layout::{BOOT_INFORMATION, COMMAND_LINE, SETUP_DATA, write};
use super::memory_map::memory_map;
use super::processor::{RSI, long_mode};
use super::{BootError, Placed, Ram};

/// Bytes of a command line that Linux takes when no header says
/// (COMMAND_LINE_SIZE without the zero).
pub const COMMAND_LINE_MAX: usize = 2047;
/// Highest address of an initrd when no header says.
pub const INITRD_ADDRESS_MAX: u64 = 0x7fff_ffff;

const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
/// The newest version of the protocol that is spoken here.
const VERSION: u16 = 0x20f;
/// A boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
const LOADED_HIGH: u8 = 1;
const CAN_USE_HEAP: u8 = 1 << 7;
const MIB_2: u32 = 2 << 20;

/// Writes the zero page; `header` is the bzImage's own, if there is one.
pub fn start(
    ram: &Ram,
    entry: u64,
    header: Option<&setup_header>,
    seed: Option<&[u8; 32]>,
    placed: &Placed,
) -> Result<CpuState, BootError> {
    let mut page = boot_params {
        hdr: header.copied().unwrap_or_else(plain_header),
        acpi_rsdp_addr: placed.rsdp(),
        ..Default::default()
    };
    page.hdr.type_of_loader = LOADER_UNDEFINED;
    page.hdr.loadflags |= LOADED_HIGH;
    // The heap is the real-mode code's, which never runs.
    page.hdr.loadflags &= !CAN_USE_HEAP;
    page.hdr.cmd_line_ptr = COMMAND_LINE as u32;
    if let Some(initrd) = &placed.initrd {
        page.hdr.ramdisk_image = initrd.start as u32;
        page.hdr.ramdisk_size = (initrd.end - initrd.start) as u32;
    }
    if let Some(seed) = seed {
        write_seed(ram, seed)?;
        page.hdr.setup_data = SETUP_DATA;
    }
    let map = memory_map(ram, placed.acpi_tables());
    let mut table = page.e820_table;
    for (entry, line) in table.iter_mut().zip(&map) {
        *entry = boot_e820_entry {
            addr: line.range.start,
            size: line.range.end - line.range.start,
            r#type: line.kind as u32,
        };
    }
    page.e820_table = table;
    page.e820_entries = map.len() as u8;
    write(ram, BOOT_INFORMATION, page.as_slice())?;

    let mut state = long_mode(ram, entry)?;
    state.registers[RSI] = BOOT_INFORMATION;
    Ok(state)
}

/// What a vmlinux lacks.
fn plain_header() -> setup_header {
    setup_header {
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        version: VERSION,
        kernel_alignment: MIB_2,
        cmdline_size: COMMAND_LINE_MAX as u32,
        initrd_addr_max: INITRD_ADDRESS_MAX as u32,
        ..Default::default()
    }
}

/// `struct setup_data`: next, type, length, data.
fn write_seed(ram: &Ram, seed: &[u8; 32]) -> Result<(), BootError> {
    let mut bytes = vec![0; 8];
    bytes.extend_from_slice(&SETUP_RNG_SEED.to_le_bytes());
    bytes.extend_from_slice(&(seed.len() as u32).to_le_bytes());
    bytes.extend_from_slice(seed);
    write(ram, SETUP_DATA, &bytes)
}
