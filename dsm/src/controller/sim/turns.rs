//! Users that pin a page in turns.

use super::host::{Operation, Thread};
use super::world::World;
use crate::checker::Flaw;
use crate::controller::Purpose;
use crate::types::{Access, NodeId, Page};

/// The page that users pin in turns.
const PAGE: u64 = 0;
/// Pins of a page at a time: one ends after another began.
const OVERLAP: usize = 3;

impl World {
    /// Threads of a node that pin a page in turns, each before the last pin ends.
    pub(super) fn pin_in_turns(&mut self) -> Result<(), Flaw> {
        let node = self.scenario.turns_at;
        if self.resting == Some(node) || !self.is_alive(node) || !self.takes_part(node) {
            return Ok(());
        }
        let host = &mut self.hosts[node];
        let mut here = host.threads.iter().filter(|thread| thread.page == PAGE);
        if here.clone().count() == OVERLAP {
            let mut threads = host.threads.iter();
            let oldest = threads.position(|thread| thread.page == PAGE && thread.works);
            if let Some(oldest) = oldest {
                host.threads.remove(oldest);
                host.pins.remove(PAGE);
            }
            return Ok(());
        }
        let access = match self.random.per_mille(self.scenario.turn_writes) {
            true => Access::Write,
            false => Access::Read,
        };
        if host.controller.hold(PAGE, access) {
            host.threads.push(Thread::holding(PAGE, access));
            self.judge_turns(node, PAGE)?;
            return self.judge(PAGE);
        }
        if here.any(|thread| !thread.holds) {
            return Ok(());
        }
        self.wait_for(node, PAGE, access, Purpose::Data)
    }

    /// A user has pinned a page. An operation about the page may take any time, and defers
    /// the answers of its node itself.
    pub(super) fn judge_turns(&mut self, node: usize, page: u64) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        let operates = |operation: &Operation| operation.pages().contains(&page);
        if host.operations.iter().any(operates) || !host.requests.pin(page) {
            return Ok(());
        }
        let (page, node) = (Page(page), NodeId(node as u8));
        Err(Flaw::Turns { page, node })
    }
}
