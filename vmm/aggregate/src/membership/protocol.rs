//! A change of membership as the primary carries it out, without links, clocks and threads.
//!
//! A change is a sequence of stages. In each stage some slices are told a [`Step`], and the
//! next stage begins when all have answered; a slice that answers [`Answer::NotYet`] is told
//! the step again. `docs/membership.md` says why the stages have this order.
//!
//! ```text
//!            all answered          all answered
//!  stage 1 ───────────────▶ stage 2 ─ … ─▶ Done
//!     │ refused, cancelled, or the node that joins is lost
//!     └──▶ undoing, stage by stage ─▶ Undone(reason)
//! ```
//!
//! Invariants: no slice is told a step before all have answered the one before; a change is
//! undone only before its point of no return (`Change::last_undone`); after that it ends as
//! `Done`, or the machine ends. The loss of a member ends the machine; that of a node that
//! is not a member yet undoes its join.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// What happens to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It becomes a member.
    Join,
    /// It gets no more pages and managers, but stays a member.
    Drain,
    /// A drain is called off.
    Keep,
    /// It leaves, after a drain.
    Leave,
    /// It comes to have nothing, as one that leaves, but stays: another process takes its place.
    Yield,
}

/// What a slice does in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Hand over no managers, and wait until none is under way.
    Hold,
    /// Look for pages whose manager is about to change.
    Settle,
    /// The primary tells the node that joins who manages what.
    Learn,
    /// Tell the node that joins about the vCPUs here.
    Introduce,
    /// The node that joins: wait until all have introduced themselves.
    Meet,
    /// The node is a member.
    Present,
    /// The node gets no more pages.
    Draining,
    /// The node asks for nothing any more.
    Leaving,
    /// The node that leaves: look whether anything is left.
    Holdings,
    /// Look whether anything here is about the node that leaves.
    Mentions,
    /// From now on the end of the node's links is no loss.
    Part,
    /// The node that leaves: end the links.
    Go,
    /// The links of the node were read to their end; its number is free.
    Absent,
    /// Hand over managers again.
    Resume,
}

/// Who is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    /// All members but the node.
    Others,
    Node,
    All,
}

const JOIN: [(Step, Whom); 7] = [
    (Step::Hold, Whom::Others),
    (Step::Settle, Whom::Others),
    (Step::Learn, Whom::Node),
    (Step::Introduce, Whom::Others),
    (Step::Meet, Whom::Node),
    (Step::Present, Whom::All),
    (Step::Resume, Whom::All),
];
const DRAIN: [(Step, Whom); 1] = [(Step::Draining, Whom::All)];
const KEEP: [(Step, Whom); 2] = [(Step::Present, Whom::All), (Step::Resume, Whom::All)];
const LEAVE: [(Step, Whom); 9] = [
    (Step::Hold, Whom::All),
    (Step::Leaving, Whom::All),
    (Step::Holdings, Whom::Node),
    (Step::Mentions, Whom::Others),
    (Step::Holdings, Whom::Node),
    (Step::Part, Whom::Others),
    (Step::Go, Whom::Node),
    (Step::Absent, Whom::Others),
    (Step::Resume, Whom::Others),
];
const YIELD: [(Step, Whom); 5] = [
    (Step::Hold, Whom::All),
    (Step::Leaving, Whom::All),
    (Step::Holdings, Whom::Node),
    (Step::Mentions, Whom::Others),
    (Step::Holdings, Whom::Node),
];
const UNDO_JOIN: [(Step, Whom); 1] = [(Step::Resume, Whom::Others)];

impl Change {
    fn stages(self) -> &'static [(Step, Whom)] {
        match self {
            Self::Join => &JOIN,
            Self::Drain => &DRAIN,
            Self::Keep => &KEEP,
            Self::Leave => &LEAVE,
            Self::Yield => &YIELD,
        }
    }

    fn undo(self) -> &'static [(Step, Whom)] {
        match self {
            Self::Join => &UNDO_JOIN,
            Self::Drain | Self::Keep | Self::Leave | Self::Yield => &KEEP,
        }
    }

    /// The last step that can be undone.
    fn last_undone(self) -> Step {
        match self {
            Self::Join => Step::Meet,
            Self::Drain => Step::Draining,
            // It undoes a change itself.
            Self::Keep => Step::Hold,
            Self::Leave | Self::Yield => Step::Holdings,
        }
    }

    /// Whether nothing is decided in this stage yet.
    fn may_be_undone(self, stage: usize) -> bool {
        let stages = self.stages();
        let last = stages
            .iter()
            .rposition(|(step, _)| *step == self.last_undone());
        last.is_some_and(|last| stage <= last)
    }
}

/// What a slice answers to a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Done,
    /// Not yet, because of this.
    NotYet(String),
    /// It cannot be.
    Refused(String),
}

/// How a change stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Answers are missing.
    Waiting,
    /// These slices are told this next.
    Tell(Step, BTreeSet<usize>),
    Done,
    /// All is as before, for this reason.
    Undone(String),
    /// The machine cannot continue, for this reason.
    Broken(String),
}

/// One change under way.
#[derive(Clone, Debug)]
pub struct Authority {
    change: Change,
    node: usize,
    /// Without the node.
    others: BTreeSet<usize>,
    stages: &'static [(Step, Whom)],
    stage: usize,
    /// Who has not answered the stage's step.
    waiting: BTreeSet<usize>,
    /// Who is asked once more, and why.
    again: BTreeSet<usize>,
    /// What a slice waits for, as it said last.
    pub not_yet: Option<String>,
    /// Why the change is undone, if it is.
    undone: Option<String>,
    /// The stages are those that undo it.
    is_undoing: bool,
}

impl Authority {
    /// `others`: the members, the primary among them, without the node.
    pub fn new(change: Change, node: usize, others: impl IntoIterator<Item = usize>) -> Self {
        let others = others.into_iter().filter(|other| *other != node);
        Self {
            change,
            node,
            others: others.collect(),
            stages: change.stages(),
            stage: 0,
            waiting: BTreeSet::new(),
            again: BTreeSet::new(),
            not_yet: None,
            undone: None,
            is_undoing: false,
        }
    }

    /// Whose membership changes.
    pub fn node(&self) -> usize {
        self.node
    }

    /// The first stage.
    pub fn begin(&mut self) -> Progress {
        self.enter(0)
    }

    fn enter(&mut self, stage: usize) -> Progress {
        self.stage = stage;
        let Some((step, whom)) = self.stages.get(stage) else {
            return match &self.undone {
                None => Progress::Done,
                Some(reason) => Progress::Undone(reason.clone()),
            };
        };
        self.waiting = match whom {
            Whom::Others => self.others.clone(),
            Whom::Node => BTreeSet::from([self.node]),
            Whom::All => self.others.iter().copied().chain([self.node]).collect(),
        };
        Progress::Tell(*step, self.waiting.clone())
    }

    /// A slice answered the step that it was told.
    pub fn answer(&mut self, from: usize, answer: Answer) -> Progress {
        if !self.waiting.remove(&from) {
            return Progress::Broken(format!(
                "node {from} answered a step of a change of membership that it was not told"
            ));
        }
        match answer {
            Answer::Done => {}
            Answer::NotYet(reason) => {
                self.again.insert(from);
                self.not_yet = Some(reason);
            }
            // Several slices may refuse one step.
            Answer::Refused(_) if self.undone.is_some() && !self.is_undoing => {}
            Answer::Refused(reason) => {
                return self.give_up(format!("node {from}: {reason}"));
            }
        }
        if !self.waiting.is_empty() {
            return Progress::Waiting;
        }
        self.go_on()
    }

    /// All have answered.
    fn go_on(&mut self) -> Progress {
        if self.undone.is_some() && !self.is_undoing {
            self.is_undoing = true;
            self.stages = self.change.undo();
            self.again.clear();
            return self.enter(0);
        }
        if self.again.is_empty() {
            return self.enter(self.stage + 1);
        }
        self.waiting = std::mem::take(&mut self.again);
        let step = self.stages[self.stage].0;
        Progress::Tell(step, self.waiting.clone())
    }

    /// Somebody wants the change to be undone. After its point of no return this changes
    /// nothing.
    pub fn cancel(&mut self, reason: &str) -> Progress {
        let is_undone = self.undone.is_some() || !self.change.may_be_undone(self.stage);
        match is_undone {
            true => Progress::Waiting,
            false => self.give_up(reason.to_owned()),
        }
    }

    fn give_up(&mut self, reason: String) -> Progress {
        if self.undone.is_some() || !self.change.may_be_undone(self.stage) {
            return Progress::Broken(reason);
        }
        self.undone = Some(reason);
        // Answers to the step that is under way come first.
        match self.waiting.is_empty() {
            true => self.go_on(),
            false => Progress::Waiting,
        }
    }

    /// A slice is lost.
    pub fn lost(&mut self, slice: usize) -> Progress {
        let is_joining = self.change == Change::Join
            && slice == self.node
            && (self.undone.is_some() || self.change.may_be_undone(self.stage));
        if !is_joining {
            return Progress::Broken(format!("node {slice} was lost"));
        }
        self.waiting.remove(&slice);
        self.again.remove(&slice);
        match self.undone {
            None => self.give_up(format!("node {slice} ended before it had joined")),
            Some(_) if self.waiting.is_empty() => self.go_on(),
            Some(_) => Progress::Waiting,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers all that is told until the change is over; the steps in their order.
    fn carry_out(authority: &mut Authority, mut progress: Progress) -> (Vec<Step>, Progress) {
        let mut steps = Vec::new();
        while let Progress::Tell(step, slices) = progress {
            steps.push(step);
            progress = Progress::Waiting;
            for slice in slices {
                assert_eq!(progress, Progress::Waiting);
                progress = authority.answer(slice, Answer::Done);
            }
        }
        (steps, progress)
    }

    #[test]
    fn a_change_goes_through_its_stages() {
        for change in [Change::Join, Change::Drain, Change::Keep, Change::Leave] {
            let mut authority = Authority::new(change, 2, [0, 1, 2]);
            let first = authority.begin();
            let (steps, end) = carry_out(&mut authority, first);
            let stages: Vec<Step> = change.stages().iter().map(|(step, _)| *step).collect();
            assert_eq!((steps, end), (stages, Progress::Done));
        }
    }

    #[test]
    fn several_slices_may_refuse_one_step() {
        let mut authority = Authority::new(Change::Join, 3, [0, 1, 2]);
        authority.begin();
        let refused = || Answer::Refused("no".into());
        assert_eq!(authority.answer(1, refused()), Progress::Waiting);
        assert_eq!(authority.answer(0, refused()), Progress::Waiting);
        let undo = authority.answer(2, Answer::Done);
        let (steps, end) = carry_out(&mut authority, undo);
        assert_eq!(steps, [Step::Resume]);
        assert_eq!(end, Progress::Undone("node 1: no".into()));
    }

    #[test]
    fn a_step_is_told_again_to_those_that_are_not_ready() {
        let mut authority = Authority::new(Change::Leave, 2, [0, 1, 2]);
        let mut progress = authority.begin();
        while let Progress::Tell(step, slices) = &progress
            && *step != Step::Mentions
        {
            let slices = slices.clone();
            for slice in slices {
                progress = authority.answer(slice, Answer::Done);
            }
        }
        let busy = || Answer::NotYet("page 7".into());
        assert_eq!(authority.answer(0, busy()), Progress::Waiting);
        let again = authority.answer(1, Answer::Done);
        assert_eq!(again, Progress::Tell(Step::Mentions, [0].into()));
        // It is called off meanwhile: the answer comes first.
        assert_eq!(authority.cancel("late"), Progress::Waiting);
        let undo = authority.answer(0, busy());
        assert_eq!(undo, Progress::Tell(Step::Present, [0, 1, 2].into()));
        let (steps, end) = carry_out(&mut authority, undo);
        assert_eq!(steps, [Step::Present, Step::Resume]);
        assert_eq!(end, Progress::Undone("late".into()));
    }

    #[test]
    fn what_is_decided_is_not_undone() {
        let mut authority = Authority::new(Change::Join, 2, [0, 1]);
        let mut progress = authority.begin();
        while let Progress::Tell(step, slices) = &progress
            && *step != Step::Present
        {
            let slices = slices.clone();
            for slice in slices {
                progress = authority.answer(slice, Answer::Done);
            }
        }
        assert_eq!(authority.cancel("too late"), Progress::Waiting);
        assert!(matches!(authority.lost(2), Progress::Broken(_)));
    }
}
