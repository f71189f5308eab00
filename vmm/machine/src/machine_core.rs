//! The machine core: what the parts of a machine are attached to.

use std::sync::Arc;

use weft_guest_memory::{DeviceMemory, Ram};
use weft_platform::bus::Bus;
use weft_platform::clock::Clock;
use weft_platform::interrupts::{InterruptRouter, IoApicPin};

use super::MachineError;
use super::shutdown::Shutdown;

/// RAM, buses, interrupt router and clock.
pub(super) struct MachineCore {
    pub ram: Ram,
    /// Guest memory for devices: coherent if the machine has several slices.
    pub memory: DeviceMemory,
    pub mmio: Bus,
    pub ports: Bus,
    pub interrupts: Arc<InterruptRouter>,
    pub clock: Arc<Clock>,
    pub shutdown: Arc<Shutdown>,
}

impl MachineCore {
    /// A pin of the I/O APIC.
    pub fn pin(&self, pin: usize) -> Result<IoApicPin, MachineError> {
        self.interrupts.pin(pin).ok_or(MachineError::Pin(pin))
    }
}
