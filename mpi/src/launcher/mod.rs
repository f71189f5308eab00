//! The launcher of a malleable cluster: `weft mpi run`, and `attach` and `resume` after it.
//!
//! ```text
//!  agents ─▶ door ──┐                      ┌─▶ agents: orders
//!  batch system ────┤  ┌────────────────┐  │
//!  user's requests ─┼─▶│    launcher    │──┼─▶ batch system: ask, give back
//!  the program ─────┤  └────────────────┘  │
//!  signals ─────────┘   malleable::decide  └─▶ record
//! ```
//!
//! One thread decides, and waits in one place; all others only bring it events. Invariants: what
//! another launcher needs to go on is written down before it is done; nothing is started anew on a host while it may run on another one.

mod archive;
mod changes;
mod door;
mod fleet;
mod folder;
mod hosts;
mod jobs;
mod network;
mod one;
mod options;
mod orders;
mod output;
mod phases;
mod program;
mod record;
mod requests;
mod site;
mod start;
mod status;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use nix::fcntl::Flock;
use weft_batch::{Job, JobId};
use weft_malleable::{Cluster, Forecast, HostId, Rules};

use crate::request::{Answer, Request};
use crate::switch::Switch;
use door::{AgentEvent, Guests};
use fleet::Fleet;
use folder::Folder;
use phases::Ending;
use program::{ProgramEvent, Shell};
use record::{Phase, Record};
use site::{Ask, Refusal};

pub use changes::Changes;
pub use folder::names;
pub use options::{HOSTS_MAX, ListedHost, Options, SiteOptions};
pub use start::{attach, create, forget, requests_socket, resume, shell};

/// The exit code if all machines were saved, since no host was left in time.
pub const EXIT_SAVED: u8 = 121;
/// The exit code if a machine was lost.
pub const EXIT_LOST: u8 = 122;

/// How often everything is looked at.
const TICK: Duration = Duration::from_millis(250);
/// How long nothing moves after the hosts have been told about each other.
const PEERS_SETTLE: Duration = Duration::from_millis(500);
/// Sentences that a status shows.
const LOG_LINES: usize = 100;

/// What happens.
enum Event {
    Agent {
        reservation: u32,
        event: AgentEvent,
    },
    /// The batch system has taken a job, or not.
    Asked {
        reservation: u32,
        result: Result<JobId, Refusal>,
    },
    Jobs(Result<BTreeMap<JobId, Job>, String>),
    /// The user's jobs by their names, from a look that began then.
    Names {
        began: Instant,
        names: Result<Vec<(String, JobId)>, String>,
    },
    Request {
        request: Request,
        answer: Sender<Answer>,
    },
    Program(ProgramEvent),
    /// The user wants the end.
    Signal,
    /// The switch of this host has ended.
    SwitchEnded,
}

/// A cluster that is being looked after.
pub struct Launcher {
    folder: Folder,
    /// Held for its life.
    _lock: Flock<File>,
    record: Record,
    /// As it was written last.
    written: Option<Record>,
    fleet: Fleet,
    guests: Arc<Guests>,
    key: weft_wire::keys::PublicKey,
    addresses: Vec<String>,
    switch: Switch,
    /// The port of the switch on this host.
    switch_port: u16,
    shell: Shell,
    _gateway: weft_gateway::Gateway,
    site: Sender<Ask>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    forecast: Forecast,
    rules: Rules,
    epoch: Instant,
    /// As the agents were told.
    peers: Vec<crate::control::PeerHost>,
    settles_at: Instant,
    /// No host is asked for before: the batch system refused.
    asks_at: Instant,
    /// Jobs of strays are not looked for before; `None`: a look is under way.
    seeks_at: Option<Instant>,
    /// Hosts in a row that could not be used, or whose jobs ended before their agents came.
    misses: u32,
    /// What is wrong with the batch system.
    trouble: Option<String>,
    log: VecDeque<String>,
    /// Since when hosts are gathered.
    gathering_since: Instant,
    follows: bool,
    interrupts: u32,
    ending: Option<Ending>,
    /// Its exit code, not zero, and when it ended.
    program_failed: Option<(u8, Instant)>,
    /// Why not all of its output was written to this launcher's.
    unshown: Option<String>,
}

impl Launcher {
    /// Serves until the cluster has ended, or is saved: the exit code.
    pub fn serve(mut self) -> anyhow::Result<u8> {
        let code = self.look_after();
        // It is of this launcher alone: the lock is held still.
        let _ = std::fs::remove_file(self.folder.requests());
        code
    }

    fn look_after(&mut self) -> anyhow::Result<u8> {
        let mut next = Instant::now();
        loop {
            let now = Instant::now();
            if now >= next {
                next = now + TICK;
                if let Some(code) = self.turn() {
                    self.write();
                    return Ok(code);
                }
                self.write();
            }
            match self
                .events
                .recv_timeout(next.saturating_duration_since(now))
            {
                Ok(event) => self.handle(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => anyhow::bail!("all threads have ended"),
            }
        }
    }

    /// # Errors
    /// This launcher cannot go on; the cluster can.
    fn handle(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Agent { reservation, event } => self.agent(HostId(reservation), event),
            Event::Asked {
                reservation,
                result,
            } => self.asked(HostId(reservation), result),
            Event::Jobs(jobs) => self.jobs(jobs),
            Event::Names { began, names } => self.found(began, names),
            Event::Request { request, answer } => self.request(request, &answer),
            Event::Program(event) => self.program(event),
            Event::Signal => self.interrupted(),
            Event::SwitchEnded => {
                let (name, log) = (self.folder.name(), self.folder.file("switch.log"));
                anyhow::bail!(
                    "the switch of this host has ended, and its messages are in {}: the machines \
                     of {name} run on, and `weft mpi attach {name}` goes on with them",
                    log.display()
                );
            }
        }
        Ok(())
    }

    /// Looks at everything; the exit code when nothing is left to do.
    fn turn(&mut self) -> Option<u8> {
        self.tell_peers();
        self.tidy();
        self.advance();
        self.ended()
    }

    /// For the user, and for a status.
    fn say(&mut self, sentence: &str) {
        crate::print(&format!("weft: {sentence}"));
        if self.log.len() == LOG_LINES {
            self.log.pop_front();
        }
        let seconds = self.epoch.elapsed().as_secs_f64();
        self.log.push_back(format!("{seconds:.1} s: {sentence}"));
    }

    /// The same, unless it was said of late.
    fn say_once(&mut self, sentence: &str) {
        if !self.log.iter().any(|line| line.ends_with(sentence)) {
            self.say(sentence);
        }
    }

    /// Writes the record, if it is news.
    fn write(&mut self) {
        self.note();
        if self.written.as_ref() == Some(&self.record) {
            return;
        }
        match self.record.write(&self.folder) {
            Ok(()) => self.written = Some(self.record.clone()),
            Err(error) => self.say_once(&format!(
                "{error:#}: if this launcher ends now, another one cannot go on"
            )),
        }
    }

    /// Brings the record up to date with what lives.
    fn note(&mut self) {
        let reservation = |(id, host): (&HostId, &fleet::LiveHost)| record::Reservation {
            number: id.0,
            job: host.job.clone(),
            secret: host.secret.clone(),
            key: host.key,
            leaves: host.leaves,
        };
        self.record.reservations = self.fleet.hosts.iter().map(reservation).collect();
        let machine = |live: &fleet::LiveMachine| record::MachineRecord {
            host: live.at.map(|at| at.0),
            nodes: live.nodes.iter().map(|(id, node)| (id.0, *node)).collect(),
            saved: live.saved.clone(),
            went_on_from: live.went_on_from.clone(),
            order: live.task.as_ref().map(|underway| record::OrderRecord {
                number: underway.order,
                task: underway.task.clone(),
                to: underway.to.map(|to| to.0),
                others: underway.others.iter().map(|other| other.0).collect(),
            }),
        };
        self.record.machines = self.fleet.machines.values().map(machine).collect();
    }

    /// As `weft_malleable` sees it.
    fn cluster(&self) -> Cluster {
        let options = &self.record.options;
        self.fleet.cluster(self.record.wanted, options, self.epoch)
    }

    fn next_number(&mut self) -> u64 {
        self.record.next += 1;
        self.record.next
    }

    fn is_in(&self, phase: Phase) -> bool {
        self.record.phase == phase
    }
}
