//! Saves while users go on, begun at rests: writers of any speed, disks that stand still,
//! saves that are dropped at any moment, and incremental ones.
//!
//! The judge keeps what users had written at the cut. When all writers are done, each page
//! that was written by then is in one file with those bytes, or is unchanged since the last
//! complete save.

use std::collections::BTreeMap;
use std::time::Duration;

use super::BadShell;
use super::saved::Save;
use super::world::World;
use crate::checker::{Flaw, ZERO_VERSION};
use crate::controller::{Event, SaveProgress};
use crate::types::{NodeId, Page};

fn flaw(node: usize, page: u64, action: &'static str) -> Flaw {
    let (page, node) = (Page(page), NodeId(node as u8));
    Flaw::Memory { page, node, action }
}

impl World {
    /// Whether pages are saved behind their users.
    pub(super) fn saves(&self) -> bool {
        self.saves.current.is_some()
    }

    /// At a rest: perhaps the cut of a save.
    pub(super) fn begin_save(&mut self) -> Result<(), Flaw> {
        let may = self.scenario.saves > 0 && self.authority.is_over() && !self.saves();
        if !may || !self.random.per_mille(self.scenario.saves) {
            return Ok(());
        }
        let absent = self.alive().any(|node| !self.hosts[node].file.is_empty());
        let is_incremental = self.saves.last.is_some() && (absent || self.random.per_mille(600));
        if absent && !is_incremental {
            return Ok(());
        }
        self.saves.current = Some(Save {
            at_cut: self.latest.clone(),
            saved: BTreeMap::new(),
            speed: [0, 30, 300, 1000][self.random.below(4) as usize],
        });
        self.show(format!("cut of a save, incremental: {is_incremental}"));
        for node in self.alive().collect::<Vec<_>>() {
            let buffers = 1 + self.random.below(4);
            let patience = Duration::from_micros(1 + self.random.below(200));
            let host = &mut self.hosts[node];
            host.copies.buffers = buffers as usize;
            host.has_cut = true;
            if !host.controller.begin_save(buffers, patience) {
                return Err(flaw(node, 0, "a save is under way already"));
            }
            let mut unchanged = Vec::new();
            let mut first = 0;
            while first < self.scenario.pages {
                let end = first + 1 + self.random.below(64);
                let unchanged = is_incremental.then_some(&mut unchanged);
                let controller = &mut self.hosts[node].controller;
                let pages = first..end.min(self.scenario.pages);
                if let Err((page, what)) = controller.cut(pages, |_| false, unchanged) {
                    return Err(flaw(node, page, what));
                }
                first = end;
            }
            for page in unchanged {
                let last = self.saves.last.as_ref();
                let version = last.map_or(ZERO_VERSION, |last| last[page as usize]);
                self.add_saved(node, page, version)?;
            }
            if self.bad != Some(BadShell::KeepsCut) {
                self.hosts[node].look_anew();
            }
        }
        self.outcome.cuts += 1;
        Ok(())
    }

    fn add_saved(&mut self, node: usize, page: u64, version: u32) -> Result<(), Flaw> {
        let Some(save) = &mut self.saves.current else {
            return Err(flaw(node, page, "a page is saved without a save"));
        };
        let latest = save.at_cut[page as usize];
        if version != latest {
            return Err(Flaw::Stale {
                page: Page(page),
                node: NodeId(node as u8),
                version,
                latest,
            });
        }
        match save.saved.insert(page, version) {
            None => Ok(()),
            Some(_) => Err(flaw(node, page, "a page is saved twice")),
        }
    }

    /// Perhaps a writer does something, or the save is dropped.
    pub(super) fn go_on_saving(&mut self) -> Result<(), Flaw> {
        let Some(save) = &self.saves.current else {
            return Ok(());
        };
        let speed = save.speed;
        let is_given_up = speed > 0 && self.random.per_mille(2);
        if is_given_up || self.is_dropped() {
            return self.drop_save();
        }
        match self.random.per_mille(speed) {
            true => {
                let node = self.any_node();
                self.write_one(node)?;
                self.complete_save()
            }
            false => Ok(()),
        }
    }

    /// Whether a node has dropped the save.
    fn is_dropped(&self) -> bool {
        let progress = |node: usize| self.hosts[node].controller.save_progress();
        self.alive()
            .any(|node| progress(node) == SaveProgress::Dropped)
    }

    /// A node's writer takes one page.
    fn write_one(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        if let Some((page, version)) = host.copies.waiting.pop_front() {
            host.controller.free_buffers(1);
            self.add_saved(node, page, version)?;
            return self.event(node, Event::Tick, None);
        }
        match host.controller.next_unsaved() {
            Some(page) => {
                let version = host.version(page);
                self.add_saved(node, page, version)
            }
            None => Ok(()),
        }
    }

    /// The save is complete when all writers are done.
    fn complete_save(&mut self) -> Result<(), Flaw> {
        let is_done = |node: usize| {
            let host = &self.hosts[node];
            host.controller.save_progress() == SaveProgress::Left(0)
                && host.copies.waiting.is_empty()
        };
        if !self.alive().all(is_done) {
            return Ok(());
        }
        let Some(save) = self.saves.current.take() else {
            return Ok(());
        };
        for (page, version) in (0..).zip(&save.at_cut) {
            let is_missing = *version != ZERO_VERSION && !save.saved.contains_key(&page);
            if is_missing && self.killed == 0 {
                return Err(flaw(0, page, "a page is not saved"));
            }
        }
        self.outcome.saves += 1;
        self.show("the save is complete".into());
        self.end_save(true)?;
        self.saves.last = Some(save.at_cut);
        Ok(())
    }

    /// Nothing of the save is kept.
    pub(super) fn drop_save(&mut self) -> Result<(), Flaw> {
        if self.saves.current.take().is_none() {
            return Ok(());
        }
        self.outcome.dropped_saves += 1;
        self.show("the save is dropped".into());
        self.saves.last = None;
        self.end_save(false)
    }

    fn end_save(&mut self, is_kept: bool) -> Result<(), Flaw> {
        for node in self.alive().collect::<Vec<_>>() {
            self.hosts[node].copies.waiting.clear();
            self.hosts[node].controller.end_save(is_kept);
            self.event(node, Event::Tick, None)?;
        }
        Ok(())
    }

    /// The writers do what is left. If the disks stand still, users go on all the same.
    pub(super) fn finish_save(&mut self) -> Result<(), Flaw> {
        if (self.saves.current.as_ref()).is_some_and(|save| save.speed == 0) {
            self.drain()?;
            return self.drop_save();
        }
        while self.saves() {
            if self.is_dropped() {
                return self.drop_save();
            }
            for node in self.alive().collect::<Vec<_>>() {
                self.write_one(node)?;
                self.work()?;
            }
            self.complete_save()?;
        }
        Ok(())
    }
}
