//! The owner of a running machine.
//!
//! Invariant: a lost node is home's to notice, by its link; and a daemon that ends has the
//! guest asked to power off.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::joining::Joining;
use super::plan::{HeirLinks, MachinePlan, MachineSettings, Monitors, home_sockets};
use crate::error::LaunchError;
use crate::launch::aggregate::{self, Aggregate, AggregateOwner};
use crate::launch::nodes::{self, Body, Node, NodeEvent};
use crate::launch::signals::{SignalEvent, Signals};
use crate::launch::workload::Workload;
use crate::monitor_protocol::{self, MonitorMessage};
use crate::options::Placement;
use crate::report::NodeState;
use crate::spawn::{self, Ended, Executable, ProgramKind, Role};
use crate::sys;

/// Longest last word: counters, and the trace of 16 nodes.
const WORD_BYTES_MAX: usize = 512 << 20;
/// How often daemons are told that this process lives, at least; several times in
/// a lease.
const BEAT: Duration = Duration::from_secs(1);
const BEATS: u32 = 4;
/// How long the loop waits where nobody needs a beat.
const WAIT: Duration = Duration::from_secs(3600);
/// How long slices have to end once home has: they have nothing left to do, and one
/// that was stopped is not waited for longer.
const END_BOUND: Duration = Duration::from_secs(2);

/// See the module.
pub struct Machine<'a> {
    pub(super) aggregate: Aggregate<'a, Monitors>,
    /// From here comes home's last word, until it has ended.
    word_from: Option<UnixStream>,
    word: Vec<u8>,
    /// Why home could not be a machine.
    failed: Option<String>,
    end_asked: bool,
    /// A node that home asked for, until it has its links.
    pub(super) joining: Option<Joining>,
    /// Of a process that takes the place of another node 0, until it has them.
    pub(super) inherited: Option<HeirLinks>,
    /// Of the move of node 0's part.
    pub(super) home_step: Option<Awaited>,
    /// That goes on on another host, and what becomes of the other nodes is not heard here.
    pub(super) is_let_go: bool,
    beaten: Instant,
    say: &'a mut dyn FnMut(&str),
}

/// A step of the move of node 0's part that has no answer yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Awaited {
    pub request: u64,
    pub number: u32,
}

/// What came of a life.
#[derive(Debug)]
pub struct MachineOutcome {
    /// Home's last word.
    pub word: Vec<u8>,
    /// Why it could not begin.
    pub failed: Option<String>,
    /// How home's process ended.
    pub ended: Ended,
    /// A signal asked for the end.
    pub end_asked: bool,
    /// The most memory that its processes on this host had resident, in bytes.
    pub resident_bytes_max: u64,
    /// What the kernel says of one that it killed for lack of memory.
    pub out_of_memory: Option<String>,
    /// Its nodes on other hosts at the end, and these hosts.
    pub hosts: Vec<(u32, String)>,
}

impl<'a> Machine<'a> {
    /// Has hosts reserve what the plan needs, and starts all processes of this host.
    /// `say` gets sentences about nodes.
    ///
    /// # Errors
    /// The first host that cannot be reached, is not trusted or does not trust this
    /// one, is of another build, lacks a CPU feature or has no room; a process that
    /// cannot be started; a signal that asked for the end meanwhile. Nothing is left.
    pub fn spawn(
        plan: MachinePlan,
        signals: &'a Signals,
        say: &'a mut dyn FnMut(&str),
    ) -> Result<Machine<'a>, LaunchError> {
        Machine::with_nodes(plan, nodes::open, signals, say)
    }

    /// The same with nodes that `open` finds.
    pub(super) fn with_nodes(
        plan: MachinePlan,
        open: impl FnOnce(&mut Monitors) -> Result<Vec<Node<Monitors>>, LaunchError>,
        signals: &'a Signals,
        say: &'a mut dyn FnMut(&str),
    ) -> Result<Machine<'a>, LaunchError> {
        let mut monitors = Monitors {
            plan,
            executable: Executable::find(ProgramKind::Monitor)?,
            settings: MachineSettings::default(),
        };
        let mut nodes = open(&mut monitors)?;
        signals.check()?;
        nodes::spawn(&monitors, &mut nodes)?;
        let role = Role::Node {
            arguments: &monitor_protocol::ARGUMENTS,
            console: true,
        };
        let path = monitors.executable.path().display().to_string();
        let home = spawn::start(&monitors.executable, &role)
            .map_err(LaunchError::system(format!("start {path}")))?;
        Ok(Machine {
            aggregate: Aggregate::new(monitors, signals, home, nodes),
            word_from: None,
            word: Vec::new(),
            failed: None,
            end_asked: false,
            joining: None,
            inherited: None,
            home_step: None,
            is_let_go: false,
            beaten: Instant::now(),
            say,
        })
    }

    /// Links the nodes, tells all what to be, and stays with them until home has
    /// ended. Home gets `sockets`, too.
    ///
    /// # Errors
    /// A host that cannot start its slice or be linked; a call to this host's kernel; a
    /// signal that asked for the end before home could hear of it. Nothing is left.
    pub fn live(
        mut self,
        settings: MachineSettings,
        sockets: &[BorrowedFd<'_>],
    ) -> Result<MachineOutcome, LaunchError> {
        self.aggregate.workload.settings = settings;
        let Aggregate {
            workload, nodes, ..
        } = &mut self.aggregate;
        let inherited = self.inherited.take();
        let is_heir = inherited.is_some();
        let (links, joins) = match inherited {
            Some(heir) => (heir.links, Some(heir.memory_bytes)),
            None => (nodes::join(workload, nodes)?, None),
        };
        // Home gets those that come from now on, by this process or from the terminal.
        self.aggregate.signals.check()?;
        if !is_heir {
            self.say_hosts();
        }
        let pair = UnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            Ok((ours, theirs))
        });
        let (ours, theirs) = pair.map_err(LaunchError::system("make a socket pair"))?;
        let Aggregate {
            workload,
            home,
            nodes,
            ..
        } = &self.aggregate;
        let sockets = home_sockets(&theirs, sockets, nodes);
        match workload.boot_into(home, (0, joins), links, &sockets) {
            // One that has ended says, or its status does, why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            booted => booted.map_err(LaunchError::system("describe the machine to its monitor"))?,
        }
        drop(theirs);
        self.word_from = Some(ours);
        let ended =
            aggregate::attend(&mut self).map_err(LaunchError::system("wait for the machine"))?;
        Ok(self.finish(ended))
    }

    fn say_hosts(&mut self) {
        let Placement::Remote(hosts) = &self.aggregate.workload.plan.placement else {
            return;
        };
        let shares = self.aggregate.workload.plan.shares.iter().skip(1);
        for (share, host) in shares.zip(hosts) {
            (self.say)(&format!("{} is on {host}", share.described));
        }
    }

    fn tell(&mut self, index: usize, text: &str) {
        let node = &self.aggregate.nodes[index];
        let number = node.number;
        let place = match &node.body {
            Body::Local(_) => String::new(),
            Body::Remote(slice) => format!(" ({})", slice.host()),
        };
        (self.say)(&format!("node {number}{place}: {text}"));
    }

    fn happened(&mut self, index: usize, event: NodeEvent) {
        if self.is_let_go {
            if let NodeEvent::Unreachable(_) = event {
                self.aggregate.nodes[index].give_up();
            }
            return;
        }
        let elsewhere = matches!(self.aggregate.nodes[index].body, Body::Remote(_));
        match event {
            NodeEvent::Said(text) => self.tell(index, &text),
            NodeEvent::Ended { why, clean: false } if elsewhere => self.tell(index, &why),
            // Home says so, with what was lost.
            NodeEvent::Ended { .. }
            | NodeEvent::Ready
            // Asked of programs alone.
            | NodeEvent::WantedBack
            | NodeEvent::Expects(_)
            | NodeEvent::Home { .. } => {}
            NodeEvent::Leaving => {
                self.tell(index, "its daemon is stopping and needs its memory back");
                let _ = self.aggregate.home.signal(Signal::SIGTERM as i32);
            }
            NodeEvent::Unreachable(why) => {
                self.tell(index, &format!("its daemon is lost: {why}"));
                // The daemon, if it lives, ends its slice, and with it the machine.
                self.aggregate.nodes[index].give_up();
            }
        }
    }

    /// How often daemons need a sign of life.
    fn beat(&self) -> Option<Duration> {
        let mut nodes = self.aggregate.nodes.iter();
        let has_daemons = nodes.any(|node| matches!(node.body, Body::Remote(_)));
        has_daemons.then(|| BEAT.min(self.aggregate.workload.lease() / BEATS))
    }

    /// What has come of the last word.
    fn read_word(&mut self) {
        let mut piece = [0; 16 << 10];
        while let Some(from) = &mut self.word_from {
            match from.read(&mut piece) {
                Ok(count @ 1..) if self.word.len() < WORD_BYTES_MAX => {
                    self.word.extend(piece.iter().take(count));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(_) | Err(_) => self.word_from = None,
            }
        }
    }

    /// After home's end: no process left.
    fn finish(mut self, ended: Ended) -> MachineOutcome {
        // One may have come too late for home to hear of it.
        while let Some(request) = self.aggregate.signals.next() {
            self.end_asked |= matches!(request, SignalEvent::Signal { .. });
        }
        let home = &self.aggregate.home;
        let mut resident_bytes_max = home.resident_bytes_max();
        let mut out_of_memory = home.killed_for_memory();
        let nodes = self.aggregate.nodes.iter();
        let hosts = nodes.filter_map(|node| match &node.body {
            Body::Remote(slice) => Some((node.number, slice.host().to_string())),
            Body::Local(_) => None,
        });
        let hosts = hosts.collect();
        let deadline = Instant::now() + END_BOUND;
        for index in 0..self.aggregate.nodes.len() {
            self.aggregate.nodes[index].await_end(deadline);
            // What it said as it ended may be why home ended.
            self.hear_node(index);
            let (bytes, why) = self.aggregate.nodes[index].end();
            resident_bytes_max += bytes;
            out_of_memory = out_of_memory.or(why);
        }
        MachineOutcome {
            word: self.word,
            failed: self.failed,
            ended,
            end_asked: self.end_asked,
            resident_bytes_max,
            out_of_memory,
            hosts,
        }
    }
}

impl Node<Monitors> {
    /// Waits until a process on this host has ended, at most to `deadline`.
    fn await_end(&self, deadline: Instant) {
        if let Body::Local(local) = &self.body
            && let Some(process) = &local.process
        {
            let left = deadline.saturating_duration_since(Instant::now());
            let _ = sys::wait_readable(&[process.pidfd()], left);
        }
    }

    /// Ends its slice; a host gets back what it lent. The most memory that a process here
    /// had resident, and why the kernel killed it.
    pub(super) fn end(&mut self) -> (u64, Option<String>) {
        match &mut self.body {
            Body::Remote(slice) => {
                if self.state == NodeState::Running {
                    slice.release();
                }
                (0, None)
            }
            Body::Local(local) => {
                let Some(mut process) = local.process.take() else {
                    return (0, None);
                };
                let by_itself = process.try_wait().ok().flatten();
                let why = by_itself.and_then(|_| process.killed_for_memory());
                let _ = process.kill();
                (process.resident_bytes_max(), why)
            }
        }
    }
}

impl<'a> AggregateOwner<'a> for Machine<'a> {
    type Workload = Monitors;

    fn aggregate(&mut self) -> &mut Aggregate<'a, Monitors> {
        &mut self.aggregate
    }

    fn processes(&self) -> &Aggregate<'a, Monitors> {
        &self.aggregate
    }

    fn waits_for(&self) -> (Vec<BorrowedFd<'_>>, Duration) {
        let linking = self.joining.as_ref().and_then(Joining::descriptor);
        let word = self.word_from.iter().map(AsFd::as_fd);
        (word.chain(linking).collect(), self.beat().unwrap_or(WAIT))
    }

    fn signalled(&mut self, request: SignalEvent) {
        if let SignalEvent::Signal { number, by_kernel } = request {
            self.end_asked = true;
            // The terminal sent it to home as well.
            if !by_kernel {
                let _ = self.aggregate.home.signal(number);
            }
        }
    }

    fn hear_home(&mut self) {
        while self.aggregate.home_talks {
            match monitor_protocol::receive(self.aggregate.home.control.as_fd()) {
                Some(Ok(MonitorMessage::Said(text) | MonitorMessage::Failed(text))) => {
                    self.failed = Some(text);
                }
                Some(Ok(MonitorMessage::Ready)) => {}
                Some(Ok(MonitorMessage::StartNode {
                    request,
                    number,
                    host,
                    memory_bytes,
                })) => self.start_node(request, (number, host, memory_bytes)),
                Some(Ok(MonitorMessage::EndNode { number })) => self.end_node(number),
                Some(Ok(MonitorMessage::Home {
                    request,
                    number,
                    step,
                })) => self.move_home(request, number, step),
                Some(Ok(MonitorMessage::HomeBeside {
                    request,
                    number,
                    beside,
                })) => self.prepare_heir(request, number, beside),
                Some(Ok(MonitorMessage::HomeTaken)) => self.inherit_slices(),
                Some(Ok(MonitorMessage::HomeRuns)) => {}
                None => break,
                Some(Err(())) => self.aggregate.home_talks = false,
            }
        }
        self.read_word();
    }

    fn hear_node(&mut self, index: usize) {
        for event in self.aggregate.listen(index) {
            if !self.grew(index, &event) && !self.moved_home(index, &event) {
                self.happened(index, event);
            }
        }
    }

    /// Links that were made meanwhile, and heartbeats.
    fn keep_time(&mut self) {
        self.hear_linking();
        let now = Instant::now();
        self.aggregate.allow_for_a_stop(now);
        let due = self.beat().is_some_and(|beat| self.beaten + beat <= now);
        if !due {
            return;
        }
        self.beaten = now;
        for index in 0..self.aggregate.nodes.len() {
            if let Some(event) = self.aggregate.heartbeat(index) {
                self.happened(index, event);
            }
        }
    }
}
