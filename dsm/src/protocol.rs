//! What goes into the state machine ([`Event`]), what comes out of it
//! ([`Action`]), and what travels between nodes ([`Message`]).

use crate::state::EntryRecord;
use crate::types::{Access, NodeId, Page, Standing};

/// How the content of a page travels with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Content {
    /// 4096 bytes beside the message.
    Bytes,
    /// The page was never written: the receiver makes a zero page.
    Zero,
    /// Nothing: the receiver holds the same bytes already.
    Held,
    /// Nothing: the receiver keeps the bytes of an earlier [`Body::Precopy`], which are the
    /// page's.
    Precopied,
}

impl Content {
    /// Whether the page gets bytes that its owner had, whichever way they come.
    pub(crate) const fn has_bytes(self) -> bool {
        matches!(self, Content::Bytes | Content::Precopied)
    }
}

/// What a holder may do with a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Right {
    /// A read-only copy; somebody else owns the page.
    Shared,
    /// The only copy, and the ownership.
    Exclusive,
}

/// A message about one page. The shell joins equal messages for consecutive
/// pages into one frame, see [`crate::message`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    pub page: Page,
    /// How often the page was discarded, modulo 256, as the sender knows it. A
    /// message of an earlier generation is ignored.
    pub generation: u8,
    /// What it says.
    pub body: Body,
}

/// What a message says. M is the page's manager, O its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Body {
    /// Requester → M: I need the page.
    Get {
        access: Access,
        /// Before any fault; may be answered with [`Body::Retry`].
        ahead: bool,
    },
    /// M → O: give the page to `requester`.
    Forward {
        access: Access,
        requester: NodeId,
        /// You are the only holder (apart from a requester that upgrades).
        sole: bool,
        /// The requester holds a copy: send no content.
        held: bool,
    },
    /// O → requester: here it is.
    Data {
        /// With which right.
        right: Right,
        /// In what form.
        content: Content,
        /// The page is known to be read and then written by its visitors.
        migratory: bool,
    },
    /// M → requester: what you asked for needs nobody else. [`Content::Zero`]:
    /// the page was never touched and is yours. [`Content::Held`]: you own it
    /// and, if you asked to write, all other copies are gone.
    Grant {
        /// `Zero` or `Held`.
        content: Content,
    },
    /// M → holder: drop your read-only copy and say so.
    Invalidate,
    /// Holder → M: I have no copy.
    InvalidateAck,
    /// New holder → M: it arrived.
    Done {
        /// The ownership came with it.
        exclusive: bool,
    },
    /// Holder → M: I dropped my read-only copy.
    Dropped,
    /// O → M: I need room, who takes this page?
    Offer {
        /// Only this node will do.
        to: Option<NodeId>,
    },
    /// M → O: nobody takes it now.
    OfferDenied {
        /// Why.
        reason: Denial,
    },
    /// M → O: push the page to `to`.
    Place {
        to: NodeId,
        /// Nobody else holds a copy (apart from `to`).
        sole: bool,
        /// `to` holds a copy and cannot lose it: send no content.
        held: bool,
    },
    /// Old owner → new owner: the page is yours.
    Push {
        /// `Held`: if you still hold your copy, it is the page now; otherwise
        /// answer [`Body::NotHere`].
        content: Content,
        /// Nobody else holds a copy.
        sole: bool,
        /// As in [`Body::Data`].
        migratory: bool,
    },
    /// Holder → M: I dropped the copy before your `Push` without content came;
    /// the ownership returns to you.
    NotHere,
    /// M → requester: not now; ask again if you still need it.
    Retry,
    /// M → requester: the page died with `node`.
    Lost {
        /// The node that had the only copy.
        node: NodeId,
    },
    /// M → a party of a transfer whose other party died: do you own the page?
    Probe {
        /// The dead node. The receiver accepts nothing more from it.
        dead: NodeId,
    },
    /// The answer.
    Held {
        /// Copied from the question.
        dead: NodeId,
        /// I own the page.
        owner: bool,
    },
    /// M → every other node: `to` shall be the manager. Send nothing about the page
    /// until [`Body::Moved`] or [`Body::Thaw`] comes.
    Freeze { to: NodeId },
    /// The answer: what I sent about the page, you have.
    Frozen,
    /// M → the next manager: you are the manager, and this is the directory's record.
    Entry { record: EntryRecord },
    /// The new manager → every other node; or the answer to [`Body::Ask`]: `to` is the
    /// manager.
    Moved { to: NodeId },
    /// M → every other node: I stay the manager.
    Thaw,
    /// A frozen node → the other end of the hand-over: this end died. Who is the
    /// manager?
    Ask {
        /// The dead node. The receiver accepts nothing more from it.
        dead: NodeId,
    },
    /// O → the next owner: the page's bytes as they are now, to be kept. O goes on writing
    /// the page. This and the next two are the controller's; the protocol does not know them.
    Precopy,
    /// The answer to [`Body::Precopy`] and to [`Body::DropPrecopy`].
    Precopied {
        /// The bytes are kept here.
        kept: bool,
    },
    /// O → the next owner: keep the bytes no longer.
    DropPrecopy,
}

impl Body {
    /// The node that the message is about, beside its two ends.
    pub const fn names(&self) -> Option<NodeId> {
        match *self {
            Body::Forward { requester, .. } => Some(requester),
            Body::Offer { to } => to,
            Body::Place { to, .. } => Some(to),
            Body::Lost { node } => Some(node),
            Body::Probe { dead } | Body::Held { dead, .. } | Body::Ask { dead } => Some(dead),
            Body::Freeze { to } | Body::Moved { to } => Some(to),
            _ => None,
        }
    }

    /// Whether a node asks for the page.
    pub const fn is_request(&self) -> bool {
        matches!(self, Body::Get { .. } | Body::Forward { .. })
    }

    /// The node that the receiver shall send the page to.
    pub const fn sends_to(&self) -> Option<NodeId> {
        match *self {
            Body::Forward { requester, .. } => Some(requester),
            Body::Place { to, .. } => Some(to),
            _ => None,
        }
    }
}

/// Why the manager or the node itself does not move a page now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Denial {
    /// Another transaction about the page is under way.
    #[error("the page is busy, choose another or try later")]
    Busy,
    /// The page is not owned by the node that offered it (any more).
    #[error("the page has gone elsewhere meanwhile")]
    NotOwner,
    /// No node has room.
    #[error("no node has room for the page; add a node or raise a budget")]
    NoRoom,
}

/// Why a request was refused on the spot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// A write to a page of policy `ReadOnly`, or its eviction from its owner.
    #[error("the page is replicated read-only")]
    ReadOnly,
    /// Eviction of a page of policy `Private`.
    #[error("the page is private to this node")]
    Private,
    /// Eviction of a page with a request or an offer of its own under way.
    #[error("the page is in use, choose another")]
    Busy,
    /// Eviction of a page that is not here, or that left meanwhile.
    #[error("the page is not here")]
    NotHere,
    /// Eviction, with a manager that died.
    #[error("the page's manager is lost")]
    ManagerLost,
    /// Adoption of a page that somebody touched before, or at a node that does
    /// not manage it.
    #[error("the page cannot be adopted: it has an owner, or another manager")]
    Adopted,
    /// Hand-over of a page that this node does not manage, or not alone.
    #[error("this node does not manage the page, or hands it over already")]
    NotManager,
    /// Hand-over to a node that is dead, absent, leaving, or this one.
    #[error("the node named cannot become the page's manager")]
    NotHeir,
    /// Hand-over while a node joins or leaves.
    #[error("a node joins or leaves; hand over managers afterwards")]
    Held,
    /// A request of a node that leaves.
    #[error("this node leaves and takes no page")]
    Leaving,
}

/// What happens to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The program touched a page without the right to (`ahead: false`), or the
    /// engine expects that it soon will (`ahead: true`, reads only). Answered by
    /// [`Action::Resolved`], [`Action::Lost`] or [`Action::Refused`]: at once,
    /// or after messages. One request per page is under way at a time; a fault
    /// that meets one emits nothing and is answered together with it.
    Fault {
        page: Page,
        access: Access,
        /// Not a fault but a guess.
        ahead: bool,
    },
    /// A message arrived. Its page bytes, if any, stay with the shell until the
    /// [`Action::Install`] that this step emits, or are thrown away.
    Message { from: NodeId, message: Message },
    /// Make room: the page should leave. Ends in [`Action::Drop`] or
    /// [`Action::Give`] (gone), [`Action::NoRoom`] or [`Action::Refused`].
    Evict {
        page: Page,
        /// Only this node will do; `None`: the node with most room.
        to: Option<NodeId>,
    },
    /// The page's content is no longer wanted (`munmap`, `MADV_DONTNEED`): it
    /// reads as zero from now on. The engine removes the range from memory
    /// itself; no action but [`Action::Resolved`] is emitted. It broadcasts the
    /// event to all nodes, **the page's manager last, after every other node
    /// has acknowledged**, see [`crate`] for why.
    Discard { page: Page },
    /// At the manager, before anybody touched the page: it is present and
    /// writable here and becomes owned by this node.
    Adopt { page: Page },
    /// `node` is dead, by the one authority that decides so. The engine calls
    /// this for every page that is in its tables, and delivers nothing from
    /// that node afterwards.
    PeerLost {
        /// The dead node.
        node: NodeId,
        page: Page,
    },
    /// At the manager: `to` shall be the page's manager. Ends in
    /// [`Action::HandedOver`], [`Action::Kept`] or [`Action::Refused`]. No discard of
    /// the page is under way, and none begins before the end.
    HandOver { page: Page, to: NodeId },
    /// At the manager: it stays the manager, if the hand-over has not gone too far.
    Recall { page: Page },
    /// A node joins or leaves: no hand-over begins until [`Event::Resume`]. Answered by
    /// [`Action::Quiet`] as soon as those begun here are over.
    Hold,
    /// Hand-overs may begin again.
    Resume,
    /// What `node` takes part in from now on. [`Standing::Absent`] begins and ends
    /// while all nodes hold.
    Member { node: NodeId, standing: Standing },
}

/// What remains of a page here when it is given away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// Nothing: remove it.
    Nothing,
    /// A read-only copy: write-protect it.
    Shared,
    /// A read-only copy, and it is write-protected already.
    AsIs,
}

/// What the shell must do, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Send a message without page bytes.
    Send { to: NodeId, message: Message },
    /// Take the page: stop writes to it, copy its bytes out if the message's
    /// content is [`Content::Bytes`], remove or keep it as `keep` says, and
    /// **only then** send.
    Give {
        to: NodeId,
        /// `Data` or `Push`.
        message: Message,
        /// What remains here.
        keep: Keep,
    },
    /// Put the page into memory.
    Install {
        page: Page,
        /// `Read`: write-protected.
        access: Access,
        /// `Bytes` (those that came with the message) or `Zero`.
        content: Content,
    },
    /// Make a page that is here writable.
    Allow { page: Page },
    /// Remove the page from memory.
    Drop { page: Page },
    /// Another node's write took the page from here, and its policy is `Update`:
    /// the engine may ask for it again, now or later, with a fault to read that
    /// nobody waits for. Comes after the action that takes it.
    Outdated { page: Page },
    /// Threads that wait for the page should try the access again.
    Resolved { page: Page },
    /// The page's only copy died with `node`, or its manager did. Requests
    /// for it get no answer.
    Lost {
        page: Page,
        /// The dead node.
        node: NodeId,
    },
    /// The eviction failed: no node has room.
    NoRoom { page: Page },
    /// The page's manager is `to`; what the directory said of the page is on its way.
    HandedOver {
        page: Page,
        /// The manager.
        to: NodeId,
    },
    /// This node manages the page from now on: another handed it over.
    TookOver { page: Page },
    /// The hand-over was recalled, or the next manager died: this node stays the manager.
    Kept { page: Page },
    /// No hand-over begun by this node is under way: the answer to [`Event::Hold`].
    Quiet,
    /// The event was refused and changed nothing.
    Refused {
        page: Page,
        /// Why.
        reason: Refusal,
    },
    /// A message that a correct peer cannot have sent. The engine should end
    /// the aggregate with `what`; the state did not change.
    Violation {
        page: Page,
        /// The sender.
        from: NodeId,
        /// What was wrong.
        what: &'static str,
    },
}

/// Takes the actions of a step, in order.
pub trait Sink {
    fn act(&mut self, action: Action);
}

impl<F: FnMut(Action)> Sink for F {
    fn act(&mut self, action: Action) {
        self(action);
    }
}
