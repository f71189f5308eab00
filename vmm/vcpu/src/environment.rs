//! What a vCPU needs from outside, whichever back end runs it.

use std::time::Duration;

use thiserror::Error;

/// Bytes in a page of guest memory.
pub const PAGE_SIZE: u64 = 4096;

/// What an access needs of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The page's bytes, which others may hold as well.
    Read,
    /// The right to change them: nobody else holds the page.
    Write,
}

/// Consecutive guest-physical pages that a vCPU used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The number of the first page.
    pub first: u64,
    /// Pages, one at least.
    pub count: u64,
    /// What it is expected to do with them.
    pub access: Access,
}

/// The address is no memory: a device's, or nobody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("guest-physical page {0:#x} is not memory")]
pub struct Unbacked(pub u64);

/// What a vCPU wants a page for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A load or a store.
    Data,
    /// A page table on the way to an address.
    Table,
    /// Instructions.
    Code,
}

/// The origin of a page request, for statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// Local APIC identifier.
    pub vcpu: u32,
    /// At privilege level 3.
    pub user: bool,
    pub purpose: Purpose,
    /// Linear address of the access; for a table, the one that is translated.
    pub address: u64,
    /// Linear address of the first instruction of the block that is executed: the
    /// instruction itself is a few further on.
    pub rip: u64,
    /// Base of GS outside level 3, where 64-bit kernels keep what belongs to one
    /// CPU; else 0.
    pub gs_base: u64,
}

/// Guest-physical memory, page by page.
///
/// `acquire` may take long, because a page may be on another node. It returns with the page
/// pinned: the page does not leave before `unpin`. After that the address stays valid until
/// the vCPU has acknowledged a request to give the page up (`Demand` of the software vCPU),
/// so the caller may keep it in its TLB.
pub trait Memory: Send + Sync {
    /// The host address of the page that starts at guest-physical `page` (a multiple of
    /// [`PAGE_SIZE`]), pinned for `access`.
    fn acquire(&self, page: u64, access: Access) -> Result<*mut u8, Unbacked>;

    /// `acquire`, with the origin of the request.
    fn acquire_for(&self, page: u64, access: Access, asker: &Asker) -> Result<*mut u8, Unbacked> {
        let _ = asker;
        self.acquire(page, access)
    }

    /// The same without waiting and without a pin; `None` if the page is not here with that
    /// right. Called first, and often.
    fn held(&self, page: u64, access: Access) -> Option<*mut u8> {
        let _ = (page, access);
        None
    }

    /// `acquire` for all of `pages` (each a multiple of [`PAGE_SIZE`]) if that needs no
    /// waiting, else for none of them. The caller must `unpin` each soon, and wait for nothing
    /// before.
    fn acquire_held(&self, pages: &[u64], access: Access) -> bool {
        let _ = (pages, access);
        false
    }

    /// Removes the pin of a successful `acquire`, exactly once. The vCPU is inside guest code,
    /// where it acknowledges requests to give pages up, or does not use the page. Never blocks.
    fn unpin(&self, page: u64) {
        let _ = page;
    }

    /// `unpin` by a vCPU. If this returns true, work was deferred until pins were removed:
    /// the vCPU calls [`Memory::do_deferred_work`] after its current block of guest code, and
    /// before it waits for anything.
    fn unpin_and_check(&self, page: u64) -> bool {
        self.unpin(page);
        false
    }

    /// Does the work that was deferred until pins were removed. The vCPU is outside guest
    /// code: pages may be taken from it.
    fn do_deferred_work(&self) {}

    /// One more than the highest guest-physical address that is memory.
    fn end(&self) -> u64;
}

/// The machine around one vCPU. Called on the vCPU's thread.
///
/// Sizes are 1, 2, 4 or 8 bytes for memory-mapped I/O, 1, 2 or 4 for ports.
/// What nobody answers reads as ones and is written to nowhere.
pub trait Environment {
    /// The guest's TSC as of the call that follows, where instructions are the
    /// clock: the environment cannot know it then. Called before every other
    /// call of a deterministic vCPU, and by no other.
    fn set_now(&mut self, tsc: u64) {
        let _ = tsc;
    }
    /// Reads a device's register.
    fn mmio_read(&mut self, address: u64, data: &mut [u8]);
    /// Writes a device's register.
    fn mmio_write(&mut self, address: u64, data: &[u8]);
    fn port_read(&mut self, port: u16, data: &mut [u8]);
    /// OUT.
    fn port_write(&mut self, port: u16, data: &[u8]);
    /// A model-specific register that is not the vCPU's own (the local APIC's
    /// base and timer, the paravirtual clock): `None` raises #GP(0).
    fn msr_read(&mut self, index: u32) -> Option<u64>;
    /// Whether the write was taken; `false` raises #GP(0).
    fn msr_write(&mut self, index: u32, value: u64) -> bool;
    /// Whether an interrupt of sufficient priority waits. From no to yes it
    /// changes only by a call of the vCPU itself on this trait, or with a kick.
    fn interrupt_waits(&mut self) -> bool;
    /// Takes the waiting interrupt of the highest priority into service. Called
    /// only when the vCPU delivers it at once.
    fn interrupt_take(&mut self) -> Option<u8>;
    /// Whether a non-maskable interrupt waits; takes it.
    fn nmi_take(&mut self) -> bool;
    /// CR8, the task priority (bits 7 to 4 of the local APIC's TPR).
    fn task_priority(&mut self) -> u8;
    /// Sets CR8.
    fn set_task_priority(&mut self, priority: u8);
}

/// Why a vCPU came back to its thread's loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// HLT with nothing to deliver: wait for an interrupt.
    Halted,
    /// Somebody asked for attention (`Kick`).
    Kicked,
    /// A fault while a double fault was delivered: the machine resets.
    TripleFault,
    /// The deterministic clock reached its deadline, or its instruction budget
    /// is used up.
    Deadline,
}

/// A vCPU did not come to a block boundary in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a vCPU did not answer within {0:?}")]
pub struct NotAnswered(pub Duration);
