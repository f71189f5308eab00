//! One PCI bus: a host bridge and functions with capabilities, memory windows,
//! MSI-X, and INTx as fallback.
//!
//! ```text
//! vCPU ── ECAM, ports 0xcf8/0xcfc ──> Root ── slot ──> Function
//!                                                        │ Endpoint: registers, BARs, MSI-X
//! vCPU ── memory-mapped access ──> Bus <── inserts BARs ─┘
//! device thread ── Endpoint::signal ──> MessageSink (MSI-X) or Pin (INTx)
//! ```
//!
//! Invariants: a BAR is in the bus exactly when memory decoding is on and its
//! address lies in a window of the host bridge; a masked vector is never
//! delivered and never forgotten. Lock order: a function's registers, then its
//! MSI-X table, then a pin, then the bus's map.
//!
//! Sources: PCI Local Bus 3.0 chapter 6; PCI Express 4.0 section 7.2.2 (ECAM).

mod configuration;
mod endpoint;
mod msix;
mod pin;
mod root;

use std::ops::Range;

use thiserror::Error;
use weft_guest_memory::{DEVICE_HOLE, PCI_WINDOW_END};

pub use configuration::Identity;
pub use endpoint::{Bar, Endpoint, EndpointOptions, EndpointState};
pub use msix::{MsixState, PENDING, Vector};
pub use pin::Pin;
pub use root::{Root, RootOptions, RootState, Slot};

/// Slots of the one bus; slot 0 is the host bridge.
pub const SLOTS: u8 = 32;
/// The I/O APIC pin of the first INTx line of the bus.
pub const FIRST_PIN: u32 = 16;
/// INTx lines that the slots share.
pub const PINS: u32 = 8;

/// The I/O APIC pin of INTA of `slot`, as in the DSDT's _PRT.
pub const fn pin_of_slot(slot: u8) -> u32 {
    FIRST_PIN + slot as u32 % PINS
}

/// The guest-physical addresses that BARs may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Below 4 GiB; addresses are assigned from here.
    pub low: Range<u64>,
    /// Above the RAM.
    pub high: Range<u64>,
}

impl Windows {
    /// The hole below 4 GiB, and `high`, as in the ACPI tables.
    pub fn new(high: Range<u64>) -> Self {
        Self {
            low: DEVICE_HOLE..PCI_WINDOW_END,
            high,
        }
    }

    fn holds(&self, range: &Range<u64>) -> bool {
        let inside = |window: &Range<u64>| window.start <= range.start && range.end <= window.end;
        inside(&self.low) || inside(&self.high)
    }
}

/// The configuration space of a function. `register` plus the length of `data` (1 to 4) is at
/// most 4096.
pub trait Function: Send + Sync {
    fn read(&self, register: u16, data: &mut [u8]);
    fn write(&self, register: u16, data: &[u8]);
}

/// Why a function cannot be added or restored.
#[derive(Debug, Error)]
pub enum PciError {
    /// The bus is full.
    #[error("all {SLOTS} PCI slots are taken")]
    NoSlot,
    /// The window for BARs is full.
    #[error("no space for a BAR of {0:#x} bytes in the window below 4 GiB")]
    NoAddress(u64),
    /// The addresses of the bus's own registers are in use.
    #[error("the PCI root's own registers cannot be placed")]
    Placement(#[from] crate::bus::Overlap),
    /// The saved state is of another machine.
    #[error("saved PCI state does not fit this machine: {0}")]
    State(&'static str),
}
