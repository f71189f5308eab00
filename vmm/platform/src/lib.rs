//! The platform of a PC: what lies between vCPUs and devices.
//!
//! | room | holds |
//! | --- | --- |
//! | [`bus`] | which device answers at which address or port |
//! | [`part`] | what every device and controller can: stand still, save, restore |
//! | [`role`] | which slice of a machine over several nodes has a role |
//! | [`clock`] | guest time: TSC, alarms, the paravirtual clock |
//! | [`interrupts`] | local APICs, I/O APIC, message-signalled interrupts |
//! | [`pci`] | the bus that devices sit on |
//! | [`acpi`] | ACPI tables, and the registers that they speak of |
//! | [`devices`] | the small devices of a PC: serial port, clock, resets |
//!
//! A room may use those above it in this list.

pub mod acpi;
pub mod bus;
pub mod clock;
pub mod devices;
pub mod interrupts;
pub mod part;
pub mod pci;
pub mod role;
