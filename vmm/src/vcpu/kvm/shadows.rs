//! Shadows of the guest's page tables, where the processor has no second level of
//! its own and the guest's memory is shared with other slices.
//!
//! KVM derives its tables from the guest's and finds out about changes by write
//! protection: a change that another slice makes goes unseen. So before another
//! slice may write to a page, all shadows are given up, unless none can have come
//! from it. Only the last of these steps waits, and it is done by who gains by it:
//!
//! ```text
//! a page is taken: unmap it ─▶ close the gate ─▶ interrupt every vCPU, until none
//!                                                is in guest mode
//! a vCPU: comes out of KVM_RUN ─▶ finds the gate closed ─▶ drops all shadows ─▶ enters
//! ```
//!
//! To drop them is to move a memory slot that nobody uses: KVM then forgets all that
//! it derived. That waits until no vCPU is in KVM_RUN, and one may be there asleep on
//! a page that another slice has; so whoever takes a page must not wait for it, or
//! two slices would wait for each other.
//!
//! Invariants:
//!
//! - The gate is closed while more was asked for than was dropped. A vCPU looks at
//!   it after the last time it cleared its `immediate_exit`; who closes it sets that
//!   flag afterwards, and then signals. So a vCPU sees the one or is stopped by the
//!   other.
//! - When [`ShadowGate::taken`] returns, no processor executes the guest by a shadow
//!   that came from the page, nor will one before all shadows were dropped.
//!
//! # Which pages
//!
//! Claim: where a page that was unmapped has no word that is an entry in use (present,
//! accessed, no reserved bit), no shadow that came from it is used unless KVM reads
//! the page again first. For a shadow that KVM keeps in step with its page, each
//! entry came from a word that is still there and in use: the vCPUs' writes to it
//! are seen, and before KVM makes an entry it reads the word once more under its
//! lock, which fails while the page is not mapped. A shadow that KVM lets go out of
//! step it compares with the page at the guest's next flush of the TLB, and before it
//! uses it elsewhere.
//!
//! Writes that KVM does not see would break this (devices, the paravirtual clock,
//! instructions that are done by `quirks`): such pages are marked, and count as
//! tables until shadows were dropped.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use super::KvmError;
use super::kick::Bell;
use crate::memory::Marks;

/// Where the slot that is moved lies, in turns: no memory or device is there.
const PLACES: [u64; 2] = [0xfffb_a000, 0xfffb_b000];
/// Its number: those before are RAM's.
const SLOT: u32 = 2;
const PAGE: usize = 4096;
/// Bits of an entry in use: present and accessed. KVM sets the second before it
/// makes an entry of its own, and what it takes ahead must have it.
const IN_USE: u64 = 1 | 1 << 5;
/// Bits of an address in an entry; those that no address has are reserved.
const ADDRESS_BITS: u32 = 52;
/// Commands of membarrier(2).
const EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_EXPEDITED: libc::c_int = 1 << 4;

/// A page for KVM to have in its slot.
#[repr(C, align(4096))]
struct Spare([u8; PAGE]);

/// The gate before guest mode.
pub struct ShadowGate {
    /// Times that all shadows had to go.
    asked: AtomicU64,
    /// Up to which of these they are gone.
    dropped: AtomicU64,
    /// Which of `PLACES` the slot is at; held while it moves.
    place: Mutex<usize>,
    spare: Box<Spare>,
    /// Of all vCPUs here; held for moments.
    bells: Mutex<Vec<Arc<Bell>>>,
    /// Pages that were written to unseen.
    marks: Arc<Marks>,
    /// Bits that no entry in use has.
    reserved: u64,
    /// Pages that were taken and cannot have been tables.
    spared: AtomicU64,
    /// Moves of the slot.
    moves: AtomicU64,
}

impl ShadowGate {
    /// For a machine without vCPUs yet. `address_bits`: of the guest's physical
    /// addresses.
    pub(super) fn new(
        vm: &VmFd,
        marks: Arc<Marks>,
        address_bits: u32,
    ) -> Result<Arc<Self>, KvmError> {
        membarrier(REGISTER_EXPEDITED).map_err(|source| KvmError::Call {
            what: "membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)",
            source,
        })?;
        let gate = Self {
            asked: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            place: Mutex::new(0),
            spare: Box::new(Spare([0; PAGE])),
            bells: Mutex::default(),
            marks,
            reserved: reserved(address_bits),
            spared: AtomicU64::new(0),
            moves: AtomicU64::new(0),
        };
        gate.put(vm, PLACES[0])?;
        Ok(Arc::new(gate))
    }

    fn put(&self, vm: &VmFd, address: u64) -> Result<(), KvmError> {
        let region = kvm_userspace_memory_region {
            slot: SLOT,
            flags: 0,
            guest_phys_addr: address,
            memory_size: PAGE as u64,
            userspace_addr: self.spare.0.as_ptr() as u64,
        };
        // SAFETY: the page is the gate's, which lives as long as the machine
        // (`Shared` has both); nobody else uses it.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(|error| KvmError::call("KVM_SET_USER_MEMORY_REGION", error))
    }

    /// One more vCPU stops at it.
    pub(super) fn add(&self, bell: Arc<Bell>) {
        self.bells
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(bell);
    }

    /// Whether shadows have to go before a vCPU may enter the guest.
    pub(super) fn is_closed(&self) -> bool {
        self.asked.load(Ordering::SeqCst) != self.dropped.load(Ordering::SeqCst)
    }

    /// Drops all shadows, if they have to go. On a vCPU's thread, outside of KVM_RUN.
    pub(super) fn open(&self, vm: &VmFd) -> Result<(), KvmError> {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        while self.is_closed() {
            let asked = self.asked.load(Ordering::SeqCst);
            // A mark that comes from now on stays; those before go with the shadows.
            self.marks.clear();
            *place = 1 - *place;
            self.put(vm, PLACES[*place])?;
            self.moves.fetch_add(1, Ordering::Relaxed);
            self.dropped.store(asked, Ordering::SeqCst);
        }
        Ok(())
    }

    /// A page, with its words, was taken from the vCPUs and is unmapped. When this
    /// returns, what came from it is in no use.
    pub fn taken<'a>(
        &self,
        address: u64,
        words: impl Iterator<Item = &'a AtomicU64>,
    ) -> io::Result<()> {
        if !self.marks.has(address) && !self.may_be_table(words) {
            self.spared.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        self.asked.fetch_add(1, Ordering::SeqCst);
        for bell in &*self.bells.lock().unwrap_or_else(PoisonError::into_inner) {
            bell.interrupt();
        }
        // The signals are on their way; this one waits until every processor that
        // runs a thread of ours was interrupted, and so left guest mode, which it
        // does not enter with a signal pending.
        membarrier(EXPEDITED)
    }

    /// The page is written to where KVM does not see it.
    pub fn written(&self, address: u64) {
        self.marks.set(address);
    }

    /// Whether an entry of KVM's may come from one of these words.
    fn may_be_table<'a>(&self, mut words: impl Iterator<Item = &'a AtomicU64>) -> bool {
        words.any(|word| {
            let word = word.load(Ordering::Relaxed);
            word & IN_USE == IN_USE && word & self.reserved == 0
        })
    }

    /// By name.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("shadows-asked", load(&self.asked)),
            ("shadows-dropped", load(&self.moves)),
            ("shadows-spared", load(&self.spared)),
        ]
    }
}

/// Bits of an address that has none of them.
fn reserved(address_bits: u32) -> u64 {
    let all = (1_u64 << ADDRESS_BITS) - 1;
    all & !((1_u64 << address_bits.min(ADDRESS_BITS)) - 1)
}

fn membarrier(command: libc::c_int) -> io::Result<()> {
    // SAFETY: takes numbers, changes nothing of ours.
    match unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
