//! Users: they look for pages, wait for them, use them and give them up.

use super::host::Thread;
use super::scenario::Kind;
use super::world::World;
use super::{BadShell, USERS_MAX};
use crate::checker::Flaw;
use crate::controller::{Event, PrefetchRun, Purpose};
use crate::types::{Access, NodeId, Page};

/// Users of a node that pages follow.
const FOLLOWED: u64 = 3;
/// Runs of a prefetch, at most.
const RUNS_MAX: u64 = 40;

impl World {
    /// A user begins to read or write a page.
    pub(super) fn begin_access(&mut self) -> Result<(), Flaw> {
        let (node, page) = (self.any_node(), self.any_page());
        let access = match self.random.per_mille(self.scenario.writes) {
            true => Access::Write,
            false => Access::Read,
        };
        let turns = self.scenario.turns > 0 && self.scenario.turns_at == node;
        let rests = turns || self.resting == Some(node) || !self.takes_part(node);
        if self.hosts[node].users() >= USERS_MAX || rests {
            return Ok(());
        }
        if self.random.per_mille(30) {
            return self.event(node, Event::Hide { page }, None);
        }
        if self.random.per_mille(50) {
            return self.hold_both(node, page, access);
        }
        self.access(node, page, access)
    }

    pub(super) fn access(&mut self, node: usize, page: u64, access: Access) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        host.look(page);
        if host.mapped(page) >= Some(access) {
            return self.use_page(node, page, access);
        }
        // A device's thread waits on any node.
        if host.kind == Kind::Sleeps && !self.random.per_mille(150) {
            host.sleepers.push((page, access));
            return self.event(node, Event::Ask { page, access }, None);
        }
        let purpose = match self.random.below(4) {
            0 => Purpose::KernelCode,
            1 => Purpose::Table,
            _ => Purpose::Data,
        };
        self.wait_for(node, page, access, purpose)
    }

    /// A thread waits for a page, if it is not here.
    pub(super) fn wait_for(
        &mut self,
        node: usize,
        page: u64,
        access: Access,
        purpose: Purpose,
    ) -> Result<(), Flaw> {
        self.threads += 1;
        let waiter = self.threads;
        self.hosts[node]
            .threads
            .push(Thread::new(waiter, page, access));
        let event = Event::Acquire {
            waiter,
            page,
            access,
            purpose,
        };
        self.event(node, event, None)
    }

    /// A thread that pins two pages at once, if both are here.
    pub(super) fn hold_both(&mut self, node: usize, page: u64, access: Access) -> Result<(), Flaw> {
        let other = (page + 1) % self.scenario.pages;
        let host = &mut self.hosts[node];
        if other == page
            || !host
                .controller
                .hold_all([page, other].into_iter(), access, |_| false)
        {
            return Ok(());
        }
        for page in [page, other] {
            host.threads.push(Thread::holding(page, access));
        }
        self.judge_turns(node, page)?;
        self.judge_turns(node, other)?;
        self.judge(page)?;
        self.judge(other)
    }

    /// The load or store itself.
    pub(super) fn use_page(&mut self, node: usize, page: u64, access: Access) -> Result<(), Flaw> {
        self.outcome.accesses += 1;
        let host = &mut self.hosts[node];
        host.look(page);
        let version = host.version(page);
        if version != self.latest[page as usize] {
            return Err(Flaw::Stale {
                page: Page(page),
                node: NodeId(node as u8),
                version,
                latest: self.latest[page as usize],
            });
        }
        if access == Access::Write {
            self.versions += 1;
            self.latest[page as usize] = self.versions;
        }
        host.fill(page, self.latest[page as usize]);
        self.judge(page)
    }

    /// A user goes on using what it has mapped. Users that look for a page again find it
    /// by its right, without the controller.
    pub(super) fn use_mapping(&mut self, node: usize) -> Result<(), Flaw> {
        let page = self.any_page();
        if self.resting == Some(node) || self.stands {
            return Ok(());
        }
        let host = &mut self.hosts[node];
        if host.kind == Kind::Waits && host.rights.allow_use(page, Access::Read) {
            host.map_at_least(page, Access::Read);
            self.judge(page)?;
        }
        let host = &self.hosts[node];
        let Some(mapped) = host.mapped(page) else {
            return Ok(());
        };
        let write = self.random.per_mille(self.scenario.writes);
        self.use_page(
            node,
            page,
            mapped.min(if write { Access::Write } else { Access::Read }),
        )
    }

    /// A thread that was woken goes on.
    pub(super) fn run_thread(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        let Some(thread) = host.threads.iter_mut().find(|thread| thread.woken) else {
            return Ok(());
        };
        thread.woken = false;
        let (waiter, page, access) = (thread.number, thread.page, thread.access);
        if !thread.holds {
            return self.event(node, Event::Retry { waiter }, None);
        }
        thread.works = true;
        if self.bad == Some(BadShell::UnpinsEarly) {
            host.pins.remove(page);
        }
        if host.kind == Kind::Waits {
            host.map_at_least(page, access);
        }
        self.use_page(node, page, access)?;
        self.event(node, Event::Leave { waiter }, None)
    }

    /// A thread that is done gives its pin back.
    pub(super) fn release(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        let Some(index) = host.threads.iter().position(|thread| thread.works) else {
            return Ok(());
        };
        let thread = host.threads.swap_remove(index);
        // It may have used its page until now.
        if self.stands {
            self.use_page(node, thread.page, thread.access)?;
        }
        let host = &mut self.hosts[node];
        if self.bad != Some(BadShell::UnpinsEarly) {
            host.pins.remove(thread.page);
        }
        Ok(())
    }

    /// A user comes to a node, and pages follow it; or it leaves.
    pub(super) fn follow(&mut self) -> Result<(), Flaw> {
        let node = self.any_node();
        if !self.takes_part(node) {
            return Ok(());
        }
        if self.random.per_mille(200) {
            let event = match self.hosts[node].prefetched.held {
                true => Event::ResumePrefetches,
                false => Event::HoldPrefetches,
            };
            return self.event(node, event, None);
        }
        let user = self.random.below(FOLLOWED) as u32;
        if self.random.per_mille(300) {
            return self.event(node, Event::EndPrefetch { user }, None);
        }
        let runs = (0..self.random.below(RUNS_MAX)).map(|_| PrefetchRun {
            // Some are no memory.
            first: self.random.below(self.scenario.pages + 2),
            count: self.random.below(8),
            access: match self.random.per_mille(300) {
                true => Access::Write,
                false => Access::Read,
            },
        });
        let list = runs.collect::<Vec<_>>().into();
        self.event(node, Event::Prefetch { user, list }, None)
    }

    /// Prefetches go on, where they are held.
    pub(super) fn resume_prefetches(&mut self) -> Result<(), Flaw> {
        for node in 0..self.hosts.len() {
            if self.is_alive(node) && self.hosts[node].prefetched.held {
                self.event(node, Event::ResumePrefetches, None)?;
            }
        }
        Ok(())
    }
}
