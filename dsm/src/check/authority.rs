//! What the authority over the aggregate remembers of a change of membership.

use super::{Bounds, Change};
use crate::types::NodeId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// Not begun.
    Before,
    /// Nodes hear that the node drains; it does, until the authority wants to finish.
    Drain,
    /// Nodes hear that no hand-over begins (and that the node leaves).
    Hold,
    /// The node that joins learns the managers; or all look for what is left of the node.
    Look,
    /// Nodes hear that the node is present, or absent.
    Tell,
    Resume,
    /// Nodes hear that the node stays.
    Cancel,
    Over,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Move {
    /// Goes to the next stage.
    Next,
    Cancel,
    /// A node hears what this stage says.
    Hear(NodeId),
    /// A node has looked, and found nothing.
    Look(NodeId),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Authority {
    pub(super) change: Option<Change>,
    pub(super) stage: Stage,
    /// Nodes that heard what the stage says, or looked.
    pub(super) told: u32,
    pub(super) quiet: u32,
    /// The change was carried out.
    pub(super) done: bool,
}

impl Authority {
    pub(super) fn new(bounds: &Bounds) -> Authority {
        Authority {
            change: bounds.change,
            stage: Stage::Before,
            told: 0,
            quiet: 0,
            done: false,
        }
    }
    /// Whether a node may ask for pages, be named, and die.
    pub(super) fn takes_part(&self, node: NodeId, hasty: bool) -> bool {
        match self.change {
            Some(Change::Join(joins)) if joins == node => {
                let early = hasty && self.stage == Stage::Tell;
                early || self.stage == Stage::Over || self.stage == Stage::Resume
            }
            Some(Change::Leave(_)) => !self.is_gone(node),
            _ => true,
        }
    }
    pub(super) fn is_gone(&self, node: NodeId) -> bool {
        self.done && self.change == Some(Change::Leave(node))
    }
    pub(super) fn bits(&self) -> u64 {
        let stage = self.stage as u64 | u64::from(self.done) << 8;
        stage << 40 | u64::from(self.told) << 8 | u64::from(self.quiet)
    }
}
