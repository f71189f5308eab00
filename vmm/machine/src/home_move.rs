//! The last step of a migration to one node on another host: what node 0 has besides vCPUs and
//! memory goes to a new process there, and node 0 ends. `super::handover` is what the machines
//! on both sides do.
//!
//! ```text
//!  prepare ─▶ pause, announce, give ─▶ send ─▶ taken ─▶ let go ─▶ goes on there
//!     │         │       │ refused           (whatever happens here)
//!     └─────────┴───────┴──▶ goes on here
//! ```

use std::time::Instant;

use serde::{Deserialize, Serialize};
use weft_aggregate::Slice;

use super::disk_copies::DiskCopies;
use super::handle::Handle;
use super::lifecycle::{End, MOVE_HOME, MachineRequest, Refusal, Stage};
use super::membership::{Activity, HomeError, Job, NodeProcesses, impossible};

/// What node 0 has besides vCPUs and memory.
const HOME: &str = "it has the machine's console, PCI bus and API";

/// A machine that goes on in a process on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeMove {
    /// What the old host calls the new one.
    pub host: String,
    /// Nanoseconds since the move began: all vCPUs stood.
    pub paused_ns: u64,
    /// The last pages had gone, and the state was saved.
    pub given_ns: u64,
    /// The process there had taken the state.
    pub taken_ns: u64,
    /// The machine ran again: it stood for so long at most.
    pub stopped_ns: u64,
}

/// Moves the home to the host of `node`, which has all else, if `with_disks` with copies of node
/// 0's disks.
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
    if slice.members().len() != 2 {
        let reason = "these go to another host only if all else is on one node there";
        return Err(stays(reason.into()));
    }
    let mut disks = DiskCopies::default();
    let mut prepare = || {
        if with_disks {
            disks = DiskCopies::begin(slice, processes, node)?;
        }
        job.enter(Activity::MovingHome);
        // Before a byte is copied: what it refuses is known then.
        let host = processes.prepare_home(node)?;
        disks.converge(job, &|| processes.await_home(node))?;
        job.enter(Activity::MovingHome);
        Ok(host)
    };
    let gone = match prepare() {
        Ok(host) => hand_over(handle, processes, (node, host), &mut disks),
        Err(reason) => {
            if with_disks {
                // The host removes what was copied.
                let _ = processes.give_home_up(node);
            }
            Err(reason)
        }
    };
    if gone.is_err() {
        disks.give_up();
    }
    gone.map_err(stays)
}

fn hand_over(
    handle: &Handle,
    processes: &dyn NodeProcesses,
    (node, host): (usize, String),
    disks: &mut DiskCopies,
) -> Result<HomeMove, String> {
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
        processes.announce_home(node);
        let home = handle.give_home(node, ran)?;
        disks
            .finish()
            .map_err(|reason| impossible(MOVE_HOME, reason))?;
        Ok(home)
    };
    let home = give().map_err(|refusal| {
        // It has no state, so it cannot run. Its host ends it with this process, at the latest.
        let _ = processes.give_home_up(node);
        // An answer that came too late left the home given, or the machine paused. These are
        // refused where it did not.
        let _ = handle.request(MachineRequest::TakeHomeBack);
        if ran {
            let _ = handle.request(MachineRequest::Resume);
        }
        refusal.to_string()
    })?;
    let given_ns = since();
    match processes.send_home(node, *home) {
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
    processes.let_home_go(node)?;
    Ok(HomeMove {
        host,
        paused_ns,
        given_ns,
        taken_ns,
        stopped_ns: since(),
    })
}
