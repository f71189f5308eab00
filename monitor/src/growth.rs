//! Nodes that join and leave while the machine runs: what the launcher sends, and what node 0
//! asks of it.
//!
//! A thread listens at the control socket, from before this process confines itself. It opens
//! links that come as open sockets.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use weft_aggregate::Slice;
use weft_api::{ChangeView, Failure};
use weft_confine::{ThreadKind, lock};
use weft_machine::membership::{Job, NewNode, NodeProcesses};
use weft_machine::migration::Migration;
use weft_machine::{Handle, Machine};
use weft_node::monitor_protocol::{Control, LauncherMessage, MonitorMessage, SliceBoot};

use crate::links;

/// Longest wait for the process of a node: hosts are asked, it starts and measures its clock.
const START_WAIT: Duration = Duration::from_secs(30);
/// How often a thread that waits looks whether its request was cancelled.
const LOOK: Duration = Duration::from_millis(50);

/// What the launcher has said of the node that node 0 asked for.
#[derive(Default)]
pub struct Replies {
    last: Mutex<LastRequest>,
    changed: Condvar,
}

/// The last request for a node, and its outcome once the launcher has replied.
#[derive(Default)]
struct LastRequest {
    number: u64,
    outcome: Option<Result<(), String>>,
}

impl Replies {
    /// The number of a new request.
    fn begin(&self) -> u64 {
        let mut last = lock(&self.last);
        let number = last.number + 1;
        *last = LastRequest {
            number,
            outcome: None,
        };
        number
    }

    /// A reply. One to a request that was cancelled comes too late.
    fn put(&self, request: u64, outcome: Result<(), String>) {
        let mut last = lock(&self.last);
        if last.number == request {
            last.outcome = Some(outcome);
            self.changed.notify_all();
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
                LauncherMessage::NodeReady { request } => self.reply(request, Ok(())),
                LauncherMessage::NodeFailed { request, reason } => {
                    self.reply(request, Err(reason));
                }
            }
        }
    }

    fn reply(&self, request: u64, outcome: Result<(), String>) {
        if let Some(replies) = &self.replies {
            replies.put(request, outcome);
        }
    }
}

/// The launcher, as node 0 sees it.
pub struct Launcher {
    pub control: Arc<Control>,
    pub replies: Arc<Replies>,
    /// The vCPUs are KVM's.
    pub is_kvm: bool,
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
        let deadline = Instant::now() + START_WAIT;
        let mut last = lock(&self.replies.last);
        loop {
            if let Some(outcome) = last.outcome.take() {
                return outcome;
            }
            let is_late = Instant::now() > deadline;
            if is_late || job.is_cancelled() {
                drop(last);
                self.end(number as usize);
                return Err(match is_late {
                    true => format!("it did not begin within {} s", START_WAIT.as_secs()),
                    false => "it was cancelled".into(),
                });
            }
            let waited = self.replies.changed.wait_timeout(last, LOOK);
            last = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end(&self, number: usize) {
        let number = number as u32;
        self.control.say(&MonitorMessage::EndNode { number });
    }
}

/// What is asked for.
pub enum Wanted {
    Grow(NewNode),
    Release(usize),
    Migrate(Migration),
}

/// A change that is under way, or the last one.
struct Current {
    job: Arc<Job>,
    /// What came of it, once it is over.
    view: ChangeView,
}

/// Changes of nodes, one after the other, on a thread of their own.
#[derive(Clone)]
pub struct Changes {
    orders: SyncSender<(Wanted, Arc<Job>)>,
    current: Arc<Mutex<Option<Current>>>,
}

impl Changes {
    /// Starts the thread.
    pub fn start(handle: Handle, launcher: Launcher) -> anyhow::Result<Self> {
        let (orders, ordered) = sync_channel(1);
        let changes = Self {
            orders,
            current: Arc::default(),
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
        if current.as_ref().is_some_and(|last| !last.view.is_over()) {
            return Err(Failure::Conflict(
                "a node joins or leaves, or the machine migrates: wait for it, or cancel it".into(),
            ));
        }
        let job = Arc::new(Job::default());
        let view = ChangeView {
            node: match &wanted {
                Wanted::Grow(_) | Wanted::Migrate(_) => None,
                Wanted::Release(node) => Some(*node),
            },
            ..ChangeView::default()
        };
        let gone = |_| Failure::Conflict("the machine has ended".into());
        self.orders.try_send((wanted, job.clone())).map_err(gone)?;
        *current = Some(Current {
            job,
            view: view.clone(),
        });
        Ok(view)
    }

    /// How far it is.
    pub fn view(&self) -> Result<ChangeView, Failure> {
        let current = lock(&self.current);
        let last = current.as_ref();
        let last = last.ok_or_else(|| {
            Failure::Conflict("no node has joined or left, and the machine has not migrated".into())
        })?;
        Ok(ChangeView {
            progress: last.job.view(),
            ..last.view.clone()
        })
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
        };
        if let Some(current) = &mut *lock(current) {
            current.view = ChangeView {
                node: current.view.node,
                failed: done.err().map(|refusal| refusal.to_string()),
                ..over
            };
        }
    }
}
