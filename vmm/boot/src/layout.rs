//! Where boot information lies, and what the kernel is told of memory.
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
use weft_guest_memory::{DEVICE_HOLE, ECAM, FOUR_GIB, Ram};

use super::{BootError, ImageError};

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
/// Here the RAM of a PC is interrupted.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// What a PC's firmware occupies: tables lie there.
pub const FIRMWARE: u64 = 0xe_0000;
/// Here it goes on; nothing of a kernel may lie lower, but for Multiboot.
pub const ONE_MIB: u64 = 0x10_0000;
/// Bytes that the ECAM of one bus takes.
pub const ECAM_BYTES: u64 = 1 << 20;

/// What a stretch of guest-physical addresses is: numbers as in e820, the same
/// in PVH's and Multiboot's maps (ACPI specification 6.5, table 15.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// RAM to use.
    Usable = 1,
    /// Hands off.
    Reserved = 2,
    /// ACPI tables: RAM once they were read.
    Acpi = 3,
}

/// One line of the map of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// Guest-physical.
    pub range: Range<u64>,
    pub kind: MemoryKind,
}

/// One more than the last byte of RAM below the hole for devices.
pub fn low_end(ram: &Ram) -> u64 {
    ram.size().min(DEVICE_HOLE)
}

/// The map of memory, in order: at most seven lines.
pub fn memory_map(ram: &Ram, acpi: Option<&Range<u64>>) -> Vec<MemoryRange> {
    let acpi = acpi.cloned().unwrap_or(FIRMWARE..FIRMWARE);
    [
        (0..LOW_RAM_END, MemoryKind::Usable),
        (LOW_RAM_END..0xa_0000, MemoryKind::Reserved),
        (acpi.clone(), MemoryKind::Acpi),
        (acpi.end..ONE_MIB, MemoryKind::Reserved),
        (ONE_MIB..low_end(ram), MemoryKind::Usable),
        // Else Linux does not trust MCFG before it has read the DSDT.
        (ECAM..ECAM + ECAM_BYTES, MemoryKind::Reserved),
        (FOUR_GIB..ram.high_end(), MemoryKind::Usable),
    ]
    .into_iter()
    .filter(|(range, _)| !range.is_empty())
    .map(|(range, kind)| MemoryRange { range, kind })
    .collect()
}

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

#[cfg(test)]
mod tests {
    use weft_platform::acpi;
    use weft_platform::acpi::topology::equal_shares;

    use super::*;

    #[test]
    fn the_map_is_sorted_disjoint_and_holds_all_ram() {
        for size in [4 << 20, 256 << 20, DEVICE_HOLE, DEVICE_HOLE + (64 << 20)] {
            let ram = Ram::new(size).unwrap();
            let map = memory_map(&ram, Some(&(FIRMWARE..FIRMWARE + 0x3000)));
            for pair in map.windows(2) {
                assert!(pair[0].range.end <= pair[1].range.start, "{pair:?}");
            }
            let usable: u64 = map
                .iter()
                .filter(|line| line.kind == MemoryKind::Usable)
                .map(|line| line.range.end - line.range.start)
                .sum();
            assert_eq!(usable, size - (ONE_MIB - LOW_RAM_END));
        }
    }
    #[test]
    fn the_firmwares_own_structure_is_in_reserved_memory() {
        let ram = Ram::new(64 << 20).unwrap();
        let description = acpi::Description {
            nodes: equal_shares(ram.size(), 1, 1),
            high_window: acpi::high_window(&ram),
            real_time_clock: false,
        };
        let placed = acpi::place(&ram, &description).unwrap();
        let map = memory_map(&ram, Some(&placed.range));
        let line = map.iter().find(|line| line.range.contains(&acpi::FACS));
        assert_eq!(line.unwrap().kind, MemoryKind::Reserved);
    }
}
