//! Processes that are killed at random moments while the home of a machine moves.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::migration::mode;
use super::{LEASE, LONG_BOUND, Site, children, wait_until};
use crate::processes;
use crate::random::Random;

/// A word of the command line of the process that takes a machine.
const TAKER: &str = "take-home";

/// What is killed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Victim {
    /// The machine's, on host 0.
    Launcher,
    /// Of this host.
    Daemon(usize),
    /// The process on host 1 that is about to take the machine.
    Taker,
}

/// A series of moves of a machine. One process is killed during each move.
pub(super) struct Kills<'a> {
    /// Where the machine goes; its home goes to host 1.
    pub to: &'a str,
    /// In turn.
    pub victims: &'a [Victim],
    pub rounds: usize,
    /// Rounds in a row in which the process on host 1 is about to take the state. As many as
    /// there are victims follow in which it is at its start.
    pub late: usize,
    /// Longest wait before the kill, in microseconds.
    pub within_us: u64,
}

impl Kills<'_> {
    /// Judges after each kill that the machine runs on one host at most, and that all pages of
    /// its guest are right there.
    pub fn carry_out(&self, site: &mut Site<'_>) -> Result<String> {
        let mut random = Random::new(site.bench.context.seed ^ 0x803e);
        let mut said = Vec::new();
        for round in 0..self.rounds {
            let victim = self.victims[round % self.victims.len()];
            let is_early = round % (self.late + self.victims.len()) >= self.late;
            let place = self.kill(site, (victim, is_early), round, &mut random);
            let place = place.with_context(|| format!("{victim:?} killed in round {round}"))?;
            let what = match place {
                None => "ended",
                Some(0) => "stayed",
                Some(_) => "went",
            };
            said.push(format!("{victim:?}: {what}"));
        }
        Ok(said.join(", "))
    }

    /// Where the machine runs afterwards, if it does.
    fn kill(
        &self,
        site: &mut Site<'_>,
        (victim, is_early): (Victim, bool),
        round: usize,
        random: &mut Random,
    ) -> Result<Option<usize>> {
        site.start_as(&site.home, &[], "dirty 40 3000 3; read word")?;
        super::home::at_work(site)?;
        let launcher = site.machines_at(0)?[0]["pid"].as_i64();
        let launcher = launcher.context("no launcher")? as i32;
        let words = ["vm", "migrate", "m", self.to, mode(round)];
        let mut command = site.weft_at(0, &words);
        let mut command = (command.stdout(Stdio::null()).stderr(Stdio::null())).spawn()?;
        let taker = await_taker(site.daemons[0].pid(), is_early)?;
        std::thread::sleep(Duration::from_micros(random.below(self.within_us)));
        let pid = match victim {
            Victim::Launcher => launcher,
            Victim::Daemon(host) => site.daemons[host - 1].pid(),
            Victim::Taker => taker,
        };
        // It may have ended.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        command.wait()?;
        // What lost a node has ended by then.
        std::thread::sleep(LEASE);
        let place = judge(site)?;
        if let Victim::Daemon(host) = victim {
            let daemon = site.daemons.remove(host - 1);
            crate::cluster::stop(daemon)?;
            let daemon = site.start_daemon(host)?;
            site.daemons.insert(host - 1, daemon);
        }
        site.all_given_back()?;
        Ok(place)
    }
}

/// The process that a daemon started to take the machine.
fn await_taker(daemon: i32, is_early: bool) -> Result<i32> {
    let mut taker = None;
    wait_until("the process that takes the machine", || {
        let is_taker = |pid: &i32| processes::command_line(*pid).contains(TAKER);
        taker = children(daemon).into_iter().find(is_taker);
        // Unless it is early, it has the kernel, and has started a process of its own.
        let has_begun = |taker: i32| is_early || !children(taker).is_empty();
        Ok(taker.is_some_and(has_begun))
    })?;
    taker.context("no process takes the machine")
}

/// Where the machine runs, if it does, with the right pages. It does not afterwards.
fn judge(site: &Site<'_>) -> Result<Option<usize>> {
    let (here, there) = (site.machines_at(0)?.len(), site.machines_at(1)?.len());
    ensure!(here + there <= 1, "the machine runs twice");
    let Some(host) = (here + there == 1).then_some(there) else {
        return Ok(None);
    };
    let mut console = site.console_at(host)?;
    let is_right = console.wait_for("dirty: right", LONG_BOUND).is_some();
    if is_right {
        site.stop_at(host)?;
    } else {
        // It lost a node, and had not noticed yet.
        let said = console.lines().last().cloned();
        ensure!(
            site.machines_at(host)?.is_empty(),
            "the guest's pages are not right: {said:?}"
        );
    }
    console.kill()?;
    Ok(is_right.then_some(host))
}
