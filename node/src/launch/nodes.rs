//! The nodes of an aggregate other than home, and the making of their slices.
//!
//! A node is `Running`, then at most once `Left` (given back) or `Lost`; it
//! never comes back under the same number. A running node has exactly one slice
//! per generation; the counters of a local slice's memory live on from one
//! generation to the next.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_proc::boot::CONTROL_FATAL;

use crate::control::{self, Arrival};
use crate::error::LaunchError;
use crate::links::{self, Links};
use crate::options::Placement;
use crate::remote::{self, RemoteSlice};
use crate::report::NodeState;
use crate::shared::{SharedMemory, Snapshot};
use crate::spawn::{self, Ended, Role, Runtime};

use super::cause::Cause;
use super::plan::{Plan, node_name};
use super::pulse::Pulse;

/// The name of a local slice in a process list.
const SLICE_NAME: &str = "weft-slice";

/// A slice on this host.
pub struct Local {
    /// Its process; none between two generations and after its end.
    pub runtime: Option<Runtime>,
    /// Whether its control socket is still open.
    pub talks: bool,
    /// Its counters.
    pub shared: SharedMemory,
}

impl Local {
    fn listen(&mut self, cause: &mut Cause) {
        let Some(runtime) = &mut self.runtime else {
            return;
        };
        while self.talks {
            match control::receive(runtime.control.as_fd()) {
                Arrival::Message(message) if message.kind == CONTROL_FATAL => {
                    cause.said(control::text(&message));
                }
                Arrival::Message(_) => {}
                Arrival::Nothing => break,
                Arrival::Closed => self.talks = false,
            }
        }
        if let Ok(Some(ended)) = runtime.try_wait() {
            cause.ended(runtime.slice_ended(ended), ended == Ended::Exited(0));
        }
    }
}

/// Where a node's slice is.
pub enum Body {
    /// Started by this launcher.
    Local(Box<Local>),
    /// Started by a daemon.
    Remote(Box<RemoteSlice>),
}

/// One node other than home.
pub struct Node {
    pub number: u32,
    /// What it is called in messages.
    pub name: String,
    /// What became of it.
    pub state: NodeState,
    /// Its slice.
    pub body: Body,
    /// What is known of the slice's end.
    pub cause: Cause,
    /// Whether the slice's process runs.
    pub pulse: Pulse,
}

impl Node {
    /// Its counters as last heard.
    pub fn counters(&self) -> Snapshot {
        match &self.body {
            Body::Local(local) => Snapshot::of(&local.shared),
            Body::Remote(slice) => slice.counters().clone(),
        }
    }

    /// Asks its daemon for a sign of life, and looks for one of the slice. A node
    /// that gave none for the lease has a cause of its end afterwards.
    pub fn heartbeat(&mut self, lease: Duration) {
        let now = Instant::now();
        let beats = match &mut self.body {
            Body::Local(local) => local.shared.stats.beats.load(Ordering::Relaxed),
            Body::Remote(slice) => {
                if let Err(why) = slice.heartbeat(lease) {
                    return self.cause.ended(why, false);
                }
                slice.counters().beats
            }
        };
        if let Some(stood) = self.pulse.stands(beats, now, lease) {
            let why = format!(
                "its slice did not run for {:.0} s: it is stopped, or its host has no time for it",
                stood.as_secs_f32()
            );
            self.cause.ended(why, false);
        }
    }

    /// Its runtime's process id on its own host.
    pub fn pid(&self) -> Option<u32> {
        match &self.body {
            Body::Local(local) => local.runtime.as_ref().map(|runtime| runtime.pid() as u32),
            Body::Remote(slice) => slice.pid(),
        }
    }

    /// What to wait for: the control socket and the end of a local slice, or
    /// the connection to a daemon.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match &self.body {
            _ if self.state != NodeState::Running => Vec::new(),
            Body::Local(local) => match &local.runtime {
                Some(runtime) if local.talks => vec![runtime.control.as_fd(), runtime.pidfd()],
                Some(runtime) => vec![runtime.pidfd()],
                None => Vec::new(),
            },
            Body::Remote(slice) => vec![slice.descriptor()],
        }
    }

    /// Makes the slice look at home. An error means that it has gone, which is
    /// seen elsewhere.
    pub fn kick(&mut self) {
        match &mut self.body {
            Body::Local(local) => {
                if let Some(runtime) = &local.runtime {
                    let _ = runtime.signal(weft_proc::boot::KICK_SIGNAL);
                }
            }
            Body::Remote(slice) => {
                let _ = slice.kick();
            }
        }
    }

    /// Takes what the slice said and how it ended, if it has. True when its host
    /// wants its memory back.
    pub fn listen(&mut self) -> bool {
        match &mut self.body {
            Body::Local(local) => {
                local.listen(&mut self.cause);
                false
            }
            Body::Remote(slice) => match slice.receive() {
                Ok(events) => events.into_iter().fold(false, |leaves, event| {
                    match event {
                        remote::Event::Said(text) => self.cause.said(text),
                        remote::Event::Ended { why, clean } => self.cause.ended(why, clean),
                        remote::Event::Leaving => return true,
                    }
                    leaves
                }),
                Err(why) => {
                    self.cause.ended(why, false);
                    false
                }
            },
        }
    }

    /// Ends the slice and keeps its last counters. The connection to the host of
    /// a node that is out of the aggregate goes too, and its reservation with it.
    pub fn stop(&mut self) {
        match &mut self.body {
            Body::Local(local) => local.runtime = None,
            Body::Remote(slice) => {
                slice.close();
                if self.state != NodeState::Running {
                    slice.disconnect();
                }
            }
        }
    }
}

/// Starts the first generation: all nodes but home, and home's links to them.
/// Fills in the budgets that the user left to remote hosts.
pub fn start(plan: &mut Plan) -> Result<(Vec<Node>, Links), LaunchError> {
    match plan.options.placement.clone() {
        Placement::Embedded(count) => {
            let mut nodes = Vec::new();
            for number in 1..count {
                let shared =
                    SharedMemory::new().map_err(LaunchError::system("make shared memory"))?;
                nodes.push(Node {
                    number: number as u32,
                    name: node_name(&plan.options.placement, number),
                    state: NodeState::Running,
                    body: Body::Local(Box::new(Local {
                        runtime: None,
                        talks: false,
                        shared,
                    })),
                    cause: Cause::default(),
                    pulse: Pulse::new(Instant::now()),
                });
            }
            let links = start_local(plan, &mut nodes)?;
            Ok((nodes, links))
        }
        Placement::Remote(hosts) => start_remote(plan, &hosts),
    }
}

/// Starts the next generation: fresh slices for every node that is still
/// running; no link to one that is not.
pub fn restart(plan: &mut Plan, nodes: &mut [Node]) -> Result<Links, LaunchError> {
    for node in nodes.iter_mut() {
        node.stop();
        node.cause = Cause::default();
        node.pulse = Pulse::new(Instant::now());
        if node.state != NodeState::Running {
            plan.settings.budget_pages[node.number as usize] = 0;
        }
    }
    match plan.options.placement.clone() {
        Placement::Embedded(_) => start_local(plan, nodes),
        Placement::Remote(_) => RemoteSlice::restart(plan, nodes),
    }
}

fn start_local(plan: &Plan, nodes: &mut [Node]) -> Result<Links, LaunchError> {
    let mut mesh = links::mesh(nodes.len() + 1, plan.options.transport)
        .map_err(LaunchError::system("connect the nodes"))?;
    for node in nodes.iter().filter(|node| node.state != NodeState::Running) {
        for links in &mut mesh {
            links[node.number as usize] = None;
        }
    }
    let mut locals: Vec<(u32, &str, &mut Local)> = nodes
        .iter_mut()
        .filter(|node| node.state == NodeState::Running)
        .filter_map(|node| match &mut node.body {
            Body::Local(local) => Some((node.number, node.name.as_str(), &mut **local)),
            Body::Remote(_) => None,
        })
        .collect();
    // All are started before the first is waited for: they get ready together.
    for (_, _, local) in &mut locals {
        local.shared.reset_gauges();
        let role = Role::Slice {
            name: SLICE_NAME,
            confinement: None,
            keeps_errors: true,
            group: None,
        };
        let runtime = spawn::start(&plan.runtime, &role).map_err(LaunchError::system(format!(
            "start {}",
            plan.runtime.display()
        )))?;
        local.runtime = Some(runtime);
        local.talks = true;
    }
    for (number, name, local) in &mut locals {
        let failed = |why| LaunchError::Runtime {
            node: (*name).to_owned(),
            why,
        };
        let Some(runtime) = &mut local.runtime else {
            continue;
        };
        control::expect_hello(runtime).map_err(failed)?;
        let links = &mesh[*number as usize];
        links::send_boot(
            &runtime.control,
            *number,
            &plan.settings,
            links,
            local.shared.descriptor(),
            &[],
        )
        .map_err(|error| failed(format!("did not take its settings: {error}")))?;
    }
    // Only now may the launcher's copies go: a slice whose link is closed at
    // the other end takes its peer for dead.
    for (_, name, local) in &mut locals {
        let Some(runtime) = &mut local.runtime else {
            continue;
        };
        control::expect_ready(runtime).map_err(|why| LaunchError::Runtime {
            node: (*name).to_owned(),
            why,
        })?;
    }
    Ok(mesh.swap_remove(0))
}

fn start_remote(plan: &mut Plan, hosts: &[String]) -> Result<(Vec<Node>, Links), LaunchError> {
    let (slices, links) = RemoteSlice::start_all(plan, hosts)?;
    let nodes = slices
        .into_iter()
        .zip(1..)
        .map(|(slice, number)| Node {
            number,
            name: node_name(&plan.options.placement, number as usize),
            state: NodeState::Running,
            body: Body::Remote(Box::new(slice)),
            cause: Cause::default(),
            pulse: Pulse::new(Instant::now()),
        })
        .collect();
    Ok((nodes, links))
}
