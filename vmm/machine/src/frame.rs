//! What the parts of a machine are attached to.

use std::sync::Arc;

use weft_guest_memory::{DeviceMemory, Ram};
use weft_platform::bus::{Bus, BusDevice};
use weft_platform::clock::Clock;
use weft_platform::interrupts::{InterruptRouter, IoApicPin};

use super::MachineError;
use super::ender::Ender;

/// What everything is attached to.
pub(super) struct Frame {
    pub ram: Ram,
    /// The same for devices.
    pub memory: DeviceMemory,
    pub mmio: Bus,
    pub ports: Bus,
    pub interrupts: Arc<InterruptRouter>,
    pub clock: Arc<Clock>,
    pub ender: Arc<Ender>,
}

impl Frame {
    /// A pin of the I/O APIC.
    pub fn pin(&self, pin: usize) -> Result<IoApicPin, MachineError> {
        self.interrupts.pin(pin).ok_or(MachineError::Pin(pin))
    }

    /// Puts a device behind a range of ports.
    pub fn port(
        &self,
        range: std::ops::Range<u64>,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), MachineError> {
        Ok(self.ports.insert(range, device)?)
    }
}
