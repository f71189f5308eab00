//! Looks at home's host: home gives way before the host's owner lacks memory.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_proc::stats::COMMAND_GIVE_WAY;

use super::super::home_budget::{Found, HomeBudget, News, Why};
use super::{Command, Owner, Pending};
use crate::host;
use crate::launch::nodes::Body;
use crate::report::NodeState;
use crate::size::{PAGE_BYTES, format_bytes};

/// How often.
const LOOK: Duration = Duration::from_secs(1);
/// The part of another node's budget that stays free: pages come to it by faults as well.
const ROOM_PART: u64 = 32;

/// What follows the memory of home's host.
pub(super) struct Watch {
    budget: HomeBudget,
    pub next_look: Instant,
}

impl Watch {
    /// None where nothing is kept free for the owner.
    pub fn new(first_pages: u64, keep_free_bytes: u64) -> Option<Watch> {
        (keep_free_bytes > 0).then(|| Watch {
            budget: HomeBudget::new(first_pages * PAGE_BYTES, keep_free_bytes),
            next_look: Instant::now(),
        })
    }
}

impl Owner<'_> {
    /// Looks at the host, if that is due.
    pub(super) fn look_at_host(&mut self) {
        let now = Instant::now();
        let due = |watch: &Watch| now >= watch.next_look;
        if !self.watch.as_ref().is_some_and(due) {
            return;
        }
        let found = self.find();
        let Some(watch) = &mut self.watch else {
            return;
        };
        watch.next_look = now + LOOK;
        let verdict = watch.budget.look(found);
        let keep_free = watch.budget.keep_free();
        self.home_shared
            .home_budget_wanted
            .store(verdict.wanted / PAGE_BYTES, Ordering::Relaxed);
        if verdict.gives_way {
            self.give_way();
        }
        if let Some(news) = verdict.news {
            self.tell(&sentence(news, keep_free, found.held, verdict.wanted));
        }
    }

    /// Has home send pages away. A home that is busy is asked again after the next look.
    fn give_way(&mut self) {
        if let Ok(sequence) = self.command(COMMAND_GIVE_WAY, 0) {
            self.pending.push(Pending {
                sequence,
                deadline: Instant::now() + self.aggregate.workload.options.lease,
                what: Command::GiveWay,
            });
        }
    }

    fn find(&self) -> Found {
        let stats = &self.home_shared.stats;
        // Alone, the program's memory is the kernel's affair, and so is its account.
        let held = match self.is_stretched() {
            true => stats.resident_pages.load(Ordering::Relaxed) * PAGE_BYTES,
            false => host::private_memory_bytes(self.aggregate.home.pid()).unwrap_or(0),
        };
        Found {
            available: host::available_memory_bytes(),
            held,
            room: self.room_elsewhere(),
        }
    }

    /// What nodes on other hosts have room for, in bytes. What goes to another node of this
    /// host gives it nothing.
    fn room_elsewhere(&self) -> Option<u64> {
        let nodes = self.aggregate.nodes.iter().filter(|node| {
            node.state == NodeState::Running && matches!(node.body, Body::Remote(_))
        });
        let rooms = nodes.map(|node| {
            let number = node.number as usize;
            let budget = self.aggregate.workload.settings.budget_pages[number];
            let owned = self.home_shared.stats.owned_pages[number].load(Ordering::Relaxed);
            (budget - budget / ROOM_PART).saturating_sub(owned)
        });
        rooms.reduce(u64::saturating_add).map(|p| p * PAGE_BYTES)
    }

    /// Home's budget now, in pages.
    pub(super) fn home_budget_pages(&self) -> u64 {
        let first = self.aggregate.workload.settings.budget_pages[0];
        let said = self.home_shared.home_budget.load(Ordering::Relaxed);
        let wanted = self.home_shared.home_budget_wanted.load(Ordering::Relaxed);
        let known = [said, wanted].into_iter().find(|&pages| pages != 0);
        known.unwrap_or(first)
    }
}

fn sentence(news: News, keep_free: u64, held: u64, wanted: u64) -> String {
    let keep_free = format_bytes(keep_free);
    let (held, wanted) = (format_bytes(held), format_bytes(wanted));
    match news {
        News::GivesWay => format!(
            "this host has less than {keep_free} free for its owner: home gives way, from {held} \
             to {wanted}"
        ),
        News::TakesBack => format!(
            "this host has {keep_free} free for its owner again: home takes memory back, {wanted} \
             at first"
        ),
        News::Stays(why) => {
            let why = match why {
                Why::NoHost => "it has no node on another host",
                Why::NoRoom => "its nodes on other hosts have no room",
            };
            format!(
                "this host has less than {keep_free} free for its owner, but the program stays: \
                 {why}"
            )
        }
    }
}
