//! What an agent does with a machine: a `weft vm` command, which has a bound.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use super::Event;
use crate::control::{SWITCH, Task};
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

fn carry_out(task: &Task) -> Result<(), String> {
    let (command, bound) = command(task).map_err(|error| error.to_string())?;
    run(command, bound)
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
                .args(["--net", &network]);
            START_MAX
        }
        Task::Restore { machine, folder } => {
            command.args(["start", "--name", machine, "--restore"]);
            command.arg(folder);
            SAVE_MAX
        }
        Task::Move { machine, to } => {
            let timeout = (MOVE_MAX - ENDS_MAX).as_secs().to_string();
            command.args(["migrate", machine, to, "--timeout", &timeout]);
            MOVE_MAX
        }
        Task::Save { machine, folder } => {
            command.args(["save", machine, "--stop"]).arg(folder);
            SAVE_MAX
        }
    };
    Ok((command, bound))
}

fn run(mut command: Command, bound: Duration) -> Result<(), String> {
    let spawned = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = spawned.map_err(|error| format!("cannot start `weft vm`: {error}"))?;
    let Some(mut messages) = child.stderr.take() else {
        return Err("`weft vm` has no pipe".into());
    };
    // A machine's launcher does not keep the pipe: it ends with the command.
    let reader = thread::spawn(move || {
        let mut said = Vec::new();
        let _ = messages.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    });
    let ended = ended(&mut child, bound).map_err(|error| error.to_string())?;
    let Some(success) = ended else {
        return Err(format!("not over within {} s", bound.as_secs()));
    };
    let said = reader.join().unwrap_or_default();
    match success {
        true => Ok(()),
        false => Err(last_of(said.trim()).trim_start_matches("weft: ").to_owned()),
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
