//! The shell around the protocol: carries out what `Node::step` says, in order.
//!
//! Invariants:
//!
//! - The node and all rights change under one lock. It is never held while
//!   somebody waits for a vCPU, a link or another slice.
//! - What one step says about a page is done before the next event about that
//!   page is looked at. Where it has to wait for vCPUs to give the page up, the
//!   page is *busy* and its events queue up; other pages go on.
//! - A page that a waiting thread was just given is taken only after that thread
//!   was at work with it (see `waiters`).
//! - Whoever may use a page asked [`SharedMemory::acquire`], or found it in
//!   `rights`, and answers a demand before the page leaves.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use weft_dsm::message::{self, DecodeError, Run};
use weft_dsm::{
    Action, Body, Config, Content, Event, Keep, ManagerOf, Message, NodeId, PAGE_BYTES, Page,
    Refusal,
};
use weft_guest_memory::Ram;
use weft_vcpu::{Access, Memory};
use weft_wire::Header;

use super::budget::{Budget, Room};
use super::counters::{MemoryCounters, PageCounts, SlicePages, VcpuCounts};
use super::outbox::{Links, Post};
use super::state::{State, Work, from_protocol};
use super::tables::Rights;
use super::trace::{READERS_PATIENCE, SliceFaults, Trace};
use super::users::Users;
use super::waiters::{Pins, Waiter};

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
    pub(super) rights: Rights,
    pub(super) budget: Budget,
    pub(super) room: Room,
    pub(super) pins: Pins,
    state: Mutex<State>,
    post: Arc<dyn Post>,
    links: Links,
    pub(super) users: OnceLock<Box<dyn Users>>,
    pub(super) lease: Duration,
    pub(super) broken: Box<dyn Fn(String) + Send + Sync>,
    /// The machine is over: nobody waits any more.
    pub(super) over: AtomicBool,
    /// Why, if it was not asked to be.
    pub(super) failure: Mutex<Option<String>>,
    /// Pages that wait for a pin to go.
    pub(super) held_back: AtomicU32,
    /// Pages that are to be asked for again in a moment.
    pub(super) standing: AtomicU32,
    pub(super) taker: OnceLock<Thread>,
    pub counters: MemoryCounters,
    pub(super) counts: PageCounts,
    pub(super) vcpu_counts: VcpuCounts,
    pub(super) trace: Trace,
    pub(super) slice: usize,
}

/// The lock, held. What is to be sent is queued when it is given up, and sent then.
pub(super) struct Guard<'a> {
    shell: &'a SharedMemory,
    state: MutexGuard<'a, State>,
    /// Dropped behind the lock: fields are dropped in the order of their declaration.
    after: After<'a>,
}

/// What is done when the lock has been given up.
struct After<'a> {
    shell: &'a SharedMemory,
    /// Slices that something is queued for, a bit for each.
    nodes: u32,
}

impl Deref for Guard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.after.nodes = self.shell.links.queue(&mut self.state.outbox);
        self.shell.wake_for_standing(&mut self.state);
        #[cfg(test)]
        super::tests::set_locked(false);
    }
}

impl Drop for After<'_> {
    fn drop(&mut self) {
        if self.nodes != 0 {
            let pages = self.shell.links.send(self.nodes, &*self.shell.post);
            MemoryCounters::add(&self.shell.counters.pages_sent, pages);
        }
    }
}

impl SharedMemory {
    /// Memory of which this slice holds nothing yet.
    pub fn new(options: SharedMemoryOptions) -> Arc<Self> {
        let end = Memory::end(&options.ram);
        let pages = (end >> PAGE_SHIFT) as usize;
        let slice = options.config.me.index();
        let parts = options.ram.parts();
        Arc::new(Self {
            parts: parts
                .into_iter()
                .map(|(start, length, host)| (start, length, host as usize))
                .collect(),
            ram: options.ram,
            end,
            own: own_part(&options.config),
            rights: Rights::new(pages),
            budget: options.budget,
            room: Room::default(),
            pins: Pins::default(),
            state: Mutex::new(State::new(&options.config, pages)),
            post: options.post,
            links: Links::default(),
            users: OnceLock::new(),
            lease: options.lease,
            broken: options.broken,
            over: AtomicBool::new(false),
            failure: Mutex::new(None),
            held_back: AtomicU32::new(0),
            standing: AtomicU32::new(0),
            taker: OnceLock::new(),
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
        let mut state = self.lock();
        for page in addresses.start >> PAGE_SHIFT..addresses.end.div_ceil(PAGE_BYTES as u64) {
            let mut refused = None;
            let event = Event::Adopt { page: Page(page) };
            state.node.step(event, &mut |action| refused = Some(action));
            if let Some(action) = refused {
                return Err(format!("page {page:#x}: {action:?}"));
            }
            self.rights.set(page, Some(Access::Write));
        }
        Ok(())
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
        let mut state = self.lock();
        for message in run.messages() {
            let bytes = message.carries_bytes().then(|| pages.next()).flatten();
            state = self.message(state, from, message, bytes);
        }
        Ok(())
    }

    fn message<'a>(
        &'a self,
        mut state: Guard<'a>,
        from: NodeId,
        message: Message,
        bytes: Option<&[u8]>,
    ) -> Guard<'a> {
        let page = message.page.0;
        if self.host_of(page << PAGE_SHIFT).is_none() {
            self.fail(format!(
                "{from} speaks of page {page:#x}, which is no memory"
            ));
            return state;
        }
        let event = Event::Message { from, message };
        if let Some(busy) = state.busy.get_mut(&page) {
            busy.events.push_back((event, bytes.map(Box::from)));
            return state;
        }
        let work = state.step(event, bytes.map(Cow::Borrowed));
        self.carry_out(state, page, work)
    }

    /// Carries out `work` about `page`, and whatever came about it meanwhile.
    pub(super) fn carry_out<'a>(
        &'a self,
        mut state: Guard<'a>,
        page: u64,
        mut work: Work<'_>,
    ) -> Guard<'a> {
        loop {
            while let Some(action) = work.actions.pop_front() {
                let Some(kept) = self.taken_by(page, &action) else {
                    self.act(&mut state, page, action, work.bytes.as_deref());
                    continue;
                };
                if self.pins.hold(page) {
                    work.actions.push_front(action);
                    let busy = state.busy.entry(page).or_default();
                    busy.held_back = Some(work.owned());
                    self.held_back.fetch_add(1, Ordering::SeqCst);
                    MemoryCounters::add(&self.counters.held_back, 1);
                    self.wake_taker(page);
                    return state;
                }
                state = self.take(state, page, kept);
                self.act(&mut state, page, action, None);
            }
            let Some((event, bytes)) = state.next_event(page) else {
                return state;
            };
            work = state.step(event, bytes.map(|bytes| Cow::Owned(bytes.into_vec())));
        }
    }

    /// What an action leaves of the page, if it takes something that is here.
    fn taken_by(&self, page: u64, action: &Action) -> Option<Option<Access>> {
        let kept = match action {
            Action::Give {
                keep: Keep::Shared | Keep::AsIs,
                ..
            } => Some(Access::Read),
            Action::Give {
                keep: Keep::Nothing,
                ..
            }
            | Action::Drop { .. } => None,
            _ => return None,
        };
        match (self.rights.of(page), kept) {
            (Some(Access::Write), _) | (Some(Access::Read), None) => Some(kept),
            _ => None,
        }
    }

    /// Takes the page from all who use it, down to what is `kept`. The lock is
    /// not held meanwhile; the page is busy.
    fn take<'a>(&'a self, mut state: Guard<'a>, page: u64, kept: Option<Access>) -> Guard<'a> {
        self.rights.set(page, kept);
        state.busy.entry(page).or_default();
        drop(state);
        let start = Instant::now();
        if let Some(users) = self.users.get()
            && let Err(error) = users.revoke(page << PAGE_SHIFT, kept, self.lease)
        {
            self.fail(format!("a page could not be revoked from a vCPU: {error}"));
        }
        MemoryCounters::add(&self.counters.taken, 1);
        MemoryCounters::add(&self.counters.taking_ns, start.elapsed().as_nanos() as u64);
        self.lock()
    }

    /// Carries out an action that takes nothing from a vCPU any more.
    pub(super) fn act(&self, state: &mut State, page: u64, action: Action, bytes: Option<&[u8]>) {
        match action {
            Action::Send { to, message } => state.outbox.put(to, message, None),
            Action::Give { to, message, keep } => {
                let page_bytes = message.carries_bytes().then(|| self.bytes_of(page));
                state.outbox.put(to, message, page_bytes);
                let pushed = matches!(message.body, Body::Push { .. });
                if pushed {
                    self.rights.mark_evicted(page);
                    state.leaving = state.leaving.saturating_sub(1);
                    MemoryCounters::add(&self.counters.evicted_sent, 1);
                }
                if keep == Keep::Nothing {
                    self.vacated(state, page, pushed);
                }
            }
            Action::Drop { .. } => {
                self.rights.set(page, None);
                self.vacated(state, page, false);
            }
            Action::Allow { .. } => self.rights.set(page, Some(Access::Write)),
            Action::Install {
                access, content, ..
            } => {
                self.install(page, content, bytes);
                state.fresh = (content == Content::Zero).then_some(page);
                match (from_protocol(access), state.standing.is_asked(page)) {
                    (Access::Read, true) => self.rights.set_unasked(page),
                    (access, _) => self.rights.set(page, Some(access)),
                }
                self.look_at_room();
            }
            Action::Resolved { .. } => {
                let grant = |waiter: &Waiter| {
                    self.rights.allow_use(page, waiter.access) && self.pins.add(page)
                };
                state.standing.answered(page);
                state.wake(page, grant);
                self.grant_asked(state, page);
            }
            Action::Outdated { .. } => self.outdated(state, page),
            Action::Lost { node, .. } => {
                self.fail(format!("page {page:#x} was lost with {node}"));
            }
            Action::Violation { from, what, .. } => {
                self.fail(format!(
                    "{from} broke the protocol about page {page:#x}: {what}"
                ));
            }
            // Home was busy with a page that was to go there, or another slice has it
            // meanwhile: others go.
            Action::NoRoom { .. }
            | Action::Refused {
                reason: Refusal::Busy | Refusal::NotHere,
                ..
            } => {
                state.leaving = state.leaving.saturating_sub(1);
                MemoryCounters::add(&self.counters.evictions_denied, 1);
            }
            Action::Refused { .. } => {
                self.fail(format!("the protocol refused: {action:?}"));
            }
        }
    }

    /// A page left. Its memory stays for when it comes back, unless there is little or
    /// the page was to make room.
    fn vacated(&self, state: &mut State, page: u64, evicted: bool) {
        if evicted || self.rights.resident() > self.budget.high() {
            state.vacant.push(page);
            self.room.call();
        }
    }

    fn install(&self, page: u64, content: Content, bytes: Option<&[u8]>) {
        let host = self.host(page);
        match (content, bytes) {
            (Content::Bytes, Some(bytes)) => {
                MemoryCounters::add(&self.counters.pages_received, 1);
                // SAFETY: nobody uses the page, for it is not here; `receive` cut
                // the payload into whole pages.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, PAGE_BYTES) };
            }
            (Content::Zero, _) if !self.rights.used(page) => {}
            // SAFETY: nobody uses the page, for it is not here.
            (Content::Zero, _) => unsafe { std::ptr::write_bytes(host, 0, PAGE_BYTES) },
            (Content::Bytes, None) | (Content::Held, _) => {
                self.fail(format!("page {page:#x} came without its bytes"));
            }
        }
    }

    /// The bytes of a page that was taken from all who could write to it: nobody gets it
    /// again before the lock is given up.
    fn bytes_of(&self, page: u64) -> &[u8] {
        let host = self.host(page);
        // SAFETY: a whole page of RAM, which `message` made sure of, and which lives as
        // long as `self`; the right to write to it was taken from all vCPUs, and who
        // gives it back needs the lock that the caller holds.
        unsafe { std::slice::from_raw_parts(host, PAGE_BYTES) }
    }

    /// Where a page that is memory lies.
    pub(super) fn host(&self, page: u64) -> *mut u8 {
        self.host_of(page << PAGE_SHIFT)
            .unwrap_or(std::ptr::null_mut())
    }

    pub(super) fn host_of(&self, address: u64) -> Option<*mut u8> {
        self.parts.iter().find_map(|(start, length, host)| {
            let offset = address.wrapping_sub(*start);
            (offset < *length).then(|| (*host as *mut u8).wrapping_add(offset as usize))
        })
    }

    pub(super) fn lock(&self) -> Guard<'_> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        #[cfg(test)]
        super::tests::set_locked(true);
        Guard {
            shell: self,
            state,
            after: After {
                shell: self,
                nodes: 0,
            },
        }
    }

    /// The memory cannot go on. May be called with the lock held: the thread that
    /// takes pages back tells whoever is to know.
    pub(super) fn fail(&self, reason: String) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_over() {
            return;
        }
        // Before the end is to be seen: the taker looks in this order.
        *failure = Some(reason);
        self.over.store(true, Ordering::SeqCst);
        drop(failure);
        if let Some(taker) = self.taker.get() {
            taker.unpark();
        }
        self.room.call();
    }

    /// The machine is over: whoever waits goes on, with memory of no meaning.
    pub fn end_waits(&self) {
        self.over.store(true, Ordering::SeqCst);
        for waiter in &self.lock().waiters {
            waiter.wake(false);
        }
        if let Some(users) = self.users.get() {
            users.end();
        }
        if let Some(taker) = self.taker.get() {
            taker.unpark();
        }
        self.room.call();
    }

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
