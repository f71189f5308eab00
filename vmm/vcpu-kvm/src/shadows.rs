//! Shadows of the guest's page tables, where the processor has no second level of
//! its own and the guest's memory is shared with other slices.
//!
//! KVM derives its tables from the guest's and finds out about changes by write
//! protection: a change that another slice makes goes unseen. So before another
//! slice may write to a page, all shadows are given up, unless none can have come
//! from it. Only the last of these steps waits, and the vCPU that needs it does it:
//!
//! ```text
//! a page is taken: unmap it ─▶ close the gate ─▶ interrupt every vCPU, until none
//!                                                is in guest mode
//! a vCPU: comes out of KVM_RUN ─▶ finds the gate closed ─▶ drops all shadows ─▶ enters
//! ```
//!
//! To drop them is to move a memory slot that nobody uses: KVM then forgets all that
//! it derived. That waits until no vCPU is in KVM_RUN, and one may be there asleep on
//! a page that another slice has; so a thread that takes a page must not wait for it,
//! or two slices would wait for each other.
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
//! accessed, of a page that KVM knew since shadows were dropped), no shadow that came
//! from it is used unless KVM reads the page again first. For a shadow that KVM keeps in step with its page, each
//! entry came from a word that is still there and in use: the vCPUs' writes to it
//! are seen, and before KVM makes an entry it reads the word once more under its
//! lock, which fails while the page is not mapped. A shadow that KVM lets go out of
//! step it compares with the page at the guest's next flush of the TLB, and before it
//! uses it elsewhere.
//!
//! KVM knows a page only while it is mapped here: an entry for any other stands for
//! nothing. Of what is no memory it makes an entry when the guest's access to it comes
//! out of KVM_RUN, which is noted.
//!
//! Writes that KVM does not see would break this (devices, the paravirtual clock,
//! instructions that are done by `quirks`): such pages are marked, and count as
//! tables until shadows were dropped.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use weft_guest_memory::{FOUR_GIB, Marks};
use weft_vcpu::paging::{ACCESSED, ADDRESS, PRESENT};

use super::KvmError;
use super::run_page::KvmKicker;

/// Where the slot that is moved lies, in turns: no memory or device is there.
const PLACES: [u64; 2] = [0xfffb_a000, 0xfffb_b000];
/// Its number: those before are RAM's.
const SLOT: u32 = 2;
const PAGE: usize = 4096;
/// Bits of an entry in use: present and accessed. KVM sets the second before it
/// makes an entry of its own, and what it takes ahead must have it.
const IN_USE: u64 = PRESENT | ACCESSED;
/// Commands of membarrier(2).
const EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_EXPEDITED: libc::c_int = 1 << 4;

/// A page for KVM to have in its slot.
#[repr(C, align(4096))]
struct Spare([u8; PAGE]);

/// Pages of memory that are known although they are not mapped any more.
#[derive(Default)]
struct Unmapped {
    /// By address: the time when.
    pages: HashMap<u64, u64>,
    /// Counts what is unmapped.
    time: u64,
}

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
    kickers: Mutex<Vec<Arc<KvmKicker>>>,
    /// Pages that were written to unseen.
    marks: Arc<Marks>,
    /// Pages that KVM may have an entry for: mapped since shadows were dropped, or
    /// registers that were used.
    known: Marks,
    /// Registers above `known` were used.
    known_above: AtomicBool,
    /// Changes of what is mapped; held for moments.
    unmapped: Mutex<Unmapped>,
    /// Pages that were taken and cannot have been tables.
    spared: AtomicU64,
    /// Moves of the slot.
    moves: AtomicU64,
}

impl ShadowGate {
    /// For a machine without vCPUs yet. Its memory ends at `end`, and no page is mapped.
    pub(super) fn new(vm: &VmFd, marks: Arc<Marks>, end: u64) -> Result<Arc<Self>, KvmError> {
        membarrier(REGISTER_EXPEDITED).map_err(|source| KvmError::Call {
            what: "membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)",
            source,
        })?;
        let gate = Self {
            asked: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            place: Mutex::new(0),
            spare: Box::new(Spare([0; PAGE])),
            kickers: Mutex::default(),
            marks,
            known: Marks::new(end.max(FOUR_GIB)),
            known_above: AtomicBool::new(false),
            unmapped: Mutex::default(),
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
    pub(super) fn add(&self, kicker: Arc<KvmKicker>) {
        self.kickers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(kicker);
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
            let time = self.unmapped().time;
            // A mark that comes from now on stays; those before go with the shadows.
            self.marks.clear();
            *place = 1 - *place;
            self.put(vm, PLACES[*place])?;
            self.forget_unmapped(time);
            self.moves.fetch_add(1, Ordering::Relaxed);
            self.dropped.store(asked, Ordering::SeqCst);
        }
        Ok(())
    }

    fn unmapped(&self) -> MutexGuard<'_, Unmapped> {
        self.unmapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// KVM knows nothing of pages that were unmapped by `time`, and still are.
    fn forget_unmapped(&self, time: u64) {
        let mut unmapped = self.unmapped();
        unmapped.pages.retain(|address, when| {
            let stays = *when > time;
            if !stays {
                self.known.unset(*address);
            }
            stays
        });
    }

    /// A page of memory is about to be mapped.
    pub fn mapped(&self, address: u64) {
        let mut unmapped = self.unmapped();
        unmapped.pages.remove(&address);
        self.known.set(address);
    }

    /// A page of memory was unmapped. Nobody maps it at the same time.
    pub fn unmapped_page(&self, address: u64) {
        let mut unmapped = self.unmapped();
        unmapped.time += 1;
        let time = unmapped.time;
        unmapped.pages.insert(address, time);
    }

    /// A guest's access to what is no memory came out of KVM_RUN.
    pub(super) fn used(&self, address: u64) -> io::Result<()> {
        if self.is_known(address) {
            return Ok(());
        }
        if !self.known.set(address) {
            self.known_above.store(true, Ordering::SeqCst);
        }
        // The page with the entry may have been taken since KVM made one of its own.
        self.close()
    }

    /// A page, with its words, was taken from the vCPUs and is unmapped. When this
    /// returns, what came from it is in no use.
    pub fn taken<'a>(
        &self,
        address: u64,
        words: impl Iterator<Item = &'a AtomicU64>,
    ) -> io::Result<()> {
        self.unmapped_page(address);
        if !self.marks.has(address) && !self.may_be_table(words) {
            self.spared.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        self.close()
    }

    /// Has all shadows go. When this returns, no vCPU is in guest mode that does not
    /// see it.
    fn close(&self) -> io::Result<()> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        for kicker in &*self.kickers.lock().unwrap_or_else(PoisonError::into_inner) {
            kicker.interrupt();
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
            // Bits of `ADDRESS` that no address has are reserved: nothing is known there.
            word & IN_USE == IN_USE && self.is_known(word & ADDRESS)
        })
    }

    fn is_known(&self, address: u64) -> bool {
        match self.known.covers(address) {
            true => self.known.has(address),
            false => self.known_above.load(Ordering::SeqCst),
        }
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

fn membarrier(command: libc::c_int) -> io::Result<()> {
    // SAFETY: takes numbers, changes nothing of ours.
    match unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: u64 = 64 << 20;
    const WORDS: usize = PAGE / 8;
    /// Present, accessed and dirty, the user's, writable.
    const ENTRY: u64 = 0x67;

    /// A gate without a machine: nobody stops at it.
    fn gate() -> ShadowGate {
        membarrier(REGISTER_EXPEDITED).unwrap();
        ShadowGate {
            asked: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            place: Mutex::new(0),
            spare: Box::new(Spare([0; PAGE])),
            kickers: Mutex::default(),
            marks: Arc::new(Marks::new(MEMORY)),
            known: Marks::new(FOUR_GIB),
            known_above: AtomicBool::new(false),
            unmapped: Mutex::default(),
            spared: AtomicU64::new(0),
            moves: AtomicU64::new(0),
        }
    }

    /// Whether the gate closes when a page with one word that is not zero is taken.
    fn closes(gate: &ShadowGate, address: u64, word: u64) -> bool {
        let words: Vec<AtomicU64> = (0..WORDS)
            .map(|index| AtomicU64::new(if index == 77 { word } else { 0 }))
            .collect();
        let before = gate.asked.load(Ordering::SeqCst);
        gate.taken(address, words.iter()).unwrap();
        gate.asked.load(Ordering::SeqCst) != before
    }

    /// What [`ShadowGate::open`] does, without a machine.
    fn drop_all(gate: &ShadowGate) {
        let time = gate.unmapped().time;
        gate.marks.clear();
        gate.forget_unmapped(time);
        gate.dropped
            .store(gate.asked.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    #[test]
    fn an_entry_for_a_page_that_was_mapped_closes_the_gate() {
        let gate = gate();
        gate.mapped(0x5000);
        gate.mapped(0x9000);
        assert!(!closes(&gate, 0x9000, 0));
        assert!(!closes(&gate, 0x9000, 0x6000 | ENTRY));
        assert!(!closes(&gate, 0x9000, 0x5000 | 1));
        assert!(!closes(&gate, 0x9000, 0xffff_8880_0000_5000 | ENTRY));
        assert!(!gate.is_closed());
        assert!(closes(&gate, 0x9000, 0x5000 | ENTRY));
        assert!(closes(&gate, 0x9000, 1 << 63 | 0x5000 | 0x21));
        assert!(gate.is_closed());
    }

    #[test]
    fn a_page_is_known_until_shadows_were_dropped() {
        let gate = gate();
        gate.mapped(0x5000);
        gate.mapped(0x7000);
        assert!(!closes(&gate, 0x5000, 0));
        assert!(closes(&gate, 0x7000, 0x5000 | ENTRY));
        drop_all(&gate);
        assert!(!closes(&gate, 0x9000, 0x5000 | ENTRY));
        // Mapped once more, it is again; what is mapped stays known.
        gate.mapped(0x5000);
        drop_all(&gate);
        assert!(closes(&gate, 0x9000, 0x5000 | ENTRY));
    }

    #[test]
    fn what_is_unmapped_while_shadows_are_dropped_stays_known() {
        let gate = gate();
        gate.mapped(0x5000);
        let time = gate.unmapped().time;
        gate.unmapped_page(0x5000);
        gate.forget_unmapped(time);
        assert!(closes(&gate, 0x9000, 0x5000 | ENTRY));
    }

    #[test]
    fn pages_written_to_unseen_are_tables() {
        let gate = gate();
        gate.written(0x9000);
        assert!(closes(&gate, 0x9000, 0));
        drop_all(&gate);
        assert!(!closes(&gate, 0x9000, 0));
    }

    #[test]
    fn the_first_use_of_a_register_closes_the_gate() {
        let gate = gate();
        assert!(!closes(&gate, 0x9000, 0xfee0_0000 | ENTRY));
        gate.used(0xfee0_0020).unwrap();
        assert!(gate.is_closed());
        drop_all(&gate);
        gate.used(0xfee0_0030).unwrap();
        assert!(!gate.is_closed());
        assert!(closes(&gate, 0x9000, 0xfee0_0000 | ENTRY));
        assert!(!closes(&gate, 0x9000, 0x80_0000_0000 | ENTRY));
        gate.used(0x90_0000_0000).unwrap();
        assert!(closes(&gate, 0x9000, 0x80_0000_0000 | ENTRY));
    }
}
