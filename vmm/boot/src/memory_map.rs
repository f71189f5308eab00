//! The map of guest memory that a kernel gets: where RAM is, and what it is for.

use std::ops::Range;

use weft_guest_memory::{DEVICE_HOLE, ECAM, FOUR_GIB, Ram};

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
