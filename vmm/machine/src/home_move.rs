//! The last step of a migration to other hosts: what node 0 has besides vCPUs and memory goes to
//! a new process on one of them, and node 0 ends. `super::handover` is what the machines on both
//! sides do.
//!
//! ```text
//!  prepare ─▶ pause, announce, give ─▶ send ─▶ taken ─▶ let go ─▶ goes on there
//!     │         │       │ refused           (whatever happens here)
//!     └─────────┴───────┴──▶ goes on here
//! ```

use std::time::Instant;

use serde::{Deserialize, Serialize};
use weft_aggregate::remote_devices::Servers;
use weft_aggregate::{PRIMARY, Slice};

use super::disk_copies::DiskCopies;
use super::handle::Handle;
use super::lifecycle::{End, MOVE_HOME, MachineRequest, Refusal, Stage};
use super::membership::{Activity, HomeError, Job, NodeProcesses, impossible};
use super::move_report::QueueMove;

/// What node 0 has besides vCPUs and memory.
const HOME: &str = "it has the machine's console, PCI bus and API";

/// A machine that goes on in a process on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeMove {
    /// What the old host calls the new one.
    pub host: String,
    /// The process there has all of the machine, and no other node is left.
    #[serde(default)]
    pub alone: bool,
    /// Nanoseconds since the move began: all vCPUs stood.
    pub paused_ns: u64,
    /// The last pages had gone, and the state was saved.
    pub given_ns: u64,
    /// The process there had taken the state.
    pub taken_ns: u64,
    /// The machine ran again: it stood for so long at most.
    pub stopped_ns: u64,
}

/// Moves the home to the host of `node`, if `with_disks` with copies of node 0's disks. Where
/// that is not the only other node, or a network has pairs for several, the new process takes the place of node 0 among them, and
/// has links to them under a number that is free now.
///
/// # Errors
/// Why it stays.
pub(super) fn move_home(
    (handle, slice, processes): (&Handle, &Slice, &dyn NodeProcesses),
    node: usize,
    with_disks: bool,
    job: &Job,
) -> Result<HomeMove, String> {
    let stays = |reason: String| format!("{HOME}: {reason}");
    // A network that began on several nodes has pairs of queues for them.
    let fits_one = !slice.remote_devices().has_dealt_pairs();
    let heir = match slice.members().len() {
        2 if fits_one => None,
        _ => Some(slice.free_number().ok_or_else(|| {
            stays("a process that takes them needs a number, and all are used".into())
        })?),
    };
    let place = Place {
        node,
        heir,
        taker: heir.unwrap_or(node),
    };
    let mut disks = DiskCopies::default();
    let mut queues = None;
    let mut prepare = || {
        if with_disks {
            disks = DiskCopies::begin(slice, processes, node)?;
        }
        job.enter(Activity::MovingHome);
        if heir.is_some() || serves_elsewhere(slice) {
            serve_here(handle, slice, &mut queues)?;
        }
        // Before a byte is copied: what it refuses is known then.
        let host = processes.prepare_home(place.taker, heir.map(|_| node))?;
        disks.converge(job, &|| processes.await_home(place.taker))?;
        job.enter(Activity::MovingHome);
        Ok(host)
    };
    let gone = match prepare() {
        Ok(host) => hand_over(handle, processes, (place, host), &mut disks),
        Err(reason) => {
            if with_disks {
                // The host removes what was copied.
                let _ = processes.give_home_up(place.taker);
            }
            Err(reason)
        }
    };
    if gone.is_err() {
        if heir.is_some() && with_disks {
            let _ = processes.give_home_up(node);
        }
        if let Some(heir) = heir {
            processes.end(heir);
        }
        if let Some(before) = queues {
            // They are served where they were, unless the machine ends.
            let _ = handle.move_queues(QueueMove::To(before));
        }
        disks.give_up();
    }
    gone.map_err(stays)
}

/// Whether another node serves a network that any node may serve: a machine on one node has none
/// of these.
fn serves_elsewhere(slice: &Slice) -> bool {
    let devices = slice.remote_devices();
    devices.queue_servers_open_at(PRIMARY) != devices.queue_servers().1
}

/// Has node 0 serve the queues of its disks and networks, which other nodes may serve: they have no
/// part of the home then. `before`: where they were served, also if one of the nodes refuses.
fn serve_here(handle: &Handle, slice: &Slice, before: &mut Option<Servers>) -> Result<(), String> {
    for node in slice.members().into_iter().filter(|node| *node != PRIMARY) {
        let moved = handle.move_queues(QueueMove::Away(node));
        let moved = moved.map_err(|refusal| refusal.to_string())?;
        if moved.queues > 0 {
            before.get_or_insert(moved.before);
        }
    }
    Ok(())
}

/// Where the home goes.
#[derive(Clone, Copy)]
struct Place {
    /// A node on that host.
    node: usize,
    /// The number of the links to the process that takes it, if other nodes have some.
    heir: Option<usize>,
    /// The node at whose host the launcher asks for that process.
    taker: usize,
}

fn hand_over(
    handle: &Handle,
    processes: &dyn NodeProcesses,
    (place, host): (Place, String),
    disks: &mut DiskCopies,
) -> Result<HomeMove, String> {
    let Place { node, heir, taker } = place;
    let begun = Instant::now();
    let since = || begun.elapsed().as_nanos() as u64;
    let (mut paused_ns, mut ran) = (0, false);
    let request = |request| {
        handle
            .request(request)
            .map_err(|refusal| refusal.to_string())
    };
    let mut give = || -> Result<_, Refusal> {
        ran = handle.status()?.stage == Stage::Running;
        if ran {
            handle.request(MachineRequest::Pause)?;
        }
        paused_ns = since();
        // As early as the machine sends nothing more from here.
        processes.announce_home(taker);
        let home = handle.give_home((node, heir), ran)?;
        disks
            .finish()
            .map_err(|reason| impossible(MOVE_HOME, reason))?;
        Ok(home)
    };
    let home = give().map_err(|refusal| {
        // It has no state, so it cannot run. Its host ends it with this process, at the latest.
        let _ = processes.give_home_up(taker);
        // An answer that came too late left the home given, or the machine paused. These are
        // refused where it did not.
        let _ = handle.request(MachineRequest::TakeHomeBack);
        if ran {
            let _ = handle.request(MachineRequest::Resume);
        }
        refusal.to_string()
    })?;
    let given_ns = since();
    match processes.send_home(taker, *home) {
        Ok(()) => {}
        Err(HomeError::Refused(reason)) => {
            request(MachineRequest::TakeHomeBack)?;
            return Err(reason);
        }
        Err(HomeError::Unknown(reason)) => {
            let reason = format!("{reason}; `weft vm list` on {host} says whether it goes on");
            let end = End::Failed {
                reason: reason.clone(),
            };
            request(MachineRequest::EndGiven(end))?;
            return Err(reason);
        }
    }
    let taken_ns = since();
    // From here on it goes on there, whatever happens here.
    request(MachineRequest::EndGiven(End::Moved { host: host.clone() }))?;
    processes.let_home_go(taker)?;
    Ok(HomeMove {
        host,
        alone: place.heir.is_none(),
        paused_ns,
        given_ns,
        taken_ns,
        stopped_ns: since(),
    })
}
