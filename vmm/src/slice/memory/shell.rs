//! The shell around the protocol: carries out what [`Node::step`] says, in order.
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
use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use thiserror::Error;
use weft_dsm::message::{self, DecodeError, Run};
use weft_dsm::read_ahead::Streams;
use weft_dsm::{Action, Config, Content, Event, Keep, Message, Node, NodeId, PAGE_BYTES, Page};
use weft_pager::uffd::UffdError;
use weft_soft::{Access, Asker, Memory, NotAnswered, SoftMachine, Unbacked};
use weft_wire::Header;

use super::counters::{MemoryCounters, PageCounts, SlicePages, VcpuCounts};
use super::tables::{PageTables, Rights};
use super::trace::{FaultKind, READERS_PATIENCE, SliceFaults, Trace};
use super::waiters::{Pins, Waiter};
use crate::memory::{GuestBytes, Ram};

const PAGE_SHIFT: u32 = PAGE_BYTES.trailing_zeros();
/// Pages with their bytes in one frame, at most.
const PARCEL_PAGES: u16 = 64;
/// Pages that were never touched and are asked for ahead, at most.
const AHEAD_PAGES: u64 = 32;
/// How often the taker looks again while a page is held back.
const HELD_BACK_LOOK: Duration = Duration::from_millis(1);
/// How often it looks when nothing is.
const IDLE_LOOK: Duration = Duration::from_secs(1);
/// How long users that only asked for a page keep it at least: nobody hears when
/// they are at work with it, and to wake a thread alone takes a part of that.
const USE_MIN: Duration = Duration::from_micros(100);

/// The way to the other slices. Never waits.
pub trait Post: Send + Sync {
    /// Sends a frame to `to`, in order with all others to it. An error has been
    /// told to whoever looks after the links.
    fn post(&self, to: NodeId, header: &Header, parts: &[&[u8]]);
}

/// A page could not be given to those who use it, or taken from them.
#[derive(Debug, Error)]
pub enum UseError {
    /// A vCPU did not give it up.
    #[error(transparent)]
    NotAnswered(#[from] NotAnswered),
    /// The kernel would not change the guest's mapping.
    #[error("cannot {what} the guest's mapping: {source}")]
    Mapping {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: UffdError,
    },
    /// What KVM derived from the page's bytes could not be made void.
    #[error("cannot stop vCPUs that use shadow page tables")]
    Shadows(#[source] std::io::Error),
}

/// Those who use this slice's pages.
pub trait Users: Send + Sync {
    /// See [`SoftMachine::revoke`].
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        patience: Duration,
    ) -> Result<(), UseError>;

    /// A page that [`SharedMemory::ask`] asked for may be used so from now on. Called
    /// under the shell's lock: must not wait, nor ask for anything.
    fn granted(&self, _address: u64, _right: Access) -> Result<(), UseError> {
        Ok(())
    }

    /// Users who are not at work with the page need not have it at hand. Called under
    /// the shell's lock, likewise.
    fn hide(&self, _address: u64) -> Result<(), UseError> {
        Ok(())
    }

    /// Somebody else is about to write to the page, at its place in [`Ram`]. Called
    /// under the shell's lock, likewise.
    fn written(&self, _address: u64) {}

    /// Nobody waits for a page any more.
    fn end(&self) {}
}

/// vCPUs that are gone use nothing.
impl Users for Weak<SoftMachine> {
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        patience: Duration,
    ) -> Result<(), UseError> {
        let Some(machine) = self.upgrade() else {
            return Ok(());
        };
        Ok(machine.revoke(address, kept, patience)?)
    }
}

/// What a slice's memory is made of.
pub struct SharedMemoryOptions {
    /// All of the guest's RAM.
    pub ram: Ram,
    /// Which slice this is, and who manages what.
    pub config: Config,
    /// The way to the others.
    pub post: Arc<dyn Post>,
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
    end: u64,
    rights: Rights,
    pins: Pins,
    state: Mutex<State>,
    post: Arc<dyn Post>,
    users: OnceLock<Box<dyn Users>>,
    lease: Duration,
    broken: Box<dyn Fn(String) + Send + Sync>,
    /// The machine is over: nobody waits any more.
    over: AtomicBool,
    /// Why, if it was not asked to be.
    failure: Mutex<Option<String>>,
    /// Pages that wait for a pin to go.
    held_back: AtomicU32,
    taker: OnceLock<Thread>,
    /// See there.
    pub counters: MemoryCounters,
    counts: PageCounts,
    vcpu_counts: VcpuCounts,
    trace: Trace,
    slice: usize,
}

struct State {
    node: Node<PageTables>,
    waiters: Vec<Arc<Waiter>>,
    /// By page: what users asked for and go on without. One entry for each page that
    /// a vCPU faults on.
    asked: HashMap<u64, Asked>,
    /// By page: what has to be done about it before anything else.
    busy: HashMap<u64, Busy>,
    /// Leaves when the lock is given up.
    parcels: Vec<Parcel>,
    /// First touches one after the other.
    streams: Streams,
    /// The page that came last and was never touched before.
    fresh: Option<u64>,
}

/// Equal messages about consecutive pages, for one slice.
struct Parcel {
    to: NodeId,
    run: Run,
}

/// The lock, held. What was to be sent meanwhile is sent before it is given up.
struct Guard<'a> {
    shell: &'a SharedMemory,
    state: MutexGuard<'a, State>,
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
        self.shell.send_parcels(&mut self.state);
    }
}

/// A page that somebody wants who does not wait here.
struct Asked {
    access: Access,
    since: Instant,
    /// The protocol has to be asked again: its last answer was not enough.
    again: bool,
}

/// A page in the middle of a step.
#[derive(Default)]
struct Busy {
    /// What is left of the step; none while a thread is at it.
    held_back: Option<Work<'static>>,
    /// What came meanwhile.
    events: VecDeque<(Event, Option<Box<[u8]>>)>,
}

/// What is left to do of a step.
#[derive(Default)]
struct Work<'a> {
    actions: VecDeque<Action>,
    /// The page that came with the message.
    bytes: Option<Cow<'a, [u8]>>,
}

impl Work<'_> {
    fn owned(self) -> Work<'static> {
        Work {
            actions: self.actions,
            bytes: self.bytes.map(|bytes| Cow::Owned(bytes.into_owned())),
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
            rights: Rights::new(pages),
            pins: Pins::default(),
            state: Mutex::new(State {
                node: Node::new(&options.config, PageTables::new(pages)),
                waiters: Vec::new(),
                asked: HashMap::new(),
                busy: HashMap::new(),
                parcels: Vec::new(),
                streams: Streams::new(AHEAD_PAGES),
                fresh: None,
            }),
            post: options.post,
            users: OnceLock::new(),
            lease: options.lease,
            broken: options.broken,
            over: AtomicBool::new(false),
            failure: Mutex::new(None),
            held_back: AtomicU32::new(0),
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
    pub fn adopt(&self, addresses: std::ops::Range<u64>) -> Result<(), String> {
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
    fn carry_out<'a>(&'a self, mut state: Guard<'a>, page: u64, mut work: Work<'_>) -> Guard<'a> {
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
            self.fail(format!("a page could not be taken from a vCPU: {error}"));
        }
        MemoryCounters::add(&self.counters.taken, 1);
        MemoryCounters::add(&self.counters.taking_ns, start.elapsed().as_nanos() as u64);
        self.lock()
    }

    /// Carries out an action that takes nothing from a vCPU any more.
    fn act(&self, state: &mut State, page: u64, action: Action, bytes: Option<&[u8]>) {
        match action {
            Action::Send { to, message } => state.post(to, message),
            Action::Give { to, message, .. } => state.post(to, message),
            Action::Drop { .. } => self.rights.set(page, None),
            Action::Allow { .. } => self.rights.set(page, Some(Access::Write)),
            Action::Install {
                access, content, ..
            } => {
                self.install(page, content, bytes);
                state.fresh = (content == Content::Zero).then_some(page);
                self.rights.set(page, Some(from_protocol(access)));
            }
            Action::Resolved { .. } => {
                let grant =
                    |waiter: &Waiter| self.rights.allow(page, waiter.access) && self.pins.add(page);
                state.wake(page, grant);
                self.grant_asked(state, page);
            }
            Action::Lost { node, .. } => {
                self.fail(format!("page {page:#x} was lost with {node}"));
            }
            Action::Violation { from, what, .. } => {
                self.fail(format!(
                    "{from} broke the protocol about page {page:#x}: {what}"
                ));
            }
            Action::NoRoom { .. } | Action::Refused { .. } => {
                self.fail(format!("the protocol refused: {action:?}"));
            }
        }
    }

    /// Gives a page that was asked for to the users, as far as it may be used.
    fn grant_asked(&self, state: &mut State, page: u64) {
        let Some(asked) = state.asked.get(&page) else {
            return;
        };
        if self.rights.allow(page, asked.access) {
            let waited = asked.since.elapsed().as_nanos() as u64;
            MemoryCounters::add(&self.counters.waited_ns, waited);
            state.asked.remove(&page);
        }
        self.grant(page, true);
    }

    /// Under the lock, for who writes to a page beside its users.
    fn tell_of_writing(&self, page: u64, access: Access) {
        if let (Access::Write, Some(users)) = (access, self.users.get()) {
            users.written(page << PAGE_SHIFT);
        }
    }

    /// Has the users use a page as far as this slice may; `pinned`: for long enough to
    /// be of use. One that is about to go is not kept once more.
    fn grant(&self, page: u64, pinned: bool) {
        let (Some(right), Some(users)) = (self.rights.of(page), self.users.get()) else {
            return;
        };
        if pinned {
            self.pins.add_for(page, USE_MIN);
        }
        if let Err(error) = users.granted(page << PAGE_SHIFT, right) {
            self.fail(format!("a page could not be given to a vCPU: {error}"));
        }
    }

    /// Sends what was put together under the lock, which is still held.
    fn send_parcels(&self, state: &mut State) {
        for Parcel { to, run } in state.parcels.drain(..) {
            let header = message::encode(&run);
            if !run.first.carries_bytes() {
                self.post.post(to, &header, &[]);
                continue;
            }
            MemoryCounters::add(&self.counters.pages_sent, run.count.into());
            let pages: Vec<&[u8]> = run
                .messages()
                .map(|message| {
                    // SAFETY: the page was taken from all who could write to it, and
                    // nobody gets it again before the lock is given up.
                    unsafe { std::slice::from_raw_parts(self.host(message.page.0), PAGE_BYTES) }
                })
                .collect();
            self.post.post(to, &header, &pages);
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

    /// Where a page that is memory lies.
    fn host(&self, page: u64) -> *mut u8 {
        self.host_of(page << PAGE_SHIFT)
            .unwrap_or(std::ptr::null_mut())
    }

    fn host_of(&self, address: u64) -> Option<*mut u8> {
        self.parts.iter().find_map(|(start, length, host)| {
            let offset = address.wrapping_sub(*start);
            (offset < *length).then(|| (*host as *mut u8).wrapping_add(offset as usize))
        })
    }

    fn lock(&self) -> Guard<'_> {
        Guard {
            shell: self,
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// The memory cannot go on. May be called with the lock held: the thread that
    /// takes pages back tells whoever is to know.
    fn fail(&self, reason: String) {
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
    }

    /// Whether it is.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// The thread that goes on with pages that were held back; runs until the
    /// machine is over, and says so if that was the memory's doing.
    pub fn take_held_back(&self) {
        let _ = self.taker.set(std::thread::current());
        while !self.is_over() {
            let waiting = self.held_back.load(Ordering::SeqCst) != 0;
            std::thread::park_timeout(match (waiting, self.pins.next_end()) {
                (true, Some(end)) => end.min(HELD_BACK_LOOK),
                (true, None) => HELD_BACK_LOOK,
                (false, _) => IDLE_LOOK,
            });
            if self.held_back.load(Ordering::SeqCst) != 0 {
                self.look_at_held_back();
            }
        }
        let failure = self
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(reason) = failure {
            (self.broken)(reason);
        }
    }

    fn look_at_held_back(&self) {
        let mut state = self.lock();
        let pages: Vec<u64> = state
            .busy
            .iter()
            .filter(|(page, busy)| busy.held_back.is_some() && !self.pins.hold(**page))
            .map(|(page, _)| *page)
            .collect();
        for page in pages {
            let work = state
                .busy
                .get_mut(&page)
                .and_then(|busy| busy.held_back.take());
            if let Some(work) = work {
                self.held_back.fetch_sub(1, Ordering::SeqCst);
                state = self.carry_out(state, page, work);
            }
        }
    }

    /// A pin may have gone between the look at it and the word that a page waits, or
    /// go by itself.
    fn wake_taker(&self, page: u64) {
        if (!self.pins.hold(page) || self.pins.next_end().is_some())
            && let Some(taker) = self.taker.get()
        {
            taker.unpark();
        }
    }

    /// Calls `copy` with the host address, the offset and the length of each piece
    /// of a range, while the slice holds its page. Whether all of it is memory.
    fn by_pages(
        &self,
        address: u64,
        length: usize,
        access: Access,
        mut copy: impl FnMut(*mut u8, usize, usize),
    ) -> bool {
        let mut done = 0;
        while done < length {
            let Some(at) = address.checked_add(done as u64) else {
                return false;
            };
            let inside = at % PAGE_BYTES as u64;
            let piece = (length - done).min(PAGE_BYTES - inside as usize);
            if !self.with_page(at - inside, access, |host| {
                copy(host.wrapping_add(inside as usize), done, piece);
            }) {
                return false;
            }
            done += piece;
        }
        true
    }

    /// Calls `work` with a page that is held, which nobody takes meanwhile.
    fn with_page(&self, page: u64, access: Access, mut work: impl FnMut(*mut u8)) -> bool {
        loop {
            let Ok(host) = self.acquire(page, access) else {
                return false;
            };
            // Pages are given away under the lock only.
            let state = self.lock();
            let held = self.rights.allow(page >> PAGE_SHIFT, access) || self.is_over();
            if held {
                work(host);
            }
            drop(state);
            self.taken_up(page);
            if held {
                return true;
            }
        }
    }

    /// Asks for a page without waiting for it: [`Users::granted`] is called when it
    /// may be used, perhaps before this returns. Asking again changes nothing. An
    /// address that is no memory is nobody's, and is never granted.
    pub fn ask(&self, address: u64, access: Access) {
        let page = address >> PAGE_SHIFT;
        if self.host_of(page << PAGE_SHIFT).is_none() {
            return;
        }
        let mut state = self.lock();
        if self.rights.allow(page, access) {
            MemoryCounters::add(&self.counters.local, 1);
            return self.grant(page, !state.busy.contains_key(&page));
        }
        if let Some(asked) = state.asked.get_mut(&page) {
            if access == Access::Write {
                asked.access = Access::Write;
            }
            return;
        }
        let asked = Asked {
            access,
            since: Instant::now(),
            again: false,
        };
        state.asked.insert(page, asked);
        if !state.busy.contains_key(&page) {
            let work = state.step(fault(page, access), None);
            state = self.carry_out(state, page, work);
        }
        match state.asked.contains_key(&page) {
            true => drop(self.count_remote(page, access)),
            false => MemoryCounters::add(&self.counters.local, 1),
        }
    }

    /// Has the users ask for a page again before they use it next.
    pub fn hide(&self, address: u64) {
        let state = self.lock();
        if let Some(users) = self.users.get()
            && let Err(error) = users.hide(address)
        {
            self.fail(format!("a page could not be hidden from vCPUs: {error}"));
        }
        drop(state);
    }

    /// Breaks off when a page that was asked for did not come in time: whoever calls
    /// [`SharedMemory::ask`] calls this now and then.
    pub fn look_for_overdue(&self) {
        // A link whose lease ends tells more: it is given the time to.
        let patience = 2 * self.lease;
        let late =
            |(page, asked): (&u64, &Asked)| (asked.since.elapsed() > patience).then_some(*page);
        let overdue = self.lock().asked.iter().find_map(late);
        if let Some(page) = overdue {
            self.fail(did_not_come(page, patience));
        }
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

    fn count_remote(&self, page: u64, access: Access) -> FaultKind {
        let (kind, counter) = match (access, self.rights.of(page)) {
            (Access::Read, _) => (FaultKind::Read, &self.counters.reads),
            (Access::Write, None) => (FaultKind::Write, &self.counters.writes),
            (Access::Write, Some(_)) => (FaultKind::Upgrade, &self.counters.upgrades),
        };
        MemoryCounters::add(counter, 1);
        self.counts.count(page, kind);
        kind
    }

    /// Waits for the page if another slice has it. See [`Memory::acquire`].
    fn fetch(
        &self,
        address: u64,
        access: Access,
        asker: Option<&Asker>,
    ) -> Result<*mut u8, Unbacked> {
        let host = self.host_of(address).ok_or(Unbacked(address))?;
        let page = address >> PAGE_SHIFT;
        let waiter = Waiter::new(page, access);
        let mut state = self.lock();
        self.tell_of_writing(page, access);
        if self.rights.allow(page, access) && self.pins.add(page) {
            return Ok(host);
        }
        state.waiters.push(waiter.clone());
        let (start, mut counted) = (Instant::now(), None);
        while !waiter.granted() && !self.is_over() {
            if !state.busy.contains_key(&page) {
                let work = state.step(fault(page, access), None);
                state = self.carry_out(state, page, work);
                if waiter.granted() {
                    break;
                }
            }
            counted = counted.or_else(|| Some(self.count_remote(page, access)));
            drop(state);
            // A link whose lease ends tells more: it is given the time to.
            if !waiter.wait(2 * self.lease) {
                self.fail(did_not_come(page, 2 * self.lease));
            }
            state = self.lock();
        }
        state.waiters.retain(|other| !Arc::ptr_eq(other, &waiter));
        if counted.is_some() && state.fresh == Some(page) {
            state = self.ask_ahead(state, page);
        }
        self.tell_of_writing(page, access);
        drop(state);
        let Some(kind) = counted else {
            MemoryCounters::add(&self.counters.local, 1);
            return Ok(host);
        };
        let waited = start.elapsed();
        let waited_ns = waited.as_nanos() as u64;
        MemoryCounters::add(&self.counters.waited_ns, waited_ns);
        if let Some(asker) = asker {
            self.vcpu_counts.count(asker.vcpu, waited_ns);
        }
        self.trace.record(page, kind, asker, start, waited);
        Ok(host)
    }
}

impl SharedMemory {
    /// Asks for the pages behind `page`, which nobody had touched before, if they
    /// are touched one after the other: memory that is used for the first time.
    fn ask_ahead<'a>(&'a self, mut state: Guard<'a>, page: u64) -> Guard<'a> {
        let ahead = state.streams.fault(page);
        for next in ahead.from..ahead.from + ahead.count {
            let known = self.host_of(next << PAGE_SHIFT).is_none()
                || self.rights.of(next).is_some()
                || state.busy.contains_key(&next);
            if known {
                break;
            }
            let event = Event::Fault {
                page: Page(next),
                access: weft_dsm::Access::Read,
                ahead: true,
            };
            let work = state.step(event, None);
            state = self.carry_out(state, next, work);
        }
        state
    }
}

impl State {
    /// Has a message leave with those that are about to, when the lock is given up.
    fn post(&mut self, to: NodeId, message: Message) {
        let mut parcels = self.parcels.iter_mut().rev();
        if let Some(last) = parcels.find(|parcel| parcel.to == to) {
            let room = !message.carries_bytes() || last.run.count < PARCEL_PAGES;
            if room && last.run.extend(&message) {
                return;
            }
        }
        let run = Run::one(message);
        self.parcels.push(Parcel { to, run });
    }

    /// Steps the node; what it says.
    fn step<'a>(&mut self, event: Event, bytes: Option<Cow<'a, [u8]>>) -> Work<'a> {
        let mut actions = VecDeque::new();
        self.node
            .step(event, &mut |action| actions.push_back(action));
        Work { actions, bytes }
    }

    /// Wakes those who wait for a page; `grant` says whether they have it.
    fn wake(&mut self, page: u64, mut grant: impl FnMut(&Waiter) -> bool) {
        for waiter in self.waiters.iter().filter(|waiter| waiter.page == page) {
            if !waiter.granted() {
                waiter.wake(grant(waiter));
            }
        }
        if let Some(asked) = self.asked.get_mut(&page) {
            asked.again = true;
        }
    }

    /// What is to be looked at next about a page whose last step is done: what came
    /// meanwhile, and then what users still want.
    fn next_event(&mut self, page: u64) -> Option<(Event, Option<Box<[u8]>>)> {
        if let Some(busy) = self.busy.get_mut(&page) {
            if let Some(event) = busy.events.pop_front() {
                return Some(event);
            }
            self.busy.remove(&page);
            self.wake(page, |_| false);
        }
        let asked = self.asked.get_mut(&page)?;
        std::mem::take(&mut asked.again).then(|| (fault(page, asked.access), None))
    }
}

impl Memory for SharedMemory {
    /// Waits for the page if another slice has it. What is returned is pinned
    /// until [`Memory::taken_up`].
    fn acquire(&self, address: u64, access: Access) -> Result<*mut u8, Unbacked> {
        self.fetch(address, access, None)
    }

    fn acquire_for(
        &self,
        address: u64,
        access: Access,
        asker: &Asker,
    ) -> Result<*mut u8, Unbacked> {
        self.fetch(address, access, Some(asker))
    }

    fn held(&self, address: u64, access: Access) -> Option<*mut u8> {
        if !self.rights.allow(address >> PAGE_SHIFT, access) {
            return None;
        }
        self.host_of(address)
    }

    fn taken_up(&self, address: u64) {
        self.pins.remove(address >> PAGE_SHIFT);
        if self.held_back.load(Ordering::SeqCst) != 0
            && let Some(taker) = self.taker.get()
        {
            taker.unpark();
        }
    }

    fn end(&self) -> u64 {
        self.end
    }
}

impl GuestBytes for SharedMemory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let from = bytes.as_mut_ptr();
        self.by_pages(
            address,
            bytes.len(),
            Access::Read,
            |host, offset, length| {
                // SAFETY: both are `length` bytes; the page stays while the copy is made.
                unsafe { std::ptr::copy_nonoverlapping(host, from.add(offset), length) };
            },
        )
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.by_pages(
            address,
            bytes.len(),
            Access::Write,
            |host, offset, length| {
                // SAFETY: both are `length` bytes; the page stays while the copy is made.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().add(offset), host, length) };
            },
        )
    }
}

fn fault(page: u64, access: Access) -> Event {
    Event::Fault {
        page: Page(page),
        access: to_protocol(access),
        ahead: false,
    }
}

fn did_not_come(page: u64, patience: Duration) -> String {
    let seconds = patience.as_secs_f64();
    format!("page {page:#x} did not come within {seconds} s")
}

fn to_protocol(access: Access) -> weft_dsm::Access {
    match access {
        Access::Read => weft_dsm::Access::Read,
        Access::Write => weft_dsm::Access::Write,
    }
}

fn from_protocol(access: weft_dsm::Access) -> Access {
    match access {
        weft_dsm::Access::Read => Access::Read,
        weft_dsm::Access::Write => Access::Write,
    }
}
