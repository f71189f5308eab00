//! All of a cluster at one moment, for people and programs that look at it.

use crate::host::{HostReport, HostState, Member};
use crate::live::Live;
use crate::offer::CPU_MIB;
use crate::planner::{Plan, Planner};
use crate::work::{Asked, MoveOrder, Placed, Work, WorkKind, WorkPart};
use crate::{Cluster, ClusterError};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;
use weft_place::{AggregateId, Host, Inventory};

/// Longer than a scheduler leaves alone what was placed or moved.
const SETTLED: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overview {
    pub cluster: String,
    /// How hosts are chosen.
    pub policy: String,
    /// It moves nothing by itself.
    pub hands_off: bool,
    /// The host that decides, if one does.
    pub leader: Option<String>,
    /// By their names.
    pub hosts: Vec<HostView>,
    pub runs: Vec<RunView>,
    pub waits: Vec<WaitView>,
    /// What the leader would move next as all is now.
    pub next_moves: Vec<NextMove>,
    /// Keys of records of work that cannot be read.
    pub damaged: Vec<String>,
    /// Of the store, when the work was read.
    #[serde(skip)]
    pub revision: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostView {
    pub name: String,
    pub address: String,
    pub state: HostState,
    pub alive: bool,
    pub cordoned: bool,
    pub draining: bool,
    /// Why it is expected to fail: a phrase.
    pub trouble: Option<String>,
    /// What it offers to the cluster: less than it lends, since a slice takes more than its
    /// memory.
    pub cores: u32,
    pub cores_free: u32,
    pub memory_mib: u64,
    pub memory_free_mib: u64,
    /// Free cores that nothing can use: no memory is free beside them.
    pub cores_stranded: u32,
    /// What it said last of itself.
    pub report: Option<HostReport>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunView {
    pub name: String,
    pub kind: WorkKind,
    pub user: String,
    pub home: String,
    pub priority: u8,
    /// The home first.
    pub parts: Vec<WorkPart>,
    /// Whether its agent lives.
    pub agent: bool,
    /// Why it is there.
    pub why: String,
    /// How many times as long it needs as on one host, by the scheduler's costs.
    pub slow_down: f64,
    /// What it does on its hosts just now, if its agent tells.
    pub live: Option<Live>,
    /// The open move.
    pub moving: Option<MoveOrder>,
    /// Why the last move did not come about.
    pub failure: Option<String>,
    /// The open move, or why the last one failed: a sentence.
    #[serde(skip)]
    pub move_state: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaitView {
    pub name: String,
    pub kind: WorkKind,
    pub user: String,
    pub home: String,
    pub cores: u32,
    pub memory_mib: u64,
    pub hosts_max: u32,
    pub priority: u8,
    /// A sentence.
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NextMove {
    pub name: String,
    /// A sentence.
    pub why: String,
}

impl Cluster {
    pub fn overview(&self) -> Result<Overview, ClusterError> {
        let mut state = self.state()?;
        let hands_off = std::mem::replace(&mut state.hands_off, true);
        let mut planner = Planner::default();
        // What it would answer now: what the leader said may be older.
        let plans = planner.update(Duration::ZERO, &state);
        let (members, work) = (&state.members, &state.work);
        let mut overview = Overview {
            cluster: self.identity().name.clone(),
            policy: planner.policy().to_owned(),
            hands_off,
            leader: self.leader()?.map(|leader| leader.name),
            hosts: hosts(planner.inventory(), members),
            runs: runs(&planner, work, self.live()?),
            waits: waits(work, &plans),
            // Forced ones are planned at once.
            next_moves: plans.iter().filter_map(next_move).collect(),
            damaged: work.damaged.clone(),
            revision: work.revision,
        };
        state.hands_off = hands_off;
        let next = planner.update(SETTLED, &state);
        for next in next.iter().filter_map(next_move) {
            let mut known = overview.next_moves.iter();
            if !known.any(|known| known.name == next.name) {
                overview.next_moves.push(next);
            }
        }
        Ok(overview)
    }
}

impl RunView {
    pub fn state(&self) -> &'static str {
        match self {
            RunView { agent: false, .. } => "agent silent",
            RunView {
                moving: Some(_), ..
            } => "moves",
            _ => "runs",
        }
    }
}

impl Overview {
    /// The most free cores on one host: nothing larger fits without being spread.
    pub fn largest_block(&self) -> u32 {
        let free = self.hosts.iter().map(|host| host.cores_free);
        free.max().unwrap_or(0)
    }
}

fn hosts(inventory: &Inventory, members: &[Member]) -> Vec<HostView> {
    let view = |host: &Host| {
        let free = inventory.room_for_more(host.id);
        let member = members.iter().find(|m| m.record.name == *host.name);
        let cordon = member.map(|member| member.cordon).unwrap_or_default();
        let is_stranded = free.memory_mib < CPU_MIB;
        HostView {
            name: host.name.to_string(),
            address: member.map_or_else(String::new, |member| member.record.address.clone()),
            state: HostState::of(member),
            alive: member.is_some_and(|member| member.report.is_some()),
            cordoned: cordon.cordoned,
            draining: cordon.draining,
            trouble: member.and_then(Member::trouble).map(str::to_owned),
            cores: host.capacity.cores,
            cores_free: free.cores,
            memory_mib: host.capacity.memory_mib,
            memory_free_mib: free.memory_mib,
            cores_stranded: if is_stranded { free.cores } else { 0 },
            report: member.and_then(|member| member.report.clone()),
        }
    };
    let mut views: Vec<HostView> = inventory.hosts().map(view).collect();
    views.sort_by(|one, other| one.name.cmp(&other.name));
    views
}

fn runs(planner: &Planner, work: &Work, mut live: BTreeMap<String, Live>) -> Vec<RunView> {
    let view = |placed: &Placed| {
        let request = &placed.request;
        RunView {
            name: request.name.clone(),
            kind: request.kind,
            user: request.user.clone(),
            home: request.home.clone(),
            priority: request.priority,
            parts: placed.parts.clone(),
            agent: work.agents.contains(&request.name),
            why: placed.why.clone(),
            slow_down: planner.slow_down(AggregateId(placed.id)),
            live: live
                .remove(&request.name)
                .filter(|live| live.id == placed.id),
            moving: placed.order.clone(),
            failure: placed.failure.clone(),
            move_state: placed.move_state(),
        }
    };
    work.placed.values().map(view).collect()
}

fn waits(work: &Work, plans: &[Plan]) -> Vec<WaitView> {
    let view = |asked: &Asked| {
        let request = &asked.request;
        let said = work.answer(&request.name, asked.id);
        let now = plans.iter().find_map(|plan| match plan {
            Plan::Place { asked: of, why, .. } | Plan::Answer { asked: of, why, .. } => {
                (of.id == asked.id).then_some(why)
            }
            _ => None,
        });
        WaitView {
            name: request.name.clone(),
            kind: request.kind,
            user: request.user.clone(),
            home: request.home.clone(),
            cores: request.cores,
            memory_mib: request.memory_mib,
            hosts_max: request.hosts_max,
            priority: request.priority,
            why: now
                .or(said.map(|said| &said.why))
                .cloned()
                .unwrap_or_default(),
        }
    };
    work.asked.iter().map(view).collect()
}

fn next_move(plan: &Plan) -> Option<NextMove> {
    match plan {
        Plan::Move { placed, order } => Some(NextMove {
            name: placed.request.name.clone(),
            why: order.why.clone(),
        }),
        _ => None,
    }
}
