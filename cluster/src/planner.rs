//! From what the store has to what the leader does: the scheduler of `weft-place`, fed with
//! the differences between the cluster and what the scheduler knows.
//!
//! Pure, like the scheduler. A plan that could not be committed corrects itself: the next
//! [`Planner::update`] sees that the store does not have it.

use crate::ClusterState;
use crate::costs::{self, MoveRecord};
use crate::host::{HostState, Member};
use crate::log::LogKind;
use crate::offer::{cpus_mib, largest, offered, wanted_back_mib};
use crate::work::{Asked, MoveOrder, Placed, Work, WorkKind, WorkPart};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weft_place::{
    Adopted, AggregateId, Costs, Decision, Event, Health, Host, HostId, Inventory, InventoryError,
    Limits, MoveResult, Part, Placement, Refused, Request, Room, Scheduler,
};

/// What the leader is to commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Place a request there.
    Place {
        asked: Asked,
        parts: Vec<WorkPart>,
        why: String,
    },
    /// Say why a request waits, or that it is refused.
    Answer {
        asked: Asked,
        why: String,
        refused: bool,
        /// Nothing was said of this request before.
        is_first: bool,
    },
    /// Have an aggregate move.
    Move { placed: Placed, order: MoveOrder },
    /// Say why a move does not come about that an operator wanted.
    RefuseWish { placed: Placed, why: String },
    /// Take an order back: nothing carries it out.
    CancelMove { placed: Placed },
    /// An aggregate must leave a host, and does not.
    Stuck { host: String, why: String },
    /// Have the store know that a host is expected to fail, and why: a phrase.
    Failing { host: String, why: String },
    /// Have the store know what moves cost here.
    Learned { record: MoveRecord },
    /// Nothing but a sentence for the log.
    Note { kind: LogKind, what: String },
}

/// See the module.
pub struct Planner {
    scheduler: Scheduler,
    /// The scheduler's policy.
    policy: String,
    /// Hosts that the scheduler knows, by their numbers.
    hosts: BTreeMap<HostId, String>,
    /// The numbers of the members.
    members: BTreeMap<String, HostId>,
    /// How they were last, and whether all had to leave them.
    states: BTreeMap<HostId, (HostState, bool)>,
    /// Of hosts that fall silent.
    silences: BTreeMap<HostId, Silences>,
    /// Sentences for the log that belong to no decision.
    notes: Vec<(LogKind, String)>,
    /// Hosts that are expected to fail, which the store does not know yet.
    failing: Vec<Plan>,
    /// Whether the cluster was seen before: what is there then is no news.
    has_seen: bool,
    /// When moves were ordered.
    ordered: BTreeMap<AggregateId, Duration>,
    /// What runs, by the store.
    begun: BTreeSet<AggregateId>,
    /// Requests that wait in the scheduler.
    waiting: BTreeSet<AggregateId>,
    refused: BTreeSet<AggregateId>,
}

/// A host that is silent this often, for this long each time, within this time is expected to
/// fail.
const SILENCES_MAX: usize = 3;
const SILENCE_MIN: Duration = Duration::from_secs(10);
const SILENCES_WITHIN: Duration = Duration::from_secs(600);

/// When a host fell silent.
#[derive(Default)]
struct Silences {
    /// It is, since then.
    since: Option<Duration>,
    /// The silences that were long enough.
    counted: Vec<Duration>,
}

/// How a cluster chooses hosts if nobody says otherwise: FragVisor's policy (section 6.5).
pub const POLICY_DEFAULT: &str = "fragbff-fewest-hosts";

impl Default for Planner {
    fn default() -> Planner {
        let policy = weft_place::policy_by_name(POLICY_DEFAULT).expect("a policy that there is");
        let limits = Limits {
            // A host that lends nothing now may lend later.
            refuse_larger: false,
            // No agent can split a part.
            split_parts: false,
            // Two moves of a host share its link and its processors: they take as long as one
            // after the other, and their guests stand for longer.
            moves_of_host_max: 1,
            ..Limits::default()
        };
        Planner {
            policy: policy.name(),
            scheduler: Scheduler::new(policy, Costs::default(), limits),
            hosts: BTreeMap::new(),
            members: BTreeMap::new(),
            states: BTreeMap::new(),
            silences: BTreeMap::new(),
            notes: Vec::new(),
            failing: Vec::new(),
            has_seen: false,
            ordered: BTreeMap::new(),
            begun: BTreeSet::new(),
            waiting: BTreeSet::new(),
            refused: BTreeSet::new(),
        }
    }
}

impl Planner {
    /// The policy by which it decides.
    pub fn policy(&self) -> &str {
        &self.policy
    }

    /// Decides by the policy of this name from now on. One that is not known changes nothing.
    fn follow(&mut self, name: &str) {
        if self.policy != name
            && let Ok(policy) = weft_place::policy_by_name(name)
        {
            self.policy = name.to_owned();
            self.scheduler.set_policy(policy);
            self.notes
                .push((LogKind::Host, format!("Hosts are chosen by {name} now.")));
        }
    }

    /// How many times as long an aggregate needs as on one host; 1 of what is not known.
    pub fn slow_down(&self, id: AggregateId) -> f64 {
        let aggregate = self.inventory().aggregate(id);
        aggregate.map_or(1.0, |aggregate| {
            Costs::default().slow_down(self.inventory(), &aggregate.placement)
        })
    }

    /// Hosts, and what is free on them.
    pub fn inventory(&self) -> &Inventory {
        self.scheduler.cluster()
    }

    /// Learns how the cluster is now, and plans what follows. `now`: since any moment, the
    /// same for all calls.
    pub fn update(&mut self, now: Duration, state: &ClusterState) -> Vec<Plan> {
        let work = &state.work;
        self.follow(state.policy.as_deref().unwrap_or(POLICY_DEFAULT));
        if let (false, Some(known)) = (self.has_seen, &state.costs) {
            self.scheduler.set_move_costs(known.costs());
        }
        let moves_max = Limits::default().moves_max;
        self.scheduler
            .set_moves_max(if state.hands_off { 0 } else { moves_max });
        let asked: BTreeMap<AggregateId, &Asked> = work
            .asked
            .iter()
            .map(|asked| (asked.aggregate(), asked))
            .collect();
        let mut decisions = Vec::new();
        let mut plans = self.learn_all(now, state, &asked, &mut decisions);
        plans.extend(self.ask_in_turn(now, state, &mut decisions));
        plans.extend(self.wish(now, work, &mut decisions));
        self.step(now, Event::Passed, &mut decisions);
        self.has_seen = true;
        plans.append(&mut self.failing);
        let learned = self.scheduler.costs().moves;
        let learned = costs::news(&learned, state.costs.as_ref());
        plans.extend(learned.map(|record| Plan::Learned { record }));
        let notes = std::mem::take(&mut self.notes).into_iter();
        plans.extend(notes.map(|(kind, what)| Plan::Note { kind, what }));
        for decision in &decisions {
            if let Decision::Move { moving, .. } = decision {
                self.ordered.insert(moving.aggregate, now);
            }
            plans.extend(self.plan(decision, &asked, work));
        }
        plans
    }

    /// All that has happened, before anything is decided: room that looks free after some of it
    /// may be taken by the rest.
    fn learn_all(
        &mut self,
        now: Duration,
        state: &ClusterState,
        asked: &BTreeMap<AggregateId, &Asked>,
        decisions: &mut Vec<Decision>,
    ) -> Vec<Plan> {
        let work = &state.work;
        let (plans, events) = self.of_moves(now, work);
        self.learn(now, events, decisions);
        let events = self.of_work(work, asked);
        self.learn(now, events, decisions);
        let events = self.of_hosts(now, state);
        self.learn(now, events, decisions);
        // Hosts have come since: what runs may be known only now.
        let adopted = self.adopted(work);
        if !adopted.is_empty() {
            self.learn(now, [Event::Adopted(adopted)], decisions);
        }
        plans
    }

    /// New requests in the order of the queue: the first one is decided before the others are
    /// known. Those that a quota holds up are not given to the scheduler.
    fn ask_in_turn(
        &mut self,
        now: Duration,
        state: &ClusterState,
        decisions: &mut Vec<Decision>,
    ) -> Vec<Plan> {
        let mut in_turn: Vec<&Asked> = state.work.asked.iter().collect();
        let largest = match in_turn.is_empty() {
            true => Inventory::new(),
            false => largest(&state.members),
        };
        in_turn.sort_by_key(|asked| (Reverse(asked.request.priority), asked.id));
        in_turn.retain(|asked| !self.refused.contains(&asked.aggregate()));
        // What is refused anyway takes nothing of a quota.
        in_turn.retain(|asked| !self.is_refused(now, asked, &largest, decisions));
        let held = state.quotas.held(&state.work, &in_turn);
        let mut plans = Vec::new();
        for asked in in_turn {
            let id = &asked.aggregate();
            if let Some(held) = held.get(id) {
                // It was asked for before there was this quota.
                if self.waiting.remove(id) {
                    self.step(now, Event::Ended(*id), decisions);
                }
                if held.refused {
                    self.refused.insert(*id);
                }
                plans.extend(answer(&state.work, asked, held.why.clone(), held.refused));
                continue;
            }
            let wanted = self.wanted(asked);
            if let Some(wanted) = wanted.filter(|_| self.waiting.insert(*id)) {
                self.step(now, Event::Requested(wanted), decisions);
            }
        }
        plans
    }

    /// Whether a request can never be placed: then it is refused. What waits may have become
    /// impossible: a host lends less than was thought.
    fn is_refused(
        &mut self,
        now: Duration,
        asked: &Asked,
        largest: &Inventory,
        decisions: &mut Vec<Decision>,
    ) -> bool {
        let id = asked.aggregate();
        let wanted = self.wanted(asked);
        let Some(why) = self.refusal(wanted.as_ref(), largest) else {
            return false;
        };
        self.refused.insert(id);
        let name = asked.request.name.clone().into();
        decisions.push(Decision::Refuse { id, name, why });
        if self.waiting.remove(&id) {
            self.step(now, Event::Ended(id), decisions);
        }
        true
    }

    /// Moves that operators want.
    fn wish(&mut self, now: Duration, work: &Work, decisions: &mut Vec<Decision>) -> Vec<Plan> {
        let mut plans = Vec::new();
        for placed in work.placed.values().filter(|placed| placed.order.is_none()) {
            let Some(wish) = &placed.wish else {
                continue;
            };
            let from = wish.from.as_ref().map(|from| self.host_of(from));
            let (Some(to), false) = (self.host_of(&wish.to), from == Some(None)) else {
                let name = &placed.request.name;
                let why = format!("{name} does not move: a host of the move has left.");
                let placed = placed.clone();
                plans.push(Plan::RefuseWish { placed, why });
                continue;
            };
            let event = Event::MoveAsked {
                id: AggregateId(placed.id),
                from: from.flatten(),
                to,
            };
            self.learn(now, [event], decisions);
        }
        plans
    }

    /// What the scheduler is asked for. `None`: the request's home has left the cluster.
    fn wanted(&self, asked: &Asked) -> Option<Request> {
        let request = &asked.request;
        let home = self.host_of(&request.home);
        let home = home.filter(|_| !request.anywhere);
        (home.is_some() || request.anywhere).then(|| to_request(asked.aggregate(), request, home))
    }

    /// Why a request can never be placed: the empty cluster would not hold it.
    fn refusal(&self, wanted: Option<&Request>, largest: &Inventory) -> Option<Refused> {
        let Some(wanted) = wanted else {
            return Some(Refused::NoHome);
        };
        let hosts_max = self.scheduler.hosts_max(wanted);
        let hosts_max = hosts_max.min(largest.hosts().count() as u32);
        (!largest.could_hold(wanted, hosts_max)).then(|| Refused::LargerThanCluster {
            capacity: largest.capacity(),
            hosts_max,
        })
    }

    /// Orders that were carried out or failed since, and those that nothing carries out.
    fn of_moves(&mut self, now: Duration, work: &Work) -> (Vec<Plan>, Vec<Event>) {
        let (mut plans, mut events) = (Vec::new(), Vec::new());
        for placed in work.placed.values() {
            let id = AggregateId(placed.id);
            let Some(aggregate) = self.inventory().aggregate(id) else {
                continue;
            };
            match (&aggregate.moving, &placed.order) {
                (Some(moving), None) => {
                    let after = aggregate.placement.after(&moving.transfers);
                    let is_done = self.placement(&placed.parts).as_ref() == Some(&after);
                    // An earlier leader may have ordered it.
                    let began = self.ordered.remove(&id);
                    let took = now.saturating_sub(began.unwrap_or(now));
                    let result = match is_done {
                        true => MoveResult::Done { took },
                        false => MoveResult::Failed,
                    };
                    let name = &placed.request.name;
                    let how = placed.how_it_moved(began.map(|_| took));
                    let note = match is_done {
                        true => Some((LogKind::Moved, format!("{name} has moved{how}."))),
                        false => placed.move_state().map(|said| (LogKind::Fail, said)),
                    };
                    plans.extend(note.map(|(kind, what)| Plan::Note { kind, what }));
                    events.push(Event::MoveEnded(id, result));
                }
                (_, Some(_)) if !work.agents.contains(&placed.request.name) => {
                    let placed = placed.clone();
                    plans.push(Plan::CancelMove { placed });
                }
                _ => {}
            }
        }
        (plans, events)
    }

    /// `None` if one of the hosts is not known.
    fn placement(&self, parts: &[WorkPart]) -> Option<Placement> {
        let part = |part: &WorkPart| {
            let host = self.host_of(&part.host)?;
            let room = part.room();
            Some(Part { host, room })
        };
        let parts = parts.iter().map(part).collect::<Option<_>>()?;
        Some(Placement { parts })
    }

    fn learn(
        &mut self,
        now: Duration,
        events: impl IntoIterator<Item = Event>,
        decisions: &mut Vec<Decision>,
    ) {
        for event in events {
            decisions.extend(taken_in(self.scheduler.learn(now, event)));
        }
    }

    fn step(&mut self, now: Duration, event: Event, decisions: &mut Vec<Decision>) {
        decisions.extend(taken_in(self.scheduler.step(now, event)));
    }

    /// A member, else a host that has left while something runs there.
    fn host_of(&self, name: &str) -> Option<HostId> {
        let left = || {
            let mut hosts = self.hosts.iter();
            hosts.find(|(_, known)| *known == name).map(|(&id, _)| id)
        };
        let member = self.members.get(name).copied();
        let known = member.filter(|id| self.hosts.get(id).is_some_and(|known| known == name));
        known.or_else(left)
    }

    /// What has ended, or is not asked for any more.
    fn of_work(&mut self, work: &Work, asked: &BTreeMap<AggregateId, &Asked>) -> Vec<Event> {
        let placed: BTreeSet<AggregateId> = work
            .placed
            .values()
            .map(|placed| AggregateId(placed.id))
            .collect();
        let running = self.scheduler.cluster().aggregates();
        let ended = running.filter(|aggregate| !placed.contains(&aggregate.request.id));
        let mut gone = Vec::new();
        for aggregate in ended {
            gone.push(aggregate.request.id);
            // What was planned and not committed has not run.
            if self.begun.remove(&aggregate.request.id) {
                let what = format!("{} has ended.", aggregate.request.name);
                self.notes.push((LogKind::End, what));
            }
        }
        self.begun.clone_from(&placed);
        for (id, what) in self.elsewhere(work) {
            gone.push(id);
            self.notes.push((LogKind::Moved, what));
        }
        let not_asked = self.waiting.iter().filter(|id| !asked.contains_key(id));
        gone.extend(not_asked.filter(|id| !placed.contains(id)));
        self.waiting.retain(|id| asked.contains_key(id));
        self.refused.retain(|id| asked.contains_key(id));
        // A start that was not committed: it is asked for again.
        self.waiting.retain(|id| !gone.contains(id));
        gone.into_iter().map(Event::Ended).collect()
    }

    /// What runs elsewhere than the scheduler knows: a program has left a host, or a host was not
    /// known when it was adopted. It is adopted again. With a sentence.
    fn elsewhere(&self, work: &Work) -> Vec<(AggregateId, String)> {
        let is_elsewhere = |placed: &&Placed| {
            let aggregate = self.inventory().aggregate(AggregateId(placed.id));
            aggregate.is_some_and(|aggregate| {
                let there = self.placement(&placed.parts);
                aggregate.moving.is_none()
                    && placed.order.is_none()
                    && there.is_some_and(|there| there != aggregate.placement)
            })
        };
        let placed = work.placed.values().filter(is_elsewhere);
        let tell = |placed: &Placed| {
            let hosts = placed.parts.iter().map(|part| &part.host[..]);
            let hosts = hosts.collect::<Vec<_>>().join(" and ");
            let what = format!("{} is on {hosts} now.", placed.request.name);
            (AggregateId(placed.id), what)
        };
        placed.map(tell).collect()
    }

    /// Hosts that came, went or changed.
    fn of_hosts(&mut self, now: Duration, state: &ClusterState) -> Vec<Event> {
        let (members, work, hands_off) = (&state.members, &state.work, state.hands_off);
        let mut events = Vec::new();
        let there: BTreeMap<HostId, &Member> = members
            .iter()
            .map(|member| (HostId(member.record.number), member))
            .collect();
        self.members = members
            .iter()
            .map(|member| (member.record.name.clone(), HostId(member.record.number)))
            .collect();
        let known = std::mem::take(&mut self.hosts);
        for (id, name) in known {
            let same = there
                .get(&id)
                .is_some_and(|member| member.record.name == name);
            // Something may run on a host that has left.
            if same || !self.inventory().on(id).is_empty() {
                let member = there.get(&id).copied().filter(|_| same);
                let (state, drain) = standing(member);
                if self.states.insert(id, (state, drain)) != Some((state, drain)) {
                    let trouble = member.and_then(Member::trouble);
                    let note = state.describe(&name, trouble);
                    self.notes.push((LogKind::Host, note));
                    events.push(Event::Cordoned {
                        host: id,
                        cordoned: state != HostState::Lends,
                        drain,
                    });
                }
                self.listen(now, id, member);
                let health = health(member, hands_off);
                if health != self.inventory().host(id).health {
                    events.push(Event::HostHealth(id, health));
                }
                let wanted = wanted_back_mib(member);
                if wanted != self.inventory().host(id).wanted_back_mib {
                    events.push(Event::WantedBack(id, wanted));
                }
                if let Some(member) = member.filter(|member| member.report.is_some()) {
                    let offered = offered(member, work);
                    if offered != self.inventory().host(id).capacity {
                        events.push(Event::Capacity(id, offered));
                    }
                }
                self.hosts.insert(id, name);
            } else {
                self.states.remove(&id);
                self.silences.remove(&id);
                let what = format!("{name} has left the cluster.");
                self.notes.push((LogKind::Host, what));
                events.push(Event::HostLeft(id));
            }
        }
        for (id, member) in there {
            // A number that is given out again may still be that of a host that has left.
            if self.hosts.contains_key(&id) {
                continue;
            }
            let name = &member.record.name;
            self.hosts.insert(id, name.clone());
            let mut host = Host::new(id, &name[..], offered(member, work));
            let (state, drain) = standing(Some(member));
            (host.cordoned, host.draining) = (state != HostState::Lends, drain);
            self.states.insert(id, (state, drain));
            if self.has_seen {
                let what = format!("{name} has joined the cluster.");
                self.notes.push((LogKind::Host, what));
            }
            host.health = health(Some(member), hands_off);
            events.push(Event::HostJoined(host));
            let wanted = wanted_back_mib(Some(member));
            if wanted > 0 {
                events.push(Event::WantedBack(id, wanted));
            }
        }
        events
    }

    /// Notes how often a host falls silent. A daemon that is started again is silent for a
    /// moment only.
    fn listen(&mut self, now: Duration, id: HostId, member: Option<&Member>) {
        let is_silent = member.is_some_and(|member| member.report.is_none());
        let silences = self.silences.entry(id).or_default();
        if !is_silent {
            silences.since = None;
            return;
        }
        let since = *silences.since.get_or_insert(now);
        if now < since + SILENCE_MIN || silences.counted.last() >= Some(&since) {
            return;
        }
        silences.counted.push(since);
        silences.counted.retain(|&at| now < at + SILENCES_WITHIN);
        let count = silences.counted.len();
        let Some(member) = member.filter(|_| count >= SILENCES_MAX) else {
            return;
        };
        // From now on the store has it, and an operator may end it.
        silences.counted.clear();
        if member.trouble().is_none() {
            let minutes = SILENCES_WITHIN.as_secs() / 60;
            self.failing.push(Plan::Failing {
                host: member.record.name.clone(),
                why: format!("it was silent {count} times within {minutes} minutes"),
            });
        }
    }

    /// What runs and was placed by an earlier leader. A part on a host that is not known has
    /// no room here.
    fn adopted(&self, work: &Work) -> Vec<Adopted> {
        // A forged record may have the number of another one.
        let mut ids = BTreeSet::new();
        let new = work.placed.values().filter(|placed| {
            let id = AggregateId(placed.id);
            self.inventory().aggregate(id).is_none() && ids.insert(id)
        });
        new.filter_map(|placed| self.adopt(placed)).collect()
    }

    fn adopt(&self, placed: &Placed) -> Option<Adopted> {
        let parts: Vec<Part> = placed
            .parts
            .iter()
            .filter_map(|part| {
                let host = self.host_of(&part.host)?;
                let room = part.room();
                Some(Part { host, room })
            })
            .collect();
        let home = parts.first()?.host;
        let placement = Placement { parts };
        let mut request = to_request(AggregateId(placed.id), &placed.request, Some(home));
        request.room = placement.room();
        let after = placed.order.as_ref();
        let after = after.and_then(|order| self.placement(&order.parts));
        let transfers = after.filter(|after| after.room() == placement.room());
        Some(Adopted {
            transfers: transfers.map_or_else(Vec::new, |after| placement.transfers_to(&after)),
            placement,
            request,
        })
    }

    fn plan(
        &self,
        decision: &Decision,
        asked: &BTreeMap<AggregateId, &Asked>,
        work: &Work,
    ) -> Option<Plan> {
        let why = decision.explain(self.inventory());
        if let Decision::Move { moving, .. } = decision {
            let mut placed = work.placed.values();
            let placed = placed
                .find(|placed| placed.id == moving.aggregate.0)?
                .clone();
            let after = self
                .inventory()
                .aggregate(moving.aggregate)?
                .placement
                .after(&moving.transfers);
            let parts = self.work_parts(&after, &placed.request)?;
            let order = MoveOrder {
                parts,
                why,
                called_off: false,
            };
            return Some(Plan::Move { placed, order });
        }
        if let Decision::NotMoved { id, .. } = decision {
            let mut placed = work.placed.values();
            let placed = placed.find(|placed| placed.id == id.0)?.clone();
            return Some(Plan::RefuseWish { placed, why });
        }
        if let Decision::Stuck { host, .. } = decision {
            let host = self.hosts[host].clone();
            return Some(Plan::Stuck { host, why });
        }
        let kind = match decision {
            Decision::TooLate { .. } => Some(LogKind::Fail),
            Decision::Whole { .. } => Some(LogKind::Moved),
            _ => None,
        };
        if let Some(kind) = kind {
            return Some(Plan::Note { kind, what: why });
        }
        let (Decision::Start { id, .. } | Decision::Delay { id, .. } | Decision::Refuse { id, .. }) =
            decision
        else {
            return None;
        };
        let asked = (*asked.get(id)?).clone();
        let home = self.host_of(&asked.request.home);
        let home = home.filter(|_| !asked.request.anywhere);
        let silent = home.is_some_and(|home| self.inventory().host(home).capacity == Room::NONE);
        let why = match decision {
            Decision::Delay { name, .. } if silent => format!(
                "{name} waits: {}, where it starts, lends nothing: run `weft node start` there.",
                asked.request.home
            ),
            _ => why,
        };
        let refused = matches!(decision, Decision::Refuse { .. });
        let Decision::Start { placement, .. } = decision else {
            return answer(work, &asked, why, refused);
        };
        if let Some(parts) = self.work_parts(placement, &asked.request) {
            return Some(Plan::Place { asked, parts, why });
        }
        let home = &self.hosts[&placement.parts[0].host];
        let why = format!(
            "{} waits: {home} has too little memory for the vCPUs that it would get.",
            asked.request.name
        );
        answer(work, &asked, why, false)
    }

    /// The parts with their memory; the home has what remains. `None` if that is less than
    /// nothing.
    fn work_parts(
        &self,
        placement: &Placement,
        request: &crate::WorkRequest,
    ) -> Option<Vec<WorkPart>> {
        let part = |part: &Part| WorkPart {
            host: self.hosts[&part.host].clone(),
            cores: part.room.cores,
            memory_mib: (part.room.memory_mib)
                .saturating_sub(cpus_mib(request.kind, part.room.cores)),
            reserved_mib: part.room.memory_mib,
        };
        let mut parts: Vec<WorkPart> = placement.parts.iter().map(part).collect();
        let others: u64 = parts[1..].iter().map(|part| part.memory_mib).sum();
        parts[0].memory_mib = request.memory_mib.checked_sub(others)?;
        Some(parts)
    }
}

/// What the leader says of a request, unless it has said just that.
fn answer(work: &Work, asked: &Asked, why: String, refused: bool) -> Option<Plan> {
    let said = work.answer(&asked.request.name, asked.id);
    let is_first = said.is_none();
    let is_new = said.is_none_or(|said| said.why != why);
    is_new.then(|| Plan::Answer {
        asked: asked.clone(),
        why,
        refused,
        is_first,
    })
}

/// Whether a host is expected to last. By itself the cluster leaves none with hands off.
fn health(member: Option<&Member>, hands_off: bool) -> Health {
    match member.and_then(Member::trouble) {
        Some(why) if !hands_off => Health::Sick(why.into()),
        _ => Health::Well,
    }
}

/// How a host takes part, and whether all has to leave it, also while it is silent.
fn standing(member: Option<&Member>) -> (HostState, bool) {
    let drain = member.is_some_and(|member| member.cordon.draining);
    (HostState::of(member), drain)
}

fn taken_in(outcome: Result<Vec<Decision>, InventoryError>) -> Vec<Decision> {
    match outcome {
        Ok(decisions) => decisions,
        // What the store says was compared with what the scheduler knows.
        Err(error @ (InventoryError::KnownHost { .. } | InventoryError::UnknownHost(_))) => {
            debug_assert!(false, "{error}");
            Vec::new()
        }
        Err(InventoryError::RunsAlready(_) | InventoryError::NotThere(_)) => Vec::new(),
    }
}

fn to_request(id: AggregateId, request: &crate::WorkRequest, home: Option<HostId>) -> Request {
    let for_cpus = cpus_mib(request.kind, request.cores);
    let room = Room::new(request.cores, request.memory_mib + for_cpus);
    let mut wanted = Request::new(id, &request.name[..], room);
    wanted.hosts_max = request.hosts_max;
    wanted.priority = request.priority;
    wanted.home = home;
    wanted.home_stays = true;
    wanted.fixed = request.kind == WorkKind::Program;
    wanted.core_memory_mib = cpus_mib(request.kind, 1);
    wanted
}
