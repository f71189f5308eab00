//! Making room. A page goes in one of three ways, the cheapest first:
//!
//! - *Vacant* memory, of pages that other nodes took, costs nobody anything.
//! - A *copy* is dropped; its owner has the page.
//! - A page that this node *owns* goes to its manager, which does not evict it as long as
//!   it manages it.
//!
//! Pages that this node manages and owns stay. Others leave if they were not used since the
//! hand passed them last (a second chance).
//!
//! Invariants:
//!
//! - A page that is pinned or in transition is no victim.
//! - Nothing here waits for another node; the offers that are under way are counted.

use std::time::Duration;

use super::transition::{Operation, Work};
use super::{Action, Controller, Look, Mutant, Passed, Sink};
use crate::protocol::{self, Body};
use crate::state::Tables;
use crate::types::Page;

/// Pages whose memory is given back after one step, at most: 2 MiB.
const GIVE_BACK_MAX: usize = 512;

impl<T: Tables, B> Controller<T, B> {
    /// Evicts as many of the pages that the hand passed as have to go.
    pub(super) fn evict(&mut self, passed: Passed, now: Duration, sink: &mut impl Sink<B>) {
        let Passed {
            vacant,
            used,
            unused,
        } = passed;
        self.vacant.extend(vacant);
        if self.rests() && !self.is(Mutant::RestEvicts) {
            return;
        }
        for page in used {
            if self.rights.of(page).is_some() {
                sink.act(Action::Watch { page });
            }
        }
        let is_copy = |page: &u64| !self.node.tables.local(Page(*page)).owner();
        let (copies, owned): (Vec<u64>, Vec<u64>) = unused.into_iter().partition(is_copy);
        let mut wanted = self.wanted();
        for page in copies.into_iter().chain(owned) {
            if wanted == 0 {
                return;
            }
            wanted -= usize::from(self.evict_page(page, now, sink));
        }
    }

    /// Whether the page leaves.
    fn evict_page(&mut self, page: u64, now: Duration, sink: &mut impl Sink<B>) -> bool {
        let local = *self.node.tables.local(Page(page));
        let home = self.node.manager_of(Page(page));
        let stays = !local.evictable()
            || local.owner() && home == self.node.me()
            || self.is_in_transition(page)
            || self.pins.hold(page, now);
        if stays {
            return false;
        }
        let actions = self.step_node(protocol::Event::Evict {
            page: Page(page),
            to: local.owner().then_some(home),
        });
        match actions.front() {
            // Not now: this node is at work with the page as its manager. Or never: its home
            // is dead.
            Some(protocol::Action::Refused { .. }) => return false,
            Some(protocol::Action::Send { message, .. })
                if matches!(message.body, Body::Offer { .. }) =>
            {
                self.leaving += 1;
            }
            _ => {}
        }
        self.carry_out(page, Work::evicting(actions), now, sink);
        true
    }

    /// Has the memory of vacant pages given back to the host.
    pub(super) fn give_back(&mut self, sink: &mut impl Sink<B>) {
        let mut vacant = std::mem::take(&mut self.vacant);
        vacant.sort_unstable();
        vacant.dedup();
        vacant.retain(|page| {
            let used = self.is(Mutant::GiveBackUsed) && self.rights.used(*page);
            let kept = self.is(Mutant::PrecopyGivenBack) && self.rights.is_precopy(*page);
            (self.rights.is_vacant(*page) || used || kept) && !self.is_in_transition(*page)
        });
        self.vacant = vacant.split_off(vacant.len().min(GIVE_BACK_MAX));
        if !self.vacant.is_empty() {
            sink.act(Action::Look(Look::Room));
        }
        for run in vacant.chunk_by(|page, next| page + 1 == *next) {
            for page in run {
                match self.is(Mutant::GiveBackAnyTime) {
                    true => self.rights.forget(*page),
                    false => drop(self.start(*page, Operation::GiveBack)),
                }
            }
            sink.act(Action::GiveBack {
                first: run[0],
                count: run.len() as u64,
            });
        }
    }
}
