//! An agent that is killed, so that its host is lost; a machine that ends, and one that moves,
//! while no launcher is there; switches that are killed.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::launcher::COUNTS;
use super::user::User;
use super::{BOOT_BOUND, Bench, END_BOUND, PROGRAM_BOUND, STEP_BOUND, ep, processes};

/// On two processors some 20 s.
const LOG_PAIRS: u32 = 29;
const LONG_LOG_PAIRS: u32 = 31;
/// A new launcher gives machines a minute to be seen.
const UNSEEN_BOUND: Duration = Duration::from_secs(150);

pub fn agent(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let program = user.ep();
    let words = ["--hosts", "2", "--vms", "4", "--", &program, "32"];
    let mut launcher = user.run("c", &words)?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    thread::sleep(Duration::from_millis(bench.random.clone().below(3000)));
    let agents = processes::agents(&user.tag);
    ensure!(agents.len() == 2, "agents: {agents:?}");
    let agent = agents.values().next().context("no agent")?;
    kill(Pid::from_raw(*agent), Signal::SIGKILL)?;
    launcher.must_end(122, END_BOUND)?;
    launcher.says("vm-")?;
    launcher.says(" is lost: ")?;
    let said = launcher.errors();
    ensure!(
        said.lines()
            .any(|line| line.contains("is lost") && line.contains("local-")),
        "no host is named: {said}"
    );
    // The logs of jobs are kept for their user.
    user.no_process_left()?;
    ensure!(user.state().join("c/job-2.log").exists(), "there is no log");
    user.must(&["forget", "c"])?;
    // The folder of an agent that was killed is removed by the next one there, some seconds later.
    thread::sleep(Duration::from_secs(10));
    let mut next = user.run("c", &["--", &program, "24"])?;
    next.must_end(0, PROGRAM_BOUND)?;
    user.nothing_left(false)?;
    let lost = said
        .lines()
        .find(|line| line.contains("is lost"))
        .unwrap_or_default();
    Ok(lost.trim_start_matches("weft: ").to_owned())
}

/// A machine leaves its host, which then goes, and no launcher hears either.
pub fn moved(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let (program, size) = (user.ep(), LOG_PAIRS.to_string());
    let words = ["--hosts", "2", "--vms", "1", "--", &program, &size];
    let mut first = user.run("c", &words)?;
    let status = user.until(&mut first, "it runs", BOOT_BOUND, |status| {
        status.is_running() && status.hosts().len() == 2
    })?;
    let hosts = status.hosts();
    let host = hosts.iter().find(|host| status.machines_on(host) == 1);
    user.must(&["release", host.context("it is nowhere")?])?;
    user.until(&mut first, "a move", STEP_BOUND, |status| {
        status.is_moving() || status.moves() > 0
    })?;
    first.kill()?;
    let record = fs::read_to_string(user.state().join("c/cluster.json"))?;
    let record: serde_json::Value = serde_json::from_str(&record)?;
    let machine = &record["machines"][0];
    let was_heard = machine["order"].is_null();
    if !was_heard {
        let token = format!("/token-{}", machine["host"]);
        let is_source = |pid: &i32| processes::command_line(*pid).contains(&token);
        let mut source = None;
        let begun = Instant::now();
        // Until it runs on the other host, and nothing of it is on its own.
        loop {
            let agents = processes::agents(&user.tag).into_iter();
            let (from, to): (Vec<_>, Vec<_>) = agents.partition(|(_, pid)| is_source(pid));
            source = source.or(from.first().map(|(_, pid)| *pid));
            let is_on = |agents: &[(String, i32)]| {
                let mut states = agents.iter().map(|(folder, _)| machine_on(&user, folder));
                states.any(|state| state.is_some_and(|state| !state.is_null()))
            };
            if is_on(&to) && !is_on(&from) {
                break;
            }
            ensure!(begun.elapsed() < STEP_BOUND, "it did not move");
            thread::sleep(Duration::from_millis(100));
        }
        kill(Pid::from_raw(source.context("no agent")?), Signal::SIGKILL)?;
    }
    let mut second = user.launch("c", &["attach", "c"])?;
    second.must_end(0, PROGRAM_BOUND)?;
    ep::judge(&(first.output() + &second.output()), LOG_PAIRS, 1)?;
    if !was_heard {
        second.says("vm-0 had left ")?;
    }
    // The folder of the agent that was killed is its host's.
    user.no_process_left()?;
    Ok(String::from(if was_heard { "it was heard" } else { "" }))
}

/// Commands that move a machine are killed, at any moment of the move: the machine has stayed, or
/// is found where it went.
pub fn commands(bench: &Bench<'_>) -> Result<String> {
    const MOVES: usize = 6;
    let user = bench.user()?;
    let (program, size) = (user.ep(), LONG_LOG_PAIRS.to_string());
    let words = ["--hosts", "2", "--vms", "1", "--", &program, &size];
    let mut launcher = user.run("c", &words)?;
    let mut random = bench.random.clone();
    let mut found = 0;
    for _ in 0..MOVES {
        let status = user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
            status.is_running() && status.hosts().len() == 2 && !status.is_moving()
        })?;
        let hosts = status.hosts().into_iter().map(str::to_owned);
        let host = hosts.into_iter().find(|host| status.machines_on(host) == 1);
        let host = host.context("it is nowhere")?;
        user.must(&["release", &host])?;
        let begun = Instant::now();
        let command = loop {
            let pids = processes::tagged_pids(&user.tag).into_iter();
            let mut moving = pids.filter(|pid| processes::command_line(*pid).contains(" migrate "));
            if let Some(pid) = moving.next() {
                break Some(pid);
            }
            // One that was quick is not seen.
            let has_moved = user.status("c")?.machines_on(&host) == 0;
            if has_moved {
                break None;
            }
            ensure!(begun.elapsed() < STEP_BOUND, "it does not move");
        };
        thread::sleep(Duration::from_millis(random.below(700)));
        // It may have ended by now.
        let _ = command.map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
        user.until(&mut launcher, "a move", STEP_BOUND, |status| {
            let mut hosts = status.hosts().into_iter();
            hosts.any(|other| other != host && status.machines_on(other) == 1)
        })?;
        found = launcher.errors().matches("vm-0 had left ").count();
    }
    launcher.must_end(0, PROGRAM_BOUND)?;
    ep::judge(&launcher.output(), LONG_LOG_PAIRS, 1)?;
    user.nothing_left(false)?;
    Ok(format!("{found} of {MOVES} were found elsewhere"))
}

/// The state of the only machine of an agent, by the agent's folder; `None`: it has none.
fn machine_on(user: &User, folder: &str) -> Option<serde_json::Value> {
    let mut list = user.command(&user.weft);
    let list = list.env("XDG_RUNTIME_DIR", Path::new(folder).join("run"));
    let said = list.args(["vm", "list", "--json"]).output().ok()?;
    let machines: serde_json::Value = serde_json::from_slice(&said.stdout).ok()?;
    Some(machines.as_array()?.first()?["state"].clone())
}

/// A machine is saved, and its host ends, and no launcher hears either.
pub fn saved(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let (list, saves) = (user.folder.join("list"), user.folder.join("saves"));
    fs::write(&list, "one max=24\n")?;
    let (list, saves) = (list.to_string_lossy(), saves.to_string_lossy());
    let words = [
        "--list",
        &list,
        "--save-to",
        &saves,
        "--margin",
        "5",
        "--time",
        "5",
    ];
    let local = [
        "--address",
        "127.0.0.1",
        "--no-copy",
        "--",
        "sh",
        "-c",
        COUNTS,
    ];
    let mut first = user.run("c", &[&words[..], &local].concat())?;
    user.until(&mut first, "it is saved", BOOT_BOUND, |status| {
        status.log().contains(" is saved: ")
    })?;
    first.kill()?;
    let begun = Instant::now();
    while !processes::tagged_pids(&user.tag).is_empty() {
        ensure!(begun.elapsed() < STEP_BOUND, "its host does not end");
        thread::sleep(Duration::from_millis(100));
    }
    let mut second = user.launch("c", &["attach", "c"])?;
    second.must_end(121, END_BOUND)?;
    second.says("vm-0 had been saved on ")?;
    // Saved machines are not given up by accident.
    user.refused(&["forget", "c"], 1, "are saved in ")?;
    user.must(&["forget", "--saved", "c"])?;
    user.no_process_left()?;
    Ok(String::new())
}

/// The switch of a host ends: its machines move to one that has a switch. The launcher's ends: the
/// next one has another.
pub fn switch(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let (program, size) = (user.ep(), (LOG_PAIRS + 1).to_string());
    let words = ["--hosts", "2", "--vms", "2", "--", &program, &size];
    let mut first = user.run("c", &words)?;
    user.until(&mut first, "it runs", BOOT_BOUND, |status| {
        status.is_running() && status.hosts().len() == 2
    })?;
    let agents = processes::agents(&user.tag);
    let switches = || {
        let pids = processes::tagged_pids(&user.tag).into_iter();
        let switches =
            pids.filter(|pid| processes::command_line(*pid).contains(" switch --listen "));
        switches.filter_map(processes::read)
    };
    let of_agent = switches().find(|switch| agents.values().any(|pid| *pid == switch.parent));
    let of_agent = of_agent.context("no host has a switch")?.identity.pid;
    kill(Pid::from_raw(of_agent), Signal::SIGKILL)?;
    user.until(&mut first, "a move", STEP_BOUND, |status| {
        status.moves() > 0 && status.log().contains("its switch has ended")
    })?;
    let own = switches().find(|switch| switch.parent == first.pid());
    kill(
        Pid::from_raw(own.context("the launcher has no switch")?.identity.pid),
        Signal::SIGKILL,
    )?;
    first.must_end(1, END_BOUND)?;
    first.says("the switch of this host has ended")?;
    let mut second = user.launch("c", &["attach", "c"])?;
    second.must_end(0, PROGRAM_BOUND)?;
    ep::judge(&(first.output() + &second.output()), LOG_PAIRS + 1, 2)?;
    user.nothing_left(false)?;
    Ok(String::new())
}

/// The next launcher misses it.
pub fn alone(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let mut launcher = user.run("c", &["--vms", "2", "--", &user.ep(), "36"])?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    launcher.kill()?;
    let is_machine = |pid: &i32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains("vm\0start\0")
    };
    let machine = processes::tagged_pids(&user.tag)
        .into_iter()
        .find(is_machine);
    kill(
        Pid::from_raw(machine.context("no machine")?),
        Signal::SIGKILL,
    )?;
    let mut next = user.launch("c", &["attach", "c"])?;
    next.must_end(122, UNSEEN_BOUND)?;
    next.says(" is lost: it ended on ")?;
    user.must(&["forget", "c"])?;
    user.nothing_left(false)?;
    Ok(String::new())
}
