//! Interrupts in user space: local APICs, the I/O APIC, and messages between.

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
