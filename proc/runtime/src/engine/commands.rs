//! Commands of the launcher: stretch now, give way, give a node back, a node is lost.

use weft_dsm::{Access, NodeId};
use weft_proc::boot::{CONTROL_DONE, ControlMessage};
use weft_proc::layout::{Kind, PAGE};
use weft_proc::stats::{
    COMMAND_GIVE_WAY, COMMAND_LOST, COMMAND_NONE, COMMAND_SHRINK, COMMAND_STRETCH,
};

use core::sync::atomic::Ordering;

use super::machine::{ENGINE, Engine, counted};
use crate::{control, space};

const EAGAIN: u64 = 11;
const EINVAL: u64 = 22;
const ENOSPC: u64 = 28;
/// Passes over all pages before a node that is to leave counts as clinging.
const GIVE_BACK_ROUNDS: usize = 16;
/// Pages of a node that leaves that are asked for before the first of them is there.
const FETCHED_AT_ONCE: u64 = 32;

/// Home: carries out the command that was announced, if any.
pub fn obey() {
    let Some(shared) = control::shared() else {
        return;
    };
    let command = shared.command.swap(COMMAND_NONE, Ordering::AcqRel);
    let argument = shared.argument.load(Ordering::Acquire) as usize;
    let sequence = shared.sequence.load(Ordering::Acquire);
    let answer = match command {
        COMMAND_STRETCH => {
            super::stretch_now(&space::lock().layout);
            Ok(())
        }
        COMMAND_GIVE_WAY => {
            super::stretch_now(&space::lock().layout);
            if let Some(engine) = ENGINE.lock().as_mut() {
                engine.give_way();
            }
            Ok(())
        }
        COMMAND_SHRINK => shrink(argument),
        COMMAND_LOST => {
            if let Some(engine) = ENGINE.lock().as_mut() {
                engine.look_for_lost_nodes();
            }
            Ok(())
        }
        _ => return,
    };
    let mut message = ControlMessage::new(CONTROL_DONE, argument as u32);
    message.words[0] = u64::from(sequence);
    if let Err((errno, why)) = answer {
        message.words[1] = errno;
        message.set_text(why);
    }
    // A launcher that is gone needs no answer.
    let _ = control::send(&message);
}

fn shrink(node: usize) -> Result<(), (u64, &'static str)> {
    let mut guard = ENGINE.lock();
    match guard.as_mut() {
        None => Err((EINVAL, "the program is not stretched")),
        Some(engine) if node == 0 || node >= engine.nodes => {
            Err((EINVAL, "no such node; home (0) cannot be given back"))
        }
        Some(engine) if engine.io.links[node].is_none() => {
            Err((EINVAL, "the node was given back already"))
        }
        Some(engine) => engine.give_back(node),
    }
}

impl Engine {
    /// Brings every page that `node` owns elsewhere and uses it no more.
    fn give_back(&mut self, node: usize) -> Result<(), (u64, &'static str)> {
        let owned = u64::from(self.core.owned_pages(NodeId(node as u8)));
        let room: u64 = (0..self.nodes)
            .filter(|&other| other != node && (other == 0 || self.io.links[other].is_some()))
            .map(|other| {
                let has = u64::from(self.core.owned_pages(NodeId(other as u8)));
                self.boot.budget_pages[other].saturating_sub(has)
            })
            .sum();
        if owned > room {
            return Err((ENOSPC, "the other nodes have no room for its pages"));
        }
        self.core.set_budget_pages(NodeId(node as u8), 0);
        // Making room may push a page to where a copy of it is, which may be the
        // node that leaves: so until nothing is left there.
        for _ in 0..GIVE_BACK_ROUNDS {
            self.fetch_all(node);
            if self.core.owned_pages(NodeId(node as u8)) == 0 {
                self.forget_node(node);
                return Ok(());
            }
        }
        let budget = counted(self.boot.budget_pages[node]);
        self.core.set_budget_pages(NodeId(node as u8), budget);
        Err((EAGAIN, "its pages keep going back to it; try again"))
    }

    /// Brings every page home that `node` owns. Several are on their way at a time: one round trip
    /// for each would take as long as the processors of both sides let it wait.
    fn fetch_all(&mut self, node: usize) {
        let window = FETCHED_AT_ONCE.min(self.budget_pages() / 32);
        let count = self.io.layout.regions().len();
        for index in 0..count {
            let region = self.io.layout.regions()[index];
            if region.kind != Kind::Anonymous {
                continue;
            }
            self.finish_transfers(region.start, region.end);
            let end = region.end / PAGE;
            let mut next = region.start / PAGE;
            for page in region.start / PAGE..end {
                if !self.is_owned_by(node, page) {
                    continue;
                }
                next = next.max(page + 1);
                while self.requests < window && next < end {
                    if self.is_owned_by(node, next) {
                        self.ask(next, Access::Write, true);
                    }
                    next += 1;
                }
                self.fetch(page, Access::Write);
                self.make_room();
            }
            // The node is not forgotten while a page of it is on its way.
            self.finish_transfers(region.start, region.end);
        }
    }

    fn is_owned_by(&self, node: usize, page: u64) -> bool {
        let owner = self.core.tables.look_entry(page).owner();
        owner.is_some_and(|owner| owner.index() == node)
    }
}
