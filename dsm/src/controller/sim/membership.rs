//! Nodes that join and leave, and managers that move, at random moments. The authority's
//! steps are those of `docs/membership.md`; any of them may be delayed at any node, and
//! walks over pages look at a few at a time.
//!
//! ```text
//!  join:   Hold ──▶ Others ──▶ Tell ──▶ Resume
//!  leave:  Drain ──▶ Hold ──▶ First ──▶ Others ──▶ Last ──▶ Tell ──▶ Resume
//!            └────────┴─────────┴─────────┴─────────┴──▶ Cancel
//! ```

use std::ops::Range;

use super::BadAuthority;
use super::authority::{Authority, Change, Stage};
use super::world::World;
use crate::checker::Flaw;
use crate::controller::{Choice, DrainPlan, DrainTarget, Event, Threshold};
use crate::types::{CHUNK_PAGES, NodeId, Standing};

/// Turns in which a leave gets no further before it is cancelled.
const TURNS_MAX: u32 = 3000;
/// Of this many runs one has splits.
const SPLIT_SEEDS: u64 = 4;

impl World {
    /// Whether users of a node look for pages.
    pub(super) fn takes_part(&mut self, node: usize) -> bool {
        let Authority {
            change,
            stage,
            users_stay,
            ..
        } = self.authority;
        match change {
            Some(Change::Join(joins)) if joins == node => {
                let early = self.bad_authority == Some(BadAuthority::JoinsEarly);
                matches!(stage, Stage::Resume | Stage::Over) || early && stage == Stage::Tell
            }
            Some(Change::Leave(leaves)) if leaves == node => match stage {
                Stage::Over => true,
                Stage::Drain => users_stay,
                _ => self.random.per_mille(50),
            },
            _ => true,
        }
    }

    /// The nodes that a stage addresses.
    fn audience(&self) -> u32 {
        let all = self.alive().map(|node| 1 << node).sum::<u32>();
        match self.authority.change {
            Some(Change::Join(node)) => all & !(1 << node),
            _ => all,
        }
    }

    /// The authority does one thing, at one node.
    pub(super) fn change_membership(&mut self, may_begin: bool) -> Result<(), Flaw> {
        self.authority.turns += 1;
        let leaves = self.authority.leaver().is_some();
        let stage = self.authority.stage;
        let undecided = matches!(
            stage,
            Stage::Drain | Stage::Hold | Stage::First | Stage::Others | Stage::Last
        );
        let alone = self.alive().count() < 2;
        let wanted = self.authority.patience == Some(0);
        let tired = alone || wanted || self.authority.turns > TURNS_MAX;
        if let Some(patience) = &mut self.authority.patience {
            *patience = patience.saturating_sub(1);
        }
        if leaves && undecided && tired {
            self.cancel();
            return Ok(());
        }
        match stage {
            Stage::Over if may_begin && self.random.per_mille(100) => self.begin_change(),
            Stage::Over => {}
            Stage::First | Stage::Last => self.look_at_leaver()?,
            Stage::Others => self.look_at_others(),
            _ => self.tell()?,
        }
        self.go_on_with_change();
        Ok(())
    }

    fn begin_change(&mut self) {
        if self.scenario.changes == 0 {
            return;
        }
        let present: Vec<usize> = self.alive().collect();
        let free = self.absent & !self.killed;
        self.scenario.changes -= 1;
        self.authority.users_stay = self.random.per_mille(300);
        match self.random.below(3) {
            0 if free != 0 => self.begin_join(free.trailing_zeros() as usize),
            1 if present.len() > 1 => {
                let node = present[self.random.below(present.len() as u64) as usize];
                self.authority.change = Some(Change::Leave(node));
                self.authority.enter(Stage::Drain);
                let cancels = self.random.per_mille(300);
                self.authority.patience = cancels.then(|| self.random.below(600) as u32);
                self.show(format!("{} leaves", NodeId(node as u8)));
            }
            _ if present.len() > 1 => self.spread(),
            _ => {}
        }
    }

    fn begin_join(&mut self, node: usize) {
        self.hosts[node] = self.new_host(node);
        self.hosts[node].controller.learn_dead(self.killed);
        self.unaware[node] = 0;
        self.absent &= !(1 << node);
        self.authority.gone &= !(1 << node);
        self.authority.change = Some(Change::Join(node));
        self.authority.enter(Stage::Hold);
        self.show(format!("{} joins", NodeId(node as u8)));
    }

    /// Some pages of a node that stays move to another.
    fn spread(&mut self) {
        let node = self.any_node();
        let first = self.random.below(self.scenario.pages);
        let pages = first..first + 1 + self.random.below(self.scenario.pages - first);
        self.begin_drain(node, pages);
    }

    pub(super) fn begin_drain(&mut self, node: usize, pages: Range<u64>) {
        let others: Vec<usize> = self.alive().filter(|other| *other != node).collect();
        let start = self.random.below(others.len().max(1) as u64) as usize;
        let others = others[start..].iter().chain(&others[..start]);
        let managed = self.hosts[node].managed(pages.clone());
        let mut targets = Vec::new();
        for other in others {
            // The last may have no room, the others have.
            let part = 1 + self.random.below(managed.max(1));
            self.hosts[*other].raise_budget(part);
            targets.push(DrainTarget {
                node: NodeId(*other as u8),
                pages: part,
            });
        }
        if let Some(last) = targets.last_mut() {
            last.pages += managed;
            self.hosts[last.node.index()].raise_budget(managed);
        }
        self.split(node, &targets);
        self.hosts[node].controller.begin_drain(DrainPlan {
            pages: vec![pages],
            targets,
            window_pages: 1 + self.random.below(20) as usize,
        });
    }

    /// All pages go to one of these targets rather than to others, or rather not to it, or
    /// it is left open. In a part of the runs.
    pub(super) fn split(&mut self, node: usize, targets: &[DrainTarget]) {
        if !self.seed.is_multiple_of(SPLIT_SEEDS) {
            return;
        }
        let chunks = self.scenario.pages.div_ceil(CHUNK_PAGES) as usize;
        let at = self.random.below(2 * targets.len().max(1) as u64) as usize;
        let choice = targets.get(at).map(|target| {
            let threshold = Threshold {
                history: 1,
                equal_pages: 0,
            };
            let history = 2 * self.random.below(2) as u8;
            let chunks = (0..chunks).map(|_| (history, CHUNK_PAGES));
            Choice::new(target.node, threshold, chunks)
        });
        self.hosts[node].controller.choose(choice);
    }

    /// A node goes on with its drain, if there is one.
    pub(super) fn drain_on(&mut self, node: usize) -> Result<(), Flaw> {
        self.event(node, Event::Drain, None)?;
        let progress = self.hosts[node].controller.drain_progress();
        if progress.is_over && self.authority.leaver() != Some(node) {
            self.hosts[node].controller.end_drain();
            self.lower_budget(node);
        }
        Ok(())
    }

    /// A node that handed pages over may fill fewer.
    fn lower_budget(&mut self, node: usize) {
        let pages = 0..self.scenario.pages;
        let drains =
            |host: &super::host::Host| host.controller.drains() || host.controller.is_precopying();
        let drains = self.hosts.iter().any(drains);
        let settled =
            |host: &mut super::host::Host| host.controller.unsettled(pages.clone()).is_none();
        let quiet = self.authority.is_over() && !drains && self.hosts.iter_mut().all(settled);
        let managed = self.hosts[node].managed(pages);
        // Memory of pages that were relocated goes back to the host some time later.
        if quiet && self.hosts[node].filled() <= managed + self.scenario.others {
            self.hosts[node].lower_budget(managed);
        }
    }

    /// No drain goes on but that of a node that leaves.
    pub(super) fn end_drains(&mut self) {
        let leaver = self
            .authority
            .leaver()
            .filter(|_| !self.authority.is_over());
        for (node, host) in self.hosts.iter_mut().enumerate() {
            if Some(node) != leaver {
                host.controller.end_drain();
            }
        }
    }

    fn cancel(&mut self) {
        if let Some(leaver) = self.authority.leaver() {
            self.hosts[leaver].controller.end_drain();
        }
        self.outcome.cancels += 1;
        self.authority.enter(Stage::Cancel);
    }

    /// One node hears what the stage says.
    fn tell(&mut self) -> Result<(), Flaw> {
        let waits = self.audience() & !self.authority.told;
        if waits == 0 {
            return Ok(());
        }
        let node = loop {
            let node = self.random.below(self.hosts.len() as u64) as usize;
            if waits & 1 << node != 0 {
                break node;
            }
        };
        let (stage, change) = (self.authority.stage, self.authority.change);
        let member = |about: usize, standing| Event::Member {
            node: NodeId(about as u8),
            standing,
        };
        let event = match (stage, change) {
            (Stage::Drain, Some(Change::Leave(leaver))) => {
                if leaver == node {
                    self.begin_drain(node, 0..self.scenario.pages);
                }
                Some(member(leaver, Standing::Draining))
            }
            (Stage::Hold, Some(Change::Leave(leaver))) => Some(member(leaver, Standing::Leaving)),
            (Stage::Tell, Some(Change::Leave(leaver))) => {
                if !self.has_read_all(leaver, node) {
                    return Ok(());
                }
                Some(member(leaver, Standing::Absent))
            }
            (Stage::Tell, Some(Change::Join(joins))) => Some(member(joins, Standing::Present)),
            (Stage::Cancel, Some(Change::Leave(leaver))) => Some(member(leaver, Standing::Present)),
            _ => None,
        };
        if let Some(event) = event {
            self.event(node, event, None)?;
        }
        match stage {
            Stage::Hold => self.event(node, Event::Hold, None)?,
            Stage::Resume | Stage::Cancel => self.event(node, Event::Resume, None)?,
            _ => {}
        }
        self.authority.told |= 1 << node;
        Ok(())
    }

    /// A node has handled what one that has left sent before.
    fn has_read_all(&self, leaver: usize, node: usize) -> bool {
        let index = leaver * self.hosts.len() + node;
        let is_sent = self.queued[index].is_empty() && self.links[index].is_empty();
        let queued = self.hosts[node].controller.has_queued(NodeId(leaver as u8));
        is_sent && !queued
    }

    /// Some of the pages that a node has not looked at.
    fn some_pages(&mut self, node: usize) -> Range<u64> {
        let first = self.authority.looked[node];
        let end = first + 1 + self.random.below(self.scenario.pages / 2);
        first..end.min(self.scenario.pages)
    }

    fn look_at_leaver(&mut self) -> Result<(), Flaw> {
        let Some(leaver) = self.authority.leaver() else {
            return Ok(());
        };
        let first = self.authority.stage == Stage::First;
        let users = self.hosts[leaver].users() > 0;
        if users || !first && self.alive().any(|node| self.unaware[node] != 0) {
            return Ok(());
        }
        let pages = self.some_pages(leaver);
        if !self.hosts[leaver]
            .controller
            .holdings(pages.clone())
            .is_nothing()
        {
            return Ok(());
        }
        self.authority.looked[leaver] = pages.end;
        if pages.end < self.scenario.pages {
            return Ok(());
        }
        let skips = self.bad_authority == Some(BadAuthority::AsksOneNode);
        if first && !skips {
            self.authority.enter(Stage::Others);
            return Ok(());
        }
        self.judge_left_by(leaver)?;
        self.hosts[leaver].controller.end_drain();
        self.hosts[leaver].die();
        self.absent |= 1 << leaver;
        self.authority.gone |= 1 << leaver;
        self.outcome.leaves += 1;
        self.authority.enter(Stage::Tell);
        Ok(())
    }

    fn look_at_others(&mut self) {
        let mut waits = self.audience() & !self.authority.told;
        if let Some(leaver) = self.authority.leaver() {
            waits &= !(1 << leaver);
        }
        let start = self.random.below(self.hosts.len() as u64) as u32;
        let turned = waits.rotate_right(start);
        if turned == 0 {
            return;
        }
        let node = (turned.trailing_zeros() + start) as usize % 32;
        let pages = self.some_pages(node);
        let controller = &mut self.hosts[node].controller;
        let found = match self.authority.change {
            Some(Change::Leave(leaver)) => controller.mentions(pages.clone(), NodeId(leaver as u8)),
            _ => controller.unsettled(pages.clone()),
        };
        self.authority.looked[node] = found.unwrap_or(pages.end);
        if self.authority.looked[node] == self.scenario.pages {
            self.authority.told |= 1 << node;
        }
    }

    /// The stage is over when all have heard.
    fn go_on_with_change(&mut self) {
        let (audience, stage) = (self.audience(), self.authority.stage);
        let heard = audience & !self.authority.told == 0;
        let calm = self.bad_authority == Some(BadAuthority::NotQuiet)
            || self.alive().all(|node| {
                let asked = audience & 1 << node != 0;
                !asked || self.hosts[node].controller.is_quiet()
            });
        match (stage, self.authority.change) {
            (Stage::Drain, Some(Change::Leave(leaver))) if heard => {
                let empty = self.hosts[leaver].controller.drain_progress().is_over;
                if empty && self.hosts[leaver].users() == 0 || self.random.below(5000) == 0 {
                    self.authority.enter(Stage::Hold);
                }
            }
            (Stage::Hold, Some(Change::Leave(_))) if heard && calm => {
                self.authority.enter(Stage::First);
            }
            (Stage::Hold, Some(Change::Join(_))) if heard && calm => {
                self.authority.enter(Stage::Others);
            }
            (Stage::Others, Some(Change::Leave(leaver)))
                if audience & !self.authority.told & !(1 << leaver) == 0 =>
            {
                self.authority.enter(Stage::Last);
            }
            (Stage::Others, Some(Change::Join(joins))) if heard && self.unaware[joins] == 0 => {
                self.teach(joins);
                self.authority.enter(Stage::Tell);
            }
            (Stage::Tell, _) if heard => self.authority.enter(Stage::Resume),
            (Stage::Resume | Stage::Cancel, change) if heard => {
                self.outcome.joins += u64::from(matches!(change, Some(Change::Join(_))));
                self.authority.change = None;
                self.authority.enter(Stage::Over);
            }
            _ => {}
        }
    }

    /// One node tells the one that joins who manages what.
    fn teach(&mut self, joins: usize) {
        let teacher = self.alive().filter(|node| *node != joins).last();
        let Some(teacher) = teacher else {
            return;
        };
        let mut next = Some(0);
        while let Some(first) = next {
            let runs_max = 1 + self.random.below(3) as usize;
            let pages = first..self.scenario.pages;
            let runs;
            (runs, next) = self.hosts[teacher].controller.managers(pages, runs_max);
            for run in runs {
                let learned = self.hosts[joins].controller.learn_managers(run);
                learned.expect("runs of pages that there are");
            }
        }
    }
}
