//! The scheduler: events in, decisions out.
//!
//! A request waits, then runs, then has ended. Invariants:
//! - of one aggregate at most one move is under way;
//! - moves that must be (a host is drained, sick, or leaves) are decided before those that
//!   would be good, and those before requests, so that a move that frees a whole block is
//!   not spoilt by a request that takes a piece of it;
//! - of two waiting requests the one with the higher priority, and of equal ones the
//!   earlier, is tried first; with [`Limits::backfill`] 0 no request overtakes another, but for
//!   one that waits for its home: others may start where they take nothing of that host.

mod adopted;
mod asked;
mod leaving;
mod waiting;

pub use adopted::Adopted;

use crate::costs::Costs;
use crate::decision::{Decision, Moved, Refused};
use crate::host::{Health, Host, HostId};
use crate::inventory::{Aggregate, Inventory, InventoryError};
use crate::placement::Move;
use crate::policy::Policy;
use crate::queue::{Place, Queue};
use crate::request::{AggregateId, Request, RequestError};
use crate::room::Room;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What keeps the scheduler from doing too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests that wait at a time.
    pub queue_max: usize,
    /// Moves under way at a time that nothing forces.
    pub moves_max: usize,
    /// Moves under way at a time that begin or end at one host.
    pub moves_of_host_max: u32,
    /// For so long after it was placed or moved an aggregate is not moved again, unless it
    /// must be.
    pub hold: Duration,
    /// How many waiting requests behind the first may start before it.
    pub backfill: usize,
    /// Requests are refused that empty hosts would not hold. Else they wait until hosts lend more.
    pub refuse_larger: bool,
    /// A part that has to leave a host goes to several others if no single one holds it.
    pub split_parts: bool,
    /// So long before its deadline a host is left.
    pub notice: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            queue_max: 1_000_000,
            moves_max: 64,
            moves_of_host_max: 2,
            hold: Duration::from_secs(10),
            backfill: 0,
            refuse_larger: true,
            split_parts: true,
            notice: Duration::from_secs(300),
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    HostJoined(Host),
    /// It is gone, with all that was on it.
    HostLeft(HostId),
    HostHealth(HostId, Health),
    /// Nothing new comes here; with `drain`, everything leaves.
    Cordoned {
        host: HostId,
        cordoned: bool,
        drain: bool,
    },
    Deadline(HostId, Option<Duration>),
    /// A host lends more or less than before.
    Capacity(HostId, Room),
    /// The owner of a host wants this much of the memory back that aggregates have there, in
    /// MiB. 0: nothing.
    WantedBack(HostId, u64),
    /// Aggregates run that this scheduler did not start: an earlier one did. All at once, so
    /// that nothing is decided before all of them are known.
    Adopted(Vec<Adopted>),
    Requested(Request),
    /// An operator wants a part of an aggregate elsewhere: the one on `from`, else its smallest
    /// that may move.
    MoveAsked {
        id: AggregateId,
        from: Option<HostId>,
        to: HostId,
    },
    /// It has ended, or is not wanted any more.
    Ended(AggregateId),
    MoveEnded(AggregateId, MoveResult),
    /// Nothing; time went by until [`Scheduler::next_wake`].
    Passed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveResult {
    Done {
        took: Duration,
    },
    /// Everything is where it was.
    Failed,
}

pub struct Scheduler {
    cluster: Inventory,
    policy: Box<dyn Policy>,
    costs: Costs,
    limits: Limits,
    queue: Queue,
    /// Aggregates on the move; whether they must.
    moving: BTreeMap<AggregateId, bool>,
    moves_of_host: BTreeMap<HostId, u32>,
    /// Hosts that got room and were not looked at yet.
    freed: BTreeSet<HostId>,
    /// Hosts that are looked at again when a move of a busy host has ended, by that host.
    postponed: BTreeMap<HostId, BTreeSet<HostId>>,
    /// When to look at a host again.
    later: BTreeSet<(Duration, HostId)>,
    /// Hosts that all must leave.
    leaving: BTreeSet<HostId>,
    /// Hosts whose owners want memory back, and until when nothing more leaves them: what has
    /// just left may still be counted.
    wanted_back: BTreeMap<HostId, Duration>,
    /// Hosts whose deadline was said to be too near.
    too_late: BTreeSet<HostId>,
    /// Aggregates whose forced move has failed, and until when none is tried again.
    retry: BTreeMap<AggregateId, Duration>,
    /// Aggregates that were said to be stuck.
    stuck: BTreeSet<(AggregateId, HostId)>,
    /// Those that may start next were tried, and find no room until there is more.
    blocked: bool,
}

impl Scheduler {
    pub fn new(policy: Box<dyn Policy>, costs: Costs, limits: Limits) -> Scheduler {
        Scheduler {
            cluster: Inventory::new(),
            policy,
            costs,
            limits,
            queue: Queue::default(),
            moving: BTreeMap::new(),
            moves_of_host: BTreeMap::new(),
            freed: BTreeSet::new(),
            postponed: BTreeMap::new(),
            later: BTreeSet::new(),
            leaving: BTreeSet::new(),
            wanted_back: BTreeMap::new(),
            too_late: BTreeSet::new(),
            retry: BTreeMap::new(),
            stuck: BTreeSet::new(),
            blocked: false,
        }
    }

    pub fn cluster(&self) -> &Inventory {
        &self.cluster
    }

    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    pub fn policy_name(&self) -> String {
        self.policy.name()
    }

    /// Requests that wait, the next one first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Request> {
        self.queue.iter()
    }

    pub fn moves_under_way(&self) -> usize {
        self.moving.len()
    }

    /// How many moves that nothing forces may be under way. 0: none.
    pub fn set_moves_max(&mut self, moves_max: usize) {
        self.limits.moves_max = moves_max;
    }

    /// Has another policy decide from now on. All hosts are looked at anew.
    pub fn set_policy(&mut self, policy: Box<dyn Policy>) {
        self.policy = policy;
        let hosts: Vec<HostId> = self.cluster.hosts().map(|host| host.id).collect();
        self.got_room(hosts);
    }

    /// When [`Event::Passed`] may change something, if nothing else happens before.
    pub fn next_wake(&self) -> Option<Duration> {
        self.later.first().map(|&(at, _)| at)
    }

    /// One event, and all that follows from it. An error changes nothing.
    pub fn step(&mut self, now: Duration, event: Event) -> Result<Vec<Decision>, InventoryError> {
        let mut decisions = Vec::new();
        let newest = self.take_in(now, event, &mut decisions)?;
        self.wake(now);
        self.leave_hosts(now, &mut decisions);
        self.give_back(now, &mut decisions);
        self.improve(now, &mut decisions);
        self.start_waiting(now, newest, &mut decisions);
        Ok(decisions)
    }

    /// Takes an event in and decides nothing yet: of several at one moment, each alone would
    /// have decisions that the next one makes wrong. What it ends by itself is the answer.
    /// [`Scheduler::step`] decides. An error changes nothing.
    pub fn learn(&mut self, now: Duration, event: Event) -> Result<Vec<Decision>, InventoryError> {
        let mut decisions = Vec::new();
        self.take_in(now, event, &mut decisions)?;
        Ok(decisions)
    }

    /// Takes the event in. A request that now waits is the answer.
    fn take_in(
        &mut self,
        now: Duration,
        event: Event,
        decisions: &mut Vec<Decision>,
    ) -> Result<Option<Place>, InventoryError> {
        match event {
            Event::HostJoined(host) => {
                let id = host.id;
                let may_take = host.takes_more(now, self.limits.notice);
                self.cluster.add(host, may_take)?;
                self.got_room([id]);
                self.host_changed(now, id);
            }
            Event::HostLeft(id) => self.host_left(now, id, decisions)?,
            Event::HostHealth(id, health) => {
                self.known(id)?;
                self.cluster.set_health(id, health);
                self.host_changed(now, id);
            }
            Event::Cordoned {
                host,
                cordoned,
                drain,
            } => {
                self.known(host)?;
                self.cluster.set_cordon(host, cordoned || drain, drain);
                self.host_changed(now, host);
            }
            Event::Deadline(id, deadline) => {
                self.known(id)?;
                self.cluster.set_deadline(id, deadline);
                self.host_changed(now, id);
            }
            Event::Capacity(id, capacity) => {
                self.known(id)?;
                if self.cluster.set_capacity(id, capacity) {
                    self.got_room([id]);
                }
            }
            Event::WantedBack(id, mib) => {
                self.known(id)?;
                self.want_back(now, id, mib);
            }
            Event::Adopted(adopted) => self.adopt_all(now, adopted)?,
            Event::Requested(request) => return Ok(self.requested(request, decisions)),
            Event::MoveAsked { id, from, to } => {
                self.known(to)?;
                from.map_or(Ok(()), |from| self.known(from))?;
                decisions.extend(self.move_asked(id, from, to));
            }
            Event::Ended(id) => self.ended(id),
            Event::MoveEnded(id, result) => self.move_ended(now, id, result, decisions),
            Event::Passed => {}
        }
        Ok(None)
    }

    fn known(&self, id: HostId) -> Result<(), InventoryError> {
        self.cluster
            .has(id)
            .then_some(())
            .ok_or(InventoryError::UnknownHost(id))
    }

    fn requested(&mut self, request: Request, decisions: &mut Vec<Decision>) -> Option<Place> {
        let id = request.id;
        let hosts_max = self.hosts_max(&request);
        let known = self.queue.contains(id) || self.cluster.aggregate(id).is_some();
        let larger = self.limits.refuse_larger && !self.cluster.could_hold(&request, hosts_max);
        let wrong = match request.check() {
            Err(error) => Some(Refused::Wrong(error)),
            Ok(()) if known => Some(Refused::Wrong(RequestError::KnownAggregate(
                request.name.clone(),
            ))),
            Ok(()) if request.home.is_some_and(|home| !self.cluster.has(home)) => {
                Some(Refused::NoHome)
            }
            Ok(()) if !self.cluster.has_host_with(&request.devices) => Some(Refused::NoDevices),
            Ok(()) if larger => Some(Refused::LargerThanCluster {
                capacity: self.cluster.capacity(),
                hosts_max,
            }),
            Ok(()) if self.queue.len() >= self.limits.queue_max => Some(Refused::QueueFull {
                waiting: self.queue.len(),
            }),
            Ok(()) => None,
        };
        if let Some(why) = wrong {
            decisions.push(Decision::Refuse {
                id,
                name: request.name,
                why,
            });
            return None;
        }
        Some(self.queue.push(request))
    }

    /// Over how many hosts the policy may spread it.
    pub fn hosts_max(&self, request: &Request) -> u32 {
        match self.policy.spreads() {
            true => request.hosts_max,
            false => 1,
        }
    }

    fn ended(&mut self, id: AggregateId) {
        if self.queue.remove(id).is_some() {
            // One behind it may be among the next now.
            self.blocked = false;
        }
        self.forget_move(id);
        self.retry.remove(&id);
        self.stuck.retain(|&(stuck, _)| stuck != id);
        let freed = self.cluster.end(id);
        self.got_room(freed);
    }

    fn move_ended(
        &mut self,
        now: Duration,
        id: AggregateId,
        result: MoveResult,
        decisions: &mut Vec<Decision>,
    ) {
        let Some(aggregate) = self.cluster.aggregate(id) else {
            return;
        };
        let Some(moving) = aggregate.moving.clone() else {
            return;
        };
        let was_spread = aggregate.is_spread();
        let done = matches!(result, MoveResult::Done { .. });
        match result {
            MoveResult::Done { took } => {
                self.costs.learn(&moving, took);
                self.retry.remove(&id);
            }
            MoveResult::Failed => self.try_later(now, &moving),
        }
        self.forget_move(id);
        for transfer in &moving.transfers {
            self.pause_wanted_back(now, transfer.from);
        }
        let freed = self.cluster.end_move(id, done, now);
        self.got_room(freed);
        let aggregate = self.cluster.aggregate(id).expect("it runs");
        if was_spread && !aggregate.is_spread() {
            let (name, host) = (
                aggregate.request.name.clone(),
                aggregate.placement.parts[0].host,
            );
            decisions.push(Decision::Whole { id, name, host });
        }
    }

    fn got_room(&mut self, hosts: impl IntoIterator<Item = HostId>) {
        for host in hosts {
            self.freed.insert(host);
            self.blocked = false;
        }
    }

    fn forget_move(&mut self, id: AggregateId) {
        if self.moving.remove(&id).is_none() {
            return;
        }
        let moving = self
            .cluster
            .aggregate(id)
            .and_then(|aggregate| aggregate.moving.clone());
        for host in hosts_of(&moving.expect("it was on the move")) {
            let count = self
                .moves_of_host
                .get_mut(&host)
                .expect("counted at its start");
            *count -= 1;
            if *count == 0 {
                self.moves_of_host.remove(&host);
            }
            self.freed
                .extend(self.postponed.remove(&host).unwrap_or_default());
        }
    }

    fn host_left(
        &mut self,
        now: Duration,
        id: HostId,
        decisions: &mut Vec<Decision>,
    ) -> Result<(), InventoryError> {
        self.known(id)?;
        let host = self.cluster.host(id).name.clone();
        for aggregate in self.cluster.on(id).to_vec() {
            let known = self
                .cluster
                .aggregate(aggregate)
                .expect("it has room there");
            // A move to a lost host has failed; the aggregate is where it was.
            if known.placement.on(id) == Room::NONE {
                self.forget_move(aggregate);
                let freed = self.cluster.end_move(aggregate, false, now);
                self.got_room(freed);
                continue;
            }
            let name = known.request.name.clone();
            self.ended(aggregate);
            decisions.push(Decision::Lost {
                id: aggregate,
                name,
                host: host.clone(),
            });
        }
        self.cluster.remove(id)?;
        self.freed.remove(&id);
        self.postponed.remove(&id);
        self.leaving.remove(&id);
        self.wanted_back.remove(&id);
        self.too_late.remove(&id);
        self.later.retain(|&(_, later)| later != id);
        self.stuck.retain(|&(_, stuck)| stuck != id);
        Ok(())
    }

    /// A host's state changed: lists it or not, and notes whether all must leave it.
    fn host_changed(&mut self, now: Duration, id: HostId) {
        let host = self.cluster.host(id);
        let may_take = host.takes_more(now, self.limits.notice);
        let leave = host.must_leave(now, self.limits.notice).is_some();
        let deadline = host.deadline;
        let host_is_kept = host.wanted_back_mib == 0;
        if may_take && !self.cluster.is_listed(id) {
            self.got_room([id]);
        }
        self.cluster.list(id, may_take);
        if leave {
            self.leaving.insert(id);
        } else {
            self.leaving.remove(&id);
            self.too_late.remove(&id);
            if host_is_kept {
                self.stuck.retain(|&(_, stuck)| stuck != id);
            }
            if let Some(deadline) = deadline {
                self.later
                    .insert((deadline.saturating_sub(self.limits.notice), id));
            }
        }
    }

    /// Hosts whose time has come.
    fn wake(&mut self, now: Duration) {
        while let Some(&(at, host)) = self.later.first()
            && at <= now
        {
            self.later.pop_first();
            self.host_changed(now, host);
            self.freed.insert(host);
        }
    }

    /// Moves that make placements better, for every host that got room, as far as the
    /// limits allow. The others are looked at when a move has ended.
    fn improve(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        while self.voluntary_moves() < self.limits.moves_max {
            let Some(host) = self.freed.pop_first() else {
                return;
            };
            if !self.cluster.has(host) {
                continue;
            }
            if self.is_busy(host) {
                self.postponed.entry(host).or_default().insert(host);
                continue;
            }
            let may_move = |aggregate: &Aggregate| {
                aggregate.changed + self.limits.hold <= now && self.busy_host(aggregate).is_none()
            };
            let wanted = self
                .policy
                .improve(&self.cluster, &self.costs, host, &may_move);
            if let Some((moving, why)) = wanted {
                let name = self.name_of(moving.aggregate);
                self.start_move(moving, name, why, false, decisions);
                // There may be another move worth making.
                self.freed.insert(host);
            } else {
                self.look_again(now, host);
            }
        }
    }

    fn voluntary_moves(&self) -> usize {
        self.moving.values().filter(|&&forced| !forced).count()
    }

    /// Notes when an aggregate of this host may move that may not yet.
    fn look_again(&mut self, now: Duration, host: HostId) {
        let here = self
            .cluster
            .on(host)
            .iter()
            .filter_map(|&id| self.cluster.aggregate(id));
        let waiting = here.filter(|aggregate| aggregate.is_spread() && aggregate.moving.is_none());
        for aggregate in waiting {
            let held_until = aggregate.changed + self.limits.hold;
            if held_until > now {
                self.later.insert((held_until, host));
            } else if let Some(busy) = self.busy_host(aggregate) {
                self.postponed.entry(busy).or_default().insert(host);
            }
        }
    }

    /// A host of this aggregate that has as many moves under way as it may have.
    fn busy_host(&self, aggregate: &Aggregate) -> Option<HostId> {
        let mut hosts = aggregate.placement.parts.iter().map(|part| part.host);
        hosts.find(|&host| self.is_busy(host))
    }

    fn is_busy(&self, host: HostId) -> bool {
        self.moves_of_host
            .get(&host)
            .is_some_and(|&n| n >= self.limits.moves_of_host_max)
    }

    fn name_of(&self, id: AggregateId) -> Box<str> {
        self.cluster
            .aggregate(id)
            .expect("it runs")
            .request
            .name
            .clone()
    }

    fn note_move(&mut self, moving: Move, forced: bool) {
        self.moving.insert(moving.aggregate, forced);
        for host in hosts_of(&moving) {
            *self.moves_of_host.entry(host).or_default() += 1;
        }
        self.cluster.start_move(moving);
    }

    fn start_move(
        &mut self,
        moving: Move,
        name: Box<str>,
        why: Moved,
        forced: bool,
        decisions: &mut Vec<Decision>,
    ) {
        let expected = self.costs.move_time(&moving);
        self.note_move(moving.clone(), forced);
        decisions.push(Decision::Move {
            moving,
            name,
            why,
            expected,
        });
    }
}

/// The hosts at which a move begins or ends, each once.
fn hosts_of(moving: &Move) -> BTreeSet<HostId> {
    moving
        .transfers
        .iter()
        .flat_map(|transfer| [transfer.from, transfer.to])
        .collect()
}
