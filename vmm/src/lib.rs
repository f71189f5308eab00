//! The virtual machine monitor of an Aggregate VM: everything that a guest
//! takes for a computer, each piece placeable on its own.
//!
//! | room | holds |
//! | --- | --- |
//! | [`memory`] | guest RAM and the map of guest-physical addresses |
//! | [`bus`] | which device answers at which address or port |
//! | [`part`] | what every device and controller can: stand still, save, restore |
//! | [`confine`] | what the process may still do once a guest runs |
//! | [`clock`] | guest time: TSC, alarms, the paravirtual clock |
//! | [`interrupts`] | local APICs, I/O APIC, message-signalled interrupts |
//! | [`pci`] | the bus that devices sit on |
//! | [`virtio`] | block, network, console and entropy devices |
//! | [`console`] | the guest's console on a terminal, pipes or a socket |
//! | [`devices`] | the small devices of a PC: serial port, clock, resets |
//! | [`acpi`] | ACPI tables, and the registers that they speak of |
//! | [`boot`] | kernels of every format, put into guest memory |
//! | [`vcpu`] | the back ends of a virtual CPU behind one trait |
//! | [`slice`] | one slice among several: shared memory, messages, links |
//! | [`machine`] | the parts put together, and their life |
//! | [`api`] | HTTP at a UNIX socket: state, pause, resume, stop, counters |
//!
//! A room may use those above it in this list, and `weft-soft`.

pub mod acpi;
pub mod api;
pub mod boot;
pub mod bus;
pub mod clock;
pub mod confine;
pub mod console;
pub mod devices;
pub mod interrupts;
mod join;
pub mod machine;
pub mod memory;
pub mod part;
pub mod pci;
#[cfg(test)]
#[path = "../soft/tests/support/random.rs"]
mod random;
#[cfg(test)]
#[path = "../tests/support/skipped.rs"]
mod skipped;
pub mod slice;
pub mod vcpu;
pub mod virtio;
