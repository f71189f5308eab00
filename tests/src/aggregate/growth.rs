//! Nodes that join a running Linux and leave it while it works: results are right, the kernel
//! does not notice, and no process is left of a node that was given back. What is refused says
//! why, and changes nothing.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::moves::{begin, finish, locations, move_vcpu};
use super::work::{SUMS, judge_litmus, litmus_until_told, sums, sums_alone};
use super::{BOUND, Bench, Check, EXIT_FAILED, Shape, TWO, code};
use crate::boot::SMALL;
use crate::guest::Guest;
use crate::random::Random;

pub(super) const CHECKS: [(&str, Check); 8] = [
    (
        "growth, 20 nodes join and leave during litmus tests",
        during_litmus,
    ),
    (
        "growth, a node of the start leaves, sums are right",
        sums_agree,
    ),
    ("growth, a machine that started on one node", from_one),
    ("growth, the platform joins in", with_platform),
    ("growth, a paused machine", paused),
    ("growth, changes that are cancelled", cancelled),
    ("growth, changes that are refused", refused),
    ("growth, nodes that are killed", killed),
];

/// Two vCPUs on node 0, and a node with memory only.
const LOPSIDED: Shape = Shape {
    name: "2 nodes, vCPUs on one",
    options: &["--cpus", "2,0", "--memory", "128M,128M"],
    nodes: 2,
    cpus: 2,
};

/// One node, to which others may come by default.
const ONE: Shape = Shape {
    name: "1 node",
    options: &["--cpus", "2", "--memory", "256M"],
    nodes: 1,
    cpus: 2,
};

/// A lost node is soon noticed.
const KILLED: Shape = Shape {
    name: "2 nodes, a lease of 1 s",
    options: &[
        "--lease", "1", "--nodes", "2", "--cpus", "2", "--memory", "256M",
    ],
    nodes: 2,
    cpus: 2,
};

/// The number of the node that joined.
pub(super) fn grow(bench: &Bench<'_>) -> Result<u64> {
    let view = bench.ask(&["vm", "grow", "m", "--memory", "128M", "--json"])?;
    let view: Value = serde_json::from_str(&view)?;
    let node = view["grown"]["node"].as_u64();
    node.with_context(|| format!("no node joined: {view}"))
}

/// What came of a node's leave.
pub(super) fn release(bench: &Bench<'_>, node: u64) -> Result<Value> {
    let view = bench.ask(&["vm", "release", "m", &node.to_string(), "--json"])?;
    let view: Value = serde_json::from_str(&view)?;
    let released = view["released"].clone();
    ensure!(released["node"].as_u64() == Some(node), "{view}");
    Ok(released)
}

/// What the command says that is refused.
fn refusal(bench: &Bench<'_>, words: &[&str]) -> Result<String> {
    let output = bench.weft(words).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        !output.status.success(),
        "{} was not refused: {said}",
        words.join(" ")
    );
    Ok(said)
}

fn during_litmus(bench: &Bench<'_>) -> Result<String> {
    let mut guest = begin(bench, "soft", TWO, (&litmus_until_told(), " rounds "))?;
    let mut random = Random::new(bench.context.seed ^ 0x6709);
    let mut bytes = 0;
    for round in 0..20 {
        let mut change = || -> Result<u64> {
            let node = grow(bench)?;
            ensure!(node == 2, "the free number is {node}");
            let vcpu = random.below(2);
            if random.below(3) > 0 {
                move_vcpu(bench, vcpu as u32, node)?;
            }
            let released = release(bench, node)?;
            let at = locations(bench)?;
            ensure!(!at.contains(&node), "vCPUs are on {at:?}");
            released["bytes"].as_u64().context("no bytes")
        };
        bytes += change().with_context(|| format!("in round {round}"))?;
    }
    // The launcher has reaped what was given back.
    bench.processes(&guest, TWO.nodes)?;
    guest.tell()?;
    let tests = judge_litmus(&finish(bench, guest)?)?;
    Ok(format!("{tests}, {bytes} bytes of pages went back"))
}

/// Node 1 has half of the memory, and its pages are in use.
fn sums_agree(bench: &Bench<'_>) -> Result<String> {
    let alone = sums_alone(bench)?;
    let twice = format!("echo at work; {SUMS}; {SUMS}");
    let guest = begin(bench, "soft", LOPSIDED, (&twice, "at work"))?;
    let node = grow(bench)?;
    // What it writes there is node 1's; a node without vCPUs owns no page.
    move_vcpu(bench, 1, 1)?;
    let released = release(bench, 1)?;
    ensure!(released["bytes"].as_u64() > Some(0), "{released}");
    let next = grow(bench)?;
    ensure!(next == 1, "number 1 is free, but node {next} joined");
    release(bench, node)?;
    let moved = sums(&finish(bench, guest)?);
    ensure!(
        moved[..] == [alone, alone].concat(),
        "{moved:?}, not twice {alone:?}"
    );
    Ok(format!("{} bytes left node 1", released["bytes"]))
}

/// As many nodes as can join, and leave again, while vCPUs, the platform and the timekeeper
/// wander over them.
fn from_one(bench: &Bench<'_>) -> Result<String> {
    let alone = sums_alone(bench)?;
    let litmus = litmus_until_told();
    let script = format!("echo at work; {SUMS}; {SUMS}; {litmus}");
    let mut guest = begin(bench, "soft", ONE, (&script, "at work"))?;
    let go = |what: &str, to: u64| {
        let words = ["vm", "move", "m", what, "--to", &to.to_string()];
        bench.ask(&words)
    };
    let mut bytes = 0;
    for round in 0..8 {
        let node = grow(bench)?;
        ensure!(node == 1, "the free number is {node}");
        move_vcpu(bench, round % 2, node)?;
        go("--platform", node)?;
        let second = grow(bench)?;
        move_vcpu(bench, 1 - round % 2, second)?;
        let listed = bench.ask(&["vm", "list"])?;
        ensure!(listed.contains("2 (0,1,1)"), "{listed}");
        for node in [node, second] {
            let released = release(bench, node)?;
            bytes += released["bytes"].as_u64().context("no bytes")?;
        }
        let at = locations(bench)?;
        ensure!(at == [0, 0], "vCPUs are on {at:?}");
    }
    for _ in 0..4 {
        grow(bench)?;
    }
    let said = refusal(bench, &["vm", "grow", "m"])?;
    ensure!(said.contains("it has 5 nodes, which is the most"), "{said}");
    for node in 1..5 {
        release(bench, node)?;
    }
    bench.processes(&guest, 1)?;
    guest.tell()?;
    let ended = finish(bench, guest)?;
    let moved = sums(&ended);
    ensure!(
        moved[..] == [alone, alone].concat(),
        "{moved:?}, not twice {alone:?}"
    );
    Ok(format!(
        "{}, {bytes} bytes came back",
        judge_litmus(&ended)?
    ))
}

/// The platform is on a node of the start, on one that joined and on one that leaves, while
/// the guest writes to the serial port.
fn with_platform(bench: &Bench<'_>) -> Result<String> {
    let mut guest = begin(bench, "soft", TWO, (&litmus_until_told(), " rounds "))?;
    let go = |to: u64| {
        let words = ["vm", "move", "m", "--platform", "--to", &to.to_string()];
        bench.ask(&words)
    };
    for _ in 0..5 {
        let first = grow(bench)?;
        go(first)?;
        let second = grow(bench)?;
        move_vcpu(bench, 1, second)?;
        release(bench, first)?;
        go(second)?;
        release(bench, second)?;
        let said = refusal(bench, &["vm", "move", "m", "--platform", "--to", "0"])?;
        ensure!(said.contains("node 0 has the platform already"), "{said}");
        go(1)?;
    }
    guest.tell()?;
    judge_litmus(&finish(bench, guest)?)
}

fn paused(bench: &Bench<'_>) -> Result<String> {
    let mut guest = begin(bench, "soft", TWO, (&litmus_until_told(), " rounds "))?;
    for round in 0..10 {
        let node = grow(bench)?;
        move_vcpu(bench, 1, node)?;
        bench.ask(&["vm", "pause", "m"])?;
        let second = grow(bench)?;
        let [time, platform] = ["--time", "--platform"];
        move_vcpu(bench, 0, second)?;
        for role in [time, platform].into_iter().take(round % 3) {
            bench.ask(&["vm", "move", "m", role, "--to", &second.to_string()])?;
        }
        release(bench, node)?;
        if round % 2 == 0 {
            bench.ask(&["vm", "resume", "m"])?;
            std::thread::sleep(Duration::from_millis(150));
            bench.ask(&["vm", "pause", "m"])?;
        }
        let third = grow(bench)?;
        move_vcpu(bench, 1, third)?;
        release(bench, second)?;
        release(bench, third)?;
        bench.ask(&["vm", "resume", "m"])?;
        std::thread::sleep(Duration::from_millis(150));
    }
    guest.tell()?;
    judge_litmus(&finish(bench, guest)?)
}

/// Pages that a node may fill.
fn budget(bench: &Bench<'_>, node: usize) -> Result<u64> {
    let view: Value = serde_json::from_str(&bench.ask(&["vm", "counters", "m", "--json"])?)?;
    let name = format!("slice{node}.memory.budget-pages");
    let pages = view["counters"][&name].as_u64();
    pages.with_context(|| format!("no {name} in {view}"))
}

/// Has the command end after some time as Ctrl-C does; whether it was too late for that.
pub(super) fn interrupt(bench: &Bench<'_>, words: &[&str], after: Duration) -> Result<bool> {
    let mut command = bench.weft(words);
    let command = (command.stdout(Stdio::null()).stderr(Stdio::piped())).spawn()?;
    std::thread::sleep(after);
    kill(Pid::from_raw(command.id() as i32), Signal::SIGINT)?;
    let output = command.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let is_undone = said.contains("it was cancelled");
    let has_begun = output.status.code().is_some();
    ensure!(
        output.status.success() || is_undone || !has_begun,
        "weft {}: {said}",
        words.join(" ")
    );
    Ok(output.status.success())
}

/// Changes that are cancelled at random moments leave the machine as it was: together its
/// nodes have room for as many pages, whichever manages them.
fn cancelled(bench: &Bench<'_>) -> Result<String> {
    // As much as a node of the start has to spare.
    const GROW: [&str; 5] = ["vm", "grow", "m", "--memory", "64M"];
    let script = format!("echo at work; {SUMS}; {}", litmus_until_told());
    let mut guest = begin(bench, "soft", TWO, (&script, "at work"))?;
    let mut random = Random::new(bench.context.seed ^ 0x6ca2);
    let room = || (0..3).map(|node| budget(bench, node)).sum::<Result<u64>>();
    bench.ask(&GROW)?;
    let words = ["vm", "release", "m", "2", "--json"];
    let view: Value = serde_json::from_str(&bench.ask(&words)?)?;
    let released_s = view["released"]["total_s"].as_f64().context("no time")?;
    bench.ask(&GROW)?;
    let begun = Instant::now();
    bench.ask(&["vm", "list"])?;
    // A command starts, and the node leaves; the command sees its end later.
    let release_us = begun.elapsed().as_micros() as u64 + (1e6 * released_s) as u64;
    let at_first = room()?;
    let mut undone = [0, 0];
    let rounds = if bench.plan.long { 30 } else { 15 };
    for round in 0..rounds {
        let (node, vcpu) = (1 + random.below(2), random.below(2) as u32);
        // It stays where a release was undone.
        if locations(bench)?[vcpu as usize] != node {
            move_vcpu(bench, vcpu, node)?;
        }
        let mut moment = || Duration::from_micros(random.below(release_us));
        let number = node.to_string();
        if interrupt(bench, &["vm", "release", "m", &number], moment())? {
            // The number is free now.
            while !interrupt(bench, &GROW, moment())? {
                undone[0] += 1;
            }
        } else {
            undone[1] += 1;
        }
        let now = room()?;
        ensure!(
            now == at_first,
            "{now} pages in round {round}, at first {at_first}"
        );
    }
    ensure!(
        undone[1] > 0,
        "all came too late: a release takes {release_us} us"
    );
    release(bench, 1)?;
    release(bench, 2)?;
    bench.processes(&guest, 1)?;
    guest.tell()?;
    let tests = judge_litmus(&finish(bench, guest)?)?;
    let [grows, releases] = undone;
    Ok(format!(
        "{tests}, {grows} grows and {releases} releases were undone"
    ))
}

fn refused(bench: &Bench<'_>) -> Result<String> {
    let guest = begin(bench, "soft", TWO, ("echo idle; sleep 1000", "idle"))?;
    for (node, words) in [
        ("0", "node 0 has the machine's console"),
        ("7", "node 7 does not exist: there are 0, 1"),
    ] {
        let said = refusal(bench, &["vm", "release", "m", node])?;
        ensure!(said.contains(words), "{said}");
    }
    for _ in 0..4 {
        grow(bench)?;
    }
    let said = refusal(bench, &["vm", "grow", "m"])?;
    ensure!(said.contains("it has 6 nodes, which is the most"), "{said}");
    ensure!(locations(bench)? == [0, 1], "something moved");
    stop(bench, guest)?;
    let one = "--name m --growable no --cpus 1 --memory 128M";
    let one: Vec<&str> = one.split(' ').collect();
    let script = "echo idle; sleep 1000";
    let mut alone = Guest::start(&mut bench.machine_of(SMALL, &one, script, "")?)?;
    ensure!(alone.wait_for("idle", BOUND).is_some(), "no boot");
    let said = refusal(bench, &["vm", "grow", "m"])?;
    ensure!(said.contains("it was started on one node"), "{said}");
    ensure!(said.contains("--growable yes"), "{said}");
    stop(bench, alone)?;
    Ok(String::new())
}

/// Ends a guest that does nothing.
fn stop(bench: &Bench<'_>, guest: Guest) -> Result<()> {
    let pid = guest.pid();
    bench.ask(&["vm", "stop", "--timeout", "0", "m"])?;
    guest.finish(BOUND)?;
    bench.nothing_left(pid)
}

/// A node dies while it joins, or while it leaves: the machine goes on without it, or ends and
/// names it.
fn killed(bench: &Bench<'_>) -> Result<String> {
    let mut random = Random::new(bench.context.seed ^ 0x6dea);
    let (mut went_on, mut ended) = (0, 0);
    let rounds = if bench.plan.long { 10 } else { 6 };
    for round in 0..rounds {
        let is_leaving = round % 2 == 1;
        let guest = begin(
            bench,
            "soft",
            KILLED,
            ("echo at work; litmus -d 100 -s 3", "at work"),
        )?;
        let words: &[&str] = match is_leaving {
            false => &["vm", "grow", "m"],
            true => {
                let node = grow(bench)?;
                move_vcpu(bench, 1, node)?;
                &["vm", "release", "m", "2"]
            }
        };
        let mut command = bench.weft(words);
        let command = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let processes = bench.processes(&guest, KILLED.nodes + 1);
        // A node that leaves may have gone already.
        if let Ok(processes) = processes {
            let victim = processes.last().context("no process")?.identity.pid;
            std::thread::sleep(Duration::from_micros(random.below(20_000)));
            let _ = kill(Pid::from_raw(victim), Signal::SIGKILL);
        }
        let command = command.wait_with_output()?;
        let said = String::from_utf8_lossy(&command.stderr).into_owned();
        let pid = guest.pid();
        let end = guest.finish(BOUND)?;
        let lost = "lost node 2 (";
        match code(&end)? {
            0 => {
                judge_litmus(&end)?;
                went_on += 1;
            }
            EXIT_FAILED if end.stderr.contains(lost) => ended += 1,
            other => bail!("exit code {other} in round {round}: {said}\n{}", end.stderr),
        }
        bench.nothing_left(pid)?;
    }
    Ok(format!("{went_on} machines went on, {ended} ended"))
}
