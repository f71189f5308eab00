//! The small devices of a PC that need no bus of their own. Each is registers
//! behind one lock, held for a few instructions.
//!
//! | file | ports | interrupt |
//! | --- | --- | --- |
//! | [`serial`] | 0x3f8 to 0x3ff (COM1) | I/O APIC pin 4, edge |
//! | [`cmos`] | 0x70, 0x71 | none: it has no alarm |
//! | [`keyboard`] | 0x64 | none: only its reset line |
//! | [`system_control`] | 0x92 | none: a reset and address line 20 |
//! | [`debug_exit`] | 0xf4 to 0xf7, when asked for | none |
//!
//! Power and reset registers are in [`crate::acpi::power`], the reset control
//! register 0xcf9 in [`crate::pci`]. Ports that nobody answers, such as 0x80 and
//! the other ports for delays and POST codes, read as ones and take all writes.

pub mod cmos;
pub mod debug_exit;
pub mod keyboard;
pub mod serial;
pub mod system_control;
