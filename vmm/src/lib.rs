//! The virtual machine monitor of an Aggregate VM: everything that a guest
//! takes for a computer, each piece placeable on its own.
//!
//! | room | holds |
//! | --- | --- |
//! | [`memory`] | guest RAM and the map of guest-physical addresses |
//! | [`bus`] | which device answers at which address or port |
//! | [`interrupts`] | local APICs, I/O APIC, message-signalled interrupts |
//! | [`vcpu`] | the back ends of a virtual CPU behind one trait |
//!
//! A room may use those above it in this list, and `weft-soft`.

pub mod bus;
pub mod interrupts;
pub mod memory;
pub mod vcpu;
