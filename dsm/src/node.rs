//! One node's state machine: [`Node::step`] takes an event, changes the tables
//! and emits actions. This file holds the part that every node plays (it asks,
//! it holds, it gives); `manager.rs` the directory; `evict.rs` pushes;
//! `recovery.rs` what happens when a node dies.
//!
//! Invariants, each judged by the independent checkers:
//!
//! * A page that a node may write is in no other memory.
//! * Exactly one owner: a node's owner flag, or one message in flight that
//!   carries the ownership (`Data` with `Exclusive`, `Push`, `Grant` of a zero page).
//! * A node's record changes in the order in which messages come; `pending` is
//!   only a mark that an answer is on its way. Requests of others are served
//!   while it is set, so nobody waits in a circle.
//! * No step loops over pages, and none over nodes but those that send
//!   invalidations, choose a target or answer waiting requests.

use crate::config::{Config, ManagerOf, Modulus};
use crate::protocol::{Action, Body, Content, Event, Keep, Message, Refusal, Right, Sink};
use crate::state::{Local, PROBE_EVERY_MAX, State, Tables};
use crate::types::{Access, NODES_MAX, NodeId, Page, Policy};

/// Ways to be wrong on purpose: the tests that prove that the checkers can fail.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mutant {
    /// Grants a write without waiting for acknowledgements.
    SkipAcks,
    /// The manager does not wait for `Done`.
    EarlyDone,
    /// The owner keeps its copy when it gives the page to a writer.
    KeepOnWrite,
    /// Takes messages of an earlier generation at face value.
    IgnoreGeneration,
    /// Accepts the ownership of a copy that it dropped.
    BlindPromotion,
    /// Declares a half-finished transfer lost to the sharers without asking.
    SkipProbe,
    /// A dead node's waiting requests stay.
    NoLostAnswer,
    /// Forgets a waiting request when another is served.
    ForgetWaiting,
    /// Makes a zero page of a page whose only copy died.
    ZeroInsteadOfLost,
    /// The old manager goes on serving while it hands a page over.
    KeepServing,
    /// A request that waited is sent twice.
    AskTwice,
    /// Hands a page over in the middle of a transaction.
    HandBusy,
    /// The entry goes before all others are frozen.
    EntryEarly,
    /// A request that waited is forgotten.
    ForgetHeld,
    /// A frozen node sends `Done` to the manager that it knew.
    EagerDone,
    /// A node that joins asks before all know it.
    JoinEarly,
    /// A node is reported gone because it has nothing, whatever is on its way to it.
    LeaveEarly,
    /// `Quiet` is said at once.
    NotQuiet,
    /// A frozen node does not ask when one end of the hand-over dies.
    NoAsk,
}

/// A node: its configuration, what it counts, and its tables.
#[derive(Debug, Clone)]
pub struct Node<T> {
    pub(crate) me: NodeId,
    pub(crate) nodes: u8,
    pub(crate) migratory: bool,
    probe_every: u8,
    pub(crate) manager: ManagerOf,
    modulus: Modulus,
    /// Pages that each node owns, of those managed here.
    pub(crate) owned_pages: [u32; NODES_MAX],
    pub(crate) budgets_pages: [u32; NODES_MAX],
    /// Pages beyond its own budget that this node takes when no other has room.
    pub(crate) spare_pages: u32,
    /// Nodes that died.
    pub(crate) dead: u32,
    /// Numbers of nodes that are not there.
    pub(crate) absent: u32,
    /// Nodes that no page is pushed to: dead, absent, about to leave.
    pub(crate) closed: u32,
    /// Nodes whose messages are not accepted: dead, absent.
    pub(crate) deaf: u32,
    /// Managers that are sent no request: dead ones, or all when this node leaves.
    pub(crate) mute: u32,
    /// This node asks for nothing any more.
    pub(crate) leaving: bool,
    /// No hand-over may begin.
    pub(crate) held: bool,
    /// Hand-overs begun here that are not over.
    pub(crate) handing: u32,
    /// The records.
    pub tables: T,
    #[cfg(test)]
    pub(crate) mutant: Option<Mutant>,
}

impl<T: Tables> Node<T> {
    /// A node with empty tables.
    ///
    /// # Panics
    /// When the configuration names no node, more than [`NODES_MAX`], or a node
    /// (this one, or a manager) that is not among them.
    pub fn new(config: &Config, tables: T) -> Node<T> {
        let nodes = config.nodes;
        assert!(nodes >= 1 && usize::from(nodes) <= NODES_MAX);
        assert!(config.me.0 < nodes);
        match config.manager {
            ManagerOf::Fixed(manager) => assert!(manager.0 < nodes),
            ManagerOf::Ranges(ranges) => assert!(ranges.last().0 < nodes),
            ManagerOf::Interleaved => {}
        }
        assert!(config.probe_every <= PROBE_EVERY_MAX);
        Node {
            me: config.me,
            nodes,
            migratory: config.migratory,
            probe_every: config.probe_every,
            manager: config.manager,
            modulus: Modulus::new(u32::from(nodes)),
            owned_pages: [0; NODES_MAX],
            budgets_pages: config.budgets_pages,
            spare_pages: 0,
            dead: 0,
            absent: config.absent,
            closed: config.absent,
            deaf: config.absent,
            mute: 0,
            leaving: false,
            held: false,
            handing: 0,
            tables,
            #[cfg(test)]
            mutant: None,
        }
    }

    /// Which node this is.
    pub fn me(&self) -> NodeId {
        self.me
    }
    /// Pages that `node` owns, of those managed here.
    pub fn owned_pages(&self, node: NodeId) -> u32 {
        self.owned_pages[node.index()]
    }
    /// Changes what `node` may own of the pages managed here. 0 for a node that
    /// is about to leave.
    pub fn set_budget_pages(&mut self, node: NodeId, pages: u32) {
        self.budgets_pages[node.index()] = pages;
    }
    /// Lets this node own `pages` of those managed here beyond its budget, but only where no
    /// other node has room for what is pushed.
    pub fn set_spare_pages(&mut self, pages: u32) {
        self.spare_pages = pages;
    }
    /// The next reader only reads: as long as the page stays here it does not count as
    /// migratory. A hint; nothing
    /// happens to a page that is not here.
    pub fn settle(&mut self, page: Page) {
        let local = self.tables.local(page);
        if local.present() {
            local.settle();
        }
    }
    /// The nodes known to be dead.
    pub fn dead(&self) -> u32 {
        self.dead
    }
    /// The manager of a page, as far as this node knows.
    pub fn manager_of(&mut self, page: Page) -> NodeId {
        match self.manager {
            ManagerOf::Fixed(node) => node,
            _ => {
                let local = *self.tables.local(page);
                self.manager_by(page, local)
            }
        }
    }
    /// The manager of a page by a node's record of it.
    pub fn manager_by(&self, page: Page, local: Local) -> NodeId {
        local.manager(self.configured_manager(page))
    }
    /// The manager of a page that was not handed over.
    pub(crate) fn configured_manager(&self, page: Page) -> NodeId {
        match self.manager {
            ManagerOf::Fixed(node) => node,
            ManagerOf::Interleaved => NodeId(self.modulus.of(page.chunk() as u32) as u8),
            ManagerOf::Ranges(ref ranges) => ranges.manager_of(page),
        }
    }
    /// Whether a node is known to be dead.
    pub(crate) fn is_dead(&self, node: NodeId) -> bool {
        self.dead & node.bit() != 0
    }
    #[cfg(test)]
    pub(crate) fn has(&self, how: Mutant) -> bool {
        self.mutant == Some(how)
    }

    /// Handles one event. Actions come in the order in which they must be done.
    pub fn step<S: Sink>(&mut self, event: Event, sink: &mut S) {
        match event {
            Event::Fault {
                page,
                access,
                ahead,
            } => self.fault(page, access, ahead, sink),
            Event::Message { from, message } => self.message(from, message, sink),
            Event::Evict { page, to } => self.evict(page, to, sink),
            Event::Discard { page } => self.discard(page, sink),
            Event::Adopt { page } => self.adopt(page, sink),
            Event::PeerLost { node, page } => self.peer_lost(node, page, sink),
            Event::HandOver { page, to } => self.hand_over(page, to, sink),
            Event::Recall { page } => self.recall(page, sink),
            Event::Hold => self.hold(sink),
            Event::Resume => self.resume(),
            Event::Member { node, standing } => self.member(node, standing),
        }
    }

    fn fault<S: Sink>(&mut self, page: Page, access: Access, ahead: bool, sink: &mut S) {
        match self.tables.policy(page) {
            Policy::Invalidate | Policy::Update => {}
            Policy::ReadOnly if access == Access::Read => {}
            Policy::ReadOnly => {
                return sink.act(Action::Refused {
                    page,
                    reason: Refusal::ReadOnly,
                });
            }
            Policy::Private => return self.private_fault(page, sink),
        }
        let local = self.tables.local(page);
        match (access, local.state()) {
            (Access::Read, State::Shared | State::Exclusive) => {
                return sink.act(Action::Resolved { page });
            }
            (Access::Write, State::Exclusive) => {
                if !local.written() {
                    local.set_written(true);
                    local.set_zero(false);
                    sink.act(Action::Allow { page });
                }
                return sink.act(Action::Resolved { page });
            }
            _ => {}
        }
        if local.pending().is_some() {
            if !ahead {
                local.met_by_fault();
            }
            return;
        }
        let frozen = local.frozen();
        let manager = self.manager_of(page);
        if self.mute & manager.bit() != 0 && (!frozen || self.leaving) {
            return self.not_asked(page, manager, sink);
        }
        self.tables.local(page).set_pending(access, ahead);
        if frozen {
            // Asked for as soon as it is known who the manager is.
        } else if manager == self.me {
            self.get(page, self.me, access, ahead, sink);
        } else {
            self.send(manager, page, Body::Get { access, ahead }, sink);
        }
    }

    #[cold]
    fn not_asked<S: Sink>(&mut self, page: Page, manager: NodeId, sink: &mut S) {
        sink.act(match self.leaving {
            true => Action::Refused {
                page,
                reason: Refusal::Leaving,
            },
            false => Action::Lost {
                page,
                node: manager,
            },
        });
    }

    fn private_fault<S: Sink>(&mut self, page: Page, sink: &mut S) {
        let local = self.tables.local(page);
        if !local.present() {
            local.make_writer(false);
            sink.act(Action::Install {
                page,
                access: Access::Write,
                content: Content::Zero,
            });
        }
        sink.act(Action::Resolved { page });
    }

    fn message<S: Sink>(&mut self, from: NodeId, message: Message, sink: &mut S) {
        let Message {
            page,
            generation,
            body,
        } = message;
        if self.deaf & from.bit() != 0 {
            return self.not_accepted(page, from, sink);
        }
        let here = self.tables.local(page).generation;
        if generation != here {
            return self.other_generation(from, message, here, sink);
        }
        if body
            .names()
            .is_some_and(|node| node.0 >= self.nodes || self.absent & node.bit() != 0)
        {
            return self.violation(page, from, "a message about an unknown node", sink);
        }
        if body.sends_to() == Some(self.me) {
            return self.violation(page, from, "a page for the node that has it already", sink);
        }
        let manager = self.manager_of(page);
        let manages = manager == self.me;
        let managed = manager == from;
        match body {
            Body::Get { access, ahead } if manages => self.get(page, from, access, ahead, sink),
            Body::Forward {
                access,
                requester,
                sole,
                held,
            } if managed => self.forward(page, access, requester, sole, held, sink),
            Body::Data {
                right,
                content,
                migratory,
            } => self.data(page, from, right, content, migratory, sink),
            Body::Grant { content } if managed => self.granted(page, content, sink),
            Body::Invalidate if managed => self.invalidate(page, from, sink),
            Body::InvalidateAck if manages => self.acknowledged(page, from, sink),
            Body::Done { exclusive } if manages => self.done(page, from, exclusive, sink),
            Body::Dropped if manages => self.tables.entry(page).copyset &= !from.bit(),
            Body::Offer { to } if manages => self.offer(page, from, to, sink),
            Body::OfferDenied { reason } if managed => self.offer_denied(page, reason, sink),
            Body::Place { to, sole, held } if managed => self.place(page, to, sole, held, sink),
            Body::Push {
                content,
                sole,
                migratory,
            } => self.push(page, from, content, sole, migratory, sink),
            Body::NotHere if manages => self.not_here(page, from, sink),
            Body::Retry if managed => self.complete(page, sink),
            Body::Lost { node } if managed => self.lost(page, node, sink),
            Body::Probe { dead } if managed => self.probe(page, from, dead, sink),
            Body::Held { dead, owner } if manages => self.held(page, from, dead, owner, sink),
            Body::Freeze { .. }
            | Body::Frozen
            | Body::Entry { .. }
            | Body::Moved { .. }
            | Body::Thaw
            | Body::Ask { .. } => self.hand_message(from, message, sink),
            _ => self.violation(
                page,
                from,
                "the sender or the receiver is not the manager",
                sink,
            ),
        }
    }

    #[cold]
    fn not_accepted<S: Sink>(&mut self, page: Page, from: NodeId, sink: &mut S) {
        if !self.is_dead(from) {
            self.violation(page, from, "a message of a node that is not there", sink);
        }
    }

    /// An earlier generation: the sender had not heard of the discard, and
    /// whatever the message was part of was reset by it. A later one comes only
    /// to a manager that has not discarded yet (it is last), and then only from
    /// a node that asks too early.
    fn other_generation<S: Sink>(
        &mut self,
        from: NodeId,
        message: Message,
        here: u8,
        sink: &mut S,
    ) {
        #[cfg(test)]
        if self.has(Mutant::IgnoreGeneration) {
            let generation = here;
            return self.message(
                from,
                Message {
                    generation,
                    ..message
                },
                sink,
            );
        }
        let later = message.generation.wrapping_sub(here) as i8 > 0;
        if later && !matches!(message.body, Body::Get { .. }) {
            let what = "a message of a later generation";
            self.violation(message.page, from, what, sink);
        } else if later {
            sink.act(Action::Send {
                to: from,
                message: Message {
                    body: Body::Retry,
                    ..message
                },
            });
        }
    }

    /// The owner gives the page away. Returns whether the ownership went too.
    pub(crate) fn give<S: Sink>(
        &mut self,
        page: Page,
        to: NodeId,
        access: Access,
        sole: bool,
        held: bool,
        sink: &mut S,
    ) -> bool {
        let migratory = self.migrates(page);
        let local = self.tables.local(page);
        let content = content_of(*local, held);
        let moves = migratory && sole && local.migratory();
        let exclusive = access == Access::Write || moves && local.written();
        let keep = if exclusive {
            Keep::Nothing
        } else if local.state() == State::Shared || !local.written() {
            Keep::AsIs
        } else {
            Keep::Shared
        };
        // A visitor that came to read, got everything and did not write: the
        // page is not of that kind (any more).
        let migratory = local.migratory() && local.written();
        let generation = local.generation;
        if exclusive {
            local.forget();
        } else {
            if sole && !local.written() {
                local.set_migratory(false);
            }
            local.set_state(State::Shared);
        }
        #[cfg(test)]
        if self.has(Mutant::KeepOnWrite) && exclusive {
            let local = self.tables.local(page);
            local.set_state(State::Shared);
        }
        #[cfg(test)]
        let keep = if self.has(Mutant::KeepOnWrite) {
            Keep::Shared
        } else {
            keep
        };
        let right = if exclusive {
            Right::Exclusive
        } else {
            Right::Shared
        };
        sink.act(Action::Give {
            to,
            message: Message {
                page,
                generation,
                body: Body::Data {
                    right,
                    content,
                    migratory: migratory && exclusive,
                },
            },
            keep,
        });
        if exclusive {
            self.outdated(page, sink);
        }
        exclusive
    }

    /// Whether a reader may be given the page as its next writer.
    fn migrates(&self, page: Page) -> bool {
        self.migratory && self.tables.policy(page) != Policy::Update
    }

    /// What was here of a page went to a writer.
    pub(crate) fn outdated<S: Sink>(&mut self, page: Page, sink: &mut S) {
        if self.tables.policy(page) == Policy::Update {
            sink.act(Action::Outdated { page });
        }
    }

    fn forward<S: Sink>(
        &mut self,
        page: Page,
        access: Access,
        requester: NodeId,
        sole: bool,
        held: bool,
        sink: &mut S,
    ) {
        let local = *self.tables.local(page);
        if !local.owner() || !local.present() {
            let manager = self.manager_of(page);
            return self.violation(
                page,
                manager,
                "a `Forward` to a node that is not the \
            owner",
                sink,
            );
        }
        // The manager will hear of the death too and ask what became of the page.
        if self.is_dead(requester) {
            return;
        }
        self.give(page, requester, access, sole, held, sink);
    }

    fn data<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        right: Right,
        content: Content,
        migratory: bool,
        sink: &mut S,
    ) {
        let remembers = self.migrates(page);
        let probe_every = self.probe_every;
        let local = self.tables.local(page);
        let Some(pending) = local.pending() else {
            // Answered with `Lost` before, because the manager died.
            let manager = self.manager_of(page);
            if !self.is_dead(manager) {
                self.violation(page, from, "unrequested data", sink);
            }
            return;
        };
        if right == Right::Shared && local.present() {
            // The manager's copy was overtaken by a third node's push. Nothing
            // can have taken the page away since: that takes another message of
            // the manager, which comes after this one.
            self.complete(page, sink);
            return self.arrived(page, from, false, sink);
        }
        let mut access = match (right, pending) {
            (Right::Shared, _) | (Right::Exclusive, Access::Read) => Access::Read,
            (Right::Exclusive, Access::Write) => Access::Write,
        };
        if !migratory {
            local.distrust();
        } else if content.has_bytes() && !local.is_probed(probe_every) {
            access = Access::Write;
        }
        if content == Content::Held {
            if !local.present() || access == Access::Read {
                return self.violation(
                    page,
                    from,
                    "data without content for a node without a \
                copy",
                    sink,
                );
            }
            // Read first, then written: the pattern that the mark stands for.
            local.make_writer(remembers);
            sink.act(Action::Allow { page });
        } else {
            match right {
                Right::Shared => {
                    local.forget();
                    local.set_state(State::Shared);
                    local.set_zero(content == Content::Zero);
                }
                Right::Exclusive => {
                    local.make_writer(migratory);
                    local.set_written(access == Access::Write);
                    local.set_zero(content == Content::Zero && access == Access::Read);
                }
            }
            sink.act(Action::Install {
                page,
                access,
                content,
            });
        }
        self.complete(page, sink);
        self.arrived(page, from, right == Right::Exclusive, sink);
    }

    /// Tells the manager that a page has arrived, unless it knows: it is the
    /// manager itself, or the content came from it (whatever it sends next
    /// comes after the content, on the same channel).
    pub(crate) fn arrived<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        exclusive: bool,
        sink: &mut S,
    ) {
        let manager = self.manager_of(page);
        if manager == self.me {
            self.done(page, self.me, exclusive, sink);
        } else if from != manager {
            self.send(manager, page, Body::Done { exclusive }, sink);
        }
    }

    /// The manager's answer when nobody else is needed.
    pub(crate) fn granted<S: Sink>(&mut self, page: Page, content: Content, sink: &mut S) {
        let me = self.me;
        let local = self.tables.local(page);
        let Some(pending) = local.pending() else {
            return self.violation(page, me, "an unrequested grant", sink);
        };
        if content == Content::Zero {
            local.make_writer(false);
            if pending == Access::Read {
                local.set_written(false);
                local.set_zero(true);
            }
            sink.act(Action::Install {
                page,
                access: pending,
                content,
            });
        } else if pending == Access::Write {
            // A push that crossed the request may have made it writable already.
            let writable = local.writable();
            // Its owner writes again after others read: not migratory.
            local.make_writer(false);
            if !writable {
                sink.act(Action::Allow { page });
            }
        }
        self.complete(page, sink);
    }

    fn invalidate<S: Sink>(&mut self, page: Page, from: NodeId, sink: &mut S) {
        let local = self.tables.local(page);
        if local.owner() {
            return self.violation(page, from, "an invalidation of the owner's copy", sink);
        }
        let held = local.present();
        if held {
            local.forget();
            sink.act(Action::Drop { page });
        }
        self.send(from, page, Body::InvalidateAck, sink);
        if held {
            self.outdated(page, sink);
        }
    }

    /// The request under way is over.
    pub(crate) fn complete<S: Sink>(&mut self, page: Page, sink: &mut S) {
        self.tables.local(page).clear_pending();
        sink.act(Action::Resolved { page });
    }

    pub(crate) fn lost<S: Sink>(&mut self, page: Page, node: NodeId, sink: &mut S) {
        self.tables.local(page).clear_pending();
        sink.act(Action::Lost { page, node });
    }

    fn discard<S: Sink>(&mut self, page: Page, sink: &mut S) {
        if self.manager_of(page) == self.me && self.tables.policy(page) != Policy::Private {
            self.discard_entry(page);
        }
        let local = self.tables.local(page);
        let waited = local.pending().is_some();
        let generation = local.generation.wrapping_add(1);
        local.reset(generation);
        if waited {
            sink.act(Action::Resolved { page });
        }
    }

    pub(crate) fn send<S: Sink>(&mut self, to: NodeId, page: Page, body: Body, sink: &mut S) {
        let generation = self.tables.local(page).generation;
        sink.act(Action::Send {
            to,
            message: Message {
                page,
                generation,
                body,
            },
        });
    }

    #[cold]
    pub(crate) fn violation<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        what: &'static str,
        sink: &mut S,
    ) {
        sink.act(Action::Violation { page, from, what });
    }
}

/// In what form the owner sends a page.
pub(crate) fn content_of(local: Local, held: bool) -> Content {
    if held {
        Content::Held
    } else if local.zero() {
        Content::Zero
    } else {
        Content::Bytes
    }
}

#[cfg(test)]
mod tests;
