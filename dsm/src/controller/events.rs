//! What goes into the controller ([`Event`]) and what comes out of it ([`Action`]).

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use super::Passed;
use crate::protocol::{Message, Refusal};
use crate::types::{Access, NodeId, Standing};

/// What a user wants a page for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Anything else.
    Data,
    /// A walk through page tables.
    Table,
    /// Instructions of a kernel.
    KernelCode,
}

/// Consecutive pages that a user is expected to need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchRun {
    pub first: u64,
    pub count: u64,
    /// What it did with them. To write, the page is taken from all other nodes.
    pub access: Access,
}

/// What a user is expected to need: runs of pages, the first ones first. Made without the
/// controller's lock, since it sorts.
#[derive(Debug, Default)]
pub struct PrefetchList {
    pub(super) runs: VecDeque<PrefetchRun>,
    /// The pages that are expected to be written, in their order.
    written: Vec<Range<u64>>,
}

impl From<Vec<PrefetchRun>> for PrefetchList {
    fn from(runs: Vec<PrefetchRun>) -> Self {
        let written = runs.iter().filter(|run| run.access == Access::Write);
        let pages = |run: &PrefetchRun| run.first..run.first.saturating_add(run.count);
        let mut written: Vec<_> = written.map(pages).collect();
        written.sort_unstable_by_key(|pages| pages.start);
        let runs = runs.into();
        Self { runs, written }
    }
}

impl PrefetchList {
    /// Whether a page is expected to be written.
    pub(super) fn writes(&self, page: u64) -> bool {
        let behind = self.written.partition_point(|pages| pages.start <= page);
        behind > 0 && self.written[behind - 1].contains(&page)
    }
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A message came. Its bytes, if any, stay with the shell until [`Action::Fill`] or
    /// [`Sink::keep`].
    Message { from: NodeId, message: Message },
    /// A thread needs a page and waits for it. Answered by [`Action::Wake`].
    Acquire {
        /// A number that no other waiting thread has.
        waiter: u64,
        page: u64,
        access: Access,
        purpose: Purpose,
    },
    /// A waiting thread was woken without its page.
    Retry {
        /// Its number.
        waiter: u64,
    },
    /// A thread that waited goes on, with its page or because all is over.
    Leave {
        /// Its number.
        waiter: u64,
    },
    /// A user needs a page and sleeps until it is mapped. Answered by [`Action::Map`].
    Ask { page: u64, access: Access },
    /// The users are to ask for a page before they use it next.
    Hide { page: u64 },
    /// The operation about a page is done.
    Done { page: u64 },
    /// The memory of pages was given back.
    GaveBack {
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// The clock's hand moved: pages may be evicted.
    Evict(Passed),
    /// Memory of vacant pages may be given back, and requests that wait for room go on.
    MakeRoom,
    /// Time passed, or a pin went.
    Tick,
    /// A user comes to this node; it used these pages lately, the first ones last. They are
    /// requested behind it: in this order, few at a time, never before what a user waits
    /// for, and only while there is room. Replaces the user's prefetch.
    Prefetch { user: u32, list: PrefetchList },
    /// A user leaves: nothing more is prefetched for it.
    EndPrefetch { user: u32 },
    /// No prefetch makes a request until [`Event::ResumePrefetches`]. Then, when
    /// [`super::Controller::is_prefetching`] ends, [`Look::Membership`].
    HoldPrefetches,
    /// Prefetches go on.
    ResumePrefetches,
    /// Nothing is begun until [`Event::EndRest`]: what users ask for waits. Then
    /// [`super::Controller::rest_report`].
    Rest,
    /// All goes on.
    EndRest,
    /// A node is dead, by the one authority that decides so. Nothing that it sent is
    /// delivered afterwards.
    PeerLost { node: NodeId },
    /// A node joins or leaves: no manager is handed over until [`Event::Resume`]. Then
    /// [`super::Controller::is_quiet`].
    Hold,
    /// Managers may be handed over again.
    Resume,
    /// What a node takes part in from now on. It is not absent while
    /// [`super::Controller::has_queued`].
    Member { node: NodeId, standing: Standing },
    /// The drain goes on: after [`super::Controller::begin_drain`], and whenever
    /// [`Look::Membership`] says so.
    Drain,
    /// The pre-copy goes on: after [`super::Controller::begin_precopy`] or
    /// [`super::Controller::end_precopy`], and whenever [`Look::Membership`] says so.
    Precopy,
}

/// The bytes of a page that came.
#[derive(Debug, PartialEq, Eq)]
pub enum Bytes<B> {
    /// Those that came with the event.
    Arrived,
    /// Those that [`Sink::keep`] gave.
    Kept(B),
}

/// What the shell must do, in this order. The first four are done at once, under the
/// lock; all others after it.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<B> {
    /// Fill the memory of a page.
    Fill {
        page: u64,
        /// With what.
        bytes: Bytes<B>,
    },
    /// Fill the memory of a page with zeros.
    Zero {
        page: u64,
    },
    /// Copy the bytes of a page for the writer of the save.
    Save {
        page: u64,
    },
    /// Send a message, behind all others for that node. If it carries bytes, those that
    /// the page has now.
    Send {
        to: NodeId,
        message: Message,
    },
    /// An operation: take a page from all users, down to what is `kept`; then
    /// [`Event::Done`].
    Revoke {
        page: u64,
        /// What they may still do.
        kept: Option<Access>,
    },
    /// An operation: fill the memory of a page from the file that has it; then
    /// [`Event::Done`].
    Load {
        page: u64,
    },
    /// An operation: have the users use a page; then [`Event::Done`].
    Map {
        page: u64,
        /// As far as this.
        right: Access,
    },
    /// An operation: take a page out of the users' mapping, as it stays; then
    /// [`Event::Done`].
    Hide {
        page: u64,
    },
    /// An operation: give the memory of pages back to the host; then
    /// [`Event::GaveBack`].
    GiveBack {
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// The users are to ask for a page before they use it next, at any time: it is not
    /// waited for, and a user may be given the page meanwhile.
    Watch {
        page: u64,
    },
    /// Wake a waiting thread.
    Wake {
        /// Its number.
        waiter: u64,
        /// It has the page, pinned. If not: [`Event::Retry`].
        granted: bool,
    },
    /// A thread has something to do.
    Look(Look),
    /// A request goes to another node.
    Remote {
        page: u64,
        access: Access,
        /// The thread that waits, unless users sleep on it.
        waiter: Option<u64>,
    },
    /// A page that a write elsewhere took is asked for again before a fault.
    Renew {
        page: u64,
    },
    /// A page that follows its user is requested.
    Prefetch {
        page: u64,
    },
    /// A page that was asked for is mapped.
    Waited {
        /// When it was asked for.
        since: Duration,
        /// How long it took to ask.
        asking: Duration,
        /// When it was here.
        here: Duration,
    },
    Count(Count, u64),
    /// The memory cannot go on.
    Fail(Failure),
}

/// Which thread has something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The one that ticks: [`super::Controller::deadline`] changed, or a pin may have gone.
    Tick,
    /// The one that makes room.
    Room,
    /// The one that drains, or waits until this node is quiet or prefetches are held.
    Membership,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Requests that were settled here.
    Local,
    /// Pages that were not taken because they were pinned.
    Deferred,
    /// Copies that were evicted.
    EvictedDropped,
    /// Pages that went home.
    EvictedSent,
    /// Pages that home could not take at the moment.
    EvictionDenied,
    /// Pages whose memory was given back.
    GivenBack,
    /// Requests that had to wait for room.
    RoomWait,
}

/// Why the memory cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A message about a page that there is not.
    #[error("{from} speaks of page {page:#x}, which is no memory")]
    NoMemory {
        from: NodeId,
        /// About which.
        page: u64,
    },
    /// A page without its bytes.
    #[error("page {page:#x} came without its bytes")]
    NoBytes { page: u64 },
    /// The only copy of a page, or its manager, died, and a user waits for the page: the
    /// request ends here.
    #[error("page {page:#x} was lost with {node}")]
    Lost { page: u64, node: NodeId },
    /// A message that no correct node sends.
    #[error("{from} broke the protocol about page {page:#x}: {what}")]
    Violation {
        from: NodeId,
        /// About which page.
        page: u64,
        /// What was wrong.
        what: &'static str,
    },
    /// The protocol refused what this node asked.
    #[error("the protocol refused a request for page {page:#x}: {reason}")]
    Refused {
        page: u64,
        /// Why.
        reason: Refusal,
    },
}

/// The shell's side of a step.
pub trait Sink<B> {
    fn act(&mut self, action: Action<B>);
    /// Keeps the bytes that came with the event, because their page is in transition.
    fn keep(&mut self) -> B;
}
