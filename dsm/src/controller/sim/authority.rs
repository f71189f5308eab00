//! What the authority over a machine remembers of a change of membership.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Join(usize),
    Leave(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Stage {
    #[default]
    Over,
    /// Nodes hear that one drains, and it does.
    Drain,
    /// Nodes hear that no hand-over begins, and that the node leaves.
    Hold,
    /// The node that leaves looks whether it has nothing.
    First,
    /// The others look: for what mentions it, or for what is not settled.
    Others,
    /// The node that leaves looks again.
    Last,
    /// Nodes hear that the node is present, or absent.
    Tell,
    Resume,
    /// Nodes hear that the node stays.
    Cancel,
}

/// What the authority remembers of a change of membership.
#[derive(Debug, Default)]
pub(super) struct Authority {
    pub(super) change: Option<Change>,
    pub(super) stage: Stage,
    /// Nodes that heard what the stage says, or found nothing.
    pub(super) told: u32,
    /// By node, the next page that it looks at.
    pub(super) looked: [u64; 32],
    pub(super) turns: u32,
    /// Turns until a leave is cancelled.
    pub(super) patience: Option<u32>,
    /// Users of the node that leaves go on until it asks for nothing any more.
    pub(super) users_stay: bool,
    /// Nodes that were reported empty, and whose number was not used again.
    pub(super) gone: u32,
}

impl Authority {
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// A node that a change is about dies: the others go on.
    pub(super) fn died(&mut self, node: usize) {
        let about = matches!(self.change, Some(Change::Join(it) | Change::Leave(it)) if it == node);
        if about && !self.is_over() {
            self.change = None;
            self.enter(Stage::Resume);
        }
    }

    pub(super) fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.told = 0;
        self.turns = 0;
        self.looked = [0; 32];
    }

    pub(super) fn leaver(&self) -> Option<usize> {
        match self.change {
            Some(Change::Leave(node)) => Some(node),
            _ => None,
        }
    }
}
