//! Nodes that join and leave while the machine runs: what the launcher sends, and what node 0
//! asks of it.
//!
//! A thread listens at the control socket, from before this process confines itself. It opens
//! links that come as open sockets.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use weft_aggregate::{HostFile, Slice};
use weft_api::{ChangeView, Failure};
use weft_checkpoint::Identity;
use weft_confine::{ThreadKind, lock};
use weft_console::Output;
use weft_machine::membership::{HomeError, Job, NewDisk, NewNode, NodeProcesses};
use weft_machine::migration::{Migrated, Migration};
use weft_machine::{Handle, HomeState, Machine, Refusal};
use weft_node::monitor_protocol::{
    Control, HomeStep, LauncherMessage, MonitorMessage, SliceBoot, SliceFile,
};
use weft_node::size::format_bytes;

use crate::links;
use crate::takeover::Departure;

/// Longest wait for the process of a node: hosts are asked, it starts and measures its clock.
const START_WAIT: Duration = Duration::from_secs(30);
/// Longest wait for a step of the move of the machine's home; daemons have shorter ones.
const HOME_WAIT: Duration = Duration::from_secs(30);
/// Longest wait for a change that ended the machine here: its last step, and the command that
/// asks what came of it.
const LINGER_CHANGE: Duration = Duration::from_secs(40);
const LINGER_READER: Duration = Duration::from_secs(1);
/// How often a thread that waits looks whether its request was cancelled.
const LOOK: Duration = Duration::from_millis(50);

/// What the launcher says to a request of node 0.
pub enum Reply {
    /// The process of a node runs, or a step of the home's move is over.
    Ready,
    /// A process is ready to take the machine's home, on this host.
    HomeReady(String),
    /// It was not done, and nothing is left of it.
    Failed(String),
    /// The host that was asked does not answer.
    Lost(String),
}

/// What the launcher has said to the last request of node 0.
#[derive(Default)]
pub struct Replies {
    last: Mutex<LastRequest>,
    changed: Condvar,
}

/// The last request, and the reply once it has come.
#[derive(Default)]
struct LastRequest {
    number: u64,
    reply: Option<Reply>,
}

impl Replies {
    /// The number of a new request.
    fn begin(&self) -> u64 {
        let mut last = lock(&self.last);
        let number = last.number + 1;
        *last = LastRequest {
            number,
            reply: None,
        };
        number
    }

    /// A reply. One to a request that was cancelled comes too late.
    fn put(&self, request: u64, reply: Reply) {
        let mut last = lock(&self.last);
        if last.number == request {
            last.reply = Some(reply);
            self.changed.notify_all();
        }
    }

    /// Waits for the reply; `None` if none has come within `bound`, or once `is_cancelled`.
    fn wait(&self, bound: Duration, is_cancelled: impl Fn() -> bool) -> Option<Reply> {
        let deadline = Instant::now() + bound;
        let mut last = lock(&self.last);
        loop {
            if let Some(reply) = last.reply.take() {
                return Some(reply);
            }
            if Instant::now() > deadline || is_cancelled() {
                return None;
            }
            let waited = self.changed.wait_timeout(last, LOOK);
            last = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Starts the thread that listens, if the machine has several nodes.
pub fn listen(
    control: &Arc<Control>,
    machine: &Machine,
    boot: &SliceBoot,
    replies: Option<Arc<Replies>>,
) -> anyhow::Result<()> {
    let Some(slice) = machine.slice() else {
        return Ok(());
    };
    let listener = Listener {
        control: control.clone(),
        slice,
        lease: Duration::from_millis(boot.lease_ms.into()),
        replies,
    };
    weft_confine::spawn("weft-growth", ThreadKind::Admission, move || listener.run())
        .context("cannot start a thread")?;
    Ok(())
}

struct Listener {
    control: Arc<Control>,
    slice: Arc<Slice>,
    lease: Duration,
    replies: Option<Arc<Replies>>,
}

impl Listener {
    fn run(self) {
        // A launcher that has gone takes this process along.
        while let Ok(Some((message, link))) = self.control.listen() {
            match message {
                LauncherMessage::Link { number, .. } => {
                    let opened =
                        link.map(|link| links::open_one(number as usize, link, self.lease));
                    let connected = match opened {
                        Some(Ok(link)) => self.slice.connect(number as usize, link),
                        Some(Err(error)) => Err(error.to_string()),
                        None => Err("a link without its socket".into()),
                    };
                    // The node that joins finds its link ended, and does not join.
                    if let Err(reason) = connected {
                        self.control.say(&MonitorMessage::Said(reason));
                    }
                }
                LauncherMessage::File { what } => {
                    if let Some((file, _)) = link {
                        self.take_file(what, file.into());
                    }
                }
                LauncherMessage::NodeReady { request } => self.reply(request, Reply::Ready),
                LauncherMessage::NodeFailed { request, reason } => {
                    self.reply(request, Reply::Failed(reason));
                }
                LauncherMessage::HomeReady { request, host } => {
                    self.reply(request, Reply::HomeReady(host));
                }
                LauncherMessage::HomeLost { request, reason } => {
                    self.reply(request, Reply::Lost(reason));
                }
            }
        }
    }

    fn take_file(&self, what: SliceFile, file: File) {
        let what = match what {
            SliceFile::Disk(number) => HostFile::Disk(number),
            SliceFile::NewPages => HostFile::New,
            SliceFile::SavedPages(number) => HostFile::Saved(number),
        };
        self.slice.host_files().put(what, file);
    }

    fn reply(&self, request: u64, reply: Reply) {
        if let Some(replies) = &self.replies {
            replies.put(request, reply);
        }
    }
}

/// The launcher, as node 0 sees it.
#[derive(Clone)]
pub struct Launcher {
    /// What the machine is called.
    pub name: String,
    pub control: Arc<Control>,
    pub replies: Arc<Replies>,
    /// The vCPUs are KVM's.
    pub is_kvm: bool,
    pub console: Output,
    /// The console is the terminal of the command that started the machine.
    pub has_terminal: bool,
}

impl NodeProcesses for Launcher {
    fn start(&self, number: usize, node: &NewNode, job: &Job) -> Result<(), String> {
        if let Some(host) = node.host.as_ref().filter(|_| self.is_kvm) {
            return Err(format!(
                "{host}: a machine with --backend kvm grows on its own host only: KVM cannot \
                 follow another host's clock yet"
            ));
        }
        let number = number as u32;
        self.control.say(&MonitorMessage::StartNode {
            request: self.replies.begin(),
            number,
            host: node.host.clone(),
            memory_bytes: node.memory_bytes,
        });
        match self.replies.wait(START_WAIT, || job.is_cancelled()) {
            Some(Reply::Failed(reason) | Reply::Lost(reason)) => Err(reason),
            Some(Reply::Ready | Reply::HomeReady(_)) => Ok(()),
            None => {
                self.end(number as usize);
                Err(match job.is_cancelled() {
                    true => "it was cancelled".into(),
                    false => format!("it did not begin within {} s", START_WAIT.as_secs()),
                })
            }
        }
    }

    fn end(&self, number: usize) {
        let number = number as u32;
        self.control.say(&MonitorMessage::EndNode { number });
    }

    fn make_disk(&self, number: usize, disk: &NewDisk) -> Result<(), String> {
        let step = HomeStep::Disk {
            number: disk.number,
            path: disk.path.clone(),
            bytes: disk.bytes,
        };
        self.expect_done(number, step)
    }

    fn share_memory(&self, number: usize) -> Result<(), String> {
        self.expect_done(number, HomeStep::Share)
    }

    fn prepare_home(&self, number: usize, beside: Option<usize>) -> Result<String, String> {
        if self.has_terminal {
            return Err("its console is the terminal of `weft vm run`".into());
        }
        let reply = match beside {
            None => self.move_home(number, vec![HomeStep::Prepare]),
            Some(beside) => {
                let request = self.replies.begin();
                self.control.say(&MonitorMessage::HomeBeside {
                    request,
                    number: number as u32,
                    beside: beside as u32,
                });
                self.replies.wait(HOME_WAIT, || false)
            }
        };
        match reply {
            Some(Reply::HomeReady(host)) => Ok(host),
            Some(Reply::Failed(reason)) => Err(reason),
            // The process has no state, so it cannot run, whether its host hears this or not.
            other => {
                let _ = self.give_home_up(number);
                Err(match other {
                    Some(Reply::Lost(reason)) => reason,
                    _ => late(),
                })
            }
        }
    }

    fn await_home(&self, number: usize) {
        self.say_home(self.replies.begin(), number, HomeStep::Wait);
    }

    fn announce_home(&self, number: usize) {
        self.say_home(self.replies.begin(), number, HomeStep::Announce);
    }

    fn send_home(&self, number: usize, home: HomeState) -> Result<(), HomeError> {
        let state = serde_json::to_string(&Departure::new(home, &self.console));
        let state = state.map_err(|error| HomeError::Refused(error.to_string()))?;
        match self.move_home(number, HomeStep::parts(&state)) {
            Some(Reply::Ready) => Ok(()),
            Some(Reply::Failed(reason)) => Err(HomeError::Refused(reason)),
            Some(Reply::Lost(reason)) => Err(HomeError::Unknown(reason)),
            Some(Reply::HomeReady(_)) | None => Err(match self.give_home_up(number) {
                Ok(()) => HomeError::Refused(late()),
                Err(reason) => HomeError::Unknown(reason),
            }),
        }
    }

    fn let_home_go(&self, number: usize) -> Result<(), String> {
        self.expect_done(number, HomeStep::LetGo)
    }

    fn give_home_up(&self, number: usize) -> Result<(), String> {
        match self.move_home(number, vec![HomeStep::GiveUp]) {
            // That is how a daemon says that the process has ended.
            Some(Reply::Failed(_)) => Ok(()),
            Some(Reply::Lost(reason)) => Err(reason),
            Some(Reply::Ready | Reply::HomeReady(_)) | None => Err(late()),
        }
    }
}

impl Launcher {
    /// Has the daemons of other hosts make a file for the pages of each of these nodes, which
    /// are given with the numbers of their files; by node, the host of each that has one.
    ///
    /// # Errors
    /// A daemon did not; those that others made are removed.
    pub fn make_files(
        &self,
        directory: &Path,
        nodes: impl Iterator<Item = (usize, usize)>,
    ) -> Result<BTreeMap<usize, String>, String> {
        let mut made = BTreeMap::new();
        for (node, file) in nodes {
            let path = directory.join(format!("pages.{file}"));
            let reason = match self.move_home(node, vec![HomeStep::NewFile { path }]) {
                // It is on this host.
                Some(Reply::Ready) => continue,
                Some(Reply::HomeReady(host)) => {
                    made.insert(node, host);
                    continue;
                }
                Some(Reply::Failed(reason) | Reply::Lost(reason)) => reason,
                None => late(),
            };
            // Why the first did not is what counts.
            let _ = self.keep_files(made.into_keys(), false);
            return Err(reason);
        }
        Ok(made)
    }

    /// Has daemons keep or remove what they made.
    ///
    /// # Errors
    /// A daemon did not; the others did.
    pub fn keep_files(&self, nodes: impl Iterator<Item = usize>, keep: bool) -> Result<(), String> {
        let ask = |node| self.expect_done(node, HomeStep::KeepNewFile { keep });
        nodes.map(ask).fold(Ok(()), Result::and)
    }

    /// Has the daemon of a node's host open a file of a checkpoint for the node.
    ///
    /// # Errors
    /// It did not.
    pub fn open_file(&self, node: usize, number: u32, path: &Path) -> Result<(), String> {
        let path = path.to_owned();
        self.expect_done(node, HomeStep::SavedFile { number, path })
    }

    fn expect_done(&self, node: usize, step: HomeStep) -> Result<(), String> {
        match self.move_home(node, vec![step]) {
            Some(Reply::Ready | Reply::HomeReady(_)) => Ok(()),
            Some(Reply::Failed(reason) | Reply::Lost(reason)) => Err(reason),
            None => Err(late()),
        }
    }

    /// Sends steps of the home's move to the launcher, and waits for the reply to the last one.
    fn move_home(&self, number: usize, steps: Vec<HomeStep>) -> Option<Reply> {
        let request = self.replies.begin();
        for step in steps {
            self.say_home(request, number, step);
        }
        self.replies.wait(HOME_WAIT, || false)
    }

    fn say_home(&self, request: u64, number: usize, step: HomeStep) {
        self.control.say(&MonitorMessage::Home {
            request,
            number: number as u32,
            step,
        });
    }
}

fn late() -> String {
    format!("its host did not reply within {} s", HOME_WAIT.as_secs())
}

/// What is asked for.
pub enum Wanted {
    Grow(NewNode),
    Release(usize),
    Migrate(Migration),
    /// Node 0 gets what a node on its own host has, after it came there. Whatever a user asks for
    /// comes first.
    Unite(usize),
}

/// A change that is under way, or the last one.
struct Current {
    job: Arc<Job>,
    /// It is called off for whatever else is asked for.
    gives_way: bool,
    /// What came of it, once it is over.
    view: ChangeView,
    /// A client has asked since it is over.
    is_read: bool,
}

impl Current {
    /// Calls it off if it gives way to others; whether it does and is not over.
    fn call_off(&self) -> bool {
        let is_called_off = self.gives_way && !self.view.is_over();
        if is_called_off {
            self.job.cancel();
        }
        is_called_off
    }
}

/// Changes of nodes, one after the other, on a thread of their own.
#[derive(Clone)]
pub struct Changes {
    orders: SyncSender<(Wanted, Arc<Job>)>,
    current: Arc<Mutex<Option<Current>>>,
    /// The checkpoint that is being written while the machine runs. Changed with `current` locked.
    saves: Arc<Mutex<Option<Identity>>>,
}

impl Changes {
    /// Starts the thread.
    pub fn start(handle: Handle, launcher: Launcher) -> anyhow::Result<Self> {
        let (orders, ordered) = sync_channel(1);
        let changes = Self {
            orders,
            current: Arc::default(),
            saves: Arc::default(),
        };
        let current = changes.current.clone();
        weft_confine::spawn("weft-changes", ThreadKind::Device, move || {
            carry_out(&handle, &launcher, &ordered, &current);
        })
        .context("cannot start a thread")?;
        Ok(changes)
    }

    /// Begins a change, unless one is under way.
    pub fn begin(&self, wanted: Wanted) -> Result<ChangeView, Failure> {
        let mut current = lock(&self.current);
        // Behind one that is called off the next one waits.
        let is_in_the_way = |last: &Current| !last.view.is_over() && !last.call_off();
        if current.as_ref().is_some_and(is_in_the_way) {
            return Err(Failure::Conflict(
                "a node joins or leaves, or the machine migrates: wait for it, or cancel it".into(),
            ));
        }
        if lock(&self.saves).is_some() {
            return Err(Failure::Conflict(
                "the machine is being saved while it runs: wait for it, or end `weft vm save`"
                    .into(),
            ));
        }
        let job = Arc::new(Job::default());
        let view = ChangeView {
            node: match &wanted {
                Wanted::Grow(_) | Wanted::Migrate(_) | Wanted::Unite(_) => None,
                Wanted::Release(node) => Some(*node),
            },
            ..ChangeView::default()
        };
        let gives_way = matches!(wanted, Wanted::Unite(_));
        let gone = |_| Failure::Conflict("the machine has ended".into());
        self.orders.try_send((wanted, job.clone())).map_err(gone)?;
        *current = Some(Current {
            job,
            gives_way,
            view: view.clone(),
            is_read: false,
        });
        Ok(view)
    }

    /// Lets no change begin until [`Changes::end_save`] of this checkpoint, unless one is under
    /// way.
    pub fn begin_save(&self, identity: Identity) -> Result<(), Failure> {
        let current = lock(&self.current);
        if current.as_ref().is_some_and(|last| !last.view.is_over()) {
            return Err(Failure::Conflict(
                "cannot save it while it runs: a node joins or leaves, or it migrates".into(),
            ));
        }
        self.check_not_saving()?;
        *lock(&self.saves) = Some(identity);
        Ok(())
    }

    /// Calls off what gives way to everything else, and waits until that is over.
    pub fn give_way(&self) {
        let deadline = Instant::now() + LINGER_CHANGE;
        let is_under_way = || lock(&self.current).as_ref().is_some_and(Current::call_off);
        while is_under_way() && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
    }

    /// Refuses what does not go with a save of a machine that runs.
    pub fn check_not_saving(&self) -> Result<(), Failure> {
        match lock(&self.saves).is_some() {
            true => Err(Failure::Conflict("it is being saved already".into())),
            false => Ok(()),
        }
    }

    /// Whether this checkpoint is being written while the machine runs.
    pub fn is_saving(&self, identity: Identity) -> bool {
        *lock(&self.saves) == Some(identity)
    }

    /// Changes may begin again, if this checkpoint was being written; whether it was.
    pub fn end_save(&self, identity: Identity) -> bool {
        let _current = lock(&self.current);
        let mut saves = lock(&self.saves);
        let was_saving = *saves == Some(identity);
        if was_saving {
            *saves = None;
        }
        was_saving
    }

    /// How far it is.
    pub fn view(&self) -> Result<ChangeView, Failure> {
        let mut current = lock(&self.current);
        let last = current.as_mut();
        let last = last.ok_or_else(|| {
            Failure::Conflict("no node has joined or left, and the machine has not migrated".into())
        })?;
        last.is_read = last.view.is_over();
        Ok(ChangeView {
            progress: last.job.view(),
            ..last.view.clone()
        })
    }

    /// Waits until the change that ended the machine here is over, and what came of it was read.
    pub fn linger(&self) {
        let wait = |bound, is_done: fn(&Current) -> bool| {
            let deadline = Instant::now() + bound;
            let is_done = || lock(&self.current).as_ref().is_none_or(is_done);
            while !is_done() && Instant::now() < deadline {
                std::thread::sleep(LOOK);
            }
        };
        wait(LINGER_CHANGE, |last| last.view.is_over());
        wait(LINGER_READER, |last| last.is_read);
    }

    /// Asks for its end.
    pub fn cancel(&self) -> Result<ChangeView, Failure> {
        match &*lock(&self.current) {
            Some(last) if !last.view.is_over() => last.job.cancel(),
            _ => {
                return Err(Failure::Conflict(
                    "no node joins or leaves, and the machine does not migrate".into(),
                ));
            }
        }
        self.view()
    }
}

fn carry_out(
    handle: &Handle,
    launcher: &Launcher,
    ordered: &Receiver<(Wanted, Arc<Job>)>,
    current: &Mutex<Option<Current>>,
) {
    while let Ok((wanted, job)) = ordered.recv() {
        let mut over = ChangeView::default();
        let done = match wanted {
            Wanted::Grow(node) => handle
                .grow(launcher, &node, &job)
                .map(|done| over.grown = Some(done)),
            Wanted::Release(node) => handle
                .release(launcher, node, &job)
                .map(|done| over.released = Some(done)),
            Wanted::Migrate(migration) => handle
                .migrate(launcher, &migration, &job)
                .map(|done| over.migrated = Some(done)),
            Wanted::Unite(node) => {
                let done = handle.unite(launcher, node, &job);
                say_united(&launcher.name, node, &done, job.is_cancelled());
                done.map(|done| over.migrated = Some(done))
            }
        };
        // Unless it gave way to the next one.
        let mut current = lock(current);
        let last = current.as_mut();
        if let Some(current) = last.filter(|last| Arc::ptr_eq(&last.job, &job)) {
            current.view = ChangeView {
                node: current.view.node,
                failed: done.err().map(|refusal| refusal.to_string()),
                ..over
            };
        }
    }
}

/// Nobody has asked for it, so it is only in the machine's log.
fn say_united(machine: &str, node: usize, done: &Result<Migrated, Refusal>, gave_way: bool) {
    let apart = format!("weft: vm {machine}: node 0 and node {node} of this host stay apart");
    match done {
        Ok(united) => eprintln!(
            "weft: vm {machine}: node 0 took over {} vCPUs and {} of pages from node {node} of this \
             host in {:.1} ms; the guest stood for {:.1} ms",
            united.vcpus,
            format_bytes(united.bytes + united.switched_bytes),
            united.total_s * 1e3,
            united.pause_ns as f64 / 1e6,
        ),
        Err(_) if gave_way => eprintln!("{apart}: another change or a save was requested"),
        Err(refusal) => eprintln!("{apart}: {refusal}"),
    }
}
