//! The owner of a running aggregate: one loop, one thread, every change.
//!
//! Invariants:
//! - exactly one home process, from [`Aggregate::start`] until it was reaped;
//! - a slice of a node that is not `Running` is dead or being told to die;
//! - when home ends, every slice ends, and no process of Weft's is left;
//! - at most one command is with home at a time, and each has a deadline.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_proc::boot::{
    CONTROL_DONE, CONTROL_EXEC, CONTROL_FATAL, CONTROL_HELLO, CONTROL_KICK, CONTROL_LOST,
    CONTROL_NO_ROOM, CONTROL_STRETCHED, ControlMessage, EXIT_INTERNAL, EXIT_NO_ROOM,
    EXIT_NODE_LOST, EXIT_SETUP, KICK_SIGNAL,
};
use weft_proc::stats::{COMMAND_LOST, COMMAND_SHRINK, COMMAND_STRETCH};

use super::Outcome;
use super::nodes::{self, Node};
use super::plan::Plan;
use super::signals::{Request, Signals};
use super::stop;
use crate::control::{self, Arrival};
use crate::error::LaunchError;
use crate::links::{self, Links};
use crate::remote;
use crate::report::{AggregateView, FORMAT, Monitor, NodeState, NodeView, Report};
use crate::rundir::{self, Answer, Client, Entry};
use crate::shared::{SharedMemory, Snapshot};
use crate::spawn::{self, Ended, Role, Runtime};
use crate::sys;

/// How often the view is renewed while somebody watches, and otherwise.
const WATCHED_TICK: Duration = Duration::from_millis(200);
const TICK: Duration = Duration::from_secs(1);

/// How much later than its slices home may be seen to end.
const HOME_END_GRACE: Duration = Duration::from_millis(200);

/// How much later than home's word that a node is gone its reason may come.
const CAUSE_GRACE: Duration = Duration::from_secs(1);

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
    /// A loss: home must answer or end.
    Lost,
}

/// See the module.
pub struct Aggregate<'a> {
    plan: Plan,
    signals: &'a Signals,
    monitor: &'a Arc<Monitor>,
    say: &'a mut dyn FnMut(&str),
    home: Runtime,
    home_talks: bool,
    home_shared: SharedMemory,
    home_links: Links,
    nodes: Vec<Node>,
    entry: Option<Entry>,
    started: Instant,
    generation: u32,
    sequence: u32,
    pending: Vec<Pending>,
    /// Losses that wait until home has taken the command before.
    losses: Vec<u32>,
    /// Whether home has said that every budget is full.
    no_room: bool,
    /// The exit code when Weft, not the program, ends it.
    verdict: Option<i32>,
    /// The program of the image that is about to say HELLO.
    program: Vec<u8>,
    next_tick: Instant,
    /// When the last round of the loop was, to notice that this process was stopped.
    last_turn: Instant,
}

impl<'a> Aggregate<'a> {
    /// Starts the slices, then home, then the program.
    pub fn start(
        mut plan: Plan,
        signals: &'a Signals,
        monitor: &'a Arc<Monitor>,
        say: &'a mut dyn FnMut(&str),
    ) -> Result<Aggregate<'a>, LaunchError> {
        let (nodes, home_links) = nodes::start(&mut plan)?;
        let home_shared = SharedMemory::new().map_err(LaunchError::system("make shared memory"))?;
        let role = Role::Home {
            arguments: &plan.program.arguments,
            signals: signals.before(),
        };
        let home = spawn::start(&plan.runtime, &role).map_err(LaunchError::system(format!(
            "start {}",
            plan.runtime.display()
        )))?;
        let pid = std::process::id();
        let entry = Entry::new(&plan.run_directory, pid)
            .map_err(LaunchError::system("make a socket in the run directory"))?;
        let mut aggregate = Aggregate {
            program: plan.program.path.as_os_str().as_bytes().to_vec(),
            plan,
            signals,
            monitor,
            say,
            home,
            home_talks: true,
            home_shared,
            home_links,
            nodes,
            entry: Some(entry),
            started: Instant::now(),
            generation: 0,
            sequence: 0,
            pending: Vec::new(),
            losses: Vec::new(),
            no_room: false,
            verdict: None,
            next_tick: Instant::now(),
            last_turn: Instant::now(),
        };
        control::expect_hello(&mut aggregate.home)
            .and_then(|_| aggregate.boot_home())
            .map_err(|why| LaunchError::Runtime {
                node: "home".into(),
                why,
            })?;
        aggregate.publish();
        Ok(aggregate)
    }

    /// Hands home its settings; the program starts. The launcher's copies of
    /// home's links are closed: from now on the mesh is the runtimes'.
    fn boot_home(&mut self) -> Result<(), String> {
        let links = std::mem::take(&mut self.home_links);
        links::send_boot(
            &self.home.control,
            0,
            &self.plan.settings,
            &links,
            self.home_shared.descriptor(),
            &self.program,
        )
        .map_err(|error| format!("did not take its settings: {error}"))
    }

    /// Serves the aggregate until the program has ended.
    pub fn run(mut self) -> Result<Outcome, LaunchError> {
        loop {
            let ended = self
                .turn()
                .map_err(LaunchError::system("wait for the aggregate"))?;
            if let Some(ended) = ended {
                return Ok(self.finish(ended));
            }
        }
    }

    /// One round of the loop: wait, then handle what came. Home's messages
    /// before slices' ends, so that a slice that was told to go is not mistaken
    /// for a lost one.
    fn turn(&mut self) -> std::io::Result<Option<Ended>> {
        self.wait()?;
        while let Some(request) = self.signals.next() {
            self.signalled(&request);
        }
        self.hear_home();
        for index in 0..self.nodes.len() {
            self.hear_node(index);
        }
        if let Some(ended) = self.home.try_wait()? {
            self.hear_home();
            return Ok(Some(ended));
        }
        self.serve_clients();
        self.keep_time();
        Ok(None)
    }

    fn wait(&self) -> std::io::Result<()> {
        let mut set: Vec<BorrowedFd<'_>> = vec![self.signals.descriptor(), self.home.pidfd()];
        if self.home_talks {
            set.push(self.home.control.as_fd());
        }
        set.extend(self.entry.iter().map(Entry::descriptor));
        for node in &self.nodes {
            set.extend(node.descriptors());
        }
        let deadlines = self.pending.iter().map(|pending| pending.deadline);
        let next = deadlines
            .chain([self.next_tick])
            .min()
            .unwrap_or(self.next_tick);
        sys::wait_readable(&set, next.saturating_duration_since(Instant::now())).map(drop)
    }

    fn signalled(&mut self, request: &Request) {
        match request {
            Request::Forward(signal) => {
                let _ = self.home.signal(*signal);
            }
            Request::Child => self.follow_stop(),
        }
    }

    /// A program that stopped itself stops the launcher too, so that a shell
    /// notices; when the shell lets the launcher go on, so does the program.
    fn follow_stop(&self) {
        // SAFETY: `info` is plain data for which all zeros is valid; only
        // stops are asked for, so the child is not reaped.
        let stopped = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WSTOPPED | libc::WNOHANG;
            libc::waitid(libc::P_PID, self.home.pid() as u32, &mut info, options) == 0
                && info.si_pid() == self.home.pid()
        };
        if stopped && stop::stop_with(self.home.pid()) {
            let _ = self.home.signal(libc::SIGCONT);
        }
    }

    fn hear_home(&mut self) {
        while self.home_talks {
            match control::receive(self.home.control.as_fd()) {
                Arrival::Message(message) => self.home_said(&message),
                Arrival::Nothing => return,
                Arrival::Closed => self.home_talks = false,
            }
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
                let name = self.name(message.node);
                self.tell(&format!("node {name}: {}", control::text(message)));
            }
            CONTROL_FATAL => self.tell(&control::text(message)),
            CONTROL_KICK => {
                if let Some(node) = self.node(message.node) {
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

    fn stretched(&mut self) {
        self.publish();
        while let Some(at) = self.position(|what| matches!(what, Command::Stretch(_))) {
            if let Command::Stretch(client) = self.pending.remove(at).what {
                client.answer(&Answer::Done);
            }
        }
    }

    /// Home says that a node has gone, and what went with it. It ends with 122.
    fn home_lost(&mut self, message: &ControlMessage) {
        let name = self.name(message.node);
        let mut parts = Vec::new();
        match message.words[0] {
            0 => {}
            1 => parts.push("1 page had its only copy there".to_owned()),
            pages => parts.push(format!("{pages} pages had their only copy there")),
        }
        if message.words[1] != 0 {
            parts.push("the program was executing there".to_owned());
        }
        if parts.is_empty() {
            parts.push("nothing of the program was there".to_owned());
        }
        let lost = parts.join(", and ");
        let why = self.learn_why(message.node).or_else(|| {
            let text = control::text(message);
            (!text.is_empty()).then_some(text)
        });
        self.tell(&match why {
            Some(why) => format!("node {name} was lost: {why}; {lost}"),
            None => format!("node {name} was lost: {lost}"),
        });
        if let Some(node) = self.node(message.node) {
            node.state = NodeState::Lost;
            node.stop();
        }
    }

    /// Why a node that home misses has gone. Its slice's parent sees the end
    /// later than home, whose link closes first.
    fn learn_why(&mut self, number: u32) -> Option<String> {
        let deadline = Instant::now() + CAUSE_GRACE;
        let node = self.node(number)?;
        // Otherwise the reason was told when it became known.
        while node.state == NodeState::Running {
            node.listen();
            let left = deadline.saturating_duration_since(Instant::now());
            if node.cause.reason().is_some() || node.cause.has_ended() || left.is_zero() {
                return node.cause.reason().map(str::to_owned);
            }
            sys::wait_readable(&node.descriptors(), left).ok()?;
        }
        None
    }

    fn hear_node(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if node.state != NodeState::Running {
            return;
        }
        let number = node.number;
        let leaves = node.listen();
        if node.cause.has_ended() {
            self.slice_gone(number);
        } else if leaves {
            let name = self.name(number);
            self.tell(&format!(
                "node {name} is about to stop: bringing its pages elsewhere"
            ));
            self.shrink(number, None);
        }
    }

    /// A slice is gone without home having said so.
    fn slice_gone(&mut self, number: u32) {
        // When home ends, its links close and the slices end with it: which of
        // the ends is seen first is chance.
        let home_ends = sys::wait_readable(&[self.home.pidfd()], HOME_END_GRACE);
        // What home says of it counts first: home knows what was lost.
        self.hear_home();
        let node = self.node(number);
        let gone = node.filter(|node| node.state == NodeState::Running && node.cause.has_ended());
        let Some(node) = gone else {
            return;
        };
        if home_ends.is_ok_and(|ready| ready[0]) {
            node.stop();
            // A slice that was killed is why home ended: worth a sentence.
            if let Some(why) = node.cause.reason().map(str::to_owned) {
                let name = self.name(number);
                self.tell(&format!("node {name} was lost: {why}"));
            }
            return;
        }
        let why = node.cause.reason_to_be_gone().to_owned();
        let leaving =
            self.position(|what| matches!(what, Command::Shrink { node, .. } if *node == number));
        let name = self.name(number);
        // While home brings a node's pages elsewhere it closes the link at the
        // end, and the slice goes; home's answer is on its way.
        if leaving.is_some() && self.home_shared.command.load(Ordering::Acquire) == 0 {
            if let Some(node) = self.node(number) {
                node.state = NodeState::Left;
                node.stop();
            }
            return;
        }
        self.tell(&format!("node {name} was lost: {why}"));
        if let Some(node) = self.node(number) {
            node.state = NodeState::Lost;
            node.stop();
        }
        self.home_shared
            .lost_nodes
            .fetch_or(1 << number, Ordering::Release);
        self.losses.push(number);
        self.sequence += 1;
        self.pending.push(Pending {
            sequence: self.sequence,
            deadline: Instant::now() + self.plan.options.lease,
            what: Command::Lost,
        });
        self.announce_losses();
    }

    /// Tells home of losses, one command at a time; the bit in `lost_nodes` is
    /// already set, so a busy home knows as well.
    fn announce_losses(&mut self) {
        if let Some(&node) = self.losses.first()
            && self.home_shared.command(COMMAND_LOST, node, self.sequence)
        {
            self.losses.remove(0);
        }
        let _ = self.home.signal(KICK_SIGNAL);
    }

    /// Home answered a command.
    fn answered(&mut self, message: &ControlMessage) {
        let sequence = message.words[0] as u32;
        let Some(at) = self
            .pending
            .iter()
            .position(|pending| pending.sequence == sequence)
        else {
            return;
        };
        let why = match message.words[1] {
            0 => None,
            errno => Some(match control::text(message) {
                text if text.is_empty() => {
                    std::io::Error::from_raw_os_error(errno as i32).to_string()
                }
                text => text,
            }),
        };
        let answer = why.clone().map_or(Answer::Done, Answer::Refused);
        match self.pending.remove(at).what {
            Command::Stretch(client) => client.answer(&answer),
            Command::Shrink { node, client } => {
                self.left(node, why);
                if let Some(client) = client {
                    client.answer(&answer);
                }
            }
            // Once stretched, home says itself what was lost, and ends if that
            // was anything.
            Command::Lost if why.is_none() && !self.is_stretched() => {
                self.tell("the program continues without it: it had not stretched");
            }
            Command::Lost => {}
        }
    }

    fn left(&mut self, number: u32, why: Option<String>) {
        let name = self.name(number);
        match why {
            Some(why) => self.tell(&format!("node {name} could not be given back: {why}")),
            None => {
                if let Some(node) = self.node(number) {
                    node.state = NodeState::Left;
                    node.stop();
                }
            }
        }
    }

    fn serve_clients(&mut self) {
        while let Some((request, client)) = self.entry.as_ref().and_then(Entry::accept) {
            match request {
                rundir::Request::View => client.answer(&Answer::View(Box::new(self.view()))),
                rundir::Request::Stretch => self.stretch(client),
                rundir::Request::Shrink { node } => self.shrink(node, Some(client)),
            }
        }
    }

    fn stretch(&mut self, client: Client) {
        if self.is_stretched() {
            return client.answer(&Answer::Refused("it is stretched already".into()));
        }
        if self.nodes.is_empty() {
            return client.answer(&Answer::Refused(
                "it has no other node: start it with --nodes 2 or more".into(),
            ));
        }
        match self.command(COMMAND_STRETCH, 0) {
            Ok(sequence) => self.pending.push(Pending {
                sequence,
                deadline: Instant::now() + self.plan.options.lease,
                what: Command::Stretch(client),
            }),
            Err(why) => client.answer(&Answer::Refused(why)),
        }
    }

    fn shrink(&mut self, number: u32, client: Option<Client>) {
        let stretched = self.is_stretched();
        let outcome = match self.node(number) {
            _ if number == 0 => Err("node 0 is home: it cannot be given back".to_owned()),
            None => Err(format!(
                "it has no node {number}: `weft list` shows its nodes"
            )),
            Some(node) if node.state != NodeState::Running => {
                Err(format!("node {number} ({}) has left already", node.name))
            }
            Some(_) if !stretched => {
                self.dismiss(number);
                if let Some(client) = client {
                    client.answer(&Answer::Done);
                }
                return;
            }
            Some(_) => self.command(COMMAND_SHRINK, number),
        };
        match (outcome, client) {
            (Ok(sequence), client) => self.pending.push(Pending {
                sequence,
                deadline: Instant::now() + rundir::SHRINK_BOUND,
                what: Command::Shrink {
                    node: number,
                    client,
                },
            }),
            (Err(why), Some(client)) => client.answer(&Answer::Refused(why)),
            (Err(why), None) => self.tell(&why),
        }
    }

    fn is_stretched(&self) -> bool {
        self.home_shared.stats.stretched.load(Ordering::Acquire) != 0
    }

    /// Gives a node back that holds nothing, because the program has not
    /// stretched. Home finds the bit when it does; should it stretch at this
    /// very moment, it finds a closed link to a node without pages, which is the
    /// same to it.
    fn dismiss(&mut self, number: u32) {
        self.home_shared
            .lost_nodes
            .fetch_or(1 << number, Ordering::Release);
        self.left(number, None);
    }

    /// Writes a command and calls home. Returns its number.
    fn command(&mut self, command: u32, argument: u32) -> Result<u32, String> {
        if !self.pending.is_empty()
            || !self
                .home_shared
                .command(command, argument, self.sequence + 1)
        {
            return Err("it is busy with an earlier command: try again in a moment".into());
        }
        self.sequence += 1;
        self.home
            .signal(KICK_SIGNAL)
            .map(|()| self.sequence)
            .map_err(|_| "the program has just ended".into())
    }

    /// Home is about to execute another program: new slices for it.
    fn next_generation(&mut self, message: &ControlMessage) {
        self.generation += 1;
        let path = control::text(message);
        if !path.is_empty() {
            self.program = path.into_bytes();
        }
        self.home_shared.reset_gauges();
        match nodes::restart(&mut self.plan, &mut self.nodes) {
            Ok(links) => self.home_links = links,
            Err(error) => self.give_up(&error.to_string(), error.exit_code()),
        }
    }

    /// What is due: the view, heartbeats, deadlines.
    fn keep_time(&mut self) {
        let now = Instant::now();
        self.allow_for_a_stop(now);
        self.announce_due_losses();
        while let Some(at) = self
            .pending
            .iter()
            .position(|pending| pending.deadline <= now)
        {
            let late = self.pending.remove(at).what;
            self.too_late(late);
        }
        if now < self.next_tick {
            return;
        }
        for index in 0..self.nodes.len() {
            self.heartbeat(index);
        }
        self.publish();
        let tick = if self.monitor.watched() {
            WATCHED_TICK
        } else {
            TICK
        };
        self.next_tick = Instant::now() + tick;
    }

    /// After a stop of this process (Ctrl-Z) every bound starts anew: nobody could
    /// have been heard meanwhile, and home was stopped as well.
    fn allow_for_a_stop(&mut self, now: Instant) {
        let passed = now.duration_since(self.last_turn);
        self.last_turn = now;
        if passed > remote::STALL.max(self.plan.options.lease / 2) {
            for pending in &mut self.pending {
                pending.deadline += passed;
            }
            for node in &mut self.nodes {
                node.pulse.renew(now);
            }
        }
    }

    fn announce_due_losses(&mut self) {
        if !self.losses.is_empty() {
            self.announce_losses();
        }
    }

    fn heartbeat(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if node.state != NodeState::Running {
            return;
        }
        node.heartbeat(self.plan.options.lease);
        if node.cause.has_ended() {
            let number = node.number;
            self.slice_gone(number);
        }
    }

    fn too_late(&mut self, command: Command) {
        let lease_s = self.plan.options.lease.as_secs_f32();
        match command {
            Command::Stretch(client) => client.answer(&Answer::Refused(format!(
                "the program did not stretch within {lease_s} s"
            ))),
            Command::Shrink { node, client } => {
                let why = format!(
                    "its pages were not elsewhere within {} s",
                    rundir::SHRINK_BOUND.as_secs()
                );
                self.left(node, Some(why.clone()));
                if let Some(client) = client {
                    client.answer(&Answer::Refused(why));
                }
            }
            Command::Lost => self.give_up(
                &format!(
                    "the program did not answer within {lease_s} s of the loss, and was ended"
                ),
                EXIT_NODE_LOST,
            ),
        }
    }

    /// Ends the program, with an exit code of Weft's.
    fn give_up(&mut self, why: &str, code: i32) {
        self.tell(why);
        self.verdict = Some(code);
        let _ = self.home.signal(libc::SIGKILL);
    }

    /// After home's end: last counters, no process left, the report.
    fn finish(mut self, ended: Ended) -> Outcome {
        self.entry = None;
        let wall_time_s = self.started.elapsed().as_secs_f64();
        for node in &mut self.nodes {
            node.stop();
        }
        if let Some(why) = self
            .home
            .killed_for_memory()
            .filter(|_| self.verdict.is_none())
        {
            self.tell(&format!("the program {ended}: {why}"));
        }
        let ended = self.verdict.map_or(ended, Ended::Exited);
        let (exit_code, signal) = match ended {
            Ended::Exited(code) => (Some(code), None),
            Ended::Signaled(signal) => (None, Some(signal)),
        };
        let aggregate = AggregateView {
            wall_time_s,
            ..self.view()
        };
        self.monitor.publish(aggregate.clone());
        Outcome {
            ended,
            report: Report {
                aggregate,
                exit_code,
                signal,
            },
        }
    }

    fn view(&self) -> AggregateView {
        let home = Snapshot::of(&self.home_shared);
        let stretched = home.stretched;
        let owned = home.owned_pages_by_node.clone();
        let owned_pages = |node: u32| stretched.then(|| owned[node as usize]);
        let budget = |node: u32| self.plan.settings.budget_pages[node as usize];
        let mut nodes = vec![NodeView {
            node: 0,
            name: "home".into(),
            state: NodeState::Running,
            pid: Some(self.home.pid() as u32),
            budget_pages: budget(0),
            owned_pages: owned_pages(0),
            counters: home,
        }];
        nodes.extend(self.nodes.iter().map(|node| NodeView {
            node: node.number,
            name: node.name.clone(),
            state: node.state,
            pid: node.pid(),
            budget_pages: budget(node.number),
            owned_pages: owned_pages(node.number),
            counters: node.counters(),
        }));
        let executing = nodes
            .iter()
            .find(|node| node.node != 0 && node.counters.executing);
        let executing_node = executing.map_or(0, |node| node.node);
        for node in &mut nodes {
            node.counters.owned_pages_by_node.clear();
            node.counters.beats = 0;
        }
        let arguments = self.plan.program.arguments.iter();
        AggregateView {
            format: FORMAT,
            pid: std::process::id(),
            program_pid: self.home.pid() as u32,
            command: arguments
                .map(|text| text.to_string_lossy().into_owned())
                .collect(),
            wall_time_s: self.started.elapsed().as_secs_f64(),
            generation: self.generation,
            stretched,
            executing_node,
            nodes,
        }
    }

    fn publish(&self) {
        self.monitor.publish(self.view());
    }

    fn tell(&mut self, text: &str) {
        (self.say)(text);
    }

    fn node(&mut self, number: u32) -> Option<&mut Node> {
        self.nodes.iter_mut().find(|node| node.number == number)
    }

    fn name(&self, number: u32) -> String {
        let node = self.nodes.iter().find(|node| node.number == number);
        node.map_or_else(|| format!("{number}"), |node| node.name.clone())
    }

    fn position(&self, wanted: impl Fn(&Command) -> bool) -> Option<usize> {
        self.pending
            .iter()
            .position(|pending| wanted(&pending.what))
    }
}
