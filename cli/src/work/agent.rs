//! The agent of a program or a machine in a cluster: a process beside the launcher. It asks for
//! room, keeps the request while it waits, and says when what was placed has ended.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use weft_cluster::{
    ALIVE_LEASE, Cluster, ClusterError, Live, MoveOrder, Placed, WorkPart, WorkRequest,
};
use weft_node::error::sentence;
use weft_node::mark;
use weft_node::member::Membership;
use weft_node::said::plain;
use weft_store::{LeaseId, StoreError};

use super::bell::{Bell, Woken};
use super::console::{self, ShownLease};
use super::gauge::{self, Gauge};
use super::mover::{Mover, Spread};
use super::{Instructions, Reply};

/// The lease is renewed once in each.
const TURN: Duration = ALIVE_LEASE.checked_div(5).expect("not by zero");
/// How often an agent looks at a move that is under way.
const MOVE_LOOK: Duration = Duration::from_secs(1);
const CALLED_OFF: &str = "an operator called it off";
/// How often a program is asked which hosts it has left. That costs the store nothing.
const PEEK: Duration = Duration::from_millis(250);
/// Nobody decides in a cluster for longer than this only if no daemon runs.
const NO_LEADER: Duration = Duration::from_secs(20);
/// For so long an agent tries to tell a store that does not answer that its work has ended. The
/// home's daemon says it later.
const FAREWELL: Duration = Duration::from_secs(60);

/// Runs as the agent of the process at the other end of the pipes.
pub fn run() -> anyhow::Result<ExitCode> {
    // A terminal that stops what writes in the background does not stop this.
    let ignored = nix::sys::signal::SigHandler::SigIgn;
    // SAFETY: no handler runs: the signal is ignored.
    unsafe { nix::sys::signal::signal(nix::sys::signal::Signal::SIGTTOU, ignored) }
        .context("cannot ignore a signal")?;
    let launcher = nix::unistd::getppid().as_raw() as u32;
    let mut line = Vec::new();
    // Not buffered: the end of the input is waited for with poll.
    let mut byte = [0];
    while io::Read::read(&mut unbuffered()?, &mut byte)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    let instructions: Instructions = serde_json::from_slice(&line)
        .context("this command is for `weft run --cluster` and `weft vm start --cluster`")?;
    let _shown = mark::show(&instructions.request.mark, "agent").context("cannot make a socket")?;
    let (reply, agent) = match Agent::begin(instructions, launcher) {
        Ok((agent, placed)) => {
            let revision = placed.revision();
            let Placed { id, parts, why, .. } = placed;
            (Reply::Placed { id, parts, why }, Some((agent, revision)))
        }
        Err(error) => (Reply::Failed(format!("{error:#}")), None),
    };
    let mut text = serde_json::to_vec(&reply)?;
    text.push(b'\n');
    // A launcher that has ended reads nothing, and is seen to have ended.
    let _ = io::stdout().lock().write_all(&text);
    let _ = io::stdout().lock().flush();
    let Some((mut agent, revision)) = agent else {
        return Ok(ExitCode::FAILURE);
    };
    leave_terminal().context("cannot leave the terminal")?;
    match agent.is_elsewhere {
        true => agent.wait_for_caller(),
        false => agent.wait_for_end(revision),
    }
    agent.say_goodbye();
    Ok(ExitCode::SUCCESS)
}

fn unbuffered() -> io::Result<std::fs::File> {
    Ok(io::stdin().as_fd().try_clone_to_owned()?.into())
}

/// A shell that waits for the launcher's output must not wait for the agent.
fn leave_terminal() -> anyhow::Result<()> {
    let nothing = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    nix::unistd::dup2_stdout(&nothing)?;
    nix::unistd::dup2_stderr(&nothing)?;
    Ok(())
}

/// Whether the launcher has ended, now or while this waits.
fn launcher_ended(wait: Duration) -> bool {
    let input = io::stdin();
    let mut ready = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    let wait = PollTimeout::try_from(wait).unwrap_or(PollTimeout::ZERO);
    // Nothing more comes than the end.
    match poll(&mut ready, wait) {
        Ok(count) => count > 0,
        Err(nix::errno::Errno::EINTR) => false,
        Err(_) => true,
    }
}

struct Agent {
    cluster: Cluster,
    lease: LeaseId,
    /// The lease has run out once since the request was there.
    lapsed: bool,
    request: WorkRequest,
    id: u64,
    /// The home is on another host: the agent there does the rest.
    is_elsewhere: bool,
    mover: Option<Mover>,
    console: Option<ShownLease>,
    /// The hosts that a program has left, as the cluster knows.
    left: Vec<String>,
    gauge: Gauge,
    /// The process at the other end of the pipes.
    launcher: u32,
}

impl Agent {
    /// Asks, and waits for a place; or takes over what is placed.
    fn begin(instructions: Instructions, launcher: u32) -> anyhow::Result<(Agent, Placed)> {
        let (_, cluster) = Membership::joined()?;
        let lease = cluster.lease()?;
        let host = instructions.host().to_owned();
        let request = instructions.request;
        let begun = match instructions.placed {
            None => cluster.ask(&request, lease).map(|id| (id, None)),
            Some(id) => cluster
                .take_over((&request.name, id), &host, &request.mark, lease)
                .map(|placed| (id, Some(placed))),
        };
        if begun.is_err() {
            // Else it ends by itself.
            let _ = cluster.end_lease(lease);
        }
        let (id, taken_over) = begun?;
        let mut agent = Agent {
            cluster,
            lease,
            lapsed: false,
            id,
            request,
            is_elsewhere: false,
            mover: None,
            console: None,
            left: Vec::new(),
            gauge: Gauge::default(),
            launcher,
        };
        let placed = match taken_over {
            Some(placed) => Ok(placed),
            None => agent.wait_for_place(instructions.patience),
        };
        match placed {
            Ok(placed) => {
                agent.is_elsewhere = placed.request.home != host;
                let machine = instructions.machine.filter(|_| !agent.is_elsewhere);
                agent.mover = machine.map(|machine| Mover::new(machine, &placed.parts));
                if let Some(mover) = &agent.mover {
                    // Without a thread for it, pages say that the agent does not answer.
                    let cluster = agent.cluster.clone();
                    agent.console = console::serve(cluster, agent.id, mover.spread()).ok();
                }
                Ok((agent, placed))
            }
            Err(error) => {
                agent.say_goodbye();
                Err(error)
            }
        }
    }

    fn wait_for_place(&mut self, patience: Option<Duration>) -> anyhow::Result<Placed> {
        let begun = Instant::now();
        let mut told = String::new();
        let mut tell = |why: &str| {
            if !why.is_empty() && told != why {
                // A launcher may have closed it.
                let _ = writeln!(io::stderr(), "weft: {}", plain(why));
                told = why.to_owned();
            }
        };
        loop {
            if launcher_ended(Duration::ZERO) {
                bail!("the launcher has ended");
            }
            match self.look(begun, patience, &mut tell) {
                Ok(Some(placed)) => return Ok(placed),
                Ok(None) => {}
                Err(error) => match error.downcast_ref::<ClusterError>() {
                    Some(ClusterError::Store(
                        error @ (StoreError::Unreachable { .. } | StoreError::Unknown { .. }),
                    )) => {
                        let text = sentence(error);
                        if patience.is_some_and(|patience| begun.elapsed() >= patience) {
                            bail!("{text}");
                        }
                        tell(&format!("{text}; asking again"));
                        launcher_ended(TURN);
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    /// One look at the cluster, and a wait for a change.
    fn look(
        &mut self,
        begun: Instant,
        patience: Option<Duration>,
        tell: &mut dyn FnMut(&str),
    ) -> anyhow::Result<Option<Placed>> {
        self.renew()?;
        let name = &self.request.name;
        let work = self.cluster.work()?;
        if let Some(placed) = work.placed.get(name).filter(|placed| placed.id == self.id) {
            return Ok(Some(placed.clone()));
        }
        if !work.asked.iter().any(|asked| asked.id == self.id) {
            // A lease that ends after it was renewed takes the request along.
            self.renew()?;
            let name = &self.request.name;
            if !self.lapsed {
                bail!("{name} was forgotten (`weft cluster forget`)");
            }
            // The store could not be reached for longer than the lease.
            self.id = self.cluster.ask(&self.request, self.lease)?;
            self.lapsed = false;
            return Ok(None);
        }
        let left = patience.map(|patience| patience.saturating_sub(begun.elapsed()));
        let is_over = left == Some(Duration::ZERO);
        let why = match work.answer(name, self.id) {
            Some(answer) if answer.refused => bail!("{}", answer.why.trim_end_matches('.')),
            Some(answer) => answer.why.clone(),
            None if begun.elapsed() < NO_LEADER => String::new(),
            None if self.cluster.leader()?.is_some() => {
                "The host that decides has not answered yet.".into()
            }
            None => "No host decides in this cluster: run `weft node start` on a member.".into(),
        };
        if is_over && !why.is_empty() {
            bail!(
                "{} (not started: it has waited {} s)",
                why.trim_end_matches('.'),
                begun.elapsed().as_secs()
            );
        }
        tell(&why);
        let wait = match left {
            None | Some(Duration::ZERO) => TURN,
            Some(left) => left.min(TURN),
        };
        self.cluster.wait_for_work(work.revision, wait)?;
        Ok(None)
    }

    /// Renews the lease, or gets another one where it has run out.
    fn renew(&mut self) -> Result<(), ClusterError> {
        match self.cluster.renew(self.lease) {
            Err(ClusterError::Store(StoreError::LeaseGone(_))) => {
                self.lease = self.cluster.lease()?;
                self.lapsed = true;
                self.cluster
                    .agent_lives(&self.request.name, self.id, self.lease)
            }
            outcome => outcome,
        }
    }

    /// Keeps the lease, as the sign of an agent, until a launcher elsewhere has one.
    fn wait_for_caller(&mut self) {
        while !launcher_ended(TURN) {
            let _ = self.cluster.renew(self.lease);
        }
    }

    /// `revision`: of the record of what was placed.
    fn wait_for_end(&mut self, revision: u64) {
        let bell = Bell::new(self.cluster.clone(), &self.request.name, revision);
        let wait = match self.mover {
            Some(_) => TURN,
            None => PEEK,
        };
        let mut turned = Instant::now();
        loop {
            // What fails is tried again in the next turn. What runs needs no store.
            let _ = match bell.wait(wait) {
                Woken::Ended => return,
                Woken::Rung => self.carry_out(),
                Woken::Passed => self.tell_left(),
            };
            if turned.elapsed() >= TURN {
                turned = Instant::now();
                let _ = self
                    .renew()
                    .and_then(|()| self.carry_out())
                    .and_then(|()| self.tell_live());
            }
        }
    }

    /// Says which hosts a program has left since it was placed.
    fn tell_left(&mut self) -> Result<(), ClusterError> {
        if self.mover.is_some() {
            return Ok(());
        }
        let hosts = gauge::left_hosts(self.launcher);
        if hosts.iter().any(|host| !self.left.contains(host)) {
            let (name, id) = (&self.request.name, self.id);
            // If another change came first, the next turn says it again.
            if self.cluster.parts_left(name, id, &hosts)? {
                self.left = hosts;
            }
        }
        Ok(())
    }

    /// Says what the aggregate does, while somebody looks.
    fn tell_live(&mut self) -> Result<(), ClusterError> {
        if !self.cluster.is_watched()? {
            self.gauge = Gauge::default();
            return Ok(());
        }
        let live = match &self.mover {
            Some(mover) => self.gauge.machine(&mover.spread()),
            None => self.gauge.program(self.launcher, &self.request.home),
        };
        // It has just started, or is about to end.
        let Some(live) = live else {
            return Ok(());
        };
        self.tell(live)
    }

    fn tell(&self, live: Live) -> Result<(), ClusterError> {
        let live = Live {
            id: self.id,
            ..live
        };
        self.cluster
            .tell_live(&self.request.name, &live, self.lease)
    }

    /// Carries out the order that is open.
    fn carry_out(&mut self) -> Result<(), ClusterError> {
        let placed = self.cluster.placed(&self.request.name, self.id)?;
        let Some((placed, order)) = placed.and_then(|placed| {
            let order = placed.order.clone()?;
            Some((placed, order))
        }) else {
            return Ok(());
        };
        let mut mover = self.mover.take();
        let outcome = match &mut mover {
            _ if order.called_off => Err(CALLED_OFF.into()),
            Some(mover) => self.oversee(mover, &placed.parts, &order),
            None => Err("a program does not move".into()),
        };
        self.mover = mover;
        // What happened has to be known: the room of both sides is taken until then.
        while let Err(error) = self.cluster.order_ended(&placed, outcome.clone().map(Some)) {
            if launcher_ended(TURN) {
                return Err(error);
            }
            let _ = self.renew();
        }
        Ok(())
    }

    /// Has a mover carry an order out. Meanwhile the lease is renewed, those who look see how far
    /// it is, and an operator may call it off.
    fn oversee(
        &mut self,
        mover: &mut Mover,
        parts: &[WorkPart],
        order: &MoveOrder,
    ) -> Result<Duration, String> {
        let spread = mover.spread();
        let (mut renewed, mut looked) = (Instant::now(), Instant::now());
        let mut called_off = false;
        let outcome = mover.carry_out(parts, order, &mut || {
            // A store that does not answer does not hold the move up for good.
            if renewed.elapsed() > TURN {
                renewed = Instant::now();
                let _ = self.renew();
            }
            if looked.elapsed() > MOVE_LOOK {
                looked = Instant::now();
                called_off |= self.look_after_move(&spread, called_off).unwrap_or(false);
            }
        });
        match (outcome, called_off) {
            (Err(_), true) => Err(CALLED_OFF.into()),
            (outcome, _) => outcome,
        }
    }

    /// Whether the open move was called off, now or before.
    fn look_after_move(&mut self, spread: &Spread, called_off: bool) -> Result<bool, ClusterError> {
        let placed = self.cluster.placed(&self.request.name, self.id)?;
        let order = placed.and_then(|placed| placed.order);
        let now = order.is_some_and(|order| order.called_off);
        if now && !called_off {
            // Too late, or just begun: then it is asked again, or has moved.
            let cancelled = spread.client().map(|client| client.cancel());
            return Ok(matches!(cancelled, Ok(Ok(_))));
        }
        if self.cluster.is_watched()?
            && let Some(live) = self.gauge.machine(spread)
        {
            self.tell(live)?;
        }
        Ok(called_off)
    }

    /// What was asked for is not wanted any more, or has ended.
    fn say_goodbye(&self) {
        let begun = Instant::now();
        if let Some(shown) = self.console.as_ref().and_then(ShownLease::get) {
            // Else pages that have the console open learn of the end ten seconds later.
            let _ = self.cluster.end_lease(shown);
        }
        loop {
            // The lease first: then nobody can place what was asked for.
            let name = &self.request.name;
            let told = self.cluster.end_lease(self.lease);
            let told = told.and_then(|()| match self.is_elsewhere {
                true => self.cluster.caller_ended(name, self.id),
                false => self.cluster.work_ended(name, self.id),
            });
            if told.is_ok() || begun.elapsed() > FAREWELL {
                return;
            }
            std::thread::sleep(TURN);
        }
    }
}
