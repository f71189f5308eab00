//! Interrupts in user space: local APICs, the I/O APIC, and messages between.
//!
//! ```text
//!  device ──line──▶ IoApic ─┐                       ┌─▶ PostedInterrupts 0 ◀─ LocalApic
//!  device ──MSI─────────────┼─ Interrupt ─▶ Hub ────┤      (atomics,          (registers,
//!  LocalApic ──ICR──────────┘   (to whom?)  deliver └─▶ PostedInterrupts n    vCPU's thread)
//!                                           (vcpu, Message)
//! ```
//!
//! - An [`Interrupt`] names its targets as the guest does; [`Hub::send`] finds
//!   which vCPUs those are and gives each a [`Message`] by [`Hub::deliver`], the
//!   one place that sends; on which slice a vCPU is, [`Locations`] says. Those that
//!   come from other slices go through [`Hub::receive`], and after a vCPU that left.
//! - A [`LocalApic`] belongs to its vCPU's thread: its registers are under no
//!   lock. Others reach it through the [`PostedInterrupts`], whose mailbox is a few atomics;
//!   what must be known of it from outside (logical identity, priority) it
//!   publishes there.
//! - Only a line into the I/O APIC and the EOI of a level-triggered interrupt
//!   take a lock, the I/O APIC's own.

mod hub;
mod io_apic;
mod local_apic;
mod locations;
mod message;
mod posted;
mod timer;
mod waker;

pub use hub::{Hub, HubCounters, InterruptLink, InterruptTopology, Line};
pub use io_apic::{IO_APIC_SIZE, IoApic, IoApicState, PINS};
pub use local_apic::{LOCAL_APIC_SIZE, LocalApic, LocalApicState, Mode, Outcome, x2apic};
pub use locations::{LocationError, Locations, Place, VERSION_MAX};
pub use message::{Delivery, Destination, Interrupt, Message};
pub use posted::PostedInterrupts;
pub use timer::TimerState;
pub use waker::VcpuWaker;

/// Where a message-signalled interrupt is written (Intel SDM volume 3, 11.11).
pub trait MessageSink: Send + Sync {
    /// A memory write of `data` to `address` in the local APICs' range.
    fn send(&self, address: u64, data: u32);
}

/// A wire into the I/O APIC.
pub trait InterruptLine: Send + Sync {
    /// Raises or lowers it.
    fn set(&self, high: bool);
}
