//! The processes of a machine's other nodes on this host, and the links between
//! all of them; nodes on other hosts are those of [`super::hosts`].
//!
//! Links are made before any process is, so that each inherits its own ends; all
//! others it closes at once, for a link whose other end lives in a third process
//! does not end when its peer dies.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{ForkResult, Pid, fork};
use weft_aggregate::SliceLinks;
use weft_confine::{ThreadKind, privilege};
use weft_machine::{Machine, OpenDisks, Outside};
use weft_node::links::{self, Links};
use weft_node::monitor;
use weft_platform::clock::Reference;
use weft_wire::halves::{self, HalvesConfig};

use super::error::{EXIT_SETUP, VmError};
use super::hosts::Hosts;
use super::machine::die_with;
use super::run::{Life, reap, was_killed};

/// How long companions have to end once the machine has: they have nothing left to
/// do, and one that was stopped is not waited for longer.
const END_BOUND: Duration = Duration::from_secs(2);
/// How often the end is looked for.
const LOOK: Duration = Duration::from_millis(2);
/// How long a thread waits for a machine's end at one time.
const WAIT: Duration = Duration::from_secs(3600);
/// Longest busy wait of a thread that reads a link.
const SPIN: Duration = Duration::ZERO;

/// One node's ends of its links, by node; empty for a machine of one node.
pub type Sockets = monitor::Sockets;

/// How a node's links are used.
pub struct LinkOptions {
    /// Silence of this length is death.
    pub lease: Duration,
    /// For tests: frames wait for a random time below this before they are sent.
    pub delay_max: Duration,
    /// The clock that all nodes follow; none on a machine of one.
    pub reference: Option<Reference>,
}

impl LinkOptions {
    /// As a life's plan says.
    pub fn of(life: &Life<'_>) -> LinkOptions {
        LinkOptions {
            lease: life.plan.nodes.lease,
            delay_max: life.plan.nodes.link_delay_max,
            reference: life.reference.clone(),
        }
    }
}

/// The processes of nodes 1 and up.
#[derive(Default)]
pub struct Companions {
    here: Vec<Pid>,
    elsewhere: Option<Hosts>,
}

impl Companions {
    /// Makes links and processes; node 0's ends are the caller's.
    pub fn start(life: &Life<'_>, parent: Pid) -> Result<(Companions, Sockets), VmError> {
        let count = life.plan.nodes.count;
        if count < 2 {
            return Ok(Default::default());
        }
        if let (false, Some(reference)) = (life.plan.nodes.hosts.is_empty(), &life.reference) {
            let (hosts, sockets) = Hosts::start(life.plan, reference)?;
            let companions = Companions {
                here: Vec::new(),
                elsewhere: Some(hosts),
            };
            return Ok((companions, sockets));
        }
        let mut mesh = mesh(life).map_err(VmError::system("make the links between nodes"))?;
        let mut companions = Companions::default();
        for node in 1..count {
            // SAFETY: this process has one thread, so the child's copy of its memory
            // is in order.
            let forked = unsafe { fork() }.map_err(VmError::system("make a node's process"));
            match forked? {
                ForkResult::Child => {
                    let sockets = std::mem::take(&mut mesh[node]);
                    drop(mesh);
                    live(life, parent, node, sockets)
                }
                ForkResult::Parent { child } => companions.here.push(child),
            }
        }
        Ok((companions, mesh.swap_remove(0)))
    }

    /// Readable when a daemon of another host has something to say.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.elsewhere.iter().flat_map(Hosts::descriptors)
    }

    /// How often they have to be tended, if at all.
    pub fn beat(&self) -> Option<Duration> {
        self.elsewhere.as_ref().map(Hosts::beat)
    }

    /// See [`Hosts::tend`].
    pub fn tend(&mut self) -> bool {
        self.elsewhere.as_mut().is_some_and(Hosts::tend)
    }

    /// Waits until all have ended, and ends those that do not.
    pub fn finish(self) -> Finished {
        let deadline = Instant::now() + END_BOUND;
        let mut finished = Finished::default();
        if let Some(hosts) = self.elsewhere {
            hosts.finish();
        }
        for child in self.here {
            let mut killed = false;
            loop {
                match reap(child) {
                    Ok(Some((status, bytes))) => {
                        finished.resident_bytes += bytes;
                        finished.killed |= !killed && was_killed(status);
                        break;
                    }
                    Ok(None) => {}
                    Err(_) => break,
                }
                if Instant::now() > deadline && !killed {
                    // It has not been reaped, so its number is still its own.
                    let _ = kill(child, Signal::SIGKILL);
                    killed = true;
                }
                std::thread::sleep(LOOK);
            }
        }
        finished
    }
}

/// How the processes of other nodes ended.
#[derive(Default)]
pub struct Finished {
    /// The most memory that they had resident together.
    pub resident_bytes: u64,
    /// Somebody else sent one of them SIGKILL.
    pub killed: bool,
}

fn mesh(life: &Life<'_>) -> io::Result<Vec<Sockets>> {
    let nodes = &life.plan.nodes;
    let mesh = links::mesh(nodes.count, nodes.transport)?;
    mesh.into_iter().map(sockets).collect()
}

/// The sockets of a node's links.
pub fn sockets(links: Links) -> io::Result<Sockets> {
    let ends = links.into_iter().map(|link| match link {
        None => Ok(None),
        Some(link) => link.into_socket().map(Some).ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "rings do not join machines")
        }),
    });
    ends.collect()
}

/// Opens a node's links; `None` for a machine of one node.
pub fn open(
    sockets: Sockets,
    number: usize,
    options: LinkOptions,
) -> anyhow::Result<Option<SliceLinks>> {
    if sockets.is_empty() {
        return Ok(None);
    }
    let mut links = Vec::new();
    for (peer, socket) in sockets.into_iter().enumerate() {
        let link = socket.map(|(socket, keys)| {
            halves::open(HalvesConfig {
                socket,
                keys,
                lease: options.lease,
                spin: SPIN,
                name: format!("node {peer}"),
            })
        });
        links.push(link.transpose().with_context(|| {
            format!("cannot open the link between node {number} and node {peer}")
        })?);
    }
    let reference = options.reference.context("no clock to follow")?;
    Ok(Some(SliceLinks {
        number,
        links,
        lease: options.lease,
        reference,
        delay_max: options.delay_max,
    }))
}

/// The life of a companion's process.
fn live(life: &Life<'_>, parent: Pid, node: usize, sockets: Sockets) -> ! {
    let code = match run(life, parent, node, sockets) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("weft: vm {}: node {node}: {error:#}", life.plan.name);
            EXIT_SETUP
        }
    };
    // Nothing of the parent's is dropped: its sockets stay where they are.
    // SAFETY: ends the process.
    unsafe { libc::_exit(code.into()) }
}

fn run(life: &Life<'_>, parent: Pid, node: usize, sockets: Sockets) -> anyhow::Result<()> {
    let plan = life.plan;
    die_with(parent)?;
    weft_confine::prepare(plan.confine)?;
    let links = open(sockets, node, LinkOptions::of(life))?.context("there are no links")?;
    let outside = Outside {
        serial: Box::new(io::sink()),
        console: None,
        disks: OpenDisks::default(),
    };
    let machine = Machine::of_slice(&plan.configuration, outside, links)?;
    if let Some(identity) = &plan.identity {
        privilege::become_user(identity)?;
        // A change of user undoes it.
        die_with(parent)?;
    }
    weft_confine::enter(ThreadKind::Main)?;
    let handle = machine.handle();
    // Why it ended is node 0's to say.
    while handle.wait(WAIT).is_none() {}
    drop(machine);
    Ok(())
}
