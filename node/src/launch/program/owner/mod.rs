//! The owner of a running program: every change of its aggregate.
//!
//! Invariants, beside those of [`super::super::aggregate`]:
//! - when home ends, every slice ends, and no process of Weft's is left;
//! - at most one command is with home at a time, and each has a deadline.
//!
//! - [`commands`]: what clients, daemons and losses ask of home
//! - [`host`]: what home's host has free, and home's budget
//! - [`losses`]: nodes that are gone
//! - [`view`]: what is shown of it

mod commands;
mod host;
mod losses;
mod view;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_proc::boot::{
    CONTROL_DONE, CONTROL_EXEC, CONTROL_FATAL, CONTROL_HELLO, CONTROL_KICK, CONTROL_LOST,
    CONTROL_NO_ROOM, CONTROL_STRETCHED, ControlMessage, EXIT_INTERNAL, EXIT_NO_ROOM, EXIT_SETUP,
};

use super::stop;
use super::{ProgramOutcome, ProgramPlan};
use crate::control::{self, Arrival};
use crate::error::{LaunchError, sentence};
use crate::launch::aggregate::{self, Aggregate};
use crate::launch::nodes::{self, NodeEvent};
use crate::launch::signals::{SignalEvent, Signals};
use crate::links::{self, Links};
use crate::report::{LiveView, NodeState};
use crate::rundir::{Client, Entry};
use crate::shared::SharedMemory;
use crate::spawn::{self, ProgramKind, Role, StartError};

/// How often the view is renewed while somebody watches, and otherwise.
const WATCHED_TICK: Duration = Duration::from_millis(200);
const TICK: Duration = Duration::from_secs(1);

/// A command that home has not answered yet.
struct Pending {
    sequence: u32,
    deadline: Instant,
    what: Command,
}

enum Command {
    /// For a `weft stretch`; answered when home says so.
    Stretch(Client),
    /// For a `weft shrink` (or a daemon that ends, then without a client).
    Shrink { node: u32, client: Option<Client> },
    /// For the owner of home's host.
    GiveWay,
    /// A loss: home must answer or end.
    Lost,
}

/// See the module.
pub struct Owner<'a> {
    aggregate: Aggregate<'a, ProgramPlan>,
    live: &'a Arc<LiveView>,
    say: &'a mut dyn FnMut(&str),
    home_shared: SharedMemory,
    home_links: Links,
    entry: Option<Entry>,
    started: Instant,
    generation: u32,
    sequence: u32,
    pending: Vec<Pending>,
    /// Nodes to give back as soon as home has given way.
    to_shrink: Vec<(u32, Option<Client>)>,
    /// Where memory is kept free for the owner of home's host.
    watch: Option<host::Watch>,
    /// Losses that wait until home has taken the command before.
    losses: Vec<u32>,
    /// Whether home has said that every budget is full.
    no_room: bool,
    /// The exit code when Weft, not the program, ends it.
    verdict: Option<i32>,
    /// The program of the image that is about to say HELLO.
    program: Vec<u8>,
    next_tick: Instant,
}

impl<'a> Owner<'a> {
    /// Starts the slices, then home, then the program.
    pub fn start(
        mut plan: ProgramPlan,
        signals: &'a Signals,
        live: &'a Arc<LiveView>,
        say: &'a mut dyn FnMut(&str),
    ) -> Result<Owner<'a>, LaunchError> {
        let mut nodes = nodes::open(&mut plan)?;
        nodes::spawn(&plan, &mut nodes)?;
        let home_links = nodes::join(&plan, &mut nodes)?;
        signals.check()?;
        let home_shared = SharedMemory::new().map_err(LaunchError::system("make shared memory"))?;
        let role = Role::Home {
            arguments: &plan.program.arguments,
            signals: signals.before(),
        };
        let home = spawn::start(&plan.runtime, &role).map_err(LaunchError::system(format!(
            "start {}",
            plan.runtime.path().display()
        )))?;
        // One that came just before home existed.
        signals.check()?;
        signals
            .pass_on()
            .map_err(LaunchError::system("set up signals"))?;
        let pid = std::process::id();
        let entry = Entry::new(&plan.run_directory, pid)
            .map_err(LaunchError::system("make a socket in the run directory"))?;
        let watch = host::Watch::new(plan.settings.budget_pages[0], plan.keep_free_bytes);
        let mut owner = Owner {
            watch,
            to_shrink: Vec::new(),
            program: plan.program.path.as_os_str().as_bytes().to_vec(),
            aggregate: Aggregate::new(plan, signals, home, nodes),
            live,
            say,
            home_shared,
            home_links,
            entry: Some(entry),
            started: Instant::now(),
            generation: 0,
            sequence: 0,
            pending: Vec::new(),
            losses: Vec::new(),
            no_room: false,
            verdict: None,
            next_tick: Instant::now(),
        };
        owner.look_at_host();
        control::expect_hello(&mut owner.aggregate.home)
            .and_then(|_| owner.boot_home())
            .map_err(|why| LaunchError::Process {
                program: ProgramKind::Runtime,
                node: "home".into(),
                why,
            })?;
        owner.publish();
        Ok(owner)
    }

    /// Hands home its settings; the program starts. The launcher's copies of
    /// home's links are closed: from now on the mesh is the runtimes'.
    fn boot_home(&mut self) -> Result<(), StartError> {
        let links = std::mem::take(&mut self.home_links);
        links::send_boot(
            &self.aggregate.home.control,
            0,
            &self.aggregate.workload.settings,
            &links,
            self.home_shared.descriptor(),
            &self.program,
        )
        .map_err(StartError::Settings)
    }

    /// Serves the aggregate until the program has ended.
    pub fn run(mut self) -> Result<ProgramOutcome, LaunchError> {
        let ended =
            aggregate::attend(&mut self).map_err(LaunchError::system("wait for the aggregate"))?;
        Ok(self.finish(ended))
    }

    /// A program that stopped itself stops the launcher too, so that a shell
    /// notices; when the shell lets the launcher go on, so does the program.
    fn follow_stop(&self) {
        // SAFETY: `info` is plain data for which all zeros is valid; only
        // stops are asked for, so the child is not reaped.
        let stopped = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WSTOPPED | libc::WNOHANG;
            libc::waitid(
                libc::P_PID,
                self.aggregate.home.pid() as u32,
                &mut info,
                options,
            ) == 0
                && info.si_pid() == self.aggregate.home.pid()
        };
        if stopped && stop::stop_with(self.aggregate.home.pid()) {
            let _ = self.aggregate.home.signal(libc::SIGCONT);
        }
    }

    fn home_said(&mut self, message: &ControlMessage) {
        match message.kind {
            CONTROL_STRETCHED => self.stretched(),
            CONTROL_LOST => self.home_lost(message),
            CONTROL_NO_ROOM => {
                self.no_room = true;
                self.tell("no room: every node's budget is full; raise --memory or add a node with --nodes or --on");
            }
            // Home says in its own words what was just told.
            CONTROL_FATAL if self.no_room && message.words[0] == EXIT_NO_ROOM as u64 => {}
            CONTROL_FATAL if message.node != 0 => {
                let name = self.aggregate.name(message.node);
                self.tell(&format!("node {name}: {}", control::text(message)));
            }
            CONTROL_FATAL => self.tell(&control::text(message)),
            CONTROL_KICK => {
                if let Some(node) = self.aggregate.node(message.node) {
                    node.kick();
                }
            }
            CONTROL_EXEC => self.next_generation(message),
            CONTROL_HELLO => {
                let booted = control::check_hello(message).and_then(|_| self.boot_home());
                if let Err(why) = booted {
                    self.give_up(&format!("the runtime of home {why}"), EXIT_SETUP);
                }
            }
            CONTROL_DONE => self.answered(message),
            kind => self.give_up(
                &format!("home sent control message {kind}, which does not exist"),
                EXIT_INTERNAL,
            ),
        }
    }

    /// Home is about to execute another program: new slices for it.
    fn next_generation(&mut self, message: &ControlMessage) {
        self.generation += 1;
        let path = control::text(message);
        if !path.is_empty() {
            self.program = path.into_bytes();
        }
        self.home_shared.reset_gauges();
        match self.renew() {
            Ok(links) => self.home_links = links,
            Err(error) => self.give_up(&sentence(&error), error.exit_code()),
        }
    }

    /// New slices on new links; none for nodes that are out of the aggregate.
    fn renew(&mut self) -> Result<Links, LaunchError> {
        let Aggregate {
            workload, nodes, ..
        } = &mut self.aggregate;
        nodes::renew(nodes);
        for node in nodes.iter().filter(|node| node.state != NodeState::Running) {
            workload.settings.budget_pages[node.number as usize] = 0;
        }
        nodes::spawn(workload, nodes)?;
        nodes::join(workload, nodes)
    }

    /// Ends the program, with an exit code of Weft's.
    fn give_up(&mut self, why: &str, code: i32) {
        self.tell(why);
        self.verdict = Some(code);
        let _ = self.aggregate.home.signal(libc::SIGKILL);
    }

    fn tell(&mut self, text: &str) {
        (self.say)(text);
    }

    fn heartbeat(&mut self, index: usize) {
        if self.aggregate.heartbeat(index).is_some() {
            self.slice_gone(self.aggregate.nodes[index].number);
        }
    }
}

impl<'a> aggregate::AggregateOwner<'a> for Owner<'a> {
    type Workload = ProgramPlan;

    fn aggregate(&mut self) -> &mut Aggregate<'a, ProgramPlan> {
        &mut self.aggregate
    }

    fn processes(&self) -> &Aggregate<'a, ProgramPlan> {
        &self.aggregate
    }

    fn waits_for(&self) -> (Vec<BorrowedFd<'_>>, Duration) {
        let deadlines = self.pending.iter().map(|pending| pending.deadline);
        let next = deadlines
            .chain([self.next_tick])
            .chain(self.watch.as_ref().map(|watch| watch.next_look))
            .min()
            .unwrap_or(self.next_tick);
        let clients = self.entry.iter().map(Entry::descriptor).collect();
        (clients, next.saturating_duration_since(Instant::now()))
    }

    fn signalled(&mut self, request: SignalEvent) {
        match request {
            // A hang-up of the terminal, say, which the program got as well.
            SignalEvent::Signal {
                by_kernel: true, ..
            } => {}
            SignalEvent::Signal { number, .. } => {
                let _ = self.aggregate.home.signal(number);
            }
            SignalEvent::Child => self.follow_stop(),
        }
    }

    fn hear_home(&mut self) {
        while self.aggregate.home_talks {
            match control::receive(self.aggregate.home.control.as_fd()) {
                Arrival::Message(message) => self.home_said(&message),
                Arrival::Nothing => return,
                Arrival::Closed => self.aggregate.home_talks = false,
            }
        }
    }

    fn hear_node(&mut self, index: usize) {
        let events = self.aggregate.listen(index);
        let why = events.iter().find_map(|event| match event {
            NodeEvent::Leaving => Some("is about to stop"),
            NodeEvent::WantedBack => Some("asks for its memory back"),
            _ => None,
        });
        let node = &self.aggregate.nodes[index];
        if node.state != NodeState::Running {
            return;
        }
        let number = node.number;
        if node.cause.has_ended() {
            self.slice_gone(number);
        } else if let Some(why) = why {
            let name = self.aggregate.name(number);
            self.tell(&format!("node {name} {why}: bringing its pages elsewhere"));
            self.shrink(number, None);
        }
    }

    /// Clients, the view, heartbeats, deadlines.
    fn keep_time(&mut self) {
        self.serve_clients();
        let now = Instant::now();
        // Home was stopped as well, and could not answer.
        if let Some(passed) = self.aggregate.allow_for_a_stop(now) {
            for pending in &mut self.pending {
                pending.deadline += passed;
            }
        }
        if !self.losses.is_empty() {
            self.announce_losses();
        }
        while let Some(at) = self
            .pending
            .iter()
            .position(|pending| pending.deadline <= now)
        {
            let late = self.pending.remove(at).what;
            self.too_late(late);
        }
        self.look_at_host();
        if now < self.next_tick {
            return;
        }
        for index in 0..self.aggregate.nodes.len() {
            self.heartbeat(index);
        }
        self.publish();
        let tick = if self.live.watched() {
            WATCHED_TICK
        } else {
            TICK
        };
        self.next_tick = Instant::now() + tick;
    }
}
