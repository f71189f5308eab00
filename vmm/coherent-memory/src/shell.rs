//! The shell of the controller: the lock around it, guest memory, threads and links.
//!
//! A slice's memory is a [`Controller`], which decides, and what is here, which does. One
//! lock is around the controller. Under it:
//!
//! - one step, or several, of the controller ([`State::step`](super::state::State::step));
//! - copies of pages: into memory when one comes, out of it when one leaves;
//! - a mark for a page that a thread writes beside the users.
//!
//! After it, by the thread that stepped (`state`): threads are woken, frames are sent
//! (`outbox`), and operations are carried out: pages are taken from the users and given to
//! them, and memory goes back to the host. Then the controller hears that they are done.
//!
//! Invariants:
//!
//! - The lock is never held while a thread waits for a vCPU, a link or another slice, nor
//!   during a call of the kernel other than those of memory that is touched.
//! - Users may use a page by [`Memory::acquire`], by [`Memory::held`], or by a mapping
//!   that [`Users::granted`] made, and give it up in [`Users::revoke`].

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use weft_dsm::controller::{Budget, Controller, Event, Pins, Rights};
use weft_dsm::message::{self, DecodeError, Run};
use weft_dsm::{Config, ManagerOf, NodeId, PAGE_BYTES};
use weft_vcpu::{Access, Memory};
use weft_wire::Header;

use super::called::Called;
use super::counters::{MemoryCounters, PageCounts, SlicePages, VcpuCounts};
use super::outbox::{Links, Post};
use super::state::State;
use super::tables::{PageTables, zeroed};
use super::trace::{READERS_PATIENCE, SliceFaults, Trace};
use super::users::Users;
use weft_guest_memory::Ram;

pub(super) const PAGE_SHIFT: u32 = PAGE_BYTES.trailing_zeros();

/// What a slice's memory is made of.
pub struct SharedMemoryOptions {
    /// All of the guest's RAM.
    pub ram: Ram,
    /// Which slice this is, and who manages what.
    pub config: Config,
    /// The way to the others.
    pub post: Arc<dyn Post>,
    /// Pages that it may fill memory with.
    pub budget: Budget,
    /// Longest that a vCPU may take to give a page up, and a page to come.
    pub lease: Duration,
    /// Called once when this slice's memory cannot go on, with the reason.
    pub broken: Box<dyn Fn(String) + Send + Sync>,
}

/// One slice's side of the guest's RAM.
pub struct SharedMemory {
    ram: Ram,
    /// Guest-physical start, bytes, host address.
    parts: Vec<(u64, u64, usize)>,
    pub(super) end: u64,
    /// Pages of this slice's own part.
    pub(super) own: Range<u64>,
    pub(super) budget: Budget,
    /// Changed by the controller alone, under the lock; read without it.
    pub(super) rights: Arc<Rights>,
    /// Set by the controller, under the lock; given back without it.
    pub(super) pins: Arc<Pins>,
    state: Mutex<State>,
    /// When time began.
    start: Instant,
    pub(super) post: Arc<dyn Post>,
    pub(super) links: Links,
    pub(super) users: OnceLock<Box<dyn Users>>,
    pub(super) lease: Duration,
    pub(super) broken: Box<dyn Fn(String) + Send + Sync>,
    /// The machine is over: no thread waits any more.
    over: AtomicBool,
    /// Why, if it was not asked to be.
    pub(super) failure: Mutex<Option<String>>,
    /// Goes on with pages that were held back, and asks again for those that are kept up
    /// to date.
    pub(super) ticker: Called,
    /// Makes room.
    pub(super) room: Called,
    /// How often what happened.
    pub counters: MemoryCounters,
    pub(super) counts: PageCounts,
    pub(super) vcpu_counts: VcpuCounts,
    pub(super) trace: Trace,
    slice: usize,
}

impl SharedMemory {
    /// Memory of which this slice holds nothing yet.
    pub fn new(options: SharedMemoryOptions) -> Arc<Self> {
        let end = Memory::end(&options.ram);
        let pages = (end >> PAGE_SHIFT) as usize;
        let slice = options.config.me.index();
        let parts: Vec<(u64, u64, usize)> = options
            .ram
            .parts()
            .into_iter()
            .map(|(start, length, host)| (start, length, host as usize))
            .collect();
        // SAFETY: zero bytes are a valid AtomicU8.
        let rights = Arc::new(Rights::new(unsafe { zeroed(pages) }));
        let pins = Arc::<Pins>::default();
        let controller = Controller::new(
            &options.config,
            PageTables::new(pages),
            rights.clone(),
            pins.clone(),
            options.budget,
            parts.iter().map(pages_of).collect(),
        );
        Arc::new(Self {
            parts,
            ram: options.ram,
            end,
            own: own_part(&options.config),
            budget: options.budget,
            rights,
            pins,
            state: Mutex::new(State::new(controller)),
            start: Instant::now(),
            post: options.post,
            links: Links::default(),
            users: OnceLock::new(),
            lease: options.lease,
            broken: options.broken,
            over: AtomicBool::new(false),
            failure: Mutex::new(None),
            ticker: Called::default(),
            room: Called::default(),
            counters: MemoryCounters::default(),
            counts: PageCounts::new(pages),
            vcpu_counts: VcpuCounts::default(),
            trace: Trace::default(),
            slice,
        })
    }

    /// Says who uses the pages. Once, before anybody does.
    pub fn connect(&self, users: Box<dyn Users>) {
        // A second connection is a mistake that the first survives.
        let _ = self.users.set(users);
    }

    /// The RAM below.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Makes the pages of `addresses` this slice's own, as they lie in memory.
    /// Before any other slice runs, at the slice that manages them.
    pub fn adopt(&self, addresses: Range<u64>) -> Result<(), String> {
        self.locked(|state| {
            for page in addresses.start >> PAGE_SHIFT..addresses.end.div_ceil(PAGE_BYTES as u64) {
                let adopted = state.controller.adopt(page);
                adopted.map_err(|reason| format!("page {page:#x}: {reason}"))?;
            }
            Ok(())
        })
    }

    /// Has copies of the pages of `addresses` kept up to date, as far as they are
    /// memory. The same on all slices, before any vCPU runs.
    pub fn keep_up_to_date(&self, addresses: &Range<u64>) {
        let end = addresses.end.min(self.end).div_ceil(1 << PAGE_SHIFT);
        let pages = addresses.start >> PAGE_SHIFT..end;
        if !pages.is_empty() {
            self.locked(|state| state.controller.tables().update(pages));
        }
    }

    /// A frame of the protocol from another slice.
    pub fn receive(
        &self,
        from: NodeId,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), DecodeError> {
        let run: Run = message::decode(header)?;
        let mut pages = payload.chunks_exact(PAGE_BYTES);
        self.locked(|state| {
            for message in run.messages() {
                let bytes = message.carries_bytes().then(|| pages.next()).flatten();
                state.step(self, Event::Message { from, message }, bytes);
            }
        });
        Ok(())
    }

    /// Where a page that is memory lies.
    pub(super) fn host(&self, page: u64) -> Option<*mut u8> {
        self.host_of(page << PAGE_SHIFT)
    }

    pub(super) fn host_of(&self, address: u64) -> Option<*mut u8> {
        self.parts.iter().find_map(|(start, length, host)| {
            let offset = address.wrapping_sub(*start);
            (offset < *length).then(|| (*host as *mut u8).wrapping_add(offset as usize))
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of the controller.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// The memory cannot go on. May be called with the lock held: the ticker tells why.
    pub(super) fn fail(&self, reason: String) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_over() {
            return;
        }
        // Before the end is to be seen: the ticker looks in this order.
        *failure = Some(reason);
        self.over.store(true, Ordering::SeqCst);
        drop(failure);
        self.ticker.call();
        self.room.call();
    }

    /// The machine is over: threads that wait go on, with memory of no meaning.
    pub fn end_waits(&self) {
        self.over.store(true, Ordering::SeqCst);
        for waiter in self.locked(|state| state.waiters()) {
            waiter.wake(false);
        }
        if let Some(users) = self.users.get() {
            users.end();
        }
        self.ticker.call();
        self.room.call();
    }

    /// Whether it is.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// How often what happened, and how full the memory is, by name.
    pub fn figures(&self) -> Vec<(&'static str, u64)> {
        let mut figures = self.counters.list();
        figures.push(("standing-used", self.rights.found()));
        figures.push(("held-pages", self.rights.resident()));
        if self.budget != Budget::UNLIMITED {
            figures.push(("budget-pages", self.budget.pages()));
        }
        figures
    }

    /// The pages that this slice asked others for most often.
    pub fn hottest(&self) -> SlicePages {
        self.counts.hottest(self.slice)
    }

    /// What a vCPU of this slice waited for, by name.
    pub fn vcpu_counters(&self, vcpu: u32) -> [(&'static str, u64); 2] {
        self.vcpu_counts.list(vcpu)
    }

    /// Records every fault from now on.
    pub fn trace_always(&self) {
        self.trace.always();
    }

    /// The faults from number `from` on; without a number, those that will come.
    /// Has faults recorded for [`READERS_PATIENCE`] from now on.
    pub fn faults(&self, from: Option<u64>) -> SliceFaults {
        self.trace.keep_on(READERS_PATIENCE);
        self.trace.read(self.slice, from)
    }
}

/// Pages that a slice manages: those that lie in its own part of RAM.
fn own_part(config: &Config) -> Range<u64> {
    match config.manager {
        ManagerOf::Ranges(ranges) => ranges.of(config.me),
        ManagerOf::Fixed(node) if node == config.me => 0..u64::MAX,
        ManagerOf::Fixed(_) | ManagerOf::Interleaved => 0..0,
    }
}

/// The pages of a part of RAM.
fn pages_of((start, length, _): &(u64, u64, usize)) -> Range<u64> {
    start >> PAGE_SHIFT..(start + length) >> PAGE_SHIFT
}

pub(super) fn to_protocol(access: Access) -> weft_dsm::Access {
    match access {
        Access::Read => weft_dsm::Access::Read,
        Access::Write => weft_dsm::Access::Write,
    }
}

pub(super) fn from_protocol(access: weft_dsm::Access) -> Access {
    match access {
        weft_dsm::Access::Read => Access::Read,
        weft_dsm::Access::Write => Access::Write,
    }
}
