//! What the shells do: operations, frames, and steps of their controllers.

use super::host::{Actions, Operation};
use super::world::World;
use super::{BadShell, SHOWN_MAX};
use crate::checker::Flaw;
use crate::controller::{Action, Event, Failure};
use crate::protocol::Body;
use crate::types::NodeId;

impl World {
    /// A thread carries out an operation, outside the lock.
    pub(super) fn operate(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        if host.operations.is_empty() {
            return Ok(());
        }
        let which = self.random.below(host.operations.len() as u64) as usize;
        let operation = host.operations.swap_remove(which);
        self.outcome.operations += 1;
        let me = NodeId(node as u8);
        self.hosts[node].operate(me, operation)?;
        let mut woken = Vec::new();
        for page in operation.pages() {
            self.judge(page)?;
            woken.extend(self.hosts[node].wake_sleepers(page));
        }
        let early = self.bad == Some(BadShell::SaysDoneEarly);
        if let Some(done) = operation.done().filter(|_| !early) {
            self.event(node, done, None)?;
        }
        for (page, access) in woken {
            self.access(node, page, access)?;
        }
        Ok(())
    }

    /// The thread that keeps a node within its budget.
    pub(super) fn make_room(&mut self, node: usize) -> Result<(), Flaw> {
        if !self.random.per_mille(self.scenario.evictor) {
            return Ok(());
        }
        self.event(node, Event::MakeRoom, None)?;
        let host = &mut self.hosts[node];
        if host.evicts() {
            let passed = host.clock.pass(&host.rights);
            self.event(node, Event::Evict(passed), None)?;
        }
        Ok(())
    }

    /// A thread sends the next frame of a link.
    pub(super) fn send(&mut self) -> Result<(), Flaw> {
        let Some(index) = self.any_link(false) else {
            return Ok(());
        };
        let queue = &mut self.queued[index];
        let which = match self.bad == Some(BadShell::SendsInAnyOrder) {
            true => self.random.below(queue.len() as u64) as usize,
            false => 0,
        };
        if let Some(mut packet) = queue.remove(which) {
            if self.bad == Some(BadShell::CopiesLate) && packet.version.is_some() {
                let host = &self.hosts[index / self.hosts.len()];
                packet.version = Some(host.version(packet.message.page.0));
            }
            self.links[index].push_back(packet);
        }
        Ok(())
    }

    pub(super) fn deliver(&mut self) -> Result<(), Flaw> {
        let Some(index) = self.any_link(true) else {
            return Ok(());
        };
        let Some(packet) = self.links[index].pop_front() else {
            return Ok(());
        };
        self.outcome.messages += 1;
        let nodes = self.hosts.len();
        if matches!(packet.message.body, Body::Push { .. }) {
            // It is this node's own now: what a write takes later was no copy.
            self.hosts[index % nodes].look(packet.message.page.0);
        }
        let event = Event::Message {
            from: NodeId((index / nodes) as u8),
            message: packet.message,
        };
        self.event(index % nodes, event, packet.version)
    }

    /// A link, or its queue, that has something.
    pub(super) fn any_link(&mut self, sent: bool) -> Option<usize> {
        let links = if sent { &self.links } else { &self.queued };
        let start = self.random.below(links.len() as u64) as usize;
        let mut all = (start..links.len()).chain(0..start);
        all.find(|index| !links[*index].is_empty())
    }

    /// Keeps an event for the report of a failure.
    pub(super) fn show(&mut self, event: String) {
        if self.shown.len() == SHOWN_MAX {
            self.shown.pop_front();
        }
        self.shown.push_back(format!("{:?} {event}", self.now));
    }

    /// One step of a controller, what it says, and the judgement.
    pub(super) fn event(
        &mut self,
        node: usize,
        event: Event,
        version: Option<u32>,
    ) -> Result<(), Flaw> {
        self.outcome.events += 1;
        self.show(format!("{}: {event:?}", NodeId(node as u8)));
        let dead = self.killed;
        self.hosts[node].requests.arrive(&event, self.now, dead);
        self.hosts[node].prefetched.arrive(&event);
        let mut actions = Actions::new(version);
        let gone = self.authority.gone;
        let before = self.hosts[node].controller.drain_progress().handed_over;
        self.hosts[node]
            .controller
            .step(event, self.now, &mut actions);
        let after = self.hosts[node].controller.drain_progress().handed_over;
        self.outcome.handed_over += after.saturating_sub(before);
        let mut lost = Vec::new();
        for action in actions.list {
            if let Action::Fail(Failure::Lost { page, node: dead }) = action {
                lost.push((page, dead));
                continue;
            }
            self.hosts[node].requests.answer(&action);
            self.hosts[node].judge_prefetch(NodeId(node as u8), &action)?;
            let granted = matches!(action, Action::Wake { granted: true, .. });
            let mut sent = Ok(());
            let page = self.hosts[node].carry_out(
                NodeId(node as u8),
                action,
                &mut |to, packet| {
                    sent = Self::judge_message(gone, node, to, &packet);
                    let index = node * usize::from(self.scenario.nodes) + to.index();
                    if self.killed & to.bit() == 0 {
                        self.queued[index].push_back(packet);
                    }
                },
                version,
                &mut self.outcome,
            )?;
            sent?;
            if let Some(page) = page {
                if granted {
                    self.judge_turns(node, page)?;
                }
                self.judge(page)?;
            }
        }
        // After the rest: users that give up are further events.
        for (page, dead) in lost {
            self.reported_lost(node, page, dead)?;
        }
        if self.bad == Some(BadShell::SaysDoneEarly) {
            self.say_done(node)?;
        }
        self.judge_budget(node)
    }

    /// Says that operations are done that nobody has begun.
    pub(super) fn say_done(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        let unsaid: Vec<Event> = host
            .operations
            .iter_mut()
            .filter_map(Operation::say)
            .collect();
        for done in unsaid {
            self.event(node, done, None)?;
        }
        Ok(())
    }
}
