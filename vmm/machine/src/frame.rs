//! What the parts of a machine are attached to.

use std::sync::Arc;

use weft_guest_memory::{DeviceMemory, Ram};
use weft_platform::bus::{Bus, BusDevice};
use weft_platform::clock::Clock;
use weft_platform::interrupts::{InterruptRouter, Line};

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
    /// A wire into the I/O APIC.
    pub fn line(&self, pin: usize) -> Result<Line, MachineError> {
        self.interrupts.line(pin).ok_or(MachineError::Pin(pin))
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
