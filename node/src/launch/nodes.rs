//! The nodes of an aggregate other than home, and the making of their slices.
//!
//! A node is `Running`, then at most once `Left` (given back) or `Lost`; it
//! never comes back under the same number. A running node has exactly one slice
//! per generation; what is kept of a local slice lives on from one generation to the
//! next.
//!
//! ```text
//! open ──▶ spawn ──▶ join ──▶ (running)
//!            ▲                   │ renew
//!            └───────────────────┘
//! ```

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::error::{LaunchError, sentence};
use crate::links::{self, Links};
use crate::options::Placement;
use crate::remote::{self, Connection, HomePlace, RemoteSlice};
use crate::report::NodeState;
use crate::said::Spoken;
use crate::spawn::{self, Ended, Process};

use super::cause::Cause;
use super::pulse::Pulse;
use super::workload::Workload;

/// A slice on this host.
pub struct Local<K> {
    /// Its process; none between two generations and after its end.
    pub process: Option<Process>,
    /// Whether its control socket is still open.
    talks: bool,
    /// What outlives it.
    pub kept: K,
}

/// Where a node's slice is.
pub enum Body<K> {
    /// Started by this launcher.
    Local(Box<Local<K>>),
    /// Started by a daemon.
    Remote(Box<RemoteSlice>),
}

/// What a node, or the host that it is on, did by itself.
#[derive(Debug, PartialEq, Eq)]
pub enum NodeEvent {
    /// It has something to say to the user.
    Said(String),
    /// Its slice has its links, and has begun.
    Ready,
    /// Its slice ended.
    Ended {
        /// The way it ended, as a sentence about the node.
        why: String,
        /// As it does when its links close.
        clean: bool,
    },
    /// Its host cannot be reached any more.
    Unreachable(String),
    /// Its daemon ends.
    Leaving,
    /// Its host wants the memory back: its owner needs it, or the host is drained.
    WantedBack,
    /// Its daemon expects the links to a node that joins, or says why it does not.
    Expects(Result<(), String>),
    /// Where node 0's part of its machine is; or why it does not come.
    Home {
        request: u64,
        outcome: Result<HomePlace, String>,
    },
}

/// One node other than home.
pub struct Node<W: Workload> {
    /// Its number in the aggregate, 1 or more.
    pub number: u32,
    /// What it is called in messages.
    pub name: String,
    /// What became of it.
    pub state: NodeState,
    /// Its slice.
    pub body: Body<W::Kept>,
    /// What is known of the slice's end.
    pub cause: Cause,
    /// Whether the slice's process runs.
    pub pulse: Pulse,
    /// The request of home for which it was started, until it has begun.
    pub joins_for: Option<u64>,
}

impl<W: Workload> Node<W> {
    fn new(workload: &W, number: u32, body: Body<W::Kept>) -> Node<W> {
        let name = node_name(workload.placement(), number as usize);
        Node::joined((number, name), body)
    }

    /// A node that joins, with its process on this host.
    pub fn joining(request: u64, number: u32, process: Process, kept: W::Kept) -> Node<W> {
        let local = Local {
            process: Some(process),
            talks: true,
            kept,
        };
        Node {
            joins_for: Some(request),
            ..Node::joined(
                (number, format!("local {number}")),
                Body::Local(Box::new(local)),
            )
        }
    }

    /// A node that came later, whose slice has begun.
    pub fn joined((number, name): (u32, String), body: Body<W::Kept>) -> Node<W> {
        Node {
            number,
            name,
            state: NodeState::Running,
            body,
            cause: Cause::default(),
            pulse: Pulse::new(Instant::now()),
            joins_for: None,
        }
    }

    /// Asks its daemon for a sign of life, and looks for one of the slice. A node
    /// that gave none for the lease has a cause of its end afterwards. `now` is the
    /// time of the owner's turn.
    pub(super) fn heartbeat(&mut self, now: Instant, lease: Duration) -> Option<NodeEvent> {
        let beats = match &mut self.body {
            Body::Local(local) => W::beats(&local.kept),
            Body::Remote(slice) => {
                if let Err(why) = slice.heartbeat(now, lease) {
                    return Some(self.happened(NodeEvent::Unreachable(sentence(&why))));
                }
                W::BEATS.then(|| slice.counters().beats)
            }
        };
        let stood = self.pulse.stands(beats?, now, lease)?;
        let why = format!(
            "its slice did not run for {:.0} s: it is stopped, or its host has no time for it",
            stood.as_secs_f32()
        );
        Some(self.happened(NodeEvent::Ended { why, clean: false }))
    }

    /// The event, once it is remembered as a cause.
    fn happened(&mut self, event: NodeEvent) -> NodeEvent {
        match &event {
            NodeEvent::Said(text) => self.cause.said(text.clone()),
            NodeEvent::Ended { why, clean } => self.cause.ended(why.clone(), *clean),
            NodeEvent::Unreachable(why) => self.cause.ended(why.clone(), false),
            NodeEvent::Leaving
            | NodeEvent::WantedBack
            | NodeEvent::Ready
            | NodeEvent::Expects(_)
            | NodeEvent::Home { .. } => {}
        }
        event
    }

    /// Its process's id on its own host.
    pub fn pid(&self) -> Option<u32> {
        match &self.body {
            Body::Local(local) => local.process.as_ref().map(|process| process.pid() as u32),
            Body::Remote(slice) => slice.pid(),
        }
    }

    /// What to wait for: the control socket and the end of a local slice, or
    /// the connection to a daemon.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match &self.body {
            _ if self.state != NodeState::Running => Vec::new(),
            Body::Local(local) => match &local.process {
                // An end that is known stays readable.
                Some(_) if self.cause.has_ended() => Vec::new(),
                Some(process) if local.talks => vec![process.control.as_fd(), process.pidfd()],
                Some(process) => vec![process.pidfd()],
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
                if let Some(process) = &local.process {
                    let _ = process.signal(weft_proc::boot::KICK_SIGNAL);
                }
            }
            Body::Remote(slice) => {
                let _ = slice.kick();
            }
        }
    }

    /// What the slice said and how it ended, if it has, and what its host did.
    pub fn listen(&mut self) -> Vec<NodeEvent> {
        let events = match &mut self.body {
            Body::Local(local) => local.listen(W::hear),
            Body::Remote(slice) => match slice.receive() {
                Ok(events) => events.into_iter().map(NodeEvent::from).collect(),
                Err(why) => vec![NodeEvent::Unreachable(sentence(&why))],
            },
        };
        events
            .into_iter()
            .map(|event| self.happened(event))
            .collect()
    }

    /// The node is lost: its slice is ended, and its host gets back what it lent.
    pub fn give_up(&mut self) {
        self.state = NodeState::Lost;
        match &mut self.body {
            Body::Local(local) => local.process = None,
            Body::Remote(slice) => slice.disconnect(),
        }
    }

    /// Ends the slice and keeps its last counters. The connection to the host of
    /// a node that is out of the aggregate goes too, and its reservation with it.
    pub fn stop(&mut self) {
        match &mut self.body {
            Body::Local(local) => local.process = None,
            Body::Remote(slice) => {
                slice.close();
                if self.state != NodeState::Running {
                    slice.disconnect();
                }
            }
        }
    }
}

impl<K> Local<K> {
    /// What the process said, and how it ended.
    fn listen(&mut self, mut hear: impl FnMut(BorrowedFd<'_>) -> Spoken) -> Vec<NodeEvent> {
        let mut events = Vec::new();
        let Some(process) = &mut self.process else {
            return events;
        };
        // Before its messages are read, so that the last of them is among them.
        let ended = process.try_wait();
        while self.talks {
            match hear(process.control.as_fd()) {
                Spoken::Sentence(text) => events.push(NodeEvent::Said(text)),
                Spoken::Ready => events.push(NodeEvent::Ready),
                Spoken::Other => {}
                Spoken::Nothing => break,
                Spoken::Closed => self.talks = false,
            }
        }
        if let Ok(Some(ended)) = ended {
            events.push(NodeEvent::Ended {
                why: process.slice_ended(ended),
                clean: ended == Ended::Exited(0),
            });
        }
        events
    }
}

impl From<remote::RemoteEvent> for NodeEvent {
    fn from(event: remote::RemoteEvent) -> NodeEvent {
        match event {
            remote::RemoteEvent::Said(text) => NodeEvent::Said(text),
            remote::RemoteEvent::Ended { why, clean } => NodeEvent::Ended { why, clean },
            remote::RemoteEvent::Leaving => NodeEvent::Leaving,
            remote::RemoteEvent::WantedBack => NodeEvent::WantedBack,
            remote::RemoteEvent::Expects(answer) => NodeEvent::Expects(answer),
            remote::RemoteEvent::Home { request, outcome } => NodeEvent::Home { request, outcome },
        }
    }
}

/// What a node is called in messages.
pub fn node_name(placement: &Placement, node: usize) -> String {
    match (placement, node) {
        (_, 0) => "home".into(),
        (Placement::Embedded(_), node) => format!("local {node}"),
        (Placement::Remote(hosts), node) => hosts[node - 1].clone(),
    }
}

/// All nodes but home, without slices. Hosts are asked, in order: first who they are
/// and whether they fit, then for room.
pub fn open<W: Workload>(workload: &mut W) -> Result<Vec<Node<W>>, LaunchError> {
    match workload.placement().clone() {
        Placement::Embedded(count) => (1..count as u32)
            .map(|number| {
                let local = Local {
                    process: None,
                    talks: false,
                    kept: workload.keep()?,
                };
                Ok(Node::new(workload, number, Body::Local(Box::new(local))))
            })
            .collect(),
        Placement::Remote(hosts) => {
            let identity = workload.identity()?;
            let check = |ours: &_, theirs: &_| workload.fits(ours, theirs);
            let connections = hosts
                .iter()
                .map(|host| Connection::open_for(&identity, host, check))
                .collect::<Result<Vec<_>, _>>()?;
            let mut nodes = Vec::new();
            for (mut connection, number) in connections.into_iter().zip(1..) {
                let request = workload.reservation(number);
                let budget_pages = remote::reserve(&mut connection, &request)?;
                workload.reserved(number, budget_pages);
                let slice = Box::new(RemoteSlice::new(connection));
                nodes.push(Node::new(workload, number, Body::Remote(slice)));
            }
            Ok(nodes)
        }
    }
}

/// Ends the slices of a generation, so that running nodes can have new ones.
pub fn renew<W: Workload>(nodes: &mut [Node<W>]) {
    for node in nodes {
        node.stop();
        node.cause = Cause::default();
        node.pulse = Pulse::new(Instant::now());
    }
}

/// Starts the processes of running nodes on this host; they wait for their
/// settings.
pub fn spawn<W: Workload>(workload: &W, nodes: &mut [Node<W>]) -> Result<(), LaunchError> {
    for local in locals(nodes).map(|(_, _, local)| local) {
        let executable = workload.executable();
        let process = spawn::start(executable, &workload.role()).map_err(LaunchError::system(
            format!("start {}", executable.path().display()),
        ))?;
        local.process = Some(process);
        local.talks = true;
    }
    Ok(())
}

/// Links all running nodes with each other and with home, whose ends are returned, and
/// has their slices begin.
pub fn join<W: Workload>(workload: &W, nodes: &mut [Node<W>]) -> Result<Links, LaunchError> {
    match workload.placement() {
        Placement::Embedded(_) => join_here(workload, nodes),
        Placement::Remote(_) => join_hosts(workload, nodes),
    }
}

fn locals<W: Workload>(
    nodes: &mut [Node<W>],
) -> impl Iterator<Item = (u32, &str, &mut Local<W::Kept>)> {
    nodes
        .iter_mut()
        .filter(|node| node.state == NodeState::Running)
        .filter_map(|node| match &mut node.body {
            Body::Local(local) => Some((node.number, node.name.as_str(), &mut **local)),
            Body::Remote(_) => None,
        })
}

fn join_here<W: Workload>(workload: &W, nodes: &mut [Node<W>]) -> Result<Links, LaunchError> {
    let mut mesh = links::mesh(nodes.len() + 1, workload.transport())
        .map_err(LaunchError::system("connect the nodes"))?;
    for node in nodes.iter().filter(|node| node.state != NodeState::Running) {
        for links in &mut mesh {
            links[node.number as usize] = None;
        }
    }
    for (number, name, local) in locals(nodes) {
        let Some(process) = &mut local.process else {
            continue;
        };
        // In flight they are open: a slice whose link is closed at the other end
        // would take its peer for dead.
        let links = std::mem::take(&mut mesh[number as usize]);
        workload
            .boot(process, number, links, &local.kept)
            .map_err(|why| LaunchError::Process {
                program: W::PROGRAM,
                node: name.to_owned(),
                why,
            })?;
    }
    // All have begun before the first is waited for: they get ready together.
    for (_, name, local) in locals(nodes) {
        let Some(process) = &mut local.process else {
            continue;
        };
        workload
            .await_ready(process)
            .map_err(|why| LaunchError::Process {
                program: W::PROGRAM,
                node: name.to_owned(),
                why,
            })?;
    }
    Ok(mesh.swap_remove(0))
}

fn join_hosts<W: Workload>(workload: &W, nodes: &mut [Node<W>]) -> Result<Links, LaunchError> {
    let count = nodes.len() as u32 + 1;
    let mut slices: Vec<(u32, &mut RemoteSlice)> = nodes
        .iter_mut()
        .filter(|node| node.state == NodeState::Running)
        .filter_map(|node| match &mut node.body {
            Body::Remote(slice) => Some((node.number, &mut **slice)),
            Body::Local(_) => None,
        })
        .collect();
    let links = remote::connect(count, workload.lease().as_millis() as u32, &mut slices)?;
    remote::start(&mut slices, |node| workload.order(node))?;
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spawn::{Executable, Role, SignalState};
    use crate::sys;
    use std::path::Path;

    #[test]
    fn what_a_process_says_as_it_ends_is_heard() {
        let role = Role::Home {
            arguments: &["sleep".into(), "600".into()],
            signals: &SignalState::save(&[]),
        };
        let sleep = Executable::open(Path::new("/bin/sleep")).unwrap();
        let mut local = Local {
            process: Some(spawn::start(&sleep, &role).unwrap()),
            talks: true,
            kept: (),
        };
        let pidfd = local.process.as_ref().unwrap().pidfd();
        // It speaks and ends just after it was found silent.
        let mut said = None;
        let mut end_it = Some(pidfd.try_clone_to_owned().unwrap());
        let mut hear = |_: BorrowedFd<'_>| {
            if let Some(pidfd) = end_it.take() {
                let _ = sys::pidfd_signal(&pidfd, libc::SIGKILL);
                sys::wait_readable(&[pidfd.as_fd()], Duration::from_secs(30)).unwrap();
                said = Some("why");
                return Spoken::Nothing;
            }
            said.take()
                .map_or(Spoken::Closed, |text| Spoken::Sentence(text.into()))
        };
        let mut events = local.listen(&mut hear);
        events.extend(local.listen(&mut hear));
        assert!(
            matches!(&events[..], [NodeEvent::Said(why), NodeEvent::Ended { .. }] if why == "why"),
            "{events:?}"
        );
    }
}
