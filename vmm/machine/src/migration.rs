//! A running machine goes to other nodes as a whole: a sequence of the primitives of
//! [`super::membership`] and of moves. `docs/membership.md` says why in this order.
//!
//! ```text
//! join the destinations ─▶ pages ahead ─▶ switch ─▶ pages that are left, ─▶ the sources
//!    │                                      │        node by node            leave
//!    └──── failed or cancelled: all go back ◀────────────┘
//! ```
//!
//! Invariants:
//!
//! - Until all pages have moved, a migration that fails or is cancelled puts vCPUs and roles
//!   back, and gives back the nodes that joined for it.
//! - A source that cannot leave stays a member, without vCPUs and memory, and the report says
//!   why.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_aggregate::commands::SliceCommand;
use weft_aggregate::membership::Change;
use weft_aggregate::{PRIMARY, Slice};
use weft_vcpu::PAGE_SIZE;

use super::handle::Handle;
use super::home_move::{self, HomeMove};
use super::lifecycle::{MIGRATE, Refusal};
use super::membership::{
    Activity, Job, NewNode, NodeProcesses, PausedExchanges, Until, add_room, check_release,
    impossible,
};
use super::precopy::Precopy;
use super::split::{self, NO_ROOM, Part, Rooms};
use super::switch_order::SwitchOrder;

pub use super::split::Choose;
pub use super::switch_order::SwitchTimes;

/// How long the machine may stand in the hybrid mode.
const DOWNTIME_MS: u64 = 20;
/// The same in the pre-copy mode, in which the guest may have to slow down for it.
const PRE_COPY_DOWNTIME_MS: u64 = 100;
/// Switches that are tried in the pre-copy mode.
const SWITCHES_MAX: usize = 20;

/// Where a machine goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Migration {
    /// The first gets what was used most, and the others are filled in this order.
    pub to: Vec<Destination>,
    /// vCPUs are divided evenly among all of them, instead of going to the first.
    #[serde(default)]
    pub spread: bool,
    #[serde(default)]
    pub mode: Mode,
    /// How long the machine may stand, in milliseconds; `None`: the mode's own limit. Not for
    /// the post-copy mode.
    #[serde(default)]
    pub downtime_ms: Option<u64>,
    /// Most bytes of pages that each source sends in a second.
    #[serde(default)]
    pub bytes_per_s: Option<u64>,
    /// Which pages go to the first of several destinations, if it gets all vCPUs; else those
    /// with the lowest numbers.
    #[serde(default)]
    pub choose: Choose,
    /// Disks of node 0 are copied, if the machine leaves its host for good.
    #[serde(default)]
    pub with_disks: bool,
    /// Node 0 stays for the console, the PCI bus and the API, where it could leave, too.
    #[serde(default)]
    pub keep_home: bool,
}

impl Migration {
    /// To a node of the machine.
    fn to_node(node: usize) -> Migration {
        Migration {
            to: vec![Destination::Node(node)],
            spread: false,
            mode: Mode::default(),
            downtime_ms: None,
            bytes_per_s: None,
            choose: Choose::default(),
            with_disks: false,
            keep_home: true,
        }
    }

    /// How long the last pages may take while the machine stands. The other half of the time
    /// is for all else.
    fn copy_max(&self) -> Duration {
        let downtime_ms = self.downtime_ms.unwrap_or(match self.mode {
            Mode::PreCopy => PRE_COPY_DOWNTIME_MS,
            Mode::Hybrid | Mode::PostCopy => DOWNTIME_MS,
        });
        Duration::from_millis(downtime_ms) / 2
    }
}

/// When the pages of a migration go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Their bytes are sent ahead while the vCPUs go on where they are. Then the machine stands
    /// once, and vCPUs and pages have moved; pages that were written meanwhile follow.
    #[default]
    Hybrid,
    /// As [`Mode::Hybrid`], but no page follows: rounds go on until all can be sent while the
    /// machine stands.
    PreCopy,
    /// After the vCPUs.
    PostCopy,
}

/// One of the nodes that a machine goes to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Destination {
    /// A node that joins for it, on another host.
    Host {
        name: String,
        /// Guest memory that it may fill, in bytes; `None`: its part of all.
        #[serde(default)]
        memory_bytes: Option<u64>,
    },
    /// A node of the machine.
    Node(usize),
    /// The same, with the most memory that it may have then, in bytes.
    Part { node: usize, memory_bytes: u64 },
}

/// A machine that went elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Migrated {
    /// The nodes that it went to, in the order of the request.
    pub nodes: Vec<usize>,
    /// The nodes that left.
    pub left: Vec<usize>,
    /// The nodes that stay without vCPUs and memory.
    pub stays: Vec<Stay>,
    /// The host on which the machine goes on with all that node 0 had, if it does.
    #[serde(default)]
    pub home: Option<HomeMove>,
    /// vCPUs that moved.
    pub vcpus: usize,
    /// Bytes of pages that were pushed; those that vCPUs fetched come on top.
    pub bytes: u64,
    /// The longest that one vCPU stood to be moved, or all of them for the switch or the
    /// platform, in nanoseconds.
    pub pause_ns: u64,
    /// Bytes of pages that the switch moved, which had been sent ahead.
    #[serde(default)]
    pub switched_bytes: u64,
    /// How long the machine stood for the switch, if there was one.
    #[serde(default)]
    pub switch: Option<SwitchTimes>,
    /// From the request to the last step.
    pub total_s: f64,
    /// Of it, until the destinations were members.
    pub join_s: f64,
    /// Pages that were sent ahead, each as often as it was, in bytes.
    #[serde(default)]
    pub ahead_bytes: u64,
    /// Of the time, until pages were sent ahead.
    #[serde(default)]
    pub ahead_s: f64,
    /// Of it, the time in which roles and vCPUs moved.
    pub vcpus_s: f64,
    /// Of it, the time in which pages moved.
    pub pages_s: f64,
}

/// A node that a migration left behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stay {
    pub node: usize,
    /// Why it could not leave.
    pub reason: String,
}

/// Where everything was before.
struct Places {
    vcpus: Vec<usize>,
    platform: usize,
    timekeeper: usize,
}

/// A migration that is under way.
struct Course<'a> {
    handle: &'a Handle,
    slice: &'a Slice,
    processes: &'a dyn NodeProcesses,
    job: &'a Job,
    before: Places,
    paused: PausedExchanges<'a>,
    /// The one node that is left; `None`: all that are no destinations.
    source: Option<usize>,
    /// Nodes that joined for it.
    joined: Vec<usize>,
    /// What was sent ahead.
    ahead: Option<Precopy<'a>>,
    report: Migrated,
}

impl Handle {
    /// Moves the machine to other nodes: its roles, vCPUs and pages. The sources leave, as far
    /// as they can.
    ///
    /// # Errors
    /// Why it cannot be; the machine runs on where it was, unless a node was lost.
    pub fn migrate(
        &self,
        processes: &dyn NodeProcesses,
        wanted: &Migration,
        job: &Job,
    ) -> Result<Migrated, Refusal> {
        let begun = Instant::now();
        self.check_runs(MIGRATE)?;
        let mut course = self.course(processes, job)?;
        course.go_or_go_back(wanted)?;
        course.leave();
        if !wanted.keep_home {
            course.move_home(wanted.with_disks);
        }
        let mut report = course.report;
        report.total_s = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Moves what `node` has to node 0, which is on the same host; it leaves. `docs/roles.md` has
    /// the reasons.
    ///
    /// # Errors
    /// Why it cannot be; the machine runs on with both, unless a node was lost.
    pub fn unite(
        &self,
        processes: &dyn NodeProcesses,
        node: usize,
        job: &Job,
    ) -> Result<Migrated, Refusal> {
        let begun = Instant::now();
        self.check_runs(MIGRATE)?;
        let mut course = self.course(processes, job)?;
        check_release(course.slice, node).map_err(|reason| impossible(MIGRATE, reason))?;
        processes
            .share_memory(node)
            .map_err(|reason| impossible(MIGRATE, reason))?;
        course.source = Some(node);
        course.go_or_go_back(&Migration::to_node(PRIMARY))?;
        course.leave();
        let mut report = course.report;
        report.total_s = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    fn course<'a>(
        &'a self,
        processes: &'a dyn NodeProcesses,
        job: &'a Job,
    ) -> Result<Course<'a>, Refusal> {
        let slice = self.several(MIGRATE)?;
        Ok(Course {
            handle: self,
            slice,
            processes,
            job,
            before: self.places(slice),
            paused: PausedExchanges::new(slice),
            source: None,
            joined: Vec::new(),
            ahead: None,
            report: Migrated::default(),
        })
    }

    fn places(&self, slice: &Slice) -> Places {
        let locations = slice.locations().all().into_iter();
        Places {
            vcpus: locations.map(|location| location.slice).collect(),
            platform: slice.platform().holder(),
            timekeeper: slice.timekeeper_number(),
        }
    }
}

impl Course<'_> {
    /// What can be undone, undone where it fails.
    fn go_or_go_back(&mut self, wanted: &Migration) -> Result<(), Refusal> {
        let rooms = rooms(self.slice, &wanted.to);
        let rooms = rooms.map_err(|reason| impossible(MIGRATE, reason))?;
        let gone = self.go(wanted, rooms);
        self.end_limit(wanted);
        split::end(self.slice);
        gone.map_err(|refusal| self.go_back(refusal.of(MIGRATE)))
    }

    fn go(&mut self, wanted: &Migration, rooms: Vec<Room>) -> Result<(), Refusal> {
        let begun = Instant::now();
        for (destination, room) in wanted.to.iter().zip(&rooms) {
            self.job.check(MIGRATE)?;
            let number = match destination {
                Destination::Node(number) | Destination::Part { node: number, .. } => *number,
                Destination::Host { name, .. } => self.join(name, room.memory_bytes)?,
            };
            self.report.nodes.push(number);
        }
        self.report.join_s = begun.elapsed().as_secs_f64();
        let parts = self.parts(wanted, &rooms)?;
        self.add_room(&parts)?;
        self.limit(wanted.bytes_per_s)?;
        let left = match wanted.mode {
            Mode::PostCopy => {
                self.move_roles_and_vcpus(wanted.spread)?;
                parts
            }
            Mode::Hybrid | Mode::PreCopy => {
                self.send_ahead(&parts, wanted)?;
                self.switch(&parts, wanted)?
            }
        };
        self.move_pages(&left)?;
        self.end_ahead()
    }

    /// What of each source goes where.
    fn parts(&self, wanted: &Migration, rooms: &[Room]) -> Result<Vec<Part>, Refusal> {
        let sources = self.sources();
        let rooms = Rooms {
            nodes: &self.report.nodes,
            pages: rooms.iter().map(|room| room.pages).collect(),
        };
        // Where vCPUs are everywhere, no destination is the one that uses most pages.
        let is_main = rooms.nodes.len() > 1 && !wanted.spread;
        let parts = if is_main && wanted.choose == Choose::History {
            split::by_history(self.slice, &sources, rooms)
        } else {
            let managed = |source| (source, self.slice.managed_pages(source));
            let sources: Vec<_> = sources.into_iter().map(managed).collect();
            rooms.in_order(&sources).ok_or_else(|| NO_ROOM.to_owned())
        };
        parts.map_err(|reason| impossible(MIGRATE, reason))
    }

    fn add_room(&self, parts: &[Part]) -> Result<(), Refusal> {
        let mut added = parts.iter().map(|part| add_room(self.slice, &part.shares));
        added
            .find_map(Result::err)
            .map_or(Ok(()), |reason| Err(impossible(MIGRATE, reason)))
    }

    /// Has the sources send no more than this.
    fn limit(&self, bytes_per_s: Option<u64>) -> Result<(), Refusal> {
        let limit = SliceCommand::LimitMoves { bytes_per_s };
        let mut limited = (self.sources().into_iter())
            .map(|source| self.slice.command_drain(source, &limit).map(drop));
        let failed = limited.find_map(Result::err);
        failed.map_or(Ok(()), |reason| Err(impossible(MIGRATE, reason)))
    }

    /// What leaves the sources from here on has no limit.
    fn end_limit(&self, wanted: &Migration) {
        if wanted.bytes_per_s.is_some() {
            // A source that does not answer is lost, which ends the machine.
            let _ = self.limit(None);
        }
    }

    fn send_ahead(&mut self, parts: &[Part], wanted: &Migration) -> Result<(), Refusal> {
        let begun = Instant::now();
        self.job.enter(Activity::SendingAhead);
        let mut ahead = Precopy::new(self.slice);
        let sent = parts
            .iter()
            .try_for_each(|part| ahead.begin(part.source, part.shares.clone()))
            .and_then(|()| match wanted.mode {
                Mode::PreCopy => ahead.converge_to(wanted.copy_max(), self.job),
                _ => ahead.converge(self.job),
            });
        self.ahead = Some(ahead);
        sent?;
        self.report.ahead_s = begun.elapsed().as_secs_f64();
        Ok(())
    }

    /// The machine stands once, and is elsewhere then. Returns what of the parts is left.
    fn switch(&mut self, parts: &[Part], wanted: &Migration) -> Result<Vec<Part>, Refusal> {
        self.job.enter(Activity::MovingVcpus);
        let needs_all = wanted.mode == Mode::PreCopy;
        let order = SwitchOrder {
            parts: parts
                .iter()
                .map(|part| (part.source, part.shares.clone()))
                .collect(),
            vcpus: self.destinations(wanted.spread),
            roles: self.report.nodes[0],
            copy_max: wanted.copy_max(),
            needs_all,
        };
        for _ in 0..SWITCHES_MAX {
            self.job.check(MIGRATE)?;
            let begun = Instant::now();
            let switched = self.handle.switch(order.clone())?;
            self.report.pause_ns = self.report.pause_ns.max(switched.times.stopped_ns);
            if switched.is_done {
                self.report.switch = Some(switched.times);
                self.report.switched_bytes = switched.pages * PAGE_SIZE;
                self.report.vcpus = switched.vcpus;
                self.report.vcpus_s = begun.elapsed().as_secs_f64();
                let left = switched.left.into_iter();
                return Ok(left
                    .map(|(source, shares)| Part { source, shares })
                    .collect());
            }
            if let Some(ahead) = &mut self.ahead {
                ahead.converge_to(wanted.copy_max(), self.job)?;
            }
        }
        let reason = format!("the last pages did not arrive in time in {SWITCHES_MAX} tries");
        Err(impossible(MIGRATE, reason))
    }

    /// The vCPUs that move, and where they go.
    fn destinations(&self, spread: bool) -> Vec<(u32, usize)> {
        let nodes = &self.report.nodes;
        let sources = self.sources();
        let all = self.before.vcpus.len();
        let locations = self.slice.locations().all().into_iter();
        let destination = |(vcpu, at): (usize, usize)| {
            let to = match spread {
                true => nodes[vcpu * nodes.len() / all],
                false => nodes[0],
            };
            // Without an even division, those that are on a destination stay there.
            let goes = at != to && (spread || sources.contains(&at));
            goes.then_some((vcpu as u32, to))
        };
        let places = locations.map(|location| location.slice).enumerate();
        places.filter_map(destination).collect()
    }

    /// Nothing is kept any more that was sent ahead.
    fn end_ahead(&mut self) -> Result<(), Refusal> {
        if let Some(ahead) = self.ahead.take() {
            self.report.ahead_bytes = ahead.end()? * PAGE_SIZE;
        }
        Ok(())
    }

    fn join(&mut self, host: &str, memory_bytes: u64) -> Result<usize, Refusal> {
        self.job.enter(Activity::Starting);
        let node = NewNode {
            host: Some(host.to_owned()),
            memory_bytes,
        };
        let grown = self.handle.grow(self.processes, &node, self.job)?;
        self.joined.push(grown.node);
        self.paused.pause(grown.node);
        Ok(grown.node)
    }

    fn move_roles_and_vcpus(&mut self, spread: bool) -> Result<(), Refusal> {
        let begun = Instant::now();
        self.job.enter(Activity::MovingVcpus);
        let first = self.report.nodes[0];
        // The pause for the platform is shortest while all pages are where they are used.
        if self.before.platform != first {
            let moved = self.handle.move_platform(first)?;
            self.report.pause_ns = self.report.pause_ns.max(moved.stopped_ns);
        }
        if self.before.timekeeper != first {
            self.handle.move_time(first)?;
        }
        let destinations = self.destinations(spread);
        for (moved, (vcpu, to)) in destinations.iter().enumerate() {
            self.job.check(MIGRATE)?;
            let left = destinations.len() - moved;
            self.job.show(|view| view.vcpus_left = left);
            // It may have gone there by itself.
            if self.slice.locations().all()[*vcpu as usize].slice == *to {
                continue;
            }
            let moved = self.handle.move_vcpu(*vcpu, *to)?;
            self.report.pause_ns = self.report.pause_ns.max(moved.stopped_ns);
            self.report.vcpus += 1;
        }
        self.job.show(|view| view.vcpus_left = 0);
        self.report.vcpus_s = begun.elapsed().as_secs_f64();
        Ok(())
    }

    /// Empties the sources, one after the other; they stay members.
    fn move_pages(&mut self, parts: &[Part]) -> Result<(), Refusal> {
        let begun = Instant::now();
        for (done, part) in parts.iter().enumerate() {
            if done > 0 {
                // After a change of membership each has room for what it manages.
                self.add_room(&parts[done..])?;
            }
            let source = part.source;
            self.job.show(|view| view.from = Some(source));
            let (handle, slice) = (self.handle, self.slice);
            handle.change(Change::Drain, source)?;
            let shares = part.shares.clone();
            let moved = handle.move_pages(slice, source, shares, Until::NothingManaged, self.job);
            handle.keep(slice, source);
            self.report.bytes += moved?.bytes;
        }
        self.report.pages_s = begun.elapsed().as_secs_f64();
        Ok(())
    }

    /// The members that are left.
    fn sources(&self) -> Vec<usize> {
        let members = self.slice.members().into_iter();
        members
            .filter(|node| match self.source {
                Some(source) => *node == source,
                None => !self.report.nodes.contains(node),
            })
            .collect()
    }

    /// The sources leave. From here on nothing is undone.
    fn leave(&mut self) {
        for node in self.sources().into_iter().filter(|node| *node != PRIMARY) {
            let released = match check_release(self.slice, node) {
                Ok(()) => {
                    let job = Job::default();
                    let done = self.handle.release_paused(self.processes, node, &job);
                    done.map_err(|refusal| refusal.to_string())
                }
                Err(reason) => Err(reason),
            };
            match released {
                Ok(released) => {
                    self.report.bytes += released.bytes;
                    self.report.left.push(node);
                }
                Err(reason) => self.report.stays.push(Stay { node, reason }),
            }
        }
    }

    /// Node 0 leaves, too, where it can.
    fn move_home(&mut self, with_disks: bool) {
        if self.report.nodes.contains(&PRIMARY) {
            return;
        }
        let ways = (self.handle, self.slice, self.processes);
        match home_move::move_home(ways, self.report.nodes[0], with_disks, self.job) {
            Ok(home) => {
                self.report.left.push(PRIMARY);
                self.report.home = Some(home);
            }
            Err(reason) => self.report.stays.push(Stay {
                node: PRIMARY,
                reason,
            }),
        }
    }

    /// Puts everything back. Why the migration failed, and what is not as before.
    fn go_back(&mut self, refusal: Refusal) -> Refusal {
        let undone = self.end_ahead().and_then(|()| self.try_back());
        match (refusal, undone) {
            (refusal, Ok(())) => refusal,
            (Refusal::Impossible { request, reason }, Err(why)) => Refusal::Impossible {
                request,
                reason: format!("{reason}; not all is where it was: {why}"),
            },
            // What it failed of ended the machine.
            (refusal, Err(_)) => refusal,
        }
    }

    fn try_back(&self) -> Result<(), Refusal> {
        for (vcpu, before) in self.before.vcpus.iter().enumerate() {
            if self.slice.locations().all()[vcpu].slice != *before {
                self.handle.move_vcpu(vcpu as u32, *before)?;
            }
        }
        if self.slice.timekeeper_number() != self.before.timekeeper {
            self.handle.move_time(self.before.timekeeper)?;
        }
        if self.slice.platform().holder() != self.before.platform {
            self.handle.move_platform(self.before.platform)?;
        }
        for node in self.joined.iter().rev() {
            self.handle
                .release_paused(self.processes, *node, &Job::default())?;
        }
        Ok(())
    }
}

/// How much of the machine a destination takes.
struct Room {
    /// Guest memory that a node which joins may fill.
    memory_bytes: u64,
    /// Pages that may be handed to it.
    pages: u64,
}

/// What each destination takes, if all of them take the whole machine.
fn rooms(slice: &Slice, to: &[Destination]) -> Result<Vec<Room>, String> {
    if to.is_empty() {
        return Err("no destination was given".into());
    }
    let all = slice.placement().memory_bytes();
    let spare = slice.placement().spare_bytes_min();
    let part = all.div_ceil(to.len() as u64).next_multiple_of(PAGE_SIZE);
    let mut known = Vec::new();
    let mut rooms = Vec::new();
    let mut room = 0;
    for destination in to {
        let (memory_bytes, bytes) = match destination {
            Destination::Node(_) => (all, all),
            Destination::Part { memory_bytes, .. } => (*memory_bytes, all.min(*memory_bytes)),
            Destination::Host { memory_bytes, .. } => {
                let bytes = memory_bytes.unwrap_or_else(|| all.min(part + spare));
                let is_whole = bytes >= all;
                (
                    bytes,
                    if is_whole {
                        all
                    } else {
                        bytes.saturating_sub(spare)
                    },
                )
            }
        };
        room += bytes / PAGE_SIZE * PAGE_SIZE;
        let mut pages = bytes / PAGE_SIZE;
        if let Destination::Node(node) | Destination::Part { node, .. } = destination {
            slice.check_member(*node)?;
            if known.contains(node) {
                return Err(format!("node {node} was given twice"));
            }
            known.push(*node);
            pages = pages.saturating_sub(slice.managed_pages(*node));
        }
        rooms.push(Room {
            memory_bytes,
            pages,
        });
    }
    match room < all {
        true => Err(format!(
            "the destinations have room for {} MiB of the machine's {} MiB; each of them needs \
             {} MiB besides for pages of others",
            room >> 20,
            all >> 20,
            spare >> 20
        )),
        false => Ok(rooms),
    }
}
