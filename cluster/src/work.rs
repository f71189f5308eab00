//! What runs in a cluster, and what waits to.
//!
//! | key | has | until |
//! | --- | --- | --- |
//! | `weft/work/asked/NAME` | [`WorkRequest`] | it is placed, or its agent's lease ends |
//! | `weft/work/said/NAME` | [`Answer`]: why it waits | its agent's lease ends |
//! | `weft/work/placed/NAME` | [`Placed`] | its agent says that it has ended |
//! | `weft/work/agent/NAME` | nothing: an agent lives | its lease ends |
//!
//! An *agent* asks for an aggregate, beside the launcher that runs it, and says when it has
//! ended. What runs is under no lease: a cut network must not make the cluster start it again.
//!
//! Invariants:
//! - a name is of one request or of one aggregate: to ask for it needs that neither is there;
//! - of one aggregate at most one order to move is open;
//! - only the leader of the current term places or orders, and only what is still asked for: the commit
//!   that places a request deletes it.

use crate::bounds::{CORES_MAX, MEMORY_MIB_MAX, PRIORITY_MAX, WORK_HOSTS_MAX};
use crate::host::check_name;
use crate::log::LogKind;
use crate::{Cluster, ClusterError, STIRRED, Term, json};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weft_place::{AggregateId, Room};
use weft_store::{Change, Committed, Condition, Entry, LeaseId, StoreError};

const WORK: &str = "weft/work/";
const ASKED: &str = "weft/work/asked/";
const SAID: &str = "weft/work/said/";
const PLACED: &str = "weft/work/placed/";
const AGENT: &str = "weft/work/agent/";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkKind {
    Program,
    Machine,
}

impl WorkKind {
    pub fn name(self) -> &'static str {
        match self {
            WorkKind::Program => "program",
            WorkKind::Machine => "machine",
        }
    }
}

/// How the home's daemon finds out that launcher and agent are both gone: each has a socket in
/// the abstract namespace whose name begins with the nonce.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Of the kernel: `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
    /// Of the network namespace: the names of sockets are its own.
    pub namespace: String,
    pub nonce: String,
}

/// A program or a machine that a user wants to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkRequest {
    /// Unique in the cluster.
    pub name: String,
    pub kind: WorkKind,
    /// The member on which its launcher is.
    pub home: String,
    /// While it waits: any member may be the home.
    #[serde(default)]
    pub anywhere: bool,
    /// The member on which the command is that asks for a home elsewhere, until a launcher there
    /// has taken over.
    #[serde(default)]
    pub caller: Option<String>,
    /// The user that started it, there.
    pub user: String,
    pub cores: u32,
    pub memory_mib: u64,
    pub hosts_max: u32,
    /// 0 to [`PRIORITY_MAX`]; a larger one is served first.
    pub priority: u8,
    pub mark: Mark,
}

impl WorkRequest {
    /// The member whose daemon finds out that launcher and agent are gone.
    pub fn watched_by(&self) -> &str {
        self.caller.as_ref().unwrap_or(&self.home)
    }

    fn is_sound(&self) -> bool {
        let room = Room::new(self.cores, self.memory_mib);
        let mut hosts = [&self.home].into_iter().chain(&self.caller);
        check_name(&self.name).is_ok()
            && hosts.all(|host| check_name(host).is_ok())
            && is_sound(room)
            && self.cores > 0
            && self.memory_mib > 0
            && (1..=WORK_HOSTS_MAX).contains(&self.hosts_max)
            && self.priority <= PRIORITY_MAX
            && [
                &self.user,
                &self.mark.boot,
                &self.mark.namespace,
                &self.mark.nonce,
            ]
            .iter()
            .all(|word| word.len() <= WORD_MAX)
    }
}

/// How often an agent tries to say how an order ended while the leader changes the record.
const ORDER_TRIES: usize = 8;

/// The longest user name or part of a mark, in bytes.
const WORD_MAX: usize = 256;

fn is_sound(room: Room) -> bool {
    room.cores <= CORES_MAX && room.memory_mib <= MEMORY_MIB_MAX
}

/// What one host gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkPart {
    pub host: String,
    pub cores: u32,
    /// Of the guest or the program.
    pub memory_mib: u64,
    /// What is counted for it on the host: a machine's vCPUs need memory, too.
    pub reserved_mib: u64,
}

impl WorkPart {
    /// What is counted on the host.
    pub fn room(&self) -> Room {
        Room::new(self.cores, self.reserved_mib)
    }

    fn memory(&self) -> Room {
        Room::new(self.cores, self.memory_mib)
    }
}

/// An aggregate that runs, or is about to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The revision of its request.
    pub id: u64,
    pub request: WorkRequest,
    /// The home first.
    pub parts: Vec<WorkPart>,
    /// Why it is there: a sentence.
    pub why: String,
    /// A move that is ordered. The agent carries it out.
    #[serde(default)]
    pub order: Option<MoveOrder>,
    /// Orders so far, the open one included.
    #[serde(default)]
    pub orders: u64,
    /// Why the last order was not carried out, or given.
    #[serde(default)]
    pub failure: Option<String>,
    /// How long no vCPU of it stood longer in its last move, in microseconds.
    #[serde(default)]
    pub stood_us: Option<u64>,
    /// A move that an operator wants, until the leader has answered.
    #[serde(default)]
    pub wish: Option<MoveWish>,
    /// The revision of this record.
    #[serde(skip)]
    pub(crate) revision: u64,
}

/// A move of an aggregate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveOrder {
    /// All of its parts afterwards, the home first.
    pub parts: Vec<WorkPart>,
    /// A sentence.
    pub why: String,
    /// An operator does not want it any more: the agent puts everything back, if it still can.
    #[serde(default)]
    pub called_off: bool,
}

/// A move of a part that an operator wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveWish {
    /// `None`: its smallest part that can move.
    #[serde(default)]
    pub from: Option<String>,
    pub to: String,
}

impl Placed {
    /// From which its changes are waited for ([`Cluster::wait_for_placed`]).
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// How its last move went, after "it has moved": what it took, where that is known, and how
    /// long its vCPUs stood.
    pub(crate) fn how_it_moved(&self, took: Option<Duration>) -> String {
        let took = took.map(|took| format!(" within {:.1} s", took.as_secs_f64()));
        let stood = self.stood_us.map(|us| {
            let ms = us as f64 / 1e3;
            format!("; no vCPU stood for more than {ms:.1} ms")
        });
        took.unwrap_or_default() + &stood.unwrap_or_default()
    }

    /// Its open move, or why the last one failed: a sentence.
    pub fn move_state(&self) -> Option<String> {
        let failed = || {
            let failure = self.failure.as_ref()?;
            Some(format!("{} did not move: {failure}.", self.request.name))
        };
        let order = self.order.as_ref().map(|order| order.why.clone());
        order.or_else(failed)
    }

    fn is_sound(&self) -> bool {
        let order = self.order.as_ref();
        let wish = self.wish.iter();
        let mut named = wish.flat_map(|wish| wish.from.iter().chain([&wish.to]));
        self.request.is_sound()
            && named.all(|host| check_name(host).is_ok())
            && self.are_sound(&self.parts)
            && order.is_none_or(|order| self.are_sound(&order.parts))
    }

    fn are_sound(&self, parts: &[WorkPart]) -> bool {
        let hosts: BTreeSet<&str> = parts.iter().map(|part| &part.host[..]).collect();
        let sound = |part: &WorkPart| {
            is_sound(part.room()) && is_sound(part.memory()) && check_name(&part.host).is_ok()
        };
        let total: Room = match parts.iter().all(sound) {
            true => parts.iter().map(WorkPart::memory).sum(),
            false => return false,
        };
        (1..=WORK_HOSTS_MAX as usize).contains(&parts.len())
            && hosts.len() == parts.len()
            && parts[0].host == self.request.home
            && self.has_its(total)
    }

    /// Whether that is what was asked for. A program may have left hosts since.
    fn has_its(&self, total: Room) -> bool {
        let wanted = Room::new(self.request.cores, self.request.memory_mib);
        match self.request.kind {
            WorkKind::Machine => total == wanted,
            WorkKind::Program => wanted.holds(total),
        }
    }
}

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The revision at which it came: no two have the same, and a later one has a larger.
    pub id: u64,
    pub request: WorkRequest,
    lease: Option<LeaseId>,
}

/// What the leader says of a request that it has not placed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The number of the request.
    pub id: u64,
    /// It will not be placed.
    pub refused: bool,
    /// A sentence.
    pub why: String,
}

/// All of it at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub revision: u64,
    /// In the order of their arrival.
    pub asked: Vec<Asked>,
    /// By their names.
    pub placed: BTreeMap<String, Placed>,
    pub answers: BTreeMap<String, Answer>,
    /// The names of those whose agents live.
    pub agents: BTreeSet<String>,
    /// Keys of records that cannot be read, or say what cannot be.
    pub damaged: Vec<String>,
}

impl Work {
    fn take(&mut self, entry: &Entry) {
        let Entry {
            key,
            value,
            revision,
            lease,
        } = entry;
        if key == STIRRED {
            return;
        }
        let taken = if let Some(name) = key.strip_prefix(ASKED) {
            read(value)
                .filter(|request: &WorkRequest| request.is_sound() && request.name == name)
                .map(|request| {
                    let (id, lease) = (*revision, *lease);
                    self.asked.push(Asked { id, request, lease });
                })
        } else if let Some(name) = key.strip_prefix(PLACED) {
            read(value)
                .filter(|placed: &Placed| placed.is_sound() && placed.request.name == name)
                .map(|placed| {
                    let revision = *revision;
                    self.placed
                        .insert(name.into(), Placed { revision, ..placed });
                })
        } else if let Some(name) = key.strip_prefix(SAID) {
            read(value).map(|answer| {
                self.answers.insert(name.into(), answer);
            })
        } else {
            key.strip_prefix(AGENT).map(|name| {
                self.agents.insert(name.into());
            })
        };
        if taken.is_none() {
            self.damaged.push(key.clone());
        }
    }

    /// The same with one more request, which nobody has made: to see what would become of it.
    pub fn with_trial(mut self, request: WorkRequest) -> Work {
        let id = self.revision + 1;
        self.asked.push(Asked {
            id,
            request,
            lease: None,
        });
        self
    }

    /// What the leader said of this request last.
    pub fn answer(&self, name: &str, id: u64) -> Option<&Answer> {
        self.answers.get(name).filter(|answer| answer.id == id)
    }
}

fn read<'a, T: Deserialize<'a>>(value: &'a [u8]) -> Option<T> {
    serde_json::from_slice(value).ok()
}

impl Asked {
    pub fn aggregate(&self) -> AggregateId {
        AggregateId(self.id)
    }
}

impl Cluster {
    /// Asks for room, under the lease of an agent. The request's number is the answer.
    pub fn ask(&self, request: &WorkRequest, lease: LeaseId) -> Result<u64, ClusterError> {
        check_name(&request.name)?;
        if !request.is_sound() {
            return Err(ClusterError::BadRequest(request.name.clone()));
        }
        let [asked, placed, agent] =
            [ASKED, PLACED, AGENT].map(|prefix| format!("{prefix}{}", request.name));
        let conditions = [
            Condition::Absent(asked.clone()),
            Condition::Absent(placed.clone()),
        ];
        let changes = [
            Change::put_leased(&asked, json(request), lease),
            Change::put_leased(agent, "", lease),
        ];
        let taken = || ClusterError::WorkNameTaken(request.name.clone());
        match self.store.commit(&conditions, &changes) {
            Ok(Committed::Done(revision)) => Ok(revision),
            Ok(Committed::Refused) => Err(taken()),
            // It may have come about: then the key has the lease that only this agent has, or
            // was placed with the nonce that only it has.
            Err(StoreError::Unknown { store, reason }) => {
                let work = self.work()?;
                let is_it = |found: &WorkRequest| found.mark == request.mark;
                let asked = work.asked.iter().find(|asked| is_it(&asked.request));
                let placed = work.placed.values();
                let placed = || placed.clone().find(|placed| is_it(&placed.request));
                let id = asked.map(|asked| asked.id);
                id.or_else(|| placed().map(|placed| placed.id))
                    .ok_or(StoreError::Unknown { store, reason }.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// All requests and all that runs.
    pub fn work(&self) -> Result<Work, ClusterError> {
        let snapshot = self.store.read(WORK)?;
        let mut work = Work {
            revision: snapshot.revision,
            ..Work::default()
        };
        for entry in &snapshot.entries {
            work.take(entry);
        }
        work.asked.sort_by_key(|asked| asked.id);
        Ok(work)
    }

    /// Says under a new lease that the agent of what is placed lives, whose lease had run out.
    /// Does nothing where the name has another number by now.
    pub fn agent_lives(&self, name: &str, id: u64, lease: LeaseId) -> Result<(), ClusterError> {
        let Some(placed) = self.placed(name, id)? else {
            return Ok(());
        };
        let key = format!("{PLACED}{name}");
        let condition = Condition::Unchanged(key, placed.revision);
        let change = Change::put_leased(format!("{AGENT}{name}"), "", lease);
        // Refused: it has just changed, and the next turn says it again.
        self.store.commit(&[condition], &[change])?;
        Ok(())
    }

    /// An aggregate has ended, or its launcher and its agent have: its name and its room are
    /// free. Does nothing where the name has another number by now.
    pub fn work_ended(&self, name: &str, id: u64) -> Result<(), ClusterError> {
        let key = format!("{PLACED}{name}");
        let Some(entry) = self.store.get(&key)? else {
            return Ok(());
        };
        if read(&entry.value).is_none_or(|placed: Placed| placed.id != id) {
            return Ok(());
        }
        let condition = Condition::Unchanged(key.clone(), entry.revision);
        // Refused: somebody else has just said the same.
        self.store.commit(&[condition], &[Change::delete(key)])?;
        Ok(())
    }

    /// A launcher on the home of what is placed goes on from here, with an agent that has this
    /// lease, instead of the command that asked on another host.
    pub fn take_over(
        &self,
        (name, id): (&str, u64),
        home: &str,
        mark: &Mark,
        lease: LeaseId,
    ) -> Result<Placed, ClusterError> {
        for _ in 0..ORDER_TRIES {
            let placed = self.placed(name, id)?;
            let waits = |placed: &Placed| {
                let request = &placed.request;
                request.home == home && (request.caller.is_some() || request.mark == *mark)
            };
            let Some(mut placed) = placed.filter(waits) else {
                return Err(ClusterError::NotElsewhere(name.into()));
            };
            if placed.request.caller.is_none() {
                // An answer of the store was lost.
                return Ok(placed);
            }
            placed.request.caller = None;
            placed.request.mark = mark.clone();
            let key = format!("{PLACED}{name}");
            let condition = Condition::Unchanged(key.clone(), placed.revision);
            let changes = [
                Change::put(key, json(&placed)),
                Change::put_leased(format!("{AGENT}{name}"), "", lease),
            ];
            match self.store.commit(&[condition], &changes) {
                Ok(Committed::Done(revision)) => return Ok(Placed { revision, ..placed }),
                Ok(Committed::Refused) | Err(StoreError::Unknown { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(ClusterError::Busy)
    }

    /// The command that asked for a home elsewhere has ended. If no launcher has taken over there,
    /// the name and the room are free.
    pub fn caller_ended(&self, name: &str, id: u64) -> Result<(), ClusterError> {
        for _ in 0..ORDER_TRIES {
            let placed = self.placed(name, id)?;
            let Some(placed) = placed.filter(|placed| placed.request.caller.is_some()) else {
                return Ok(());
            };
            let key = format!("{PLACED}{name}");
            let condition = Condition::Unchanged(key.clone(), placed.revision);
            if self.store.commit(&[condition], &[Change::delete(key)])? != Committed::Refused {
                return Ok(());
            }
        }
        Err(ClusterError::Busy)
    }

    /// What is placed under a name, if it has this number.
    pub fn placed(&self, name: &str, id: u64) -> Result<Option<Placed>, ClusterError> {
        let placed = self.placed_under(name)?;
        Ok(placed.filter(|placed| placed.id == id))
    }

    /// What is placed under this name now.
    pub(crate) fn placed_under(&self, name: &str) -> Result<Option<Placed>, ClusterError> {
        let entry = self.store.get(&format!("{PLACED}{name}"))?;
        let mut work = Work::default();
        if let Some(entry) = &entry {
            work.take(entry);
        }
        Ok(work.placed.remove(name))
    }

    /// A program has left hosts: its slices there have given their memory back. Nothing happens
    /// where it has no part there, or the name another number by now. `false`: the record has
    /// just changed, and the caller says it again.
    pub fn parts_left(&self, name: &str, id: u64, hosts: &[String]) -> Result<bool, ClusterError> {
        let Some(mut placed) = self.placed(name, id)? else {
            return Ok(true);
        };
        let before = placed.parts.len();
        let home = placed.request.home.clone();
        placed
            .parts
            .retain(|part| part.host == home || !hosts.contains(&part.host));
        if placed.parts.len() == before {
            return Ok(true);
        }
        let key = format!("{PLACED}{name}");
        let condition = Condition::Unchanged(key.clone(), placed.revision);
        let change = Change::put(key, json(&placed));
        Ok(self.store.commit(&[condition], &[change])? != Committed::Refused)
    }

    /// Asks the leader for a move. It orders that, or says why not: in the record's `failure`.
    pub fn wish(&self, name: &str, wish: &MoveWish) -> Result<(), ClusterError> {
        for _ in 0..ORDER_TRIES {
            let Some(mut placed) = self.work()?.placed.remove(name) else {
                return Err(ClusterError::NoSuchWork(name.into()));
            };
            let members = self.members()?;
            for host in wish.from.iter().chain([&wish.to]) {
                let mut members = members.iter();
                if !members.any(|member| member.record.name == *host) {
                    return Err(ClusterError::NoSuchHost(host.clone()));
                }
            }
            placed.wish = Some(wish.clone());
            placed.failure = None;
            let key = format!("{PLACED}{name}");
            let condition = Condition::Unchanged(key.clone(), placed.revision);
            let change = Change::put(key, json(&placed));
            if self.store.commit(&[condition], &[change])? != Committed::Refused {
                return Ok(());
            }
        }
        Err(ClusterError::Busy)
    }

    /// Has the agent put everything back that an open move has moved, if it still can. The record's
    /// `failure` says then that it was called off.
    pub fn call_off(&self, name: &str) -> Result<(), ClusterError> {
        for _ in 0..ORDER_TRIES {
            let Some(mut placed) = self.work()?.placed.remove(name) else {
                return Err(ClusterError::NoSuchWork(name.into()));
            };
            let Some(order) = &mut placed.order else {
                return Err(ClusterError::NoMove(name.into()));
            };
            order.called_off = true;
            let key = format!("{PLACED}{name}");
            let condition = Condition::Unchanged(key.clone(), placed.revision);
            let change = Change::put(key, json(&placed));
            if self.store.commit(&[condition], &[change])? != Committed::Refused {
                return Ok(());
            }
        }
        Err(ClusterError::Busy)
    }

    /// An agent has carried the order of `placed` out, or could not. What was carried out counts
    /// also if the leader has taken the order back meanwhile; else that changes nothing. The
    /// outcome has how long no vCPU stood longer, if that is known.
    pub fn order_ended(
        &self,
        placed: &Placed,
        outcome: Result<Option<Duration>, String>,
    ) -> Result<(), ClusterError> {
        let name = &placed.request.name;
        for _ in 0..ORDER_TRIES {
            let Some(mut now) = self.placed(name, placed.id)? else {
                return Ok(());
            };
            let is_open = now.order.is_some() && now.orders == placed.orders;
            match (&placed.order, &outcome) {
                (Some(order), Ok(stood)) if now.parts != order.parts => {
                    now.stood_us = stood.map(|stood| stood.as_micros() as u64);
                    (now.parts, now.why) = (order.parts.clone(), order.why.clone());
                    now.failure = None;
                }
                (_, Err(failure)) if is_open => now.failure = Some(failure.clone()),
                _ => return Ok(()),
            }
            now.order = None;
            let key = format!("{PLACED}{name}");
            let condition = Condition::Unchanged(key.clone(), now.revision);
            let change = Change::put(key, json(&now));
            if self.store.commit(&[condition], &[change])? != Committed::Refused {
                return Ok(());
            }
        }
        Err(ClusterError::Busy)
    }

    /// Deletes what the cluster knows of a name, whatever it is: an operator knows that
    /// nothing of it runs.
    pub fn forget_work(&self, name: &str) -> Result<(), ClusterError> {
        let keys = [ASKED, SAID, PLACED, AGENT].map(|prefix| format!("{prefix}{name}"));
        let mut known = false;
        for key in &keys {
            known |= self.store.get(key)?.is_some();
        }
        if !known {
            return Err(ClusterError::NoSuchWork(name.into()));
        }
        self.store.commit(&[], &keys.map(Change::delete))?;
        Ok(())
    }

    /// Waits until what is placed under a name changes after `after`, or `wait` is over. The
    /// revision to wait from next is the answer.
    pub fn wait_for_placed(
        &self,
        name: &str,
        after: u64,
        wait: Duration,
    ) -> Result<u64, ClusterError> {
        // A longer name that begins with this one wakes its caller for nothing.
        self.wait_below(&format!("{PLACED}{name}"), after, wait)
    }

    /// Waits until something of [`Cluster::work`], members, or what operators want of them
    /// changes after `after`, or `wait` is over. `true`: something has.
    pub fn wait_for_work(&self, after: u64, wait: Duration) -> Result<bool, ClusterError> {
        match self.store.watch(WORK, after, wait) {
            Ok(updates) => Ok(!updates.is_empty()),
            // Too much has changed: all must be read again.
            Err(StoreError::Compacted { .. }) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

impl Term {
    /// Places a request. `false`: nobody asks for it any more.
    pub fn place(
        &self,
        asked: &Asked,
        parts: Vec<WorkPart>,
        why: String,
    ) -> Result<bool, ClusterError> {
        let name = &asked.request.name;
        let mut request = asked.request.clone();
        if let (true, Some(first)) = (request.anywhere, parts.first()) {
            request.home.clone_from(&first.host);
        }
        let placed = Placed {
            id: asked.id,
            request,
            parts,
            why: why.clone(),
            order: None,
            orders: 0,
            wish: None,
            failure: None,
            stood_us: None,
            revision: 0,
        };
        let key = format!("{ASKED}{name}");
        let conditions = [
            Condition::Unchanged(key.clone(), asked.id),
            Condition::Absent(format!("{PLACED}{name}")),
        ];
        let changes = vec![
            Change::delete(key),
            Change::delete(format!("{SAID}{name}")),
            Change::put(format!("{PLACED}{name}"), json(&placed)),
        ];
        self.commit_logged(&conditions, changes, Some((LogKind::Start, why)))
    }

    /// Orders a move. `false`: it has ended, or changed.
    pub fn order(&self, placed: &Placed, order: MoveOrder) -> Result<bool, ClusterError> {
        let record = (LogKind::Move, order.why.clone());
        let new = Placed {
            order: Some(order),
            orders: placed.orders + 1,
            failure: None,
            wish: None,
            ..placed.clone()
        };
        self.replace(placed, &new, Some(record))
    }

    /// Says that a move does not come about that an operator wanted. `why`: a sentence. `false`: it
    /// has ended, or changed.
    pub fn refuse_wish(&self, placed: &Placed, why: &str) -> Result<bool, ClusterError> {
        let (_, phrase) = why.split_once(": ").unwrap_or(("", why));
        let new = Placed {
            failure: Some(phrase.trim_end_matches('.').to_owned()),
            wish: None,
            ..placed.clone()
        };
        self.replace(placed, &new, Some((LogKind::Fail, why.to_owned())))
    }

    /// Takes an order back whose agent is gone. `false`: it has ended, or changed.
    pub fn cancel_order(&self, placed: &Placed) -> Result<bool, ClusterError> {
        let new = Placed {
            order: None,
            failure: Some("its agent is gone".to_owned()),
            ..placed.clone()
        };
        // The leader notes what became of the order when it sees that none is open any more.
        self.replace(placed, &new, None)
    }

    fn replace(
        &self,
        placed: &Placed,
        new: &Placed,
        record: Option<(LogKind, String)>,
    ) -> Result<bool, ClusterError> {
        let key = format!("{PLACED}{}", placed.request.name);
        let condition = Condition::Unchanged(key.clone(), placed.revision);
        self.commit_logged(&[condition], vec![Change::put(key, json(new))], record)
    }

    /// Says why a request waits, or that it is refused. `false`: nobody asks any more. The log
    /// has why it waits at first, and that it is refused.
    pub fn answer(
        &self,
        asked: &Asked,
        why: String,
        refused: bool,
        is_first: bool,
    ) -> Result<bool, ClusterError> {
        let name = &asked.request.name;
        let id = asked.id;
        let answer = json(&Answer {
            id,
            refused,
            why: why.clone(),
        });
        let key = format!("{SAID}{name}");
        let change = match asked.lease {
            Some(lease) => Change::put_leased(key, answer, lease),
            None => Change::put(key, answer),
        };
        let condition = Condition::Unchanged(format!("{ASKED}{name}"), id);
        let kind = match (refused, is_first) {
            (true, _) => Some(LogKind::Refuse),
            (false, true) => Some(LogKind::Wait),
            (false, false) => None,
        };
        self.commit_logged(&[condition], vec![change], kind.map(|kind| (kind, why)))
    }
}
