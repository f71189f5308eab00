//! Interrupts in user space: local APICs, the I/O APIC, and messages between them.
//!
//! ```text
//!  device ──pin──▶ IoApic ─┐                          ┌─▶ PostedInterrupts 0 ◀─ LocalApic
//!  device ──MSI────────────┼─ Interrupt ─▶ Interrupt ─┤     (atomics,          (registers,
//!  LocalApic ──ICR─────────┘  (targets?)    Router    └─▶ PostedInterrupts n    vCPU's thread)
//!                                       deliver(vcpu, Message)
//! ```
//!
//! - An [`Interrupt`] has the destination that the guest wrote. [`InterruptRouter::send`]
//!   finds the vCPUs that it means and calls [`InterruptRouter::deliver`] for each, the only
//!   function that sends. [`Locations`] has the slice of each vCPU. Messages from other
//!   slices arrive in [`InterruptRouter::receive`], and are forwarded if the vCPU has left.
//! - A [`LocalApic`] belongs to its vCPU's thread, and no lock guards its registers. Other
//!   threads use its [`PostedInterrupts`], which are a few atomics: they post interrupts there,
//!   and read the logical identity and priority that the local APIC publishes there.
//! - Only a change of an I/O APIC pin and the EOI of a level-triggered interrupt take a lock,
//!   the I/O APIC's own.

mod io_apic;
mod local_apic;
mod locations;
mod message;
mod posted;
mod router;
mod timer;
mod waker;

pub use io_apic::{IO_APIC_SIZE, IoApic, IoApicState, PINS};
pub use local_apic::{LOCAL_APIC_SIZE, LocalApic, LocalApicState, Mode, Outcome, x2apic};
pub use locations::{EPOCH_MAX, LocationError, Locations, VcpuLocation};
pub use message::{Delivery, Destination, Interrupt, Message};
pub use posted::PostedInterrupts;
pub use router::{InterruptCounters, InterruptLink, InterruptRouter, InterruptTopology, IoApicPin};
pub use timer::TimerState;
pub use waker::VcpuWaker;

/// Where a message-signalled interrupt is written (Intel SDM volume 3, 11.11).
pub trait MessageSink: Send + Sync {
    /// A memory write of `data` to `address` in the local APICs' range.
    fn send(&self, address: u64, data: u32);
}

/// An interrupt line of a device: a pin of the I/O APIC, or what stands for one.
pub trait InterruptLine: Send + Sync {
    /// Drives the line high or low.
    fn set(&self, high: bool);
}
