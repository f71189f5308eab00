//! Observers of writes to guest memory.

/// Hears of guest memory that a device wrote, before the guest is told. A
/// vCPU that keeps decoded code of the page must forget it.
pub trait WriteObserver: Send + Sync {
    /// `length` bytes from guest-physical `address` have changed.
    fn written(&self, address: u64, length: u64);
}
