//! How a device tells its driver: a message per queue, or the wire and the ISR
//! status (4.1.4.5, 4.1.5.3, 4.1.5.4). A queue may be served elsewhere than its
//! registers are; then it tells them.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use weft_confine::lock;
use weft_platform::pci::Endpoint;

use super::error::DeviceError;
use super::report::Report;

/// No vector (4.1.5.1.3).
pub const NO_VECTOR: u16 = 0xffff;
const ISR_QUEUE: u8 = 1;
const ISR_CONFIGURATION: u8 = 2;

/// The way from a queue to its driver where the registers are elsewhere. Never waits.
pub trait FarRegisters: Send + Sync {
    /// Buffers of the queue were used.
    fn queue(&self, index: u16);
    /// What the driver reads as configuration changed.
    fn configuration(&self);
    /// The device stopped, for this reason.
    fn fail(&self, reason: &str);
}

/// Where a device's registers are.
enum Registers {
    Here(Arc<Endpoint>),
    Far(Arc<dyn FarRegisters>),
}

/// The way from a device to its driver. Shared by all of its threads.
pub struct Interrupt {
    registers: Registers,
    /// Held while the wire is set, so that it agrees with the status.
    isr: Mutex<u8>,
    configuration_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
    needs_reset: AtomicBool,
    report: Report,
    sent: AtomicU64,
    faults: AtomicU64,
}

impl Interrupt {
    pub(super) fn new(endpoint: Arc<Endpoint>, queues: usize, name: &str) -> Self {
        Self::with(Registers::Here(endpoint), queues, name)
    }

    /// For queues whose registers are elsewhere.
    pub fn far(registers: Arc<dyn FarRegisters>, name: &str) -> Self {
        Self::with(Registers::Far(registers), 0, name)
    }

    fn with(registers: Registers, queues: usize, name: &str) -> Self {
        Self {
            registers,
            isr: Mutex::new(0),
            configuration_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            needs_reset: AtomicBool::new(false),
            report: Report::new(name),
            sent: AtomicU64::new(0),
            faults: AtomicU64::new(0),
        }
    }

    /// Buffers of the queue were used.
    pub fn queue(&self, index: u16) {
        if let Registers::Far(far) = &self.registers {
            self.sent.fetch_add(1, Ordering::Relaxed);
            return far.queue(index);
        }
        if let Some(vector) = self.queue_vectors.get(usize::from(index)) {
            self.send(vector.load(Ordering::Relaxed), ISR_QUEUE);
        }
    }

    /// The device's configuration changed.
    pub fn configuration(&self) {
        if let Registers::Far(far) = &self.registers {
            return far.configuration();
        }
        let vector = self.configuration_vector.load(Ordering::Relaxed);
        self.send(vector, ISR_CONFIGURATION);
    }

    /// The driver did what it must not: shows DEVICE_NEEDS_RESET (2.1.2).
    pub fn fail(&self, error: &DeviceError) {
        self.faults.fetch_add(1, Ordering::Relaxed);
        self.report.say(format_args!(
            "{error}; the device stops until its driver resets it"
        ));
        if !self.needs_reset.swap(true, Ordering::AcqRel) {
            match &self.registers {
                Registers::Here(_) => self.configuration(),
                Registers::Far(far) => far.fail(&error.to_string()),
            }
        }
    }

    /// Says something about this device, if there was not too much lately.
    pub fn say(&self, message: impl std::fmt::Display) {
        self.report.say(message);
    }

    /// Whether the device has stopped.
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Interrupts and faults so far.
    pub fn counts(&self) -> (u64, u64) {
        (
            self.sent.load(Ordering::Relaxed),
            self.faults.load(Ordering::Relaxed),
        )
    }

    /// Reads and clears the ISR status; the wire goes low.
    pub(super) fn take_isr(&self) -> u8 {
        let mut isr = lock(&self.isr);
        let status = std::mem::take(&mut *isr);
        if let Registers::Here(endpoint) = &self.registers {
            endpoint.set_intx(false);
        }
        status
    }

    pub(super) fn isr(&self) -> u8 {
        *lock(&self.isr)
    }

    /// The vector of a queue, or of the configuration for `None`.
    pub(super) fn vector(&self, queue: Option<u16>) -> u16 {
        self.vector_cell(queue)
            .map_or(NO_VECTOR, |cell| cell.load(Ordering::Relaxed))
    }

    pub(super) fn set_vector(&self, queue: Option<u16>, vector: u16) {
        // A vector that is not there reads back as none (4.1.5.1.3.1).
        let there = usize::from(vector) <= self.queue_vectors.len();
        if let Some(cell) = self.vector_cell(queue) {
            cell.store(if there { vector } else { NO_VECTOR }, Ordering::Relaxed);
        }
    }

    pub(super) fn reset(&self) {
        self.take_isr();
        self.needs_reset.store(false, Ordering::Release);
        self.configuration_vector
            .store(NO_VECTOR, Ordering::Relaxed);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::Relaxed);
        }
    }

    pub(super) fn restore(&self, isr: u8, needs_reset: bool) {
        *lock(&self.isr) = isr;
        self.needs_reset.store(needs_reset, Ordering::Release);
    }

    fn vector_cell(&self, queue: Option<u16>) -> Option<&AtomicU16> {
        match queue {
            Some(index) => self.queue_vectors.get(usize::from(index)),
            None => Some(&self.configuration_vector),
        }
    }

    fn send(&self, vector: u16, cause: u8) {
        let Registers::Here(endpoint) = &self.registers else {
            return;
        };
        self.sent.fetch_add(1, Ordering::Relaxed);
        if endpoint.messages() {
            endpoint.signal(vector);
        } else {
            let mut isr = lock(&self.isr);
            *isr |= cause;
            endpoint.set_intx(true);
        }
    }
}
