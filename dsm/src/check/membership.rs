//! The authority's part when a node joins or leaves: whom it has told what. The steps are
//! those of `docs/membership.md`; any of them may be delayed at any node.

use super::authority::{Authority, Move, Stage};
use super::world::World;
use super::{Bounds, Change};
use crate::checker::Flaw;
use crate::protocol::Event;
use crate::types::{NodeId, Page, Standing};

impl World {
    /// Nodes that the stage addresses.
    fn audience(&self, bounds: &Bounds) -> u32 {
        let all: u32 = self.live(bounds).map(NodeId::bit).sum();
        match self.authority.change {
            Some(Change::Join(node)) => all & !node.bit(),
            Some(Change::Leave(node)) if self.authority.done => all & !node.bit(),
            _ => all,
        }
    }

    pub(super) fn moves(&self, bounds: &Bounds) -> Vec<Move> {
        let authority = &self.authority;
        let Some(change) = authority.change else {
            return Vec::new();
        };
        let waits = self.audience(bounds) & !authority.told;
        let hear = (0..bounds.nodes as u8)
            .map(NodeId)
            .filter(|node| waits & node.bit() != 0)
            .filter(|&node| self.has_read_all(node))
            .map(Move::Hear);
        let mut moves = match authority.stage {
            Stage::Before if self.killed_changes() => vec![],
            Stage::Before => vec![Move::Next],
            Stage::Drain if waits == 0 => vec![Move::Next],
            Stage::Look => self.looks(bounds, change),
            Stage::Over => vec![],
            _ => hear.collect(),
        };
        let undecided = matches!(authority.stage, Stage::Drain | Stage::Hold | Stage::Look);
        if undecided && bounds.cancels && matches!(change, Change::Leave(_)) {
            moves.push(Move::Cancel);
        }
        moves
    }

    /// A node that is gone has closed its links: what it sent before comes first.
    fn has_read_all(&self, node: NodeId) -> bool {
        match self.authority.change {
            Some(Change::Leave(leaver)) if self.authority.done => !self.is_sending(leaver, node),
            _ => true,
        }
    }

    fn looks(&self, bounds: &Bounds, change: Change) -> Vec<Move> {
        let pages: Vec<Page> = (0..bounds.pages as u8)
            .map(|slot| self.page(slot))
            .collect();
        match change {
            Change::Join(node) => {
                let others = self.audience(bounds) & !self.authority.told;
                let aware = self.unaware & node.bit() == 0;
                let may_look = |other: &NodeId| {
                    let mut copy = self.nodes[other.index()].clone();
                    let unsettled = pages.iter().any(|&page| copy.mentions(page, node));
                    aware && others & other.bit() != 0 && !unsettled
                };
                let nodes = self.live(bounds).filter(may_look);
                nodes.map(Move::Look).collect()
            }
            Change::Leave(leaver) => {
                let first_looked = self.authority.told & leaver.bit() != 0;
                let others = self.audience(bounds) & !leaver.bit() & !self.authority.told;
                let may_look = |node: &NodeId| {
                    let mut copy = self.nodes[node.index()].clone();
                    if *node == leaver {
                        // A dead node's last messages must be cut off first.
                        let last = others == 0 && self.unaware == 0;
                        let turn = !first_looked || last;
                        turn && pages.iter().all(|&page| copy.has_nothing(page))
                    } else {
                        let turn = first_looked && others & node.bit() != 0;
                        turn && !pages.iter().any(|&page| copy.mentions(page, leaver))
                    }
                };
                let nodes = self.live(bounds).filter(may_look);
                nodes.map(Move::Look).collect()
            }
        }
    }

    pub(super) fn make(&mut self, step: Move, bounds: &Bounds) -> Result<(), Flaw> {
        let Some(change) = self.authority.change else {
            return Ok(());
        };
        match step {
            Move::Next => self.enter(match (self.authority.stage, change) {
                (Stage::Before, Change::Leave(_)) => Stage::Drain,
                _ => Stage::Hold,
            }),
            Move::Cancel => self.enter(Stage::Cancel),
            Move::Look(node) => self.look(node, change, bounds),
            Move::Hear(node) => {
                self.authority.told |= node.bit();
                self.hear(node, change)?;
            }
        }
        self.go_on(bounds);
        Ok(())
    }

    fn enter(&mut self, stage: Stage) {
        self.authority.stage = stage;
        self.authority.told = 0;
    }

    fn look(&mut self, node: NodeId, change: Change, bounds: &Bounds) {
        let before = self.authority.told;
        self.authority.told |= node.bit();
        match change {
            Change::Join(_) if self.audience(bounds) & !self.authority.told != 0 => {}
            // All have settled; the last one tells who manages what.
            Change::Join(joins) => {
                for slot in 0..bounds.pages as u8 {
                    let page = self.page(slot);
                    let manager = self.nodes[node.index()].manager_of(page);
                    self.nodes[joins.index()].learn_manager(page, manager);
                }
                self.enter(Stage::Tell);
            }
            Change::Leave(leaver) if node == leaver => {
                #[cfg(test)]
                let hasty = self.nodes[0].mutant == Some(crate::node::Mutant::LeaveEarly);
                #[cfg(not(test))]
                let hasty = false;
                // Once before the others look, when it asks for nothing any more, and once
                // after them.
                if hasty || self.audience(bounds) & !before == 0 {
                    self.authority.done = true;
                    self.enter(Stage::Tell);
                }
            }
            Change::Leave(_) => {}
        }
    }

    fn hear(&mut self, node: NodeId, change: Change) -> Result<(), Flaw> {
        let (about, standing) = match (self.authority.stage, change) {
            (Stage::Hold, Change::Leave(leaver)) => (leaver, Some(Standing::Leaving)),
            (Stage::Drain, Change::Leave(leaver)) => (leaver, Some(Standing::Draining)),
            (Stage::Tell, Change::Leave(leaver)) => (leaver, Some(Standing::Absent)),
            (Stage::Tell, Change::Join(joins)) => (joins, Some(Standing::Present)),
            (Stage::Cancel, Change::Leave(leaver)) => (leaver, Some(Standing::Present)),
            _ => (node, None),
        };
        if let Some(standing) = standing {
            let event = Event::Member {
                node: about,
                standing,
            };
            self.step(node, 0, event, None)?;
        }
        match self.authority.stage {
            Stage::Hold => self.step(node, 0, Event::Hold, None),
            Stage::Resume | Stage::Cancel => self.step(node, 0, Event::Resume, None),
            _ => Ok(()),
        }
    }

    /// The stage is over when all have heard.
    pub(super) fn go_on(&mut self, bounds: &Bounds) {
        let all = self.audience(bounds);
        let Authority { told, quiet, .. } = self.authority;
        let heard = all & !told == 0;
        match self.authority.stage {
            Stage::Hold if heard && all & !quiet == 0 => self.enter(Stage::Look),
            Stage::Tell if heard => self.enter(Stage::Resume),
            Stage::Resume | Stage::Cancel if heard => {
                self.enter(Stage::Over);
                let joined = matches!(self.authority.change, Some(Change::Join(_)));
                self.authority.done |= joined && !self.killed_changes();
            }
            _ => {}
        }
    }

    fn killed_changes(&self) -> bool {
        match self.authority.change {
            Some(Change::Join(node) | Change::Leave(node)) => self.killed == Some(node),
            None => false,
        }
    }

    /// A node died. If it was the one that joins or leaves, the others go on.
    pub(super) fn end_of_change(&mut self, bounds: &Bounds) {
        let begun = !matches!(self.authority.stage, Stage::Before | Stage::Over);
        if self.authority.change.is_some() && begun && self.killed_changes() {
            self.enter(Stage::Resume);
        }
        self.go_on(bounds);
    }

    /// Judge 8: nothing is left of a node that has left.
    pub(super) fn judge_gone(&self, bounds: &Bounds) -> Result<(), Flaw> {
        let Some(Change::Leave(node)) = self.authority.change.filter(|_| self.authority.done)
        else {
            return Ok(());
        };
        let flaw = |what| Err(Flaw::NotGone { node, what });
        if self.in_flight(node) {
            return flaw("a message to or from it is in flight");
        }
        for slot in 0..bounds.pages {
            let page = self.page(slot as u8);
            if !self.nodes[node.index()].tables.locals[slot].clear() {
                return flaw("it has a page, or asks for one");
            }
            for other in self.live(bounds).filter(|&other| other != node) {
                let other = &self.nodes[other.index()];
                let local = other.tables.locals[slot];
                if other.manager_by(page, local) == node {
                    return flaw("a node believes that it manages a page");
                }
                if other.tables.entries[slot].mentions(node) {
                    return flaw("an entry mentions it");
                }
            }
        }
        Ok(())
    }
}
