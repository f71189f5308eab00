//! Nodes that are lost, at random moments: a slice killed, a daemon killed, a
//! cable pulled.
//!
//! What must hold each time: the run ends within the lease and a margin; either
//! with the code for a lost node and a message that names it, or, when nothing
//! was on the node yet or any more, exactly as the native run; never with wrong
//! bytes, never with a hang, and no process stays behind.

use std::ffi::OsString;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::case::Case;
use crate::cluster::{Cluster, Wanted, free_port};
use crate::context::Context;
use crate::judge::{self, Native};
use crate::namespace::{self, Pair};
use crate::processes::{Process, command_line};
use crate::random::Random;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, Running, start};
use crate::suite::run_native;

/// The exit code for a lost node.
const EXIT_NODE_LOST: i32 = 122;
/// The exit code when the nodes that are left have no room for the program.
const EXIT_NO_ROOM: i32 = 123;
/// The exit code when nothing was started.
const EXIT_NOT_STARTED: i32 = 125;
/// How long a node may take to start its slice.
const START: Duration = Duration::from_secs(30);
/// What the tests ask for.
const LEASE: Duration = Duration::from_secs(2);
/// What a busy machine may add to the lease.
const MARGIN: Duration = Duration::from_secs(3);
/// The loss happens at a random moment up to this after the start.
const MOMENT_MAX: Duration = Duration::from_millis(2500);
const HOME_MIB: &str = "8M";
const OTHER_MIB: &str = "40M";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// The runtime of an embedded node.
    Slice,
    /// The runtime that a daemon started.
    RemoteSlice,
    Daemon,
    /// The cable between two hosts.
    Cable,
}

impl Loss {
    fn name(self) -> &'static str {
        match self {
            Loss::Slice => "kill slice",
            Loss::RemoteSlice => "kill remote slice",
            Loss::Daemon => "kill daemon",
            Loss::Cable => "cut network",
        }
    }
}

/// A program that is busy on both nodes for longer than any moment.
fn victim() -> Case {
    Case::new("victim", "{programs}/coherence 24 400")
        .program("coherence")
        .memory(26, 0)
}

/// Runs `moments` losses of each kind that is wanted.
pub fn run_losses(
    context: &Context,
    moments: usize,
    wanted: &dyn Fn(&str) -> bool,
    report: &Report,
) {
    let kinds = [Loss::Slice, Loss::RemoteSlice, Loss::Daemon, Loss::Cable];
    let kinds = kinds.into_iter().filter(|loss| wanted(loss.name()));
    if kinds.clone().count() == 0 {
        return;
    }
    let case = victim();
    if let Some(why) = case.missing(context) {
        report.add("losses", Duration::ZERO, Verdict::Skipped(why));
        return;
    }
    let native = match run_native(&case, context) {
        Ok(native) => native,
        Err(error) => {
            let reasons = vec![format!("{error:#}")];
            report.add("losses (native)", Duration::ZERO, Verdict::Failed(reasons));
            return;
        }
    };
    println!(
        "losses: seed {}, {moments} moments of each kind",
        context.seed
    );
    let no_namespaces = namespace::missing();
    for loss in kinds {
        if let (Loss::Cable, Some(why)) = (loss, &no_namespaces) {
            report.add(loss.name(), Duration::ZERO, Verdict::Skipped(why.clone()));
            continue;
        }
        let mut random = Random::new(context.seed ^ loss as u64);
        for number in 0..moments {
            let moment = Duration::from_micros(random.below(MOMENT_MAX.as_micros() as u64));
            let started = Instant::now();
            let verdict = lose(context, &case, &native, loss, moment)
                .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
            let name = format!("{} {number} at {} ms", loss.name(), moment.as_millis());
            report.add(&name, started.elapsed(), verdict);
        }
    }
}

fn lose(
    context: &Context,
    case: &Case,
    native: &Native,
    loss: Loss,
    moment: Duration,
) -> Result<Verdict> {
    let directory = context.directory(&format!("loss-{}", loss.name()))?;
    match loss {
        Loss::Slice => lose_embedded(context, case, native, moment, &directory),
        Loss::RemoteSlice | Loss::Daemon | Loss::Cable => {
            lose_remote(context, case, native, loss, moment, &directory)
        }
    }
}

fn common_options() -> Vec<OsString> {
    let lease = LEASE.as_secs().to_string();
    [
        "--memory",
        &format!("{HOME_MIB},{OTHER_MIB}"),
        "--lease",
        &lease,
        "--",
    ]
    .map(OsString::from)
    .to_vec()
}

fn lose_embedded(
    context: &Context,
    case: &Case,
    native: &Native,
    moment: Duration,
    directory: &Path,
) -> Result<Verdict> {
    let mut command: Vec<OsString> = vec![context.weft.clone().into(), "run".into()];
    command.extend(["--nodes".into(), "2".into()]);
    command.extend(common_options());
    command.extend(case.words(context).into_iter().map(Into::into));
    let mut running = start(&Invocation::new(&command, directory))?;
    let slice = find_slice(&mut running, context, moment)?;
    let Some(slice) = slice else {
        return Ok(judge_end(
            case,
            native,
            running.finish()?,
            Instant::now(),
            directory,
        ));
    };
    kill(Pid::from_raw(slice), Signal::SIGKILL).context("killing the slice")?;
    let at = Instant::now();
    Ok(judge_end(case, native, running.finish()?, at, directory))
}

/// Waits until `moment` after the start, then names a runtime that is not
/// home's. `None`: the run ended before.
pub(crate) fn find_slice(
    running: &mut Running,
    context: &Context,
    moment: Duration,
) -> Result<Option<i32>> {
    wait_until(running.started() + moment);
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let members = running.members();
        if members.is_empty() {
            return Ok(None);
        }
        if let Some(slice) = members.iter().find(|member| is_slice(member, context)) {
            return Ok(Some(slice.identity.pid));
        }
        if Instant::now() > deadline {
            let lines: Vec<String> = members.iter().map(crate::processes::describe).collect();
            bail!("no process looks like a slice: {}", lines.join("; "));
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A slice executes the runtime, but does not carry the program's name.
fn is_slice(process: &Process, context: &Context) -> bool {
    let pid = process.identity.pid;
    let executable = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    executable.ends_with("weft-runtime")
        && !command_line(pid).starts_with(&*context.programs.to_string_lossy())
}

fn wait_until(moment: Instant) {
    thread::sleep(moment.saturating_duration_since(Instant::now()));
}

fn lose_remote(
    context: &Context,
    case: &Case,
    native: &Native,
    loss: Loss,
    moment: Duration,
    directory: &Path,
) -> Result<Verdict> {
    let pair = (loss == Loss::Cable).then(Pair::new).transpose()?;
    let wanted = match &pair {
        Some(pair) => Wanted {
            host: Pair::ADDRESS_B.to_string(),
            port: 7117,
            memory: "1G".to_string(),
            prefix: pair.prefix('b'),
            runtime: None,
        },
        None => Wanted {
            host: "127.0.0.1".to_string(),
            port: free_port()?,
            memory: "1G".to_string(),
            prefix: Vec::new(),
            runtime: None,
        },
    };
    let mut cluster = Cluster::start(context, directory, &wanted)?;
    let mut command = pair
        .as_ref()
        .map(|pair| pair.prefix('a'))
        .unwrap_or_default();
    command.extend([context.weft.clone().into(), "run".into(), "--on".into()]);
    command.push(cluster.address.clone().into());
    command.extend(common_options());
    command.extend(case.words(context).into_iter().map(Into::into));
    let mut invocation = Invocation::new(&command, &directory.join("run"));
    invocation.environment = vec![cluster.home.environment()];
    let mut running = start(&invocation)?;
    wait_until(running.started() + moment);

    let mut daemon_left = Vec::new();
    let at = match loss {
        Loss::Cable => {
            pair.as_ref()
                .context("a cable needs namespaces")?
                .cut(true)?;
            Instant::now()
        }
        Loss::RemoteSlice => {
            let deadline = Instant::now() + Duration::from_secs(10);
            loop {
                let members = cluster.daemon_members();
                if let Some(slice) = members.iter().find(|member| is_slice(member, context)) {
                    kill(Pid::from_raw(slice.identity.pid), Signal::SIGKILL)?;
                    break Instant::now();
                }
                if running.members().is_empty() {
                    // It ended before the moment came.
                    break Instant::now();
                }
                if Instant::now() > deadline {
                    bail!("the daemon starts no slice");
                }
                thread::sleep(Duration::from_millis(2));
            }
        }
        Loss::Daemon | Loss::Slice => {
            let pid = cluster.daemon_pid().context("the daemon runs")?;
            kill(Pid::from_raw(pid), Signal::SIGKILL)?;
            let at = Instant::now();
            if let Some(outcome) = cluster.kill_daemon()? {
                daemon_left = outcome.leftovers;
            }
            at
        }
    };
    let outcome = running.finish()?;
    let mut verdict = judge_end(case, native, outcome, at, &directory.join("run"));
    if loss == Loss::Cable {
        daemon_left = slices_after_lease(&mut cluster, context, at);
    }
    if !daemon_left.is_empty() {
        let mut reasons = match verdict {
            Verdict::Failed(reasons) => reasons,
            _ => Vec::new(),
        };
        reasons.extend(
            daemon_left
                .iter()
                .map(|left| format!("left on the other node: {left}")),
        );
        verdict = Verdict::Failed(reasons);
    }
    Ok(verdict)
}

/// After a cut the other side cannot hear of the end: its slices must go by
/// themselves, within their lease.
fn slices_after_lease(cluster: &mut Cluster, context: &Context, cut: Instant) -> Vec<String> {
    let deadline = cut + LEASE + MARGIN;
    loop {
        let members = cluster.daemon_members();
        let slices: Vec<String> = members
            .iter()
            .filter(|member| is_slice(member, context))
            .map(crate::processes::describe)
            .collect();
        if slices.is_empty() || Instant::now() > deadline {
            return slices;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn judge_end(
    case: &Case,
    native: &Native,
    outcome: Outcome,
    lost: Instant,
    directory: &Path,
) -> Verdict {
    let ended = Instant::now();
    let mut reasons: Vec<String> = outcome
        .leftovers
        .iter()
        .map(|left| format!("left a process behind: {left}"))
        .collect();
    let after = ended.saturating_duration_since(lost);
    let note = match outcome.end {
        End::Exit(EXIT_NODE_LOST) => {
            if after > LEASE + MARGIN {
                reasons.push(format!("ended {:.1} s after the loss", after.as_secs_f64()));
            }
            if !outcome.stderr.contains("node") {
                reasons.push("the message does not name the node".to_string());
            }
            format!("ended {:.2} s after", after.as_secs_f64())
        }
        // Nothing was on the node yet, but the program needs its room.
        End::Exit(EXIT_NO_ROOM)
            if outcome.stderr.contains("nothing was on it")
                && outcome.stderr.contains("no room") =>
        {
            "ended without the lost node's room".to_string()
        }
        // The loss came before the program.
        End::Exit(EXIT_NOT_STARTED) if is_empty(&outcome.stdout) => {
            if after > START + MARGIN || !outcome.stderr.contains("node") {
                reasons.push(format!(
                    "ended {:.1} s after: {}",
                    after.as_secs_f64(),
                    outcome.stderr.trim()
                ));
            }
            "not started".to_string()
        }
        End::Hang => {
            reasons.push("hangs after the loss".to_string());
            reasons.extend(outcome.stacks.iter().cloned());
            String::new()
        }
        _ => {
            reasons.extend(judge::compare(case, native, &outcome, directory));
            "not affected: ended as the native run does".to_string()
        }
    };
    if reasons.is_empty() {
        return Verdict::Passed(note);
    }
    reasons.push(format!(
        "{}; stderr: {}",
        outcome.end,
        outcome.stderr.trim()
    ));
    Verdict::Failed(reasons)
}

fn is_empty(file: &Path) -> bool {
    file.metadata().is_ok_and(|file| file.len() == 0)
}
