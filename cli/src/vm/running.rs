//! Talking to machines that run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde::Serialize;
use weft_api::client::{Client, ClientError};
use weft_api::{ConsoleView, STOP_SECONDS, STOP_SECONDS_MAX, VmView};
use weft_console::attach::{Left, attach};
use weft_console::terminal;
use weft_node::rundir;
use weft_node::size::format_bytes;

use super::registry::{self, VIEW_BOUND};
use crate::summary::format_seconds;
use crate::table::{self, Align};

/// A machine that was asked.
#[derive(Serialize)]
#[serde(untagged)]
enum Asked {
    Answered(Box<VmView>),
    /// It is starting, busy or stuck.
    Silent {
        name: String,
        state: &'static str,
        error: String,
    },
}

/// Asks every machine. Sockets that nobody listens at are removed.
fn ask_all(directory: &Path) -> anyhow::Result<Vec<Asked>> {
    let machines = registry::machines(directory)
        .with_context(|| format!("cannot read {}", directory.display()))?;
    let mut asked = Vec::new();
    for (name, path) in machines {
        match Client::new(&path).view(VIEW_BOUND) {
            Ok(view) => asked.push(Asked::Answered(Box::new(view))),
            Err(error) if error.is_gone() => remove_leftover(directory, &name, &path),
            Err(error) => asked.push(Asked::Silent {
                name,
                state: "silent",
                error: error.to_string(),
            }),
        }
    }
    Ok(asked)
}

fn remove_leftover(directory: &Path, name: &str, path: &Path) {
    // With the lock it is not one that is just being created.
    let locked = registry::lock(directory);
    if locked.is_ok() && !registry::answers(path) {
        let _ = fs::remove_file(path);
        let _ = fs::remove_file(directory.join(format!("{name}.console")));
    }
}

/// `weft vm list`.
pub fn list(json: bool) -> anyhow::Result<ExitCode> {
    let machines = ask_all(&registry::directory()?)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&machines)?);
    } else if machines.is_empty() {
        eprintln!("weft: no machine is running");
    } else {
        print!("{}", render(&machines));
    }
    Ok(ExitCode::SUCCESS)
}

fn render(machines: &[Asked]) -> String {
    use Align::{Left, Right};
    let headings = [
        ("pid", Right),
        ("name", Left),
        ("state", Left),
        ("back end", Left),
        ("vcpus", Right),
        ("memory", Right),
        ("time", Right),
        ("kernel", Left),
    ];
    let rows: Vec<Vec<String>> = machines
        .iter()
        .map(|machine| match machine {
            Asked::Answered(view) => vec![
                view.pid.to_string(),
                view.name.clone(),
                view.state.name().to_owned(),
                view.back_end.name.clone(),
                vcpus(view),
                format_bytes(view.configuration.memory_bytes),
                format_seconds(view.uptime_s),
                view.configuration.kernel.display().to_string(),
            ],
            Asked::Silent { name, error, .. } => {
                let mut row = vec![String::new(); headings.len()];
                row[1] = name.clone();
                row[2] = error.clone();
                row
            }
        })
        .collect();
    table::render(&headings, &rows)
}

/// How many vCPUs a machine has; over several nodes also how many are on each, as
/// `--cpus` takes them. Nodes that joined and have the last numbers count while they have one.
fn vcpus(view: &VmView) -> String {
    let cpus = view.configuration.cpus;
    let last = view.locations.iter().map(|location| location.node).max();
    let nodes = (view.configuration.slices.len()).max(last.map_or(0, |last| last + 1));
    if nodes < 2 {
        return cpus.to_string();
    }
    let on = |node| {
        let there = view
            .locations
            .iter()
            .filter(|location| location.node == node);
        there.count().to_string()
    };
    let counts: Vec<String> = (0..nodes).map(on).collect();
    format!("{cpus} ({})", counts.join(","))
}

/// The API of the machine with this name, or pid.
pub(super) fn find(machine: &str) -> anyhow::Result<Client> {
    let directory = registry::directory()?;
    let own = registry::api_path(&directory, machine);
    if fs::symlink_metadata(&own).is_ok() && registry::answers(&own) {
        return Ok(Client::new(&own));
    }
    if let Ok(pid) = machine.parse::<u32>() {
        for (_, path) in registry::machines(&directory)? {
            let client = Client::new(&path);
            let view = client.view(VIEW_BOUND);
            if view.is_ok_and(|view| [view.pid, view.machine_pid].contains(&pid)) {
                return Ok(client);
            }
        }
    }
    bail!("no running machine has the name or pid {machine}: `weft vm list` shows those that run")
}

/// The API of this machine, or of the only one that runs, and what it is.
pub(super) fn find_or_only(machine: Option<&str>) -> anyhow::Result<(Client, VmView)> {
    if let Some(machine) = machine {
        let client = find(machine)?;
        let view = client.view(VIEW_BOUND);
        return Ok((client, view.with_context(|| format!("vm {machine}"))?));
    }
    let directory = registry::directory()?;
    let mut running = Vec::new();
    for (_, path) in registry::machines(&directory)? {
        let client = Client::new(&path);
        if let Ok(view) = client.view(VIEW_BOUND) {
            running.push((client, view));
        }
    }
    match running.len() {
        0 => bail!("no machine is running"),
        1 => Ok(running.swap_remove(0)),
        count => bail!(
            "{count} machines are running: give a name or a pid (`weft vm list` \
        shows them)"
        ),
    }
}

fn done(machine: &str, answer: Result<VmView, ClientError>) -> anyhow::Result<ExitCode> {
    let view = answer.with_context(|| format!("vm {machine}"))?;
    eprintln!("weft: vm {} is {}", view.name, view.state.name());
    Ok(ExitCode::SUCCESS)
}

/// `weft vm pause`.
pub fn pause(machine: &str) -> anyhow::Result<ExitCode> {
    done(machine, find(machine)?.pause())
}

/// `weft vm resume`.
pub fn resume(machine: &str) -> anyhow::Result<ExitCode> {
    done(machine, find(machine)?.resume())
}

/// `weft vm move --time`.
pub fn move_time(machine: &str, to: usize, json: bool) -> anyhow::Result<ExitCode> {
    let moved = find(machine)?
        .move_time(to)
        .with_context(|| format!("vm {machine}"))?;
    match json {
        true => println!("{}", serde_json::to_string_pretty(&moved)?),
        false => eprintln!(
            "weft: node {} keeps the time, which node {} kept before",
            moved.to, moved.from
        ),
    }
    Ok(ExitCode::SUCCESS)
}

/// `weft vm move --platform`.
pub fn move_platform(machine: &str, to: usize, json: bool) -> anyhow::Result<ExitCode> {
    let moved = find(machine)?
        .move_platform(to)
        .with_context(|| format!("vm {machine}"))?;
    match json {
        true => println!("{}", serde_json::to_string_pretty(&moved)?),
        false => eprintln!(
            "weft: node {} has the platform, which node {} had before: the guest stood {}.{:01} ms",
            moved.to,
            moved.from,
            moved.stopped_ns / 1_000_000,
            moved.stopped_ns % 1_000_000 / 100_000,
        ),
    }
    Ok(ExitCode::SUCCESS)
}

/// `weft vm move --vcpu`.
pub fn move_vcpu(machine: &str, vcpu: u32, to: usize, json: bool) -> anyhow::Result<ExitCode> {
    let moved = find(machine)?
        .move_vcpu(vcpu, to)
        .with_context(|| format!("vm {machine}"))?;
    if json {
        println!("{}", serde_json::to_string_pretty(&moved)?);
        return Ok(ExitCode::SUCCESS);
    }
    let us = |ns: u64| format!("{}.{:01} µs", ns / 1000, ns % 1000 / 100);
    eprintln!(
        "weft: vCPU {} moved from node {} to node {}: it stood {} (save {}, send {}, resume {}, \
        install {}); {} of state",
        moved.vcpu,
        moved.from,
        moved.to,
        us(moved.stopped_ns),
        us(moved.save_ns),
        us(moved.send_ns),
        us(moved.resume_ns),
        us(moved.install_ns),
        format_bytes(moved.state_bytes as u64),
    );
    Ok(ExitCode::SUCCESS)
}

/// `weft vm balloon`.
pub fn balloon(machine: &str, bytes: u64, json: bool) -> anyhow::Result<ExitCode> {
    let balloon = find(machine)?
        .set_balloon(bytes)
        .with_context(|| format!("vm {machine}"))?;
    if json {
        println!("{}", serde_json::to_string_pretty(&balloon)?);
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!(
        "weft: vm {machine} was asked to give back {}; {} so far",
        format_bytes(balloon.target_bytes),
        format_bytes(balloon.actual_bytes),
    );
    Ok(ExitCode::SUCCESS)
}

/// `weft vm stop`.
pub fn stop(machine: &str, timeout_s: f64) -> anyhow::Result<ExitCode> {
    if !(0.0..=STOP_SECONDS_MAX).contains(&timeout_s) {
        bail!("--timeout {timeout_s}: must be 0 to {STOP_SECONDS_MAX} seconds");
    }
    done(machine, find(machine)?.stop(timeout_s))
}

/// `weft vm counters`.
pub fn counters(machine: &str, json: bool) -> anyhow::Result<ExitCode> {
    let counters = find(machine)?
        .counters()
        .with_context(|| format!("vm {machine}"))?;
    if json {
        println!("{}", serde_json::to_string_pretty(&counters)?);
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = counters
        .counters
        .iter()
        .map(|(name, value)| vec![name.clone(), value.to_string()])
        .collect();
    print!(
        "{}",
        table::render(&[("counter", Align::Left), ("value", Align::Right)], &rows)
    );
    Ok(ExitCode::SUCCESS)
}

/// `weft vm console`.
pub fn console(machine: &str) -> anyhow::Result<ExitCode> {
    let client = find(machine)?;
    let view = client
        .view(VIEW_BOUND)
        .with_context(|| format!("vm {machine}"))?;
    let path: PathBuf = match view.console {
        ConsoleView::Socket { path } => path,
        ConsoleView::Stdio => bail!(
            "the console of vm {} is where `weft vm run` was called (pid {}): \
             start it with --console socket to attach to it",
            view.name,
            view.pid
        ),
    };
    let stream = rundir::connect(&path)
        .with_context(|| format!("cannot attach to the console {}", path.display()))?;
    let left = attach(stream);
    terminal::restore();
    match left.with_context(|| format!("the console {} failed", path.display()))? {
        Left::Detached => eprintln!("\nweft: detached; vm {} continues", view.name),
        Left::Closed => eprintln!("\nweft: vm {} closed its console", view.name),
        Left::Quit => {
            eprintln!("\nweft: stopping vm {}", view.name);
            return done(machine, client.stop(STOP_SECONDS));
        }
    }
    Ok(ExitCode::SUCCESS)
}
