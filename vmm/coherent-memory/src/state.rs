//! The state under the lock of all guest memory, and the work that follows the unlock.
//!
//! A thread locks, steps the controller, and carries out at once what must happen under the
//! lock (copies of pages, messages into the outbox). The rest is collected in [`After`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use weft_dsm::PAGE_BYTES;
use weft_dsm::controller::{Action, Bytes, Controller, Count, Event, Look, Sink};

use super::counters::MemoryCounters;
use super::outbox::Outbox;
use super::shell::{PAGE_SHIFT, SharedMemory, from_protocol};
use super::tables::PageTables;
use super::waiter::Waiter;

/// The bytes of a page whose message waits in the controller.
type Kept = Box<[u8]>;

/// What the lock guards.
pub(super) struct State {
    pub controller: Controller<PageTables, Kept>,
    outbox: Outbox,
    waiters: Vec<(u64, Arc<Waiter>)>,
    next_waiter: u64,
    /// Requests for pages that were sent to other slices so far.
    pub requested: u64,
    /// Copies of pages that wait for the writer of the save.
    pub saved: VecDeque<(u64, Kept)>,
    after: After,
}

/// The work that follows the unlock.
#[derive(Default)]
pub(super) struct After {
    pub woken: Vec<(Arc<Waiter>, bool)>,
    /// The slices that frames are queued for, a bit for each.
    pub nodes: u32,
    pub operations: Vec<Action<Kept>>,
    /// The deferred-work thread must be woken.
    pub deferred_work: bool,
    /// The evictor must be woken.
    pub evictor: bool,
    /// Threads that drain, or wait for a change of membership, must be woken.
    pub membership: bool,
}

impl State {
    pub fn new(controller: Controller<PageTables, Kept>) -> Self {
        Self {
            controller,
            outbox: Outbox::default(),
            waiters: Vec::new(),
            next_waiter: 0,
            requested: 0,
            saved: VecDeque::new(),
            after: After::default(),
        }
    }

    /// Steps the controller and carries out the actions that need the lock. `arrived` is the
    /// page that came with a message.
    pub fn step(&mut self, shell: &SharedMemory, event: Event, arrived: Option<&[u8]>) {
        let from = match &event {
            Event::Message { from, .. } => Some(from.index()),
            _ => None,
        };
        let mut executor = ActionExecutor {
            shell,
            outbox: &mut self.outbox,
            waiters: &self.waiters,
            after: &mut self.after,
            requested: &mut self.requested,
            saved: &mut self.saved,
            arrived,
            from,
        };
        self.controller.step(event, shell.now(), &mut executor);
    }

    /// Queues the outgoing messages; returns the work that follows the unlock.
    pub fn finish(&mut self, shell: &SharedMemory) -> After {
        self.after.nodes = shell.links.queue(&mut self.outbox);
        std::mem::take(&mut self.after)
    }

    /// Registers the calling thread as a waiter; returns its number.
    pub fn add_waiter(&mut self) -> (u64, Arc<Waiter>) {
        self.next_waiter += 1;
        let waiter = Waiter::new();
        self.waiters.push((self.next_waiter, waiter.clone()));
        (self.next_waiter, waiter)
    }

    /// Forgets a waiter whose thread no longer waits.
    pub fn remove_waiter(&mut self, number: u64) {
        self.waiters.retain(|(other, _)| *other != number);
    }

    /// All waiting threads.
    pub fn waiters(&self) -> Vec<Arc<Waiter>> {
        let waiters = self.waiters.iter();
        waiters.map(|(_, waiter)| waiter.clone()).collect()
    }
}

/// Carries out the actions of a step that need the lock, and collects the others.
struct ActionExecutor<'a> {
    shell: &'a SharedMemory,
    outbox: &'a mut Outbox,
    waiters: &'a [(u64, Arc<Waiter>)],
    after: &'a mut After,
    requested: &'a mut u64,
    saved: &'a mut VecDeque<(u64, Kept)>,
    arrived: Option<&'a [u8]>,
    /// The slice whose message is handled.
    from: Option<usize>,
}

impl ActionExecutor<'_> {
    fn waiter(&self, number: u64) -> Option<&Arc<Waiter>> {
        let mut waiters = self.waiters.iter();
        let waiter = waiters.find(|(other, _)| *other == number);
        waiter.map(|(_, waiter)| waiter)
    }

    fn fill(&self, page: u64, bytes: &[u8]) {
        MemoryCounters::add(&self.shell.counters.pages_received, 1);
        let (Some(host), PAGE_BYTES) = (self.shell.host(page), bytes.len()) else {
            return self.shell.fail(format!(
                "page {page:#x} came with {} bytes instead of {PAGE_BYTES}",
                bytes.len()
            ));
        };
        // SAFETY: a whole page of RAM, which `host` found, and a whole page of bytes; no
        // user has the page, for it is not here before this step is done.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, PAGE_BYTES) };
    }

    fn count(&self, count: Count, many: u64) {
        let counters = &self.shell.counters;
        let counter = match count {
            Count::Local => &counters.local,
            Count::Deferred => &counters.deferred,
            Count::EvictedDropped => &counters.evicted_dropped,
            Count::EvictedSent => &counters.evicted_sent,
            Count::EvictionDenied => &counters.evictions_denied,
            Count::GivenBack => &counters.given_back,
            Count::RoomWait => &counters.room_waits,
        };
        MemoryCounters::add(counter, many);
    }
}

impl Sink<Kept> for ActionExecutor<'_> {
    fn act(&mut self, action: Action<Kept>) {
        match action {
            Action::Fill { page, bytes } => match (&bytes, self.arrived) {
                (Bytes::Kept(bytes), _) => self.fill(page, bytes),
                (Bytes::Arrived, bytes) => self.fill(page, bytes.unwrap_or_default()),
            },
            Action::Zero { page } => {
                if let Some(host) = self.shell.host(page) {
                    // SAFETY: a whole page of RAM; no user has the page, for it is not
                    // here before this step is done.
                    unsafe { std::ptr::write_bytes(host, 0, PAGE_BYTES) };
                }
            }
            Action::Save { page } => {
                if let Some(host) = self.shell.host(page) {
                    // SAFETY: a whole page of RAM, which lives as long as the shell. No user may
                    // write to it: this step will let them, after this.
                    let bytes =
                        unsafe { std::slice::from_raw_parts(host.cast_const(), PAGE_BYTES) };
                    self.saved.push_back((page, bytes.into()));
                    MemoryCounters::add(&self.shell.counters.saved_first, 1);
                }
            }
            Action::Send { to, message } => {
                *self.requested += u64::from(message.body.is_request());
                let page = message.carries_bytes().then_some(message.page.0);
                let bytes = page.and_then(|page| self.shell.host(page)).map(|host| {
                    // SAFETY: a whole page of RAM, which lives as long as the shell. The
                    // right to write to it was taken from all users, and the controller
                    // gives it back under the lock only, which the caller holds.
                    unsafe { std::slice::from_raw_parts(host.cast_const(), PAGE_BYTES) }
                });
                self.outbox.put(to, message, bytes);
            }
            Action::Revoke { .. }
            | Action::Map { .. }
            | Action::Load { .. }
            | Action::Hide { .. }
            | Action::GiveBack { .. }
            | Action::Watch { .. } => self.after.operations.push(action),
            Action::Wake { waiter, granted } => {
                if let Some(waiter) = self.waiter(waiter) {
                    if let (true, Some(from)) = (granted, self.from) {
                        waiter.served_by(from);
                    }
                    self.after.woken.push((waiter.clone(), granted));
                }
            }
            Action::Look(Look::Tick) => self.after.deferred_work = true,
            Action::Look(Look::Room) => self.after.evictor = true,
            Action::Look(Look::Membership) => self.after.membership = true,
            Action::Remote {
                page,
                access,
                waiter,
            } => {
                let kind = self.shell.count_remote(page, access);
                if let Some(waiter) = waiter.and_then(|waiter| self.waiter(waiter)) {
                    waiter.asked_for(kind);
                }
            }
            Action::Renew { .. } => {
                MemoryCounters::add(&self.shell.counters.subscription_requests, 1)
            }
            Action::Prefetch { .. } => MemoryCounters::add(&self.shell.counters.prefetched, 1),
            Action::Waited {
                since,
                asking,
                here,
            } => {
                let now = self.shell.now();
                let counters = &self.shell.counters;
                counters.count_wait(now.saturating_sub(since), asking, now.saturating_sub(here));
            }
            Action::Count(count, many) => self.count(count, many),
            Action::Fail(failure) => self.shell.fail(failure.to_string()),
        }
    }

    fn keep(&mut self) -> Kept {
        self.arrived.unwrap_or_default().into()
    }
}

impl SharedMemory {
    /// Does `work` under the lock, and the work that follows after the unlock.
    pub(super) fn locked<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let (result, mut after) = self.under_lock(work);
        while self.finish_outside_lock(&mut after) {
            (_, after) = self.under_lock(|state| {
                for operation in after.operations.drain(..) {
                    if let Some(done) = done(&operation) {
                        state.step(self, done, None);
                    }
                }
            });
        }
        result
    }

    fn under_lock<R>(&self, work: impl FnOnce(&mut State) -> R) -> (R, After) {
        let mut state = self.lock();
        #[cfg(test)]
        super::tests::set_locked(true);
        let result = work(&mut state);
        let after = state.finish(self);
        #[cfg(test)]
        super::tests::set_locked(false);
        (result, after)
    }

    /// Does the work that follows the unlock; whether operations are done of which the
    /// controller must be told. An operation that failed is removed: its page stays in
    /// transition, since a vCPU may still use it.
    fn finish_outside_lock(&self, after: &mut After) -> bool {
        for (waiter, granted) in after.woken.drain(..) {
            waiter.wake(granted);
        }
        if after.nodes != 0 {
            let pages = self.links.send(after.nodes, &*self.transport);
            MemoryCounters::add(&self.counters.pages_sent, pages);
        }
        if after.deferred_work {
            self.deferred_work.wake();
        }
        if after.evictor {
            self.evictor.wake();
        }
        if after.membership {
            self.membership.give();
        }
        let operate = |operation: &Action<Kept>| match self.operate(operation) {
            Ok(is_done) => is_done,
            Err(reason) => {
                self.fail(reason);
                false
            }
        };
        after.operations.retain(operate);
        !after.operations.is_empty()
    }

    /// Carries out an operation; whether it is done, or is when its page comes. The pages are in
    /// transition: nothing else happens to them.
    fn operate(&self, operation: &Action<Kept>) -> Result<bool, String> {
        #[cfg(test)]
        super::tests::assert_unlocked("an operation is carried out");
        let address = |page: u64| page << PAGE_SHIFT;
        if let Action::GiveBack { first, count } = *operation {
            let given = self
                .ram()
                .give_back(address(first), address(count) as usize);
            return given
                .map(|()| true)
                .map_err(|error| format!("memory cannot be given back to the host: {error}"));
        }
        if let Action::Load { page } = *operation {
            return self.load(page);
        }
        let Some(notifier) = self.notifier.get() else {
            return Ok(true);
        };
        let (what, done) = match *operation {
            Action::Revoke { page, kept } => {
                let start = Instant::now();
                let done = notifier.revoke(address(page), kept.map(from_protocol), self.lease);
                MemoryCounters::add(&self.counters.taken, 1);
                let taking_ns = start.elapsed().as_nanos() as u64;
                MemoryCounters::add(&self.counters.taking_ns, taking_ns);
                ("revoked from a vCPU", done)
            }
            Action::Map { page, right } => {
                let done = notifier.granted(address(page), from_protocol(right));
                ("given to a vCPU", done)
            }
            Action::Hide { page } => ("hidden from vCPUs", notifier.hide(address(page))),
            Action::Watch { page } => ("watched for use", notifier.watch_for_use(address(page))),
            _ => return Ok(true),
        };
        done.map(|()| true)
            .map_err(|error| format!("a page could not be {what}: {error}"))
    }
}

/// The event that tells the controller that an operation is done.
fn done(operation: &Action<Kept>) -> Option<Event> {
    match *operation {
        Action::Revoke { page, .. }
        | Action::Map { page, .. }
        | Action::Load { page }
        | Action::Hide { page } => Some(Event::Done { page }),
        Action::GiveBack { first, count } => Some(Event::GaveBack { first, count }),
        _ => None,
    }
}
