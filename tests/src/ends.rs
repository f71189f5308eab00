//! Runs that end, or go on, while the execution is on another node: what the user
//! is told, and that it is the first cause. `tests/programs/elsewhere.c` goes there.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::context::Context;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, run};

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

const EXPECTED: [Expected; 4] = [
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

/// Runs each of them.
pub fn run_ends(context: &Context, report: &Report) {
    if !context.programs.join("elsewhere").exists() {
        let why = "elsewhere was not built".to_string();
        return report.add("ends", Duration::ZERO, Verdict::Skipped(why));
    }
    for expected in &EXPECTED {
        let started = Instant::now();
        let verdict = expected
            .check(context)
            .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
        report.add(
            &format!("ends: {}", expected.name),
            started.elapsed(),
            verdict,
        );
    }
}
