//! What an agent does with a machine: a `weft vm` command, which has a bound.

use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use serde::Deserialize;

use super::Event;
use crate::control::{Outcome, Part, SWITCH, Task};
use crate::wait;

/// A start waits for nothing but this host.
const START_MAX: Duration = Duration::from_secs(150);
/// `weft vm migrate` gives up before, and puts everything back.
const MOVE_MAX: Duration = Duration::from_secs(900);
const SAVE_MAX: Duration = Duration::from_secs(3600);
/// A command that was told to end puts things back.
const ENDS_MAX: Duration = Duration::from_secs(60);
/// What is told of a command that failed.
const SAID_MAX: usize = 2000;

/// Starts it in a thread of its own; its end is an event.
pub fn start(id: u64, task: Task, events: Sender<Event>) {
    let failed = events.clone();
    let work = move || {
        let result = carry_out(&task);
        // The agent may have ended.
        let _ = events.send(Event::Done { id, result });
    };
    let spawned = thread::Builder::new().name("task".into()).spawn(work);
    if let Err(error) = spawned {
        let result = Err(format!("cannot start a thread: {error}"));
        let _ = failed.send(Event::Done { id, result });
    }
}

fn carry_out(task: &Task) -> Result<Outcome, String> {
    let (command, bound) = command(task).map_err(|error| error.to_string())?;
    let said = run(command, bound)?;
    if !matches!(task, Task::Move { .. } | Task::Reshape { .. }) {
        return Ok(Outcome::default());
    }
    let outcome = outcome(&said)
        .map_err(|error| format!("what `weft vm migrate` reports cannot be read: {error}"))?;
    match (&task, outcome.stays) {
        // Its vCPUs and memory have gone, and go again with the next try.
        (Task::Move { .. }, Some(why)) => Err(format!("node 0 stays: {why}")),
        (_, stays) => Ok(Outcome { stays, ..outcome }),
    }
}

/// The command, and how long it may take.
fn command(task: &Task) -> std::io::Result<(Command, Duration)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("vm");
    let bound = match task {
        Task::Start(machine) => {
            let network = format!("switch={SWITCH},mac={}", machine.address);
            command
                .args(["start", "--backend", "soft", "--name", &machine.name])
                // A rank that restarts is lost, and what it restarts from need not move with it.
                .arg("--no-reboot")
                .arg("--kernel")
                .arg(&machine.kernel)
                .arg("--initrd")
                .arg(&machine.initrd)
                .args(["--cmdline", &machine.command_line])
                .args(["--memory", &machine.memory.to_string()])
                .args(["--cpus", &machine.cpus.to_string()])
                .args(["--cpu", &machine.cpu])
                .args(["--net", &network]);
            on(&mut command, &machine.on);
            if machine.spare > 0 {
                command.args(["--spare", &machine.spare.to_string()]);
            }
            START_MAX
        }
        Task::Restore {
            machine,
            folder,
            on: hosts,
        } => {
            command.args(["start", "--name", machine, "--restore"]);
            command.arg(folder);
            on(&mut command, hosts);
            SAVE_MAX
        }
        Task::Move { machine, to } => {
            command.args([
                "migrate",
                machine,
                to,
                "--json",
                "--timeout",
                &move_timeout(),
            ]);
            MOVE_MAX
        }
        Task::Reshape {
            machine,
            to,
            keeps_home,
        } => {
            let to: Vec<String> = to.iter().map(destination).collect();
            command
                .args(["migrate", machine, &to.join(","), "--spread", "--json"])
                .args(["--timeout", &move_timeout()]);
            if *keeps_home {
                command.arg("--keep-home");
            }
            MOVE_MAX
        }
        Task::Save { machine, folder } => {
            command.args(["save", machine, "--stop"]).arg(folder);
            SAVE_MAX
        }
    };
    Ok((command, bound))
}

fn on(command: &mut Command, hosts: &[String]) {
    for host in hosts {
        command.args(["--on", host]);
    }
}

fn move_timeout() -> String {
    (MOVE_MAX - ENDS_MAX).as_secs().to_string()
}

/// As `weft vm migrate` takes it.
fn destination(part: &Part) -> String {
    let mebibytes = part.memory >> 20;
    match part.node {
        Some(node) => format!("{node}={mebibytes}M"),
        None => format!("{}={mebibytes}M", part.host),
    }
}

/// From what `weft vm migrate --json` prints.
fn outcome(said: &str) -> serde_json::Result<Outcome> {
    #[derive(Deserialize)]
    struct Report {
        migrated: Migrated,
    }
    #[derive(Deserialize)]
    struct Migrated {
        nodes: Vec<usize>,
        stays: Vec<Stay>,
        pause_ns: u64,
        home: Option<Home>,
    }
    #[derive(Deserialize)]
    struct Home {
        alone: bool,
        stopped_ns: u64,
    }
    #[derive(Deserialize)]
    struct Stay {
        reason: String,
    }
    let report: Report = serde_json::from_str(said)?;
    let migrated = report.migrated;
    let stay = migrated.stays.into_iter().next();
    let of_home = migrated.home.as_ref().map(|home| home.stopped_ns);
    let stood = [migrated.pause_ns].into_iter().chain(of_home);
    Ok(Outcome {
        nodes: migrated.nodes,
        stays: stay.map(|stay| stay.reason),
        is_alone: migrated.home.is_some_and(|home| home.alone),
        stood_ms: stood.map(|ns| ns.div_ceil(1_000_000) as u32).collect(),
    })
}

/// Its standard output.
fn run(mut command: Command, bound: Duration) -> Result<String, String> {
    let spawned = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = spawned.map_err(|error| format!("cannot start `weft vm`: {error}"))?;
    // A machine's launcher keeps neither pipe: they end with the command.
    let output = wait::drain(child.stdout.take());
    let messages = wait::drain(child.stderr.take());
    let ended = ended(&mut child, bound).map_err(|error| error.to_string())?;
    let Some(success) = ended else {
        return Err(format!("not over within {} s", bound.as_secs()));
    };
    let text = |thread: thread::JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&thread.join().unwrap_or_default()).into_owned()
    };
    match success {
        true => Ok(text(output)),
        false => Err(last_of(text(messages).trim())
            .trim_start_matches("weft: ")
            .to_owned()),
    }
}

/// Whether it ended well; `None`: not in time.
fn ended(child: &mut Child, bound: Duration) -> std::io::Result<Option<bool>> {
    let mut status = wait::ended(child, bound)?;
    if status.is_none() {
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        // It may have ended just now.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        status = wait::ended_or_killed(child, ENDS_MAX)?;
    }
    Ok(status.map(|status| status.success()))
}

fn last_of(text: &str) -> &str {
    let mut start = text.len().saturating_sub(SAID_MAX);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_changes_its_hosts_by_nodes_and_names() {
        let part = |host: &str, node, mebibytes: u64| Part {
            host: host.into(),
            node,
            memory: mebibytes << 20,
        };
        let task = Task::Reshape {
            machine: "vm-0".into(),
            to: vec![part("a", Some(0), 512), part("b", None, 640)],
            keeps_home: true,
        };
        let (command, _) = command(&task).unwrap();
        let words: Vec<_> = command.get_args().collect();
        assert_eq!(words[..4], ["vm", "migrate", "vm-0", "0=512M,b=640M"]);
        assert!(words.contains(&"--keep-home".as_ref()));
        let said = r#"{"node":null,"migrated":{"nodes":[0,3],"left":[1],
            "pause_ns":12000001,
            "home":{"host":"a","alone":true,"stopped_ns":21000000},
            "stays":[{"node":0,"reason":"it has a disk"}]}}"#;
        let expected = Outcome {
            nodes: vec![0, 3],
            stays: Some("it has a disk".into()),
            is_alone: true,
            stood_ms: vec![13, 21],
        };
        assert_eq!(outcome(said).unwrap(), expected);
        assert!(outcome("{}").is_err());
    }
}
