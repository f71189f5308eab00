//! Virtio 1.2 devices over PCI, each the same small set of files: `mod` (the
//! device and its options), `handler` (what its threads do), `persist` (its
//! state).
//!
//! ```text
//! attach ──> Idle ──DRIVER_OK──> Running ──status := 0──> Resetting ──quiet──> Idle
//!                                │     ^
//!                              pause  resume
//!                                v     │
//!                                Paused ── save ──> state ── restore ──> Paused
//! ```
//!
//! Invariants: a ring belongs to exactly one [`Handler`], and a handler either
//! to one [`worker::Worker`]'s thread or, paused, to the [`Transport`]; a paused
//! or reset device has no I/O in flight; a vCPU's thread only writes registers
//! and eventfds. What a driver gets wrong becomes a [`DeviceError`]: the device stops,
//! shows DEVICE_NEEDS_RESET, and waits for a reset.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.2, OASIS; sections are named
//! where they are used.

pub mod balloon;
pub mod block;
pub mod console;
mod error;
#[cfg(any(test, feature = "fake-driver"))]
pub mod fake_driver;
pub mod interrupt;
pub mod net;
mod report;
pub mod ring;
pub mod rng;
pub mod transport;
mod vectors;
pub mod worker;

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_confine::{ThreadKind, lock};
use weft_platform::pci::PciError;

pub use error::DeviceError;
pub use ring::Ring;
pub use transport::{
    Attach, Counters, NOTIFY_MULTIPLIER, NotificationRoutes, RouteObserver, Transport,
    TransportState,
};
pub use worker::Handler;

/// VIRTIO_F_INDIRECT_DESC (6): descriptors may point to tables of descriptors.
pub const FEATURE_INDIRECT: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX (6): both sides say when they want to hear.
pub const FEATURE_EVENT_INDEX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1 (6): the only version here.
pub const FEATURE_VERSION_1: u64 = 1 << 32;
/// What the transport offers for every device.
pub const TRANSPORT_FEATURES: u64 = FEATURE_INDIRECT | FEATURE_EVENT_INDEX | FEATURE_VERSION_1;

/// What kind of device it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Virtio device ID (5).
    pub id: u16,
    /// PCI class code: 24 bits.
    pub class: u32,
    /// Short name, for threads and messages.
    pub name: &'static str,
}

/// A device type behind the transport.
pub trait VirtioDevice: Send {
    fn kind(&self) -> Kind;
    /// Features beside the transport's own.
    fn features(&self) -> u64;
    /// Largest size of each queue: powers of two.
    fn queue_sizes(&self) -> Vec<u16>;
    /// Threads that it wants.
    fn workers(&self) -> usize;
    /// What they do, and so what they may ask of the kernel.
    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Device
    }
    /// What the driver reads as device configuration.
    fn configuration(&self) -> Arc<ConfigSpace>;
    /// The driver is ready and took `features`. `rings` has one entry per
    /// queue, empty for those that the driver left off. Returns at most
    /// `workers()` handlers.
    fn activate(
        &mut self,
        features: u64,
        rings: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError>;
    /// The driver wants it as at first; called while no handler is at work.
    fn reset(&mut self) {}
    /// The device's own counters, with their names; requests and interrupts are counted
    /// for every device.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// What it is beside queues and registers; called while paused.
    fn save(&self) -> DeviceState;
    /// Becomes `state`; called before `activate`.
    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError>;
    /// Frames for the device come here from now on, not to that of another process.
    fn announce(&mut self) {}
    /// The same device of another process may claim what this one uses of its host; called
    /// while paused.
    fn release_backing(&mut self) {}
    /// Uses what a device of another process has released, or takes back what it released
    /// itself; called while paused.
    ///
    /// # Errors
    /// Why it cannot be used, as a sentence.
    fn claim_backing(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// Device state of each type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    Block(block::Geometry),
    Console(console::ConsoleState),
    Balloon(balloon::BalloonState),
    Net(net::NetState),
    /// Entropy.
    Rng(rng::RngState),
}

/// Saved state that is of something else.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("saved state does not fit this device: {0}")]
pub struct StateError(pub &'static str);

/// Why a device cannot be attached, paused or restored.
#[derive(Debug, Error)]
pub enum VirtioError {
    /// The bus refused.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// No thread, or no eventfd.
    #[error("cannot start the threads of {device}")]
    Start {
        device: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// I/O in flight did not end.
    #[error("{device} still has I/O in flight after {milliseconds} ms")]
    Busy {
        device: String,
        /// How long it was waited for.
        milliseconds: u128,
    },
    /// Saved state of another device.
    #[error("{device}")]
    State {
        device: String,
        /// Why.
        source: StateError,
    },
    /// The driver's queues as saved are no queues.
    #[error("the saved queues of {device} cannot be used")]
    Queues {
        device: String,
        /// Why.
        source: DeviceError,
    },
}

/// Device configuration, as its driver reads it (2.5).
#[derive(Debug, Default)]
pub struct ConfigSpace {
    bytes: Mutex<Vec<u8>>,
    /// Offsets of bytes that the driver may write.
    writable: Vec<Range<usize>>,
    generation: AtomicU8,
}

impl ConfigSpace {
    /// Those bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes: Mutex::new(bytes),
            ..Self::default()
        }
    }

    /// These bytes; the driver may write the ranges `writable`.
    pub fn with_writable(bytes: Vec<u8>, writable: impl Into<Vec<Range<usize>>>) -> Self {
        Self {
            writable: writable.into(),
            ..Self::new(bytes)
        }
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        lock(&self.bytes).len()
    }

    /// Changes with the bytes.
    pub fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// Reads; zero beyond the end.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let bytes = lock(&self.bytes);
        for (at, byte) in (offset as usize..).zip(data) {
            *byte = bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// The driver writes: what it may not change stays.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = lock(&self.bytes);
        for (at, new) in (offset as usize..).zip(data) {
            let writable = self.writable.iter().any(|range| range.contains(&at));
            if let Some(old) = bytes.get_mut(at).filter(|_| writable) {
                *old = *new;
            }
        }
    }

    /// Changes the bytes from `offset` on; what lies beyond the end is lost.
    pub fn set(&self, offset: usize, data: &[u8]) {
        let mut bytes = lock(&self.bytes);
        for (old, new) in bytes.iter_mut().skip(offset).zip(data) {
            *old = *new;
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// A copy.
    pub fn bytes(&self) -> Vec<u8> {
        lock(&self.bytes).clone()
    }
}
