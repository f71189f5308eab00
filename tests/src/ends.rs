//! Runs that end, or go on, while the execution is on another node: what the user
//! is told, and that it is the first cause. `tests/programs/elsewhere.c` goes there.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::context::Context;
use crate::loss::find_slice;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, run, start};

const EXIT_NODE_LOST: i32 = 122;
const EXIT_NO_ROOM: i32 = 123;

/// A run, and what must come of it.
struct Expected {
    name: &'static str,
    options: &'static str,
    program: &'static str,
    exit: i32,
    /// In the message.
    says: &'static [&'static str],
    /// Not in the message.
    omits: &'static [&'static str],
    /// On standard output.
    prints: &'static str,
}

const EXPECTED: [Expected; 5] = [
    Expected {
        name: "no room is said by the node that executes",
        options: "--memory 2M,40M --jump 8",
        program: "elsewhere fill",
        exit: EXIT_NO_ROOM,
        says: &["no room"],
        omits: &["lost"],
        prints: "",
    },
    Expected {
        name: "no room is said by a third node",
        options: "--nodes 3 --memory 2M,40M,8M --jump 8",
        program: "elsewhere fill",
        exit: EXIT_NO_ROOM,
        says: &["no room"],
        omits: &["lost"],
        prints: "",
    },
    Expected {
        name: "a forbidden system call is named",
        options: "--memory 2M,40M --jump 8",
        program: "elsewhere call",
        exit: EXIT_NODE_LOST,
        says: &["SIGSYS", "system call that slices may not make"],
        omits: &[],
        prints: "",
    },
    Expected {
        name: "the time is asked for where the execution is",
        options: "--memory 2M,40M --jump 8",
        program: "elsewhere clocks",
        exit: 0,
        says: &[],
        omits: &[],
        prints: "",
    },
    // Each instruction needs a page of each node.
    Expected {
        name: "a count of one makes progress",
        options: "--memory 2M,40M --jump 1",
        program: "elsewhere copy",
        exit: 0,
        says: &[],
        omits: &[],
        prints: "6921fdd674000000\n",
    },
];

impl Expected {
    fn check(&self, context: &Context) -> Result<Verdict> {
        let directory = context.directory("ends")?;
        let mut command = vec![context.weft.clone().into_os_string()];
        let line = format!("run {} -- {{programs}}/{}", self.options, self.program);
        let line = context.fill(&line);
        command.extend(line.split(' ').map(Into::into));
        let outcome = run(&Invocation::new(&command, &directory))?;
        let reasons = self.judge(&outcome)?;
        Ok(match reasons.is_empty() {
            true => Verdict::Passed(outcome.stderr.lines().next().unwrap_or("").to_string()),
            false => Verdict::Failed(reasons),
        })
    }

    fn judge(&self, outcome: &Outcome) -> Result<Vec<String>> {
        let mut reasons = outcome.leftovers.clone();
        if outcome.end != End::Exit(self.exit) {
            reasons.push(format!("{} instead of exit {}", outcome.end, self.exit));
        }
        // The table below it has names of its own.
        let said: String = outcome
            .stderr
            .lines()
            .take_while(|line| !line.is_empty())
            .collect();
        let says = |text: &&&str| said.contains(**text);
        let missing = self.says.iter().filter(|text| !says(text));
        reasons.extend(missing.map(|text| format!("the message does not say `{text}`")));
        let besides = self.omits.iter().filter(says);
        reasons.extend(besides.map(|text| format!("the message says `{text}`")));
        let printed = fs::read_to_string(&outcome.stdout)?;
        if printed != self.prints {
            reasons.push(format!("printed `{}`", printed.trim()));
        }
        if !reasons.is_empty() {
            reasons.push(format!("stderr: {}", outcome.stderr.trim()));
        }
        Ok(reasons)
    }
}

/// What is stopped while a program executes elsewhere.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stopped {
    /// The slice, for good.
    Slice,
    /// Home and the launcher, as a terminal does, for longer than the lease.
    Program,
}

const LEASE: Duration = Duration::from_secs(1);
/// Longer than the lease, and than what is taken for a pause of the launcher.
const PAUSE: Duration = Duration::from_millis(3500);
/// When to stop it: somewhere in its work.
const MOMENT: Duration = Duration::from_millis(700);

/// A program that computes on another node or, to be let go on, one that goes to
/// and fro and knows what its memory must hold.
fn stop(context: &Context, stopped: Stopped) -> Result<Verdict> {
    let directory = context.directory("ends-stopped")?;
    let program = match stopped {
        Stopped::Slice => "--memory 2M,40M --jump 8 -- {programs}/elsewhere spin",
        Stopped::Program => "--memory 8M,40M -- {programs}/coherence 24 400",
    };
    let line = context.fill(&format!("run --lease {} {program}", LEASE.as_secs()));
    let mut command = vec![context.weft.clone().into_os_string()];
    command.extend(line.split(' ').map(Into::into));
    let mut running = start(&Invocation::new(&command, &directory))?;
    std::thread::sleep(MOMENT);
    let slice = find_slice(&mut running, context, Duration::ZERO)?;
    let slice = slice.context("the program ended too soon")?;
    match stopped {
        Stopped::Slice => kill(Pid::from_raw(slice), Signal::SIGSTOP)?,
        Stopped::Program => {
            let members: Vec<Pid> = running
                .members()
                .iter()
                .map(|member| Pid::from_raw(member.identity.pid))
                .filter(|pid| pid.as_raw() != slice)
                .collect();
            members
                .iter()
                .try_for_each(|&pid| kill(pid, Signal::SIGSTOP))?;
            std::thread::sleep(PAUSE);
            members
                .iter()
                .try_for_each(|&pid| kill(pid, Signal::SIGCONT))?;
        }
    }
    let outcome = running.finish()?;
    let lost = outcome.stderr.contains("its slice did not run for");
    let fits = match stopped {
        Stopped::Slice => outcome.end == End::Exit(EXIT_NODE_LOST) && lost,
        Stopped::Program => outcome.end == End::Exit(0),
    };
    Ok(match fits && outcome.leftovers.is_empty() {
        true => Verdict::Passed(String::new()),
        false => Verdict::Failed(vec![format!(
            "{}; left behind: {:?}; stderr: {}",
            outcome.end,
            outcome.leftovers,
            outcome.stderr.trim()
        )]),
    })
}

/// Runs each of them that is wanted.
pub fn run_ends(context: &Context, wanted: &dyn Fn(&str) -> bool, report: &Report) {
    if !context.programs.join("elsewhere").exists() {
        let why = "elsewhere was not built".to_string();
        return report.add("ends", Duration::ZERO, Verdict::Skipped(why));
    }
    let attempt = |name: &str, check: &dyn Fn() -> Result<Verdict>| {
        let name = format!("ends: {name}");
        if !wanted(&name) {
            return;
        }
        let started = Instant::now();
        let verdict = check().unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
        report.add(&name, started.elapsed(), verdict);
    };
    for (name, stopped) in [
        ("a slice that is stopped is lost", Stopped::Slice),
        ("a program that is stopped goes on", Stopped::Program),
    ] {
        attempt(name, &|| stop(context, stopped));
    }
    for expected in &EXPECTED {
        attempt(expected.name, &|| expected.check(context));
    }
}
