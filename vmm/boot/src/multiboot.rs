//! Multiboot 1: an entry in 32-bit mode; EBX points to a table of what the boot
//! loader knows (Multiboot Specification 0.6.96).

use weft_vcpu::CpuState;

use super::elf::Segment;
use super::error::{BootError, ImageError};
use super::layout::{Places, write};
use super::memory_map::{LOW_RAM_END, MemoryKind, ONE_MIB, low_end, memory_map};
use super::processor::{RAX, RBX, protected_mode};
use super::{Placed, Ram};

const HEADER_MAGIC: u32 = 0x1bad_b002;
const LOADER_MAGIC: u64 = 0x2bad_b002;
/// The header is completely within this many bytes of the file.
pub const SEARCHED: usize = 8192;
/// Requirements of bits 0 to 15 that are met: modules on pages, memory map.
const KNOWN_REQUIREMENTS: u32 = 0b11;
const REQUIREMENTS: u32 = 0xffff;
/// The header has addresses: the file is loaded by them, not as ELF.
const HAS_ADDRESSES: u32 = 1 << 16;

/// Flags of the table: which of its fields hold.
const HAS_MEMORY: u32 = 1;
const HAS_COMMAND_LINE: u32 = 1 << 2;
const HAS_MODULES: u32 = 1 << 3;
const HAS_MEMORY_MAP: u32 = 1 << 6;
const HAS_LOADER_NAME: u32 = 1 << 9;

/// Behind the table.
const LOADER_NAME: u64 = 0x100;
const MODULES: u64 = 0x180;
const MEMORY_MAP: u64 = 0x200;

/// A Multiboot header.
#[derive(Debug, PartialEq, Eq)]
pub struct Header {
    /// Where it lies in the file.
    offset: usize,
    flags: u32,
    /// header_addr, load_addr, load_end_addr, bss_end_addr, entry_addr.
    addresses: [u32; 5],
}

/// Looks for a header in the first 8 KiB.
pub fn find(data: &[u8]) -> Option<Header> {
    let searched = &data[..data.len().min(SEARCHED)];
    let words: Vec<u32> = searched
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| u32::from_le_bytes(*bytes))
        .collect();
    let at = words.windows(3).position(|w| {
        w[0] == HEADER_MAGIC && w.iter().fold(0, |sum: u32, word| sum.wrapping_add(*word)) == 0
    })?;
    let mut addresses = [0; 5];
    if words[at + 1] & HAS_ADDRESSES != 0 {
        addresses.copy_from_slice(words.get(at + 3..at + 8)?);
    }
    Some(Header {
        offset: at * 4,
        flags: words[at + 1],
        addresses,
    })
}

impl Header {
    /// Refuses what cannot be given, as the specification asks.
    pub fn check(&self) -> Result<(), ImageError> {
        let unknown = self.flags & REQUIREMENTS & !KNOWN_REQUIREMENTS;
        if unknown != 0 {
            return Err(ImageError::Unsupported(format!(
                "its Multiboot header requires an unsupported feature (flags {unknown:#x})"
            )));
        }
        Ok(())
    }

    /// The one segment and the entry, when the header says so itself.
    pub fn flat(&self, file_size: u64) -> Option<Result<(Segment, u64), ImageError>> {
        (self.flags & HAS_ADDRESSES != 0).then(|| self.flat_segment(file_size))
    }

    fn flat_segment(&self, file_size: u64) -> Result<(Segment, u64), ImageError> {
        let malformed = |problem: String| ImageError::Malformed {
            place: "Multiboot header",
            problem,
        };
        let [header, load, load_end, bss_end, entry] = self.addresses.map(u64::from);
        let start = header
            .checked_sub(load)
            .and_then(|before| (self.offset as u64).checked_sub(before))
            .ok_or_else(|| malformed(format!("loaded from {load:#x}, header at {header:#x}")))?;
        let end = match load_end {
            0 => file_size,
            load_end => load_end
                .checked_sub(load)
                .map(|length| start + length)
                .ok_or_else(|| malformed(format!("from {load:#x} to {load_end:#x}")))?,
        };
        if start > end || end > file_size {
            return Err(ImageError::Truncated {
                what: "the bytes that its Multiboot header loads",
                needed: end,
                has: file_size,
            });
        }
        let in_file = end - start;
        let size = match bss_end {
            0 => in_file,
            bss_end => in_file.max(bss_end.saturating_sub(load)),
        };
        let segment = Segment {
            address: load,
            bytes: start..end,
            size,
        };
        if !segment.range().contains(&entry) {
            return Err(malformed(format!("its entry {entry:#x} is not loaded")));
        }
        Ok((segment, entry))
    }
}

/// Writes the table.
pub fn start(
    ram: &Ram,
    entry: u32,
    placed: &Placed,
    places: &Places,
) -> Result<CpuState, BootError> {
    let table = places.information;
    let behind = |offset| (table + offset) as u32;
    let map = memory_map(ram, placed.acpi_tables());
    let mut lines = Vec::new();
    for line in &map {
        lines.extend_from_slice(&20_u32.to_le_bytes());
        lines.extend_from_slice(&line.range.start.to_le_bytes());
        lines.extend_from_slice(&(line.range.end - line.range.start).to_le_bytes());
        lines.extend_from_slice(&(line.kind as u32).to_le_bytes());
    }
    write(ram, table + MEMORY_MAP, &lines)?;
    write(ram, table + LOADER_NAME, b"weft\0")?;

    let upper = map
        .iter()
        .find(|line| line.kind == MemoryKind::Usable && line.range.start == ONE_MIB)
        .map_or(low_end(ram), |line| line.range.end)
        - ONE_MIB;
    let mut words = [0_u32; 29];
    words[0] = HAS_MEMORY | HAS_COMMAND_LINE | HAS_MEMORY_MAP | HAS_LOADER_NAME;
    words[1] = (LOW_RAM_END / 1024) as u32;
    words[2] = (upper / 1024) as u32;
    words[4] = places.command_line as u32;
    words[11] = lines.len() as u32;
    words[12] = behind(MEMORY_MAP);
    words[16] = behind(LOADER_NAME);
    if let Some(initrd) = &placed.initrd {
        // Start, end, no string, reserved.
        let module = [initrd.start as u32, initrd.end as u32, 0, 0];
        let bytes: Vec<u8> = module.iter().flat_map(|word| word.to_le_bytes()).collect();
        write(ram, table + MODULES, &bytes)?;
        words[0] |= HAS_MODULES;
        words[5] = 1;
        words[6] = behind(MODULES);
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    write(ram, table, &bytes)?;

    let mut state = protected_mode(ram, entry, places.gdt)?;
    state.registers[RAX] = LOADER_MAGIC;
    state.registers[RBX] = table;
    Ok(state)
}
