//! The machines on an agent's host, as `weft vm list` shows them.

use std::process::{Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Deserialize;

use super::{Event, say};
use crate::control::{PULSE, Seen};
use crate::wait;

/// How long all machines may take to end.
const STOPS_MAX: Duration = Duration::from_secs(2);

#[derive(Deserialize)]
struct Listed {
    name: String,
    machine_pid: Option<u32>,
}

/// Looks each second, in a thread of its own.
pub fn watch(events: Sender<Event>) -> anyhow::Result<()> {
    let look = move || {
        let mut said = String::new();
        loop {
            match list() {
                Ok(machines) => {
                    if events.send(Event::Machines(machines)).is_err() {
                        return;
                    }
                }
                // What was known stays: nothing follows from a list that failed.
                Err(error) => {
                    let why = format!("{error:#}");
                    if why != said {
                        say(&format!("cannot list the machines: {why}"));
                        said = why;
                    }
                }
            }
            thread::sleep(PULSE);
        }
    };
    let thread = thread::Builder::new().name("machines".into());
    thread.spawn(look).context("cannot start a thread")?;
    Ok(())
}

fn list() -> anyhow::Result<Vec<Seen>> {
    let listed = Command::new(std::env::current_exe()?)
        .args(["vm", "list", "--json"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let machines: Vec<Listed> = serde_json::from_slice(&listed.stdout)?;
    let seen = machines.into_iter().map(|machine| Seen {
        resident: machine.machine_pid.map_or(0, resident),
        name: machine.name,
    });
    Ok(seen.collect())
}

/// The memory of a guest is shared memory of its process (`RssShmem` of proc_pid_status(5)).
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssShmem:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0_u64) << 10
}

/// Ends all at once.
pub fn end_all() {
    let machines = list().unwrap_or_default();
    let own = std::env::current_exe().unwrap_or_default();
    let stop = |machine: &Seen| {
        Command::new(&own)
            .args(["vm", "stop", &machine.name, "--timeout", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
    };
    let stops: Vec<_> = machines.iter().map(stop).collect();
    let begun = Instant::now();
    for child in stops {
        let left = STOPS_MAX.saturating_sub(begun.elapsed());
        // What has not ended by then ends with the agent, its keeper.
        let _ = child.and_then(|mut child| wait::ended_or_killed(&mut child, left));
    }
}
