//! A node joins a running machine, or leaves it: the sequence of primitives that one request
//! needs. `docs/membership.md` has the protocol; the owner carries out each of its changes,
//! and serves others between them.
//!
//! ```text
//! grow:     start a process, link it ─▶ Join
//! release:  Drain ─▶ move its vCPUs ─▶ its pages ─▶ Leave ─▶ end the process
//!             └ cancelled: Keep ◀────────┘
//! ```
//!
//! Invariant: a request that fails or is cancelled leaves the machine running, with the same
//! nodes as before. vCPUs and pages that have moved by then stay where they are.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_aggregate::commands::{DrainReport, DrainShare, SliceCommand, SliceReply};
use weft_aggregate::membership::{Change, ChangeError};
use weft_aggregate::{PRIMARY, Slice};
use weft_confine::lock;
use weft_vcpu::PAGE_SIZE;

use super::handle::Handle;
use super::lifecycle::{End, GROW, MachineRequest, RELEASE, Refusal, Stage, change_name};
use super::move_report::QueueMove;
use super::owner::Owner;
use super::state::HomeState;

/// Longest wait for the link to a node that joins, once its process runs.
const LINK_WAIT: Duration = Duration::from_secs(20);
/// Between two looks at a drain.
const LOOK: Duration = Duration::from_millis(20);
/// A drain that moves nothing for so long is given up.
const STANDSTILL: Duration = Duration::from_secs(30);

/// A node that a machine is to get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewNode {
    /// The host that it is on; `None`: the launcher's own.
    #[serde(default)]
    pub host: Option<String>,
    /// Guest memory that it may fill, in bytes.
    pub memory_bytes: u64,
}

/// Starts and ends the processes of nodes, on whichever host.
pub trait NodeProcesses: Send + Sync {
    /// Starts the process of node `number` and links it with all others; the link to this
    /// process arrives at [`Slice::connect`]. Waits until the process has begun.
    ///
    /// # Errors
    /// Why it cannot be; nothing is left.
    fn start(&self, number: usize, node: &NewNode, job: &Job) -> Result<(), String>;

    /// Ends the process of a node that did not join, or has left.
    fn end(&self, number: usize);

    /// Has the host of node `number` make an empty file for a copy of a disk, and give it to the
    /// node. The host removes it unless the home goes there.
    ///
    /// # Errors
    /// Why it does not; nothing is left.
    fn make_disk(&self, number: usize, disk: &NewDisk) -> Result<(), String>;

    /// Has the host of node `number` lend node 0, which is on this host, too, what it lends that
    /// node.
    ///
    /// # Errors
    /// It does not.
    fn share_memory(&self, number: usize) -> Result<(), String>;

    /// Has the host of node `number` start a process that can take the machine's home, around
    /// the memory of that node. Returns what this host calls that one. Where other nodes stay,
    /// `number` is free: that of the process's links to them, on the host of node `beside`.
    ///
    /// # Errors
    /// Why the home stays here; nothing is left.
    fn prepare_home(&self, number: usize, beside: Option<usize>) -> Result<String, String>;

    /// Tells the host that the process will be needed, however long that takes. Said at least
    /// once in a minute.
    fn await_home(&self, number: usize);

    /// Tells that process that frames for the machine come to its host from now on.
    fn announce_home(&self, number: usize);

    /// Sends the machine's state there, and waits until the process has taken it.
    ///
    /// # Errors
    /// Whether it can still go on there.
    fn send_home(&self, number: usize, home: HomeState) -> Result<(), HomeError>;

    /// Lets the process there go on, and waits until it does. A host that cannot be told lets
    /// it go on, too.
    ///
    /// # Errors
    /// It did not say so.
    fn let_home_go(&self, number: usize) -> Result<(), String>;

    /// Ends the process that was prepared, if it has not gone on.
    ///
    /// # Errors
    /// Its host does not say that it has ended.
    fn give_home_up(&self, number: usize) -> Result<(), String>;
}

/// A disk that will be copied to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    pub number: u8,
    /// On both hosts.
    pub path: PathBuf,
    pub bytes: u64,
}

/// Why a home did not reach the process that was to take it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HomeError {
    /// That process has ended: the machine can go on here.
    Refused(String),
    /// It is not known whether the machine goes on there, so it must not go on here.
    Unknown(String),
}

/// What a change of membership is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// The node's process starts.
    #[default]
    Starting,
    /// All nodes learn of it.
    Joining,
    /// Its pages are sent ahead, while its vCPUs go on.
    SendingAhead,
    /// Its vCPUs move elsewhere.
    MovingVcpus,
    /// Its pages move elsewhere.
    MovingPages,
    /// All nodes check that nothing is left of it.
    Leaving,
    /// The disks of node 0 are copied to the last node's host.
    CopyingDisks,
    /// The rest of the machine goes to a process on the last node's host.
    MovingHome,
}

/// How far a change of membership is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    pub activity: Activity,
    /// The node whose vCPUs and pages move.
    pub from: Option<usize>,
    /// vCPUs that are still on the node that leaves.
    pub vcpus_left: usize,
    /// Bytes of pages that are still there.
    pub bytes_left: u64,
    /// Bytes of pages that went to other nodes.
    pub bytes_sent: u64,
    /// When it will be done, by the rate so far; `None` while that is unknown.
    pub seconds_left: Option<f64>,
}

/// One change of membership, for those who watch it.
#[derive(Default)]
pub struct Job {
    is_cancelled: AtomicBool,
    view: Mutex<JobView>,
}

impl Job {
    /// Asks for the end: all will be as before, unless it is too late.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::SeqCst);
    }

    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }

    pub fn view(&self) -> JobView {
        *lock(&self.view)
    }

    pub(super) fn enter(&self, activity: Activity) {
        lock(&self.view).activity = activity;
    }

    pub(super) fn show(&self, change: impl FnOnce(&mut JobView)) {
        change(&mut lock(&self.view));
    }

    pub(super) fn check(&self, request: &'static str) -> Result<(), Refusal> {
        match self.is_cancelled() {
            true => Err(impossible(request, "it was cancelled".into())),
            false => Ok(()),
        }
    }
}

/// A node that joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grown {
    /// Its number.
    pub node: usize,
    /// Guest memory that it may fill, in bytes.
    pub memory_bytes: u64,
    /// From the request to its membership.
    pub total_s: f64,
    /// Of it, from the moment when its process was ready.
    pub join_s: f64,
}

/// A node that left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Released {
    /// Its number, which is free now.
    pub node: usize,
    /// vCPUs that moved elsewhere.
    pub vcpus: usize,
    /// Queues of disks and networks that other nodes serve instead.
    #[serde(default)]
    pub queues: usize,
    /// How long the guest stood for these.
    #[serde(default)]
    pub queues_stopped_ns: u64,
    /// The longest time that one of these vCPUs stood.
    #[serde(default)]
    pub pause_ns: u64,
    /// Bytes of pages that went to other nodes.
    pub bytes: u64,
    /// From the request to the end of its links.
    pub total_s: f64,
    /// Of it, the time in which pages moved.
    pub pages_s: f64,
}

pub(super) fn impossible(request: &'static str, reason: String) -> Refusal {
    Refusal::Impossible { request, reason }
}

impl Owner {
    /// On the primary: one change, to its end.
    pub(super) fn change_membership(&mut self, change: Change, node: usize) -> Result<(), Refusal> {
        let name = change_name(change);
        self.check_change(change, node)
            .map_err(|reason| impossible(name, reason))?;
        if matches!(change, Change::Drain | Change::Leave) {
            self.take_roles_from(node)?;
        }
        let slice = self.slice.as_deref().filter(|slice| slice.is_primary());
        let slice = slice
            .ok_or_else(|| impossible(name, "node 0 does this for the whole machine".to_owned()))?;
        match slice.change_membership(change, node) {
            Ok(()) => {}
            Err(ChangeError::Undone(reason)) => return Err(impossible(name, reason)),
            Err(ChangeError::Broken(reason)) => return Err(self.broken(name, reason)),
        }
        match change {
            Change::Join => self
                .start_joined(slice, node)
                .map_err(|reason| self.broken(name, reason)),
            Change::Drain | Change::Yield => Ok(()),
            Change::Keep | Change::Leave => {
                // A slice that does not answer is lost, which ends the machine; without an
                // end of hand-overs, slices have more room than they need.
                let _ = slice.fit_rooms();
                Ok(())
            }
        }
    }

    /// Tells a node that joined where the roles are, and has it run, or pause, as the machine
    /// does. It has no vCPU yet.
    fn start_joined(&self, slice: &Slice, node: usize) -> Result<(), String> {
        self.announce_platform(slice, node)?;
        self.announce_queues(slice, node)?;
        let time = self.announce_time();
        let time = time.map_err(|refusal| refusal.to_string())?;
        slice.command(node, &self.run_command(time))?;
        if self.stage == Stage::Paused {
            // Its clock went on from the others' pause.
            let tsc = self.clock.now();
            slice.command(node, &SliceCommand::Pause)?;
            slice.command(node, &SliceCommand::StandAt { tsc })?;
        }
        Ok(())
    }

    /// Moves the roles of a node that leaves to node 0.
    fn take_roles_from(&mut self, node: usize) -> Result<(), Refusal> {
        let slice = self.slice.as_deref();
        if slice.is_some_and(|slice| slice.platform().holder() == node) {
            self.move_platform(PRIMARY)?;
        }
        if self.keeps_time(node) {
            self.move_time(PRIMARY)?;
        }
        Ok(())
    }

    /// What the slices themselves do not check: a node that leaves has no vCPU. One can have
    /// come since the others left.
    fn check_change(&self, change: Change, node: usize) -> Result<(), String> {
        let slice = self.slice.as_deref();
        let has_vcpu = slice.is_some_and(|slice| !slice.locations().at(node).is_empty());
        match change == Change::Leave && has_vcpu {
            true => Err(format!("a vCPU moved to node {node} meanwhile")),
            false => Ok(()),
        }
    }

    fn broken(&self, request: &'static str, reason: String) -> Refusal {
        // A lost node is reported by the name that it was reported lost with.
        let reason = match self.shutdown.wanted() {
            Some(End::Failed { reason }) => reason,
            _ => reason,
        };
        let refusal = Refusal::Failed { request, reason };
        self.shutdown.end(End::Failed {
            reason: refusal.to_string(),
        });
        refusal
    }
}

impl Handle {
    /// Adds a node to the machine. One change at a time; the caller sees to that.
    ///
    /// # Errors
    /// Why it cannot be; the machine runs on as before, unless a node was lost.
    pub fn grow(
        &self,
        processes: &dyn NodeProcesses,
        node: &NewNode,
        job: &Job,
    ) -> Result<Grown, Refusal> {
        let begun = Instant::now();
        let slice = self.several(GROW)?;
        let number = slice.free_number().ok_or_else(|| {
            impossible(
                GROW,
                format!(
                    "it has {} nodes, which is the most for one that was started on {}",
                    slice.members().len(),
                    slice.placement().slices()
                ),
            )
        })?;
        self.check_runs(GROW)?;
        processes
            .start(number, node, job)
            .map_err(|reason| impossible(GROW, reason))?;
        let ready = Instant::now();
        let joined = self.admit(slice, number, job);
        if let Err(refusal) = joined {
            slice.disconnect(number);
            processes.end(number);
            return Err(refusal);
        }
        Ok(Grown {
            node: number,
            memory_bytes: node.memory_bytes,
            total_s: begun.elapsed().as_secs_f64(),
            join_s: ready.elapsed().as_secs_f64(),
        })
    }

    fn admit(&self, slice: &Slice, number: usize, job: &Job) -> Result<(), Refusal> {
        if !slice.is_linked(number, LINK_WAIT) {
            let reason = format!("node {number} ended before it joined, or was not linked");
            return Err(impossible(GROW, reason));
        }
        job.check(GROW)?;
        job.enter(Activity::Joining);
        self.change(Change::Join, number)
    }

    /// Takes a node out of the machine: its vCPUs and pages go to the others.
    ///
    /// # Errors
    /// Why it cannot be; the machine runs on with the node, unless a node was lost.
    pub fn release(
        &self,
        processes: &dyn NodeProcesses,
        node: usize,
        job: &Job,
    ) -> Result<Released, Refusal> {
        let slice = self.several(RELEASE)?;
        let _paused = PausedExchanges::new(slice);
        self.release_paused(processes, node, job)
    }

    /// The same, while no pages are exchanged.
    pub(super) fn release_paused(
        &self,
        processes: &dyn NodeProcesses,
        node: usize,
        job: &Job,
    ) -> Result<Released, Refusal> {
        let begun = Instant::now();
        let slice = self.several(RELEASE)?;
        check_release(slice, node).map_err(|reason| impossible(RELEASE, reason))?;
        self.check_runs(RELEASE)?;
        job.show(|view| view.from = Some(node));
        // Before its pages go: to serve queues it uses some all the time.
        let queues = self.move_queues(QueueMove::Away(node));
        let queues = queues.map_err(|refusal| refusal.of(RELEASE))?;
        let left = self
            .change(Change::Drain, node)
            .and_then(|()| self.empty(slice, node, job))
            .and_then(|moved| {
                job.enter(Activity::Leaving);
                self.change(Change::Leave, node).map(|()| moved)
            });
        let (vcpus, pause_ns, pages) = left.inspect_err(|_| {
            self.keep(slice, node);
            // It serves what it served before, unless the machine ends.
            let _ = self.move_queues(QueueMove::To(queues.before.clone()));
        })?;
        processes.end(node);
        Ok(Released {
            node,
            vcpus,
            queues: queues.queues,
            queues_stopped_ns: queues.stopped_ns,
            pause_ns,
            bytes: pages.bytes,
            total_s: begun.elapsed().as_secs_f64(),
            pages_s: pages.seconds,
        })
    }

    /// Calls a drain off.
    pub(super) fn keep(&self, slice: &Slice, node: usize) {
        // Where the machine ends there is nothing to keep.
        let _ = slice.command_drain(node, &SliceCommand::StopMoves);
        let _ = self.change(Change::Keep, node);
    }

    /// Has vCPUs and pages go to the other members: how many vCPUs, and the longest time that one
    /// stood.
    fn empty(
        &self,
        slice: &Slice,
        node: usize,
        job: &Job,
    ) -> Result<(usize, u64, MovedPages), Refusal> {
        job.enter(Activity::MovingVcpus);
        let (mut vcpus, mut pause_ns) = (0, 0);
        while let Some(vcpu) = slice.locations().at(node).first().copied() {
            let left = slice.locations().at(node).len();
            job.show(|view| view.vcpus_left = left);
            job.check(RELEASE)?;
            let moved = self.move_vcpu(vcpu, least_vcpus(slice, node))?;
            pause_ns = moved.stopped_ns.max(pause_ns);
            vcpus += 1;
        }
        job.show(|view| view.vcpus_left = 0);
        let others: Vec<usize> = (slice.members().into_iter())
            .filter(|other| *other != node)
            .collect();
        // No page gets another manager meanwhile: the node is draining, and one change is
        // under way.
        let pages = slice.managed_pages(node).div_ceil(others.len() as u64);
        let shares: Vec<DrainShare> = (others.into_iter())
            .map(|slice| DrainShare { slice, pages })
            .collect();
        add_room(slice, &shares).map_err(|reason| impossible(RELEASE, reason))?;
        let pages = self.move_pages(slice, node, shares, Until::Nothing, job)?;
        Ok((vcpus, pause_ns, pages))
    }

    /// Has the pages of a node that drains go to slices that have room, and waits until they
    /// are gone.
    pub(super) fn move_pages(
        &self,
        slice: &Slice,
        node: usize,
        shares: Vec<DrainShare>,
        until: Until,
        job: &Job,
    ) -> Result<MovedPages, Refusal> {
        job.enter(Activity::MovingPages);
        let begun = Instant::now();
        let failed = |reason: String| impossible(RELEASE, reason);
        let drain = SliceCommand::DrainPages(shares);
        slice.command_drain(node, &drain).map_err(failed)?;
        let mut last = (Instant::now(), u64::MAX);
        loop {
            let reply = slice.command_drain(node, &SliceCommand::DrainProgress);
            let report = match reply.map_err(failed)? {
                SliceReply::Drained(report) => report,
                other => return Err(failed(format!("node {node} answered {other:?}"))),
            };
            show(job, report, begun.elapsed());
            let has_all_sent = || report.left_pages == 0 && slice.managed_pages(node) == 0;
            if report.is_over || until == Until::NothingManaged && has_all_sent() {
                return Ok(MovedPages {
                    bytes: report.sent_pages * PAGE_SIZE,
                    seconds: begun.elapsed().as_secs_f64(),
                });
            }
            job.check(RELEASE)?;
            if report.lacks_room {
                return Err(failed("the other nodes have no room for its pages".into()));
            }
            if report.left_pages != last.1 {
                last = (Instant::now(), report.left_pages);
            } else if last.0.elapsed() > STANDSTILL {
                return Err(failed(format!(
                    "{} pages of node {node} did not move for {} s",
                    report.left_pages,
                    STANDSTILL.as_secs()
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    pub(super) fn change(&self, change: Change, node: usize) -> Result<(), Refusal> {
        self.request(MachineRequest::ChangeMembership { change, node })
            .map(drop)
    }

    pub(super) fn several(&self, request: &'static str) -> Result<&Slice, Refusal> {
        self.slice.as_deref().ok_or_else(|| {
            let reason = "it was started on one node, and its memory cannot be shared: start it \
                          with --growable yes, --nodes 2 or --on HOST";
            impossible(request, reason.into())
        })
    }

    pub(super) fn check_runs(&self, request: &'static str) -> Result<(), Refusal> {
        match self.status()?.stage {
            Stage::Running | Stage::Paused => Ok(()),
            stage => Err(Refusal::Stage { request, stage }),
        }
    }
}

/// While it lives no slice exchanges pages, so that those that each manages can be counted.
pub(super) struct PausedExchanges<'a>(&'a Slice);

impl<'a> PausedExchanges<'a> {
    pub fn new(slice: &'a Slice) -> Self {
        let paused = Self(slice);
        let members = slice.members().into_iter();
        members.for_each(|node| paused.pause(node));
        // Node 0, which counts, may not have heard yet of pages that moved between others.
        // Where that takes too long, what is counted is refused later, and nothing is lost.
        let _ = slice.wait_until_settled();
        paused
    }

    /// Also on a node that has joined since.
    pub fn pause(&self, node: usize) {
        self.tell(node, true);
    }

    fn tell(&self, node: usize, is_paused: bool) {
        // A slice that does not answer is lost, which ends the machine.
        let _ = (self.0).command_drain(node, &SliceCommand::PauseExchanges(is_paused));
    }
}

impl Drop for PausedExchanges<'_> {
    fn drop(&mut self) {
        // After that the others do not answer this process, and exchange pages since they heard of
        // the heir.
        if !self.0.has_yielded() {
            let members = self.0.members().into_iter();
            members.for_each(|node| self.tell(node, false));
        }
    }
}

/// What of a release can be seen without asking anybody.
pub(super) fn check_release(slice: &Slice, node: usize) -> Result<(), String> {
    slice.check_member(node)?;
    if node == PRIMARY {
        return Err("node 0 has the machine's console, its PCI bus and its API".into());
    }
    match slice.devices_of(node).first() {
        Some(device) => Err(format!(
            "node {node} has {device}, and disks and networks cannot move to another node"
        )),
        None => Ok(()),
    }
}

/// When a node has given enough pages away.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Until {
    /// It has no page.
    Nothing,
    /// It manages no page, and what it had at first is gone: its devices may use pages all
    /// the time.
    NothingManaged,
}

/// Pages that went to other nodes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MovedPages {
    pub bytes: u64,
    pub seconds: f64,
}

/// Gives slices room for the pages that they are about to manage.
pub(super) fn add_room(slice: &Slice, shares: &[DrainShare]) -> Result<(), String> {
    for share in shares {
        let pages = share.pages;
        slice.command_drain(share.slice, &SliceCommand::AddRoom { pages })?;
    }
    Ok(())
}

/// The member with the fewest vCPUs, `node` excepted.
fn least_vcpus(slice: &Slice, node: usize) -> usize {
    let others = slice.members().into_iter().filter(|other| *other != node);
    let least = others.min_by_key(|other| slice.locations().at(*other).len());
    least.unwrap_or(PRIMARY)
}

fn show(job: &Job, report: DrainReport, passed: Duration) {
    let mut view = lock(&job.view);
    let done = report.sent_pages as f64;
    view.bytes_left = report.left_pages * PAGE_SIZE;
    view.bytes_sent = report.sent_pages * PAGE_SIZE;
    view.seconds_left =
        (done > 0.0).then(|| passed.as_secs_f64() * report.left_pages as f64 / done);
}
