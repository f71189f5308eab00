//! Rests at random moments, together with everything else: users stand, all nodes rest, pages
//! are written to the files of a checkpoint, and all goes on.
//!
//! The judges do not ask the controllers whether they rest: they look at the links, at what
//! users have mapped, at the records and at the bytes in memory.

use std::collections::BTreeMap;
use std::time::Duration;

use super::BadAuthority;
use super::authority::Stage;
use super::world::World;
use crate::checker::{Flaw, Frame, Judge, ZERO_VERSION, idle_node};
use crate::controller::{Event, RestReport, unrest};
use crate::state::Phase;
use crate::types::{NodeId, Page};

/// Looks at all nodes until a rest is given up.
const LOOKS_MAX: u32 = 300;
/// Things that nodes do between two reports, at most.
const BETWEEN_MAX: u64 = 30;

impl World {
    /// Whether the authority over the machine is between two requests.
    fn may_rest(&self) -> bool {
        self.authority.is_over() || self.authority.stage == Stage::Drain
    }

    /// A rest of all nodes, from its begin to its end.
    pub(super) fn rest_all(&mut self) -> Result<(), Flaw> {
        if !self.may_rest() {
            return Ok(());
        }
        self.stands = true;
        // Time passes, so that visits end.
        let tick_max = self.scenario.tick_max;
        self.scenario.tick_max = tick_max.max(Duration::from_micros(1));
        self.show("all users stand".into());
        for node in self.alive_from_any() {
            self.work_for_a_while()?;
            self.event(node, Event::Rest, None)?;
        }
        match self.comes_to_rest()? {
            true => {
                self.outcome.rests += 1;
                self.show("all nodes rest".into());
                self.stay_at_rest()?;
            }
            false => self.outcome.restless += 1,
        }
        self.stands = false;
        self.scenario.tick_max = tick_max;
        for node in self.alive_from_any() {
            self.event(node, Event::EndRest, None)?;
            self.work_for_a_while()?;
        }
        Ok(())
    }

    fn alive_from_any(&mut self) -> Vec<usize> {
        let mut nodes: Vec<usize> = self.alive().collect();
        let start = self.random.below(nodes.len().max(1) as u64) as usize;
        nodes.rotate_left(start);
        nodes
    }

    fn work_for_a_while(&mut self) -> Result<(), Flaw> {
        for _ in 0..self.random.below(BETWEEN_MAX) {
            self.work()?;
        }
        Ok(())
    }

    /// Asks all nodes again and again, each at any time after the one before.
    fn comes_to_rest(&mut self) -> Result<bool, Flaw> {
        for _ in 0..LOOKS_MAX {
            // A node that hears of a death asks others by itself: before it is looked at.
            if self.alive().any(|node| self.unaware[node] != 0) {
                self.work_for_a_while()?;
                continue;
            }
            let mut reports = Vec::new();
            for node in self.alive().collect::<Vec<_>>() {
                self.work_for_a_while()?;
                let report = self.hosts[node].controller.rest_report(self.now);
                reports.push((NodeId(node as u8), self.falsified(report)));
            }
            if unrest(&reports).is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What an authority hears that does not count messages.
    fn falsified(&self, report: RestReport) -> RestReport {
        match self.bad_authority == Some(BadAuthority::RestsUncounted) {
            true => RestReport {
                sent: Vec::new(),
                received: Vec::new(),
                ..report
            },
            false => report,
        }
    }

    /// Nothing is sent and nothing changes, whatever threads that are not users do.
    fn stay_at_rest(&mut self) -> Result<(), Flaw> {
        let before = self.latest.clone();
        self.judge_rest()?;
        self.judge_save()?;
        self.begin_save()?;
        self.relocate_some()?;
        for _ in 0..self.random.below(100) {
            self.work()?;
            self.nothing_is_under_way()?;
        }
        let written = (before.iter().zip(&self.latest)).position(|(before, after)| before != after);
        if let Some(page) = written {
            let (page, node) = (Page(page as u64), NodeId(0));
            let action = "a write during a rest";
            return Err(Flaw::Memory { page, node, action });
        }
        self.judge_rest()?;
        self.judge_save()
    }

    fn nothing_is_under_way(&self) -> Result<(), Flaw> {
        let nodes = self.hosts.len();
        let links = self.queued.iter().zip(&self.links).enumerate();
        for (index, (queued, link)) in links {
            let ends_alive = self.is_alive(index / nodes) && self.is_alive(index % nodes);
            let packet = queued.iter().chain(link).next();
            if let Some(packet) = packet.filter(|_| ends_alive) {
                let (page, node) = (packet.message.page, NodeId((index / nodes) as u8));
                let action = "a message that is under way during a rest";
                return Err(Flaw::Memory { page, node, action });
            }
        }
        Ok(())
    }

    /// Each page that was touched has one owner, and every holder has its newest bytes.
    fn judge_rest(&mut self) -> Result<(), Flaw> {
        self.nothing_is_under_way()?;
        for page in (0..self.scenario.pages).map(Page) {
            let mut judge = Judge::new(page, self.latest[page.0 as usize]);
            for node in self.alive().collect::<Vec<_>>() {
                let me = NodeId(node as u8);
                let host = &mut self.hosts[node];
                let local = host.controller.tables().look(page);
                idle_node(page, me, local)?;
                let mapped = host.allowed(page.0);
                let version = host.kept_version(page.0);
                judge.node(me, Frame { mapped, version }, local)?;
                if let Some((page, what)) = host.controller.restless(page.0..page.0 + 1) {
                    let page = Page(page);
                    let node = me;
                    return Err(Flaw::Unanswered { page, node, what });
                }
            }
            let Some(manager) = self.living_manager(page.0) else {
                continue;
            };
            let entry = *self.hosts[manager].controller.tables().look_entry(page);
            let one = u32::from(!entry.untouched() && entry.phase() != Phase::Lost);
            judge.verdict(0, one, one)?;
            judge.idle(NodeId(manager as u8), &entry)?;
        }
        Ok(())
    }

    /// Each page that was written is in one file of a checkpoint, with its newest bytes.
    fn judge_save(&mut self) -> Result<(), Flaw> {
        let mut saved = BTreeMap::new();
        for node in self.alive().collect::<Vec<_>>() {
            let me = NodeId(node as u8);
            for page in self.hosts[node].controller.owned(0..self.scenario.pages) {
                let (version, latest) = (
                    self.hosts[node].kept_version(page),
                    self.latest[page as usize],
                );
                let page = Page(page);
                let node = me;
                if version != latest {
                    return Err(Flaw::Stale {
                        page,
                        node,
                        version,
                        latest,
                    });
                }
                if saved.insert(page, me).is_some() {
                    let action = "a page that is in two files of a checkpoint";
                    return Err(Flaw::Memory { page, node, action });
                }
            }
        }
        for page in (0..self.scenario.pages).map(Page) {
            let written = self.latest[page.0 as usize] != ZERO_VERSION;
            if self.killed == 0 && written && !saved.contains_key(&page) {
                let node = NodeId(self.hosts[0].manager_of(page.0) as u8);
                let action = "a page that is in no file of a checkpoint";
                return Err(Flaw::Memory { page, node, action });
            }
        }
        Ok(())
    }
}
