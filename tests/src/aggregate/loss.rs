//! Nodes that are lost at random moments.
//!
//! What must hold: within the lease and a margin the command ends, with the
//! documented code and one sentence that names the node and what it had, and
//! nothing is left behind.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{BOUND, Bench, EXIT_FAILED, Run, THREE, code};
use crate::guest::{Ended, Guest};
use crate::processes::Process;
use crate::random::Random;

const LEASE: Duration = Duration::from_secs(1);
/// What may be added to the lease.
const MARGIN: Duration = Duration::from_secs(3);
/// The exit code of a machine whose process was killed.
const EXIT_KILLED: i32 = 137;

/// What node 0 had, node 1 and node 2, as the sentence says it.
const HAD: [&str; 3] = [
    "node 0 (vCPU 0, 128 MiB of memory)",
    "node 1 (vCPU 1, 128 MiB of memory)",
    "node 2 (no vCPU, 64 MiB of memory)",
];

/// When it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Boot,
    Work,
    ShutDown,
}

impl When {
    /// What the guest does meanwhile; what it says when it may happen.
    fn script(self) -> (&'static str, Option<&'static str>) {
        match self {
            When::Boot => ("litmus -d 100", None),
            When::Work => ("echo at work; litmus -d 100", Some("at work")),
            When::ShutDown => ("true", Some("weft-guest: exit")),
        }
    }

    fn longest(self) -> Duration {
        Duration::from_millis(match self {
            When::Boot => 1500,
            When::Work => 1000,
            When::ShutDown => 150,
        })
    }
}

pub(super) fn run(seed: u64, moments: usize, run: &Run<'_>) {
    let mut random = Random::new(seed ^ 0xa99);
    for number in 0..moments {
        for when in [When::Boot, When::Work, When::ShutDown] {
            let at = Duration::from_micros(random.below(when.longest().as_micros() as u64));
            let moment = Moment { when, at };
            let node = 1 + random.below(2) as usize;
            let name = |what: &str| format!("{what}, {when:?} +{} ms, {number}", at.as_millis());
            run(&name(&format!("kill node {node}")), &|bench| {
                killed(bench, moment, node)
            });
            // Every kind once is enough where the moment matters little.
            if when == When::Work {
                run(&name("kill node 0"), &|bench| killed(bench, moment, 0));
                run(&name("kill the command"), &|bench| orphaned(bench, moment));
                run(&name(&format!("stop node {node}, continue it")), &|bench| {
                    stopped(bench, moment, node, true)
                });
                run(&name(&format!("stop node {node} for good")), &|bench| {
                    stopped(bench, moment, node, false)
                });
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Moment {
    when: When,
    at: Duration,
}

impl Moment {
    /// A machine at this moment, and its nodes' processes by number.
    fn reach(self, bench: &Bench<'_>) -> Result<(Guest, Vec<Process>)> {
        let (script, text) = self.when.script();
        let guest = match text {
            None => bench.start(THREE, &[], script)?,
            Some(text) => bench.start_until(THREE, &[], script, text)?,
        };
        let mut processes = bench.processes(&guest, THREE.nodes)?;
        processes.rotate_right(1);
        std::thread::sleep(self.at);
        Ok((guest, processes))
    }
}

fn signal(process: &Process, signal: Signal) -> Result<()> {
    let sent = kill(Pid::from_raw(process.identity.pid), signal);
    sent.with_context(|| format!("{signal} to {}", process.identity.pid))
}

fn killed(bench: &Bench<'_>, moment: Moment, node: usize) -> Result<String> {
    let (guest, processes) = moment.reach(bench)?;
    // It is gone when the machine has ended already.
    let sent = signal(&processes[node], Signal::SIGKILL);
    ensure!(sent.is_ok() || moment.when == When::ShutDown, "{sent:?}");
    let lost = Instant::now();
    let pid = guest.pid();
    let ended = guest.finish(BOUND)?;
    let took = lost.elapsed();
    bench.nothing_left(pid)?;
    if moment.when == When::ShutDown && code(&ended)? == 0 {
        return Ok("it had powered off".to_owned());
    }
    let wanted = match node {
        0 => EXIT_KILLED,
        _ => EXIT_FAILED,
    };
    judge(&ended, wanted, node, took)
}

fn judge(ended: &Ended, wanted: i32, node: usize, took: Duration) -> Result<String> {
    let found = code(ended)?;
    ensure!(
        found == wanted,
        "exit {found}, not {wanted}: {}",
        ended.stderr
    );
    ensure!(
        took <= LEASE + MARGIN,
        "ended {:.1} s after: {}",
        took.as_secs_f64(),
        ended.stderr
    );
    let said: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| line.contains("lost node"))
        .collect();
    ensure!(
        said.len() == 1 && said[0].contains(HAD[node]),
        "the end is not said in one sentence that names {}: {}",
        HAD[node],
        ended.stderr
    );
    // What is booted, by what, with which words, and how it ended.
    let lines = ended.stderr.lines().count();
    ensure!(lines <= 4, "more is said: {}", ended.stderr);
    Ok(format!("ended {:.2} s after", took.as_secs_f64()))
}

fn stopped(bench: &Bench<'_>, moment: Moment, node: usize, go_on: bool) -> Result<String> {
    let (guest, processes) = moment.reach(bench)?;
    let pid = guest.pid();
    signal(&processes[node], Signal::SIGSTOP)?;
    let lost = Instant::now();
    let stopped = processes[node].clone();
    let waker = go_on.then(|| {
        std::thread::spawn(move || {
            std::thread::sleep(LEASE + Duration::from_millis(500));
            signal(&stopped, Signal::SIGCONT)
        })
    });
    let ended = guest.finish(BOUND)?;
    let took = lost.elapsed();
    if let Some(waker) = waker {
        let sent = waker.join().ok().context("the waker panicked")?;
        sent.context("it did not wait to be continued")?;
        // One that does not end by itself is killed later than this.
        let most = LEASE + Duration::from_millis(2000);
        ensure!(took < most, "it did not end by itself: {took:?}");
    }
    bench.nothing_left(pid)?;
    judge(&ended, EXIT_FAILED, node, took)
}

/// Nobody is left to remove the sockets: the next who looks does.
fn orphaned(bench: &Bench<'_>, moment: Moment) -> Result<String> {
    let (mut guest, _) = moment.reach(bench)?;
    let pid = guest.pid();
    guest.kill()?;
    guest.finish(BOUND)?;
    bench.no_process_left(pid)?;
    bench.ask(&["vm", "list"])?;
    bench.nothing_left(pid)?;
    Ok(String::new())
}
