//! Where boot information lies.
//!
//! ```text
//! 0x00500            descriptor table (GDT)
//! 0x07000 .. 0x08000 boot_params, hvm_start_info or Multiboot information
//! 0x08000 .. 0x09000 stack
//! 0x09000 .. 0x0f000 page tables of the first 4 GiB
//! 0x20000 .. 0x30000 command line
//! 0x30000            setup_data
//! 0x9fc00 .. 0xe0000 not RAM: where a PC has BIOS data and VGA memory
//! 0xe0000 ..         ACPI tables, then nothing up to 1 MiB
//! 1 MiB ..           kernel ... initrd at the end of low RAM
//! ```
//!
//! What a Multiboot kernel is told gives way to the kernel, where that lies below 1 MiB
//! itself: see [`Places`].
//!
//! All below 64 KiB lies in memory called usable: Linux keeps off the first
//! 64 KiB (later the first 1 MiB) whatever it is told, and builds page tables and
//! a GDT of its own before it uses that memory. It copies `boot_params` and the
//! command line, and reserves `setup_data` and the initrd, before it allocates.

use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use weft_guest_memory::Ram;

use super::error::{BootError, ImageError};
use super::memory_map::LOW_RAM_END;

/// Descriptor table of the first CPU.
pub const GDT: u64 = 0x500;
/// `boot_params`, or what the other protocols have in its place.
pub const BOOT_INFORMATION: u64 = 0x7000;
/// The stack grows down from here.
pub const STACK_TOP: u64 = 0x8ff0;
/// Six pages: PML4, PDPT, four page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// Zero-terminated.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Most bytes of a command line, with its zero, whatever the kernel says.
pub const COMMAND_LINE_ROOM: usize = 0x1_0000;
/// Linked list of `struct setup_data`.
pub const SETUP_DATA: u64 = 0x3_0000;
/// Bytes of the descriptor table.
pub const GDT_BYTES: u64 = 48;
/// Bytes of the boot information.
const INFORMATION_BYTES: u64 = 0x1000;
/// A PC's real mode has its vectors and the BIOS's data below.
const REAL_MODE_END: u64 = 0x500;

/// Where what a kernel is told lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Descriptor table.
    pub gdt: u64,
    /// What [`BOOT_INFORMATION`] says.
    pub information: u64,
    /// Zero-terminated.
    pub command_line: u64,
}

impl Places {
    /// Where it lies unless something is in the way.
    pub const USUAL: Self = Self {
        gdt: GDT,
        information: BOOT_INFORMATION,
        command_line: COMMAND_LINE,
    };

    /// Beside a kernel that has `taken`, with `command_line_bytes` for its command line:
    /// each at its usual place, or else as high below 1 MiB as there is room.
    pub fn beside(mut taken: Vec<Range<u64>>, command_line_bytes: u64) -> Result<Self, ImageError> {
        let mut places = Self::USUAL;
        for (place, bytes) in [
            (&mut places.gdt, GDT_BYTES),
            (&mut places.information, INFORMATION_BYTES),
            (&mut places.command_line, command_line_bytes),
        ] {
            *place = room(&taken, *place, bytes).ok_or(ImageError::NoRoomBelow { bytes })?;
            taken.push(*place..*place + bytes);
        }
        Ok(places)
    }
}

/// Room for `bytes` beside what is `taken`.
fn room(taken: &[Range<u64>], usual: u64, bytes: u64) -> Option<u64> {
    let below = |end: &u64| Some(end.checked_sub(bytes)? & !0xf);
    let is_free = |start: &u64| {
        let end = start + bytes;
        *start >= REAL_MODE_END
            && end <= LOW_RAM_END
            && taken
                .iter()
                .all(|other| end <= other.start || other.end <= *start)
    };
    let ends = taken.iter().map(|range| range.start).chain([LOW_RAM_END]);
    let highest = ends.filter_map(|end| below(&end)).filter(is_free).max();
    Some(usual).filter(is_free).or(highest)
}

/// Writes to guest memory.
pub fn write(ram: &Ram, address: u64, bytes: &[u8]) -> Result<(), BootError> {
    ram.guest()
        .write_slice(bytes, GuestAddress(address))
        .map_err(|source| BootError::Memory { address, source })
}

/// Writes much to guest memory.
pub fn put(ram: &Ram, address: u64, bytes: &[u8]) -> Result<(), BootError> {
    ram.put(address, bytes).map_err(|error| BootError::Memory {
        address,
        source: GuestMemoryError::IOError(error),
    })
}

/// Writes zeros to guest memory.
pub fn clear(ram: &Ram, range: Range<u64>) -> Result<(), BootError> {
    static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
    let mut address = range.start;
    while address < range.end {
        let length = (range.end - address).min(ZEROS.len() as u64);
        put(ram, address, &ZEROS[..length as usize])?;
        address += length;
    }
    Ok(())
}
