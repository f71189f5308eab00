//! The shell of the controller: the lock around it, guest memory, threads and links.
//!
//! A slice's memory is a [`Controller`], which decides, and this shell, which acts. One lock
//! guards the controller. Under it:
//!
//! - one step, or several, of the controller ([`State::step`](super::state::State::step));
//! - copies of pages: into memory when one comes, out of it when one leaves;
//! - a mark for a page that a thread writes which is not a vCPU.
//!
//! After the unlock, the thread that stepped (`state`) wakes threads, sends frames (`outbox`)
//! and carries out operations: it revokes and grants mappings of pages, and gives memory back
//! to the host. Then it tells the controller that the operations are done.
//!
//! Invariants:
//!
//! - No thread waits for a vCPU, a link or another slice under the lock, or makes a system
//!   call; the kernel is entered only by page faults of copies.
//! - A mapper may use a page after [`Memory::acquire`] or [`Memory::held`], or in a mapping
//!   that [`MmuNotifier::granted`] made, until [`MmuNotifier::revoke`].

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use weft_dsm::controller::{Budget, Controller, Event, Homes, Pins, Rights};
use weft_dsm::message::{self, DecodeError, Run};
use weft_dsm::{Config, ManagerOf, NodeId, PAGE_BYTES};
use weft_vcpu::{Access, Memory};
use weft_wire::Header;

use super::blocks::ExchangedBlocks;
use super::counters::{MemoryCounters, PageCounts, SlicePages, VcpuCounts};
use super::history::PageHistory;
use super::notifier::MmuNotifier;
use super::outbox::{Links, Transport};
use super::page_source::Sources;
use super::served::{FaultObserver, ServedCounts};
use super::signal::Signal;
use super::state::State;
use super::tables::{PageTables, zeroed};
use super::trace::{READERS_PATIENCE, SliceFaults, Trace};
use super::wakeup::Wakeup;
use weft_guest_memory::Ram;

pub(super) const PAGE_SHIFT: u32 = PAGE_BYTES.trailing_zeros();

/// The arguments of [`SharedMemory::new`].
pub struct SharedMemoryOptions {
    /// All of the guest's RAM.
    pub ram: Ram,
    /// This slice's number, and the manager of each page.
    pub config: Config,
    /// Sends frames to the other slices.
    pub transport: Arc<dyn Transport>,
    /// Pages that the slice may fill.
    pub budget: Budget,
    /// Longest time in which a vCPU must give up a page. A page must come within two leases.
    pub lease: Duration,
    /// Called once, with the reason, if this slice's memory cannot continue.
    pub on_failure: Box<dyn Fn(String) + Send + Sync>,
}

/// One slice's side of the guest's RAM.
pub struct SharedMemory {
    ram: Ram,
    /// Guest-physical start, bytes, host address.
    parts: Vec<(u64, u64, usize)>,
    pub(super) end: u64,
    /// Pages of this slice's own part, which it manages at first.
    pub(super) own: Range<u64>,
    /// The pages that this slice manages now. Only the controller changes them, under the lock.
    pub(super) homes: Arc<Homes>,
    /// Only the controller changes them, under the lock; read without it.
    pub(super) rights: Arc<Rights>,
    /// The controller sets them under the lock; removed without it.
    pub(super) pins: Arc<Pins>,
    /// Nothing else is locked meanwhile.
    pub(super) history: Mutex<PageHistory>,
    pub(super) exchange: ExchangedBlocks,
    state: Mutex<State>,
    /// Where absent pages are, while there are any.
    pub(super) absent: RwLock<Sources>,
    /// Absent pages in transition whose bytes come from elsewhere.
    pub(super) awaited: Mutex<BTreeSet<u64>>,
    /// Time 0 of the controller.
    start: Instant,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) links: Links,
    pub(super) notifier: OnceLock<Box<dyn MmuNotifier>>,
    pub(super) lease: Duration,
    pub(super) on_failure: Box<dyn Fn(String) + Send + Sync>,
    /// The machine has ended: no thread waits any more.
    over: AtomicBool,
    /// Why the memory failed, until the deferred-work thread reports it.
    pub(super) failure: Mutex<Option<String>>,
    /// The thread that continues with deferred pages and renews subscriptions.
    pub(super) deferred_work: Wakeup,
    /// The thread that keeps the memory within its budget.
    pub(super) evictor: Wakeup,
    /// Threads that drain, or wait for a change of membership.
    pub(super) membership: Signal,
    pub counters: MemoryCounters,
    pub(super) counts: PageCounts,
    pub(super) vcpu_counts: VcpuCounts,
    pub(super) served_counts: ServedCounts,
    pub(super) fault_observer: OnceLock<Box<dyn FaultObserver>>,
    pub(super) trace: Trace,
    pub(super) slice: usize,
}

impl SharedMemory {
    /// Memory of which this slice holds no page yet.
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
            homes: controller.homes(),
            rights,
            pins,
            history: Mutex::new(PageHistory::new(pages)),
            exchange: ExchangedBlocks::default(),
            state: Mutex::new(State::new(controller)),
            absent: RwLock::default(),
            awaited: Mutex::default(),
            start: Instant::now(),
            transport: options.transport,
            links: Links::default(),
            notifier: OnceLock::new(),
            lease: options.lease,
            on_failure: options.on_failure,
            over: AtomicBool::new(false),
            failure: Mutex::new(None),
            deferred_work: Wakeup::default(),
            evictor: Wakeup::default(),
            membership: Signal::default(),
            counters: MemoryCounters::default(),
            counts: PageCounts::new(pages),
            vcpu_counts: VcpuCounts::default(),
            served_counts: ServedCounts::default(),
            fault_observer: OnceLock::new(),
            trace: Trace::default(),
            slice,
        })
    }

    /// Registers the notifier of the slice's mapper. Once, before a page is used.
    pub fn register_notifier(&self, notifier: Box<dyn MmuNotifier>) {
        // Only the first notifier counts.
        let _ = self.notifier.set(notifier);
    }

    /// Guest RAM as this slice has it mapped.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Page numbers are less than this.
    pub fn pages(&self) -> u64 {
        self.end >> PAGE_SHIFT
    }

    /// Makes this slice the owner of the pages of `addresses`, with the bytes that are in
    /// memory. On the slice that manages them, before another slice runs.
    pub fn adopt(&self, addresses: Range<u64>) -> Result<(), String> {
        self.locked(|state| {
            for page in addresses.start >> PAGE_SHIFT..addresses.end.div_ceil(PAGE_BYTES as u64) {
                let adopted = state.controller.adopt(page);
                adopted.map_err(|reason| format!("page {page:#x}: {reason}"))?;
            }
            Ok(())
        })
    }

    /// Subscribes to the pages of `addresses` that are memory. The same on all slices, before
    /// a vCPU runs.
    pub fn subscribe(&self, addresses: &Range<u64>) {
        let end = addresses.end.min(self.end).div_ceil(1 << PAGE_SHIFT);
        let pages = addresses.start >> PAGE_SHIFT..end;
        if !pages.is_empty() {
            self.locked(|state| state.controller.tables().subscribe(pages));
        }
    }

    /// Handles a frame of the protocol from another slice.
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

    /// The host address of a page; `None` if the page is not memory.
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

    /// Ends the memory because of a failure. May be called with the lock held: the
    /// deferred-work thread reports the reason.
    pub fn fail(&self, reason: String) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_over() {
            return;
        }
        // Before `over`: the deferred-work thread reads the reason after it has seen `over`.
        *failure = Some(reason);
        self.over.store(true, Ordering::SeqCst);
        drop(failure);
        self.deferred_work.wake();
        self.evictor.wake();
    }

    /// Ends all waits, because the machine ends: threads continue with invalid memory.
    pub fn end_waits(&self) {
        self.over.store(true, Ordering::SeqCst);
        for waiter in self.locked(|state| state.waiters()) {
            waiter.wake(false);
        }
        if let Some(notifier) = self.notifier.get() {
            notifier.end();
        }
        self.deferred_work.wake();
        self.evictor.wake();
    }

    /// Whether the machine has ended.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Counters, and how full the memory is, keyed by name.
    pub fn figures(&self) -> Vec<(&'static str, u64)> {
        let mut figures = self.counters.list();
        figures.push(("subscription-hits", self.rights.found()));
        figures.push(("absent-pages", self.rights.absent()));
        figures.push(("held-pages", self.rights.resident()));
        let budget = self.budget();
        if budget != Budget::UNLIMITED {
            figures.push(("budget-pages", budget.pages()));
        }
        figures
    }

    /// The pages that this slice requested most often.
    pub fn hottest(&self) -> SlicePages {
        self.counts.hottest(self.slice)
    }

    /// A vCPU's faults and their waits, keyed by name.
    pub fn vcpu_counters(&self, vcpu: u32) -> [(&'static str, u64); 2] {
        self.vcpu_counts.list(vcpu)
    }

    /// A vCPU's remote faults by the slice that served them, keyed by name.
    pub fn served_counters(&self, vcpu: u32) -> Vec<(String, u64)> {
        self.served_counts.list(vcpu)
    }

    /// Sets what is told of the remote faults of vCPUs. Once, before a vCPU runs.
    pub fn observe_faults(&self, observer: Box<dyn FaultObserver>) {
        // Only the first observer counts.
        let _ = self.fault_observer.set(observer);
    }

    /// Records every fault from now on.
    pub fn trace_always(&self) {
        self.trace.always();
    }

    /// The recorded faults from number `from` on; without a number, only future ones. Keeps
    /// tracing on for [`READERS_PATIENCE`].
    pub fn faults(&self, from: Option<u64>) -> SliceFaults {
        self.trace.keep_on(READERS_PATIENCE);
        self.trace.read(self.slice, from)
    }
}

/// The pages that a slice manages: its own part of RAM.
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
