//! Pre-copy: bytes of pages go to the node that will own the pages, while their owner goes
//! on writing them. When a page moves later, its bytes need not travel again.
//!
//! ```text
//!           ┌── its right to write is taken, if there is one ──┐
//!  not sent ┤                                                  ├─▶ sent ──▶ kept by the target
//!     ▲     └── its users only read it ────────────────────────┘    │          │
//!     └───────── written, given to another node, refused ───────────┴──────────┤
//!                                           given to the target: `Precopied` ◀─┘
//! ```
//!
//! The protocol is not concerned: a page keeps its owner and its record. A local write
//! costs a fault and no message. The first round is a walk over the pages that this node owns
//! and manages; each later one goes over those that were written or came since, or had to
//! wait. Rounds go on until [`Controller::end_precopy`], which then tells targets what is not
//! needed.
//!
//! Invariants:
//!
//! - `Precopied` stands for bytes only where the target said that it keeps them, and nobody
//!   wrote the page since they were copied. The messages of a link stay in order.
//! - At most one pre-copy of a page is not answered, and at most
//!   [`DrainPlan::window_pages`] are at a time, fewer after a fault of another node's user.
//! - A target keeps a pre-copy in the memory of the page itself, which no user may use and
//!   which fills its budget like any other. It may refuse one, and drops none by itself.
//! - A node is not gone while it has a pre-copy to answer.

use std::time::Duration;

use super::drain::{DrainPlan, DrainTarget, Walk, Window};
use super::transition::Operation;
use super::{Action, Bytes, Controller, Failure, Look, Mutant, Sink};
use crate::protocol::{Body, Content, Message};
use crate::state::{State, Tables};
use crate::types::{Access, NodeId, Page};

/// Pages that one step looks at, at most.
const LOOK_MAX: u64 = 1024;

/// How far a pre-copy is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrecopyProgress {
    /// Pages that were sent, each as often as it was.
    pub sent_pages: u64,
    /// Rounds that are over.
    pub rounds: u64,
    /// Pages that the last round sent.
    pub round_pages: u64,
    /// Pages that targets refused.
    pub refused_pages: u64,
    /// Pages that are still to be sent, about.
    pub left_pages: u64,
    /// The targets have all that can be sent at this moment.
    pub is_settled: bool,
    /// It was ended, and all targets have answered.
    pub is_over: bool,
}

/// What a target has of a page.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    to: Option<NodeId>,
    /// It has been told, and has not answered.
    unanswered: bool,
    /// The bytes are still the page's.
    is_current: bool,
    /// The right to write was taken for it, though the protocol allows writing.
    is_protected: bool,
    /// The next round looks at the page.
    is_listed: bool,
}

/// The pages of a round.
#[derive(Debug)]
enum Round {
    /// All of the plan.
    All(Walk),
    /// These, the last one first.
    Listed(Vec<u64>),
}

impl Round {
    fn next_page(&mut self, plan: &DrainPlan) -> Option<u64> {
        match self {
            Self::All(walk) => walk.next_page(&plan.pages),
            Self::Listed(pages) => pages.pop(),
        }
    }

    fn is_over(&self, plan: &DrainPlan) -> bool {
        match self {
            Self::All(walk) => walk.is_over(&plan.pages),
            Self::Listed(pages) => pages.is_empty(),
        }
    }
}

/// The rounds of a pre-copy.
#[derive(Debug)]
struct Course {
    plan: DrainPlan,
    round: Round,
    window: Window,
    /// Pages that this round has sent.
    sent: u64,
    /// Targets are told to keep nothing.
    ends: bool,
    /// A page of this round of the end has to wait.
    waits: bool,
}

/// The pre-copies of a node, to and from others.
#[derive(Debug, Default)]
pub(super) struct Precopies {
    /// By page; empty without a pre-copy to others.
    sent: Vec<Sent>,
    /// By page, whose pre-copy its memory is filled with; empty until one came.
    kept: Vec<Option<NodeId>>,
    /// Pages for the next round, each once.
    listed: Vec<u64>,
    course: Option<Course>,
    unanswered: usize,
    /// Pages that are being taken from those who may write them, to be sent.
    protecting: usize,
    progress: PrecopyProgress,
}

impl Precopies {
    /// Whether there is something to do about pre-copies.
    pub fn is_under_way(&self) -> bool {
        self.course.is_some()
    }

    /// The node that a page was sent ahead to.
    pub fn target(&self, page: u64) -> Option<NodeId> {
        self.sent.get(page as usize)?.to
    }

    /// Whether a node, or any, has to answer about a page.
    pub fn is_unanswered(&self, page: u64, node: Option<NodeId>) -> bool {
        let sent = self.sent.get(page as usize);
        sent.is_some_and(|sent| sent.unanswered && (node.is_none() || sent.to == node))
    }

    /// The target that keeps the bytes that the page has.
    pub fn kept_by(&self, page: u64) -> Option<NodeId> {
        let sent = self.sent.get(page as usize)?;
        sent.to.filter(|_| sent.is_current && !sent.unanswered)
    }

    /// What this node kept of a page is its content now.
    pub fn unkeep(&mut self, page: u64) {
        if let Some(kept) = self.kept.get_mut(page as usize) {
            *kept = None;
        }
    }

    /// A page was written, or is about to be, or is not here any more.
    fn outdate(&mut self, page: u64) {
        if let Some(sent) = self.sent.get_mut(page as usize) {
            sent.is_current = false;
            sent.is_protected = false;
        }
    }

    /// The next round looks at a page.
    pub fn list(&mut self, page: u64) {
        let sent = self.sent.get_mut(page as usize);
        if let Some(sent) = sent.filter(|sent| !sent.is_listed) {
            sent.is_listed = true;
            self.listed.push(page);
        }
    }

    /// The pages of the next round.
    fn next_round(&mut self) -> Vec<u64> {
        let mut pages = std::mem::take(&mut self.listed);
        for page in &pages {
            if let Some(sent) = self.sent.get_mut(*page as usize) {
                sent.is_listed = false;
            }
        }
        pages.sort_unstable_by(|a, b| b.cmp(a));
        pages
    }

    /// Nothing of a page is at a target any more, or about to be.
    pub fn forget(&mut self, page: u64) {
        if let Some(sent) = self.sent.get_mut(page as usize) {
            *sent = Sent {
                is_listed: sent.is_listed,
                ..Sent::default()
            };
        }
    }

    fn keeps_of(&self, page: u64, node: NodeId) -> bool {
        self.kept.get(page as usize) == Some(&Some(node))
    }
}

impl<T: Tables, B> Controller<T, B> {
    /// Begins a pre-copy, or changes the plan of one that is under way.
    /// [`super::Event::Precopy`] goes on with it.
    pub fn begin_precopy(&mut self, plan: DrainPlan) {
        let plan = self.within_memory(plan);
        if self.precopies.sent.is_empty() {
            self.precopies.sent = vec![Sent::default(); self.rights.pages() as usize];
        }
        self.precopies.progress = PrecopyProgress::default();
        self.precopies.course = Some(Course {
            round: Round::All(Walk::default()),
            window: Window::new(plan.window_pages),
            plan,
            sent: 0,
            ends: false,
            waits: false,
        });
    }

    /// Sends nothing ahead any more, and has targets drop what has not become theirs.
    /// [`super::Event::Precopy`] goes on with that.
    pub fn end_precopy(&mut self) {
        match &mut self.precopies.course {
            Some(course) => {
                course.ends = true;
                course.round = Round::All(Walk::default());
            }
            None => self.precopies.progress.is_over = true,
        }
    }

    /// Whether a pre-copy is under way, its end included.
    pub fn is_precopying(&self) -> bool {
        self.precopies.is_under_way()
    }

    /// Whether a node, or any, has to answer about a page that was sent ahead.
    pub(super) fn is_precopying_to(&self, page: u64, node: Option<NodeId>) -> bool {
        self.precopies.is_unanswered(page, node)
    }

    /// How far the pre-copy is that was begun last.
    pub fn precopy_progress(&self) -> PrecopyProgress {
        let Precopies {
            progress,
            listed,
            course,
            unanswered,
            protecting,
            ..
        } = &self.precopies;
        let is_answered = *unanswered == 0 && *protecting == 0;
        let listed = listed.len() as u64;
        let (left_pages, is_settled) = match course {
            Some(Course {
                round: Round::Listed(pages),
                ends,
                ..
            }) => {
                let left = pages.len() as u64 + listed;
                (left, left == 0 && is_answered && !ends)
            }
            Some(Course { sent, .. }) => (self.rights.resident().saturating_sub(*sent), false),
            None => (0, false),
        };
        PrecopyProgress {
            left_pages,
            is_settled,
            ..*progress
        }
    }

    /// Changes the right to a page. What was sent ahead of one that may be written is not
    /// its content any more.
    pub(super) fn set_right(&mut self, page: u64, right: Option<Access>) {
        self.rights.set(page, right);
        if right == Some(Access::Write) && !self.is(Mutant::PrecopyAfterWrite) {
            self.precopies.outdate(page);
        }
        if right != Some(Access::Read) {
            self.soil(page);
        }
        if right.is_some() {
            self.precopies.list(page);
        }
    }

    /// A page left. Other nodes may write it.
    pub(super) fn left(&mut self, page: u64) {
        self.rights.set(page, None);
        self.soil(page);
        self.precopies.outdate(page);
    }

    /// The users may write a page again that was protected for its pre-copy.
    pub(super) fn end_protection(&mut self, page: u64) {
        let sent = self.precopies.sent.get(page as usize);
        let is_protected = sent.is_some_and(|sent| sent.is_protected);
        // The right to one that is unsaved returns with the next store.
        let is_unsaved = self.saves.is_unsaved(page);
        if is_protected
            && !is_unsaved
            && self.node.tables.local(Page(page)).state() == State::Exclusive
        {
            self.set_right(page, Some(Access::Write));
        }
    }

    /// A message that gives a page away: without its bytes, if the receiver keeps them.
    pub(super) fn with_precopy(&mut self, to: NodeId, message: Message) -> Message {
        let lax = self.is(Mutant::PrecopyUnanswered);
        let Some(sent) = self.precopies.sent.get_mut(message.page.0 as usize) else {
            return message;
        };
        let is_kept = sent.is_current && (!sent.unanswered || lax);
        let is_used = is_kept && sent.to == Some(to);
        match sent.unanswered {
            true => (sent.is_current, sent.is_protected) = (false, false),
            false if sent.to == Some(to) => self.precopies.forget(message.page.0),
            false => (sent.is_current, sent.is_protected) = (false, false),
        }
        let mut message = message;
        if let Body::Data { content, .. } | Body::Push { content, .. } = &mut message.body
            && is_used
            && *content == Content::Bytes
        {
            *content = Content::Precopied;
        }
        message
    }

    /// Goes on with the walk, as far as the window allows.
    pub(super) fn go_on_precopying(&mut self, now: Duration, sink: &mut impl Sink<B>) {
        if self.rests() && !self.is(Mutant::RestPrecopies) {
            return;
        }
        let Some(mut course) = self.precopies.course.take() else {
            return;
        };
        // What was written since the last round ended is not left for the next look.
        let has_ended = course.round.is_over(&course.plan) && self.precopies.unanswered == 0;
        if has_ended && !course.ends && !self.precopies.listed.is_empty() {
            self.begin_round(&mut course);
        }
        let mut looked = 0;
        while looked < LOOK_MAX && !course.window.is_full(self.precopies.unanswered) {
            let Some(page) = course.round.next_page(&course.plan) else {
                break;
            };
            looked += 1;
            match course.ends {
                true => self.drop_precopy(page, &mut course, sink),
                false => self.precopy(page, &mut course, now, sink),
            }
        }
        if looked == LOOK_MAX {
            sink.act(Action::Look(Look::Membership));
        }
        if course.round.is_over(&course.plan) && self.precopies.unanswered == 0 {
            if course.ends && !course.waits {
                self.precopies.progress.is_over = true;
                self.precopies.sent = Vec::new();
                self.precopies.listed = Vec::new();
                return;
            }
            course.waits = false;
            match course.ends {
                true => course.round = Round::All(Walk::default()),
                false => self.begin_round(&mut course),
            }
        }
        self.precopies.course = Some(course);
    }

    fn begin_round(&mut self, course: &mut Course) {
        let progress = &mut self.precopies.progress;
        progress.rounds += 1;
        progress.round_pages = std::mem::take(&mut course.sent);
        course.round = Round::Listed(self.precopies.next_round());
    }

    /// Sends a page ahead, or begins to, if its target does not have it.
    fn precopy(&mut self, page: u64, course: &mut Course, now: Duration, sink: &mut impl Sink<B>) {
        let sent = self.precopies.sent[page as usize];
        let local = *self.node.tables.local(Page(page));
        let stays = sent.is_current && !sent.unanswered
            || !local.owner()
            || local.zero()
            || self.is_leaving()
            || self.node.manager_of(Page(page)) != self.node.me();
        if stays {
            return;
        }
        if sent.unanswered || self.is_in_transition(page) || !local.evictable() {
            return self.precopies.list(page);
        }
        // A target that has something of the page stays its target.
        let to = sent.to.or_else(|| self.precopy_target(page, course));
        let Some(to) = to.filter(|to| self.node.takes_pages(*to)) else {
            return;
        };
        let right = self.rights.of(page);
        let pinned = self.pins.hold(page, now) && !self.is(Mutant::PrecopyIgnoresPins);
        if right.is_none() || right == Some(Access::Write) && pinned {
            return self.precopies.list(page);
        }
        self.precopies.sent[page as usize].to = Some(to);
        course.sent += 1;
        if right == Some(Access::Read) || self.is(Mutant::PrecopyUnprotected) {
            return self.send_precopy(page, sink);
        }
        self.precopies.sent[page as usize].is_protected = true;
        self.rights.set(page, Some(Access::Read));
        self.start(page, Operation::Protect);
        self.precopies.protecting += 1;
        sink.act(Action::Revoke {
            page,
            kept: Some(Access::Read),
        });
    }

    /// The first target that is not full, if possible of those that the split has for the page.
    fn precopy_target(&self, page: u64, course: &mut Course) -> Option<NodeId> {
        let me = self.node.me();
        let takes = |target: &DrainTarget| {
            target.pages > 0 && target.node != me && self.node.takes_pages(target.node)
        };
        let chosen = |target: &DrainTarget| takes(target) && self.chooses(page, target.node);
        let targets = &mut course.plan.targets;
        let any = targets.iter().position(takes)?;
        let at = targets.iter().position(chosen).unwrap_or(any);
        let target = &mut targets[at];
        target.pages -= 1;
        Some(target.node)
    }

    /// Nobody may write a page any more that was taken from its users to be sent ahead.
    pub(super) fn protected(&mut self, page: u64, sink: &mut impl Sink<B>) {
        self.precopies.protecting = self.precopies.protecting.saturating_sub(1);
        self.send_precopy(page, sink);
    }

    /// Sends a page ahead that no user may write.
    fn send_precopy(&mut self, page: u64, sink: &mut impl Sink<B>) {
        let generation = self.node.tables.local(Page(page)).generation;
        let Some(sent) = self.precopies.sent.get_mut(page as usize) else {
            return;
        };
        let Some(to) = sent.to.filter(|to| self.node.takes_pages(*to)) else {
            return;
        };
        (sent.unanswered, sent.is_current) = (true, true);
        self.precopies.unanswered += 1;
        self.precopies.progress.sent_pages += 1;
        let message = Message {
            page: Page(page),
            generation,
            body: Body::Precopy,
        };
        sink.act(Action::Send { to, message });
    }

    /// At the end: a target keeps nothing of a page that did not become its own.
    fn drop_precopy(&mut self, page: u64, course: &mut Course, sink: &mut impl Sink<B>) {
        let sent = self.precopies.sent[page as usize];
        if sent.unanswered || sent.is_protected && self.is_in_transition(page) {
            course.waits = true;
            return;
        }
        self.end_protection(page);
        let Some(to) = sent.to else {
            return;
        };
        // A node that is about to leave is sent nothing, and sends nothing. If it stays, the
        // target is told then.
        if !self.node.takes_pages(to) || self.is_leaving() {
            course.waits = true;
            return;
        }
        let generation = self.node.tables.local(Page(page)).generation;
        let sent = &mut self.precopies.sent[page as usize];
        *sent = Sent {
            to: Some(to),
            unanswered: true,
            is_listed: sent.is_listed,
            ..Sent::default()
        };
        self.precopies.unanswered += 1;
        let message = Message {
            page: Page(page),
            generation,
            body: Body::DropPrecopy,
        };
        sink.act(Action::Send { to, message });
    }

    /// Whether memory here is filled with a pre-copy of `node`.
    pub(super) fn keeps_precopy_of(&self, page: u64, node: NodeId) -> bool {
        self.rights.is_precopy(page) && self.precopies.keeps_of(page, node)
    }

    /// Handles a message about pre-copies; whether it is one.
    pub(super) fn is_precopy_message(
        &mut self,
        from: NodeId,
        message: Message,
        sink: &mut impl Sink<B>,
    ) -> bool {
        let kept = match message.body {
            Body::Precopy | Body::DropPrecopy | Body::Precopied { .. }
                if !self.node.hears(from) =>
            {
                return true;
            }
            Body::Precopy => self.keep_precopy(from, message, sink),
            Body::DropPrecopy => {
                self.unkeep_precopy(message.page.0, from, sink);
                false
            }
            Body::Precopied { kept } => {
                self.precopy_answered(from, message.page.0, kept, sink);
                return true;
            }
            _ => return false,
        };
        let message = Message {
            body: Body::Precopied { kept },
            ..message
        };
        sink.act(Action::Send { to: from, message });
        true
    }

    /// Keeps a page that another node sent ahead, if there is room; whether it is kept.
    fn keep_precopy(&mut self, from: NodeId, message: Message, sink: &mut impl Sink<B>) -> bool {
        let page = message.page.0;
        let resident = self.rights.resident();
        let has_room = self.rights.used(page) || self.budget.room(resident) > 0;
        let is_elsewhere = self.rights.of(page).is_none() && !self.is_in_transition(page);
        let same = self.node.tables.local(message.page).generation == message.generation;
        if !(has_room && is_elsewhere && same) || self.is_leaving() {
            return false;
        }
        if self.precopies.kept.is_empty() {
            self.precopies.kept = vec![None; self.rights.pages() as usize];
        }
        sink.act(Action::Fill {
            page,
            bytes: Bytes::Arrived,
        });
        self.precopies.kept[page as usize] = Some(from);
        self.rights.set_precopy(page);
        if self.is(Mutant::PrecopyGivenBack) {
            self.vacant.push(page);
        }
        true
    }

    /// What is kept of a page for a node is not wanted.
    fn unkeep_precopy(&mut self, page: u64, from: NodeId, sink: &mut impl Sink<B>) {
        if self.keeps_precopy_of(page, from) && !self.is(Mutant::PrecopyForEver) {
            self.rights.drop_precopy(page);
            self.vacant.push(page);
            sink.act(Action::Look(Look::Room));
        }
    }

    fn precopy_answered(&mut self, from: NodeId, page: u64, kept: bool, sink: &mut impl Sink<B>) {
        let Precopies {
            sent,
            course,
            unanswered,
            progress,
            ..
        } = &mut self.precopies;
        let sent = sent.get_mut(page as usize);
        let Some(sent) = sent.filter(|sent| sent.unanswered && sent.to == Some(from)) else {
            let what = "an answer about a page that was not sent ahead";
            return sink.act(Action::Fail(Failure::Violation { from, page, what }));
        };
        sent.unanswered = false;
        *unanswered -= 1;
        if !kept {
            // One that was refused is not sent again before it is written.
            *sent = Sent {
                is_protected: sent.is_protected,
                is_listed: sent.is_listed,
                ..Sent::default()
            };
        }
        let Some(course) = course else {
            return;
        };
        course.window.widen();
        if !kept && !course.ends {
            progress.refused_pages += 1;
            let mut targets = course.plan.targets.iter_mut();
            if let Some(target) = targets.find(|target| target.node == from) {
                target.pages += 1;
            }
        }
    }

    /// Another node asked for a page, which may have to pass those that are sent ahead.
    pub(super) fn precopy_gives_way(&mut self) {
        if let Some(course) = &mut self.precopies.course {
            course.window.give_way();
        }
    }

    /// A node is gone: nothing is kept for it, and it keeps nothing.
    pub(super) fn forget_precopies_of(&mut self, node: NodeId, sink: &mut impl Sink<B>) {
        for page in 0..self.precopies.kept.len() as u64 {
            self.unkeep_precopy(page, node, sink);
        }
        let mut unanswered = 0;
        for sent in &mut self.precopies.sent {
            if sent.to == Some(node) {
                unanswered += usize::from(sent.unanswered);
                *sent = Sent {
                    is_protected: sent.is_protected,
                    is_listed: sent.is_listed,
                    ..Sent::default()
                };
            }
        }
        self.precopies.unanswered -= unanswered;
    }
}
