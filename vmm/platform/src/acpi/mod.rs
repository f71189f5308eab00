//! ACPI tables, which describe the machine to an unmodified kernel (ACPI Specification 6.5).
//!
//! | file | holds |
//! | --- | --- |
//! | [`topology`] | the NUMA nodes: their CPUs and memory |
//! | `tables` | RSDP, XSDT, FADT, FACS, MADT, SRAT, SLIT, MCFG |
//! | `dsdt` | the devices that a kernel cannot discover by itself, in AML |
//! | [`power`] | the registers of the tables: power off, reset, button |
//!
//! The machine is *hardware-reduced* (4.1): it has none of the fixed ACPI
//! registers of old PCs, no SCI, and, as there is no 8259, PIT or HPET either, a
//! kernel must not look for them. Linux then takes the I/O APIC as the only
//! interrupt controller and the local APIC or TSC as the only timers, without a
//! warning. Power off and reset are plain registers.

mod dsdt;
pub mod power;
mod tables;
#[cfg(test)]
mod tests;
pub mod topology;

use std::ops::Range;

use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};
use weft_guest_memory::{FOUR_GIB, Ram};

pub use topology::Node;

/// The address of the RSDP, the first table: in the firmware's area, so that a kernel that is
/// not given the address finds it by a search.
pub const TABLES: u64 = 0xe_0000;
/// The tables end below this address.
pub const TABLES_END: u64 = 0xe_f000;
/// The address of the FACS (5.2.10), aligned to 64 bytes. System and firmware share it for as
/// long as the system runs, so it is in reserved memory, after the pages that become RAM once
/// the tables were read.
pub const FACS: u64 = TABLES_END;
/// Most CPUs: an xAPIC has eight bits for a CPU's number, and 255 means all CPUs.
pub const CPUS_MAX: usize = 255;
/// Most nodes of memory: Linux supports 64 in Debian's configuration.
pub const NODES_MAX: usize = 64;
/// Input of the I/O APIC for COM1.
pub const SERIAL_LINE: u32 = 4;
/// Input of the I/O APIC for events: level-triggered, active high.
pub const EVENT_LINE: u32 = 9;
/// Ports of COM1.
pub const SERIAL_PORTS: Range<u16> = 0x3f8..0x400;
/// The identifier of the I/O APIC in the MADT. CPU 0's local APIC has the same number.
pub const IO_APIC_ID: u8 = 0;

/// Size of the window for 64-bit BARs.
const HIGH_WINDOW_BYTES: u64 = 16 << 30;
const GIB: u64 = 1 << 30;
const PAGE: u64 = 4096;

/// The window for 64-bit BARs: above all RAM.
pub fn high_window(ram: &Ram) -> Range<u64> {
    let start = ram.high_end().max(FOUR_GIB).next_multiple_of(GIB);
    start..start + HIGH_WINDOW_BYTES
}

/// What the tables describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The nodes with all CPUs and all memory. CPU n has local APIC n.
    pub nodes: Vec<Node>,
    /// The window for 64-bit BARs.
    pub high_window: Range<u64>,
    /// Whether a clock of the MC146818 kind is at port 0x70.
    pub real_time_clock: bool,
}

/// Why the tables cannot be made.
#[derive(Debug, Error)]
pub enum AcpiError {
    /// No CPUs, too many, or a number that occurs twice.
    #[error(
        "CPUs of the nodes: {0:?}: each number from 0 up must occur once, and there may be \
    {CPUS_MAX}"
    )]
    Cpus(Vec<u8>),
    /// No nodes, or too many.
    #[error("{0} nodes of memory: the number must be 1 to {NODES_MAX}")]
    Nodes(usize),
    /// Ranges of memory of two nodes overlap, or a range is empty.
    #[error("the memory from {:#x} to {:#x} belongs to two nodes, or is empty", .0.start, .0.end)]
    Memory(Range<u64>),
    /// The tables are larger than their area.
    #[error("the ACPI tables need {0} bytes, but {room} are available", room = TABLES_END - TABLES)]
    Room(u64),
    /// The area of the tables is not memory.
    #[error("guest memory at {TABLES:#x} cannot be written")]
    Write(#[source] vm_memory::GuestMemoryError),
}

/// Tables in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Guest-physical address of the RSDP.
    pub rsdp: u64,
    /// Guest-physical addresses of the tables, whole pages.
    pub range: Range<u64>,
}

/// Writes the tables to guest memory.
pub fn place(ram: &Ram, description: &Description) -> Result<Placed, AcpiError> {
    topology::check(&description.nodes)?;
    let bytes = tables::build(description, TABLES);
    let length = bytes.len() as u64;
    if length > TABLES_END - TABLES {
        return Err(AcpiError::Room(length));
    }
    for (address, bytes) in [(TABLES, bytes), (FACS, tables::facs())] {
        ram.guest()
            .write_slice(&bytes, GuestAddress(address))
            .map_err(AcpiError::Write)?;
    }
    Ok(Placed {
        rsdp: TABLES,
        range: TABLES..TABLES + length.next_multiple_of(PAGE),
    })
}
