//! The life of a machine over several nodes: listed, paused, asked to end, reset.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{BOUND, Bench, Check, TWO, ended_with};
use super::{judge_litmus, litmus_until_told};
use crate::guest::Guest;

pub(super) const CHECKS: [(&str, Check); 6] = [
    ("20 pauses during litmus tests", pauses),
    ("list and counters", listed),
    ("stop asks, then ends", stop),
    ("signals ask the guest", signals),
    ("a reset, once and again", resets),
    ("every node's process is confined", confined),
];

/// A guest that does nothing and can be asked to end: somebody listens to its power
/// button.
const IDLE: &str = "until ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q input/event0; \
    do usleep 10000; done; echo idle; sleep 100";

fn view(bench: &Bench<'_>, name: &str) -> Result<Value> {
    let views: Value = serde_json::from_str(&bench.ask(&["vm", "list", "--json"])?)?;
    let mut found = views.as_array().into_iter().flatten();
    let found = found.find(|view| view["name"] == name).cloned();
    found.with_context(|| format!("{name} is not in {views}"))
}

fn pauses(bench: &Bench<'_>) -> Result<String> {
    let options = ["--name", "p"];
    let mut guest = bench.start_until(TWO, &options, &litmus_until_told(), " rounds ")?;
    for number in 0..20 {
        bench.ask(&["vm", "pause", "p"])?;
        let paused = view(bench, "p")?;
        ensure!(paused["state"] == "paused", "{paused}");
        ensure!(
            paused["vcpus"] == serde_json::json!(["paused", "paused"]),
            "{paused}"
        );
        if number % 5 == 0 {
            std::thread::sleep(Duration::from_millis(100));
            let later = view(bench, "p")?;
            ensure!(later["guest_time_s"] == paused["guest_time_s"], "{later}");
        }
        bench.ask(&["vm", "resume", "p"])?;
        std::thread::sleep(Duration::from_millis(20));
    }
    guest.tell()?;
    judge_litmus(&bench.finish(guest)?)
}

fn listed(bench: &Bench<'_>) -> Result<String> {
    let guest = bench.start_until(TWO, &["--name", "l"], IDLE, "idle")?;
    let table = bench.ask(&["vm", "list"])?;
    for text in ["l", "running", "soft", "256.0 MiB"] {
        ensure!(table.contains(text), "`{text}` is not in {table}");
    }
    let seen = view(bench, "l")?;
    let vcpus = seen["vcpus"].as_array().map_or(0, Vec::len);
    ensure!(vcpus == 2, "{vcpus} vCPUs: {seen}");
    let places = serde_json::json!([{"node": 0, "epoch": 0}, {"node": 1, "epoch": 0}]);
    ensure!(seen["locations"] == places, "{seen}");
    let counters: Value = serde_json::from_str(&bench.ask(&["vm", "counters", "--json", "l"])?)?;
    let counters = counters["counters"].as_object().context("counters")?;
    for part in ["vcpu0.", "vcpu1.", "slice0.memory.", "slice1.memory."] {
        ensure!(
            counters.keys().any(|name| name.starts_with(part)),
            "no counter of {part}: {counters:?}"
        );
    }
    bench.ask(&["vm", "stop", "l"])?;
    ended_well(bench, guest)
}

/// The guest was asked and powered off.
fn ended_well(bench: &Bench<'_>, guest: Guest) -> Result<String> {
    let pid = guest.pid();
    ended_with(&guest.finish(BOUND)?, 0, &["powered off by the guest"])?;
    bench.nothing_left(pid)?;
    Ok(String::new())
}

fn stop(bench: &Bench<'_>) -> Result<String> {
    let asked = bench.start_until(TWO, &["--name", "s"], IDLE, "idle")?;
    bench.ask(&["vm", "stop", "s"])?;
    ended_well(bench, asked)?;
    // Also while it is starting.
    for text in ["idle", "weft-guest: hello"] {
        let guest = bench.start_until(TWO, &["--name", "s"], IDLE, text)?;
        let pid = guest.pid();
        let before = Instant::now();
        bench.ask(&["vm", "stop", "--timeout", "0", "s"])?;
        ended_with(&guest.finish(BOUND)?, 120, &["stopped"])?;
        let took = before.elapsed();
        ensure!(took < Duration::from_secs(3), "stopped after {took:?}");
        bench.nothing_left(pid)?;
    }
    // And where it stands.
    let paused = bench.start_until(TWO, &["--name", "s"], IDLE, "idle")?;
    let pid = paused.pid();
    bench.ask(&["vm", "pause", "s"])?;
    bench.ask(&["vm", "stop", "--timeout", "0", "s"])?;
    ended_with(&paused.finish(BOUND)?, 120, &["stopped"])?;
    bench.nothing_left(pid)?;
    Ok(String::new())
}

fn signals(bench: &Bench<'_>) -> Result<String> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let guest = bench.start_until(TWO, &[], IDLE, "idle")?;
        kill(Pid::from_raw(guest.pid() as i32), signal)?;
        ended_well(bench, guest)?;
    }
    // A second one does not wait for the guest, which here is deaf.
    let deaf = "rm /etc/acpi/PWRF/*; echo deaf; sleep 100";
    let guest = bench.start_until(TWO, &[], deaf, "deaf")?;
    let pid = guest.pid();
    for _ in 0..2 {
        kill(Pid::from_raw(pid as i32), Signal::SIGTERM)?;
        std::thread::sleep(Duration::from_millis(500));
    }
    let ended = guest.finish(Duration::from_secs(8))?;
    ended_with(&ended, 143, &["stopped by signal 15"])?;
    bench.nothing_left(pid)?;
    Ok(String::new())
}

fn resets(bench: &Bench<'_>) -> Result<String> {
    let mut options = TWO.options.to_vec();
    options.push("--no-reboot");
    let guest = Guest::start(&mut bench.machine(&options, "true", "weft.reboot")?)?;
    let pid = guest.pid();
    ended_with(&guest.finish(BOUND)?, 116, &["reset by the guest"])?;
    bench.nothing_left(pid)?;

    let mut options = TWO.options.to_vec();
    options.extend(["--name", "again"]);
    let mut again = Guest::start(&mut bench.machine(&options, "sleep 1", "weft.reboot")?)?;
    let pid = again.pid();
    let deadline = Instant::now() + BOUND;
    let restarted = |bench: &Bench<'_>| {
        let seen = view(bench, "again").ok()?;
        seen["restarts"].as_u64().filter(|restarts| *restarts >= 2)
    };
    while restarted(bench).is_none() {
        ensure!(Instant::now() < deadline, "it does not start again");
        let _ = again.wait_for("no such line", Duration::from_millis(50));
    }
    bench.ask(&["vm", "stop", "--timeout", "0", "again"])?;
    let ended = again.finish(BOUND)?;
    ended_with(&ended, 120, &["reset by the guest", "restarting"])?;
    bench.nothing_left(pid)?;
    let lives = ended.console().matches("weft-guest: hello").count();
    ensure!(lives >= 2, "{lives} lives");
    Ok(format!("{lives} lives"))
}

/// Every thread of every node has a filter and no way to new privileges; what root
/// started is not root's.
fn confined(bench: &Bench<'_>) -> Result<String> {
    let guest = bench.start_until(TWO, &["--name", "c"], IDLE, "idle")?;
    let mut threads = 0;
    for process in bench.processes(&guest, TWO.nodes)? {
        let pid = process.identity.pid;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?.path();
            let name = fs::read_to_string(task.join("comm"))?;
            let status = fs::read_to_string(task.join("status"))?;
            let has = |line: &str| status.lines().any(|found| found == line);
            let name = name.trim();
            ensure!(has("Seccomp:\t2"), "{pid} {name} has no filter");
            ensure!(has("NoNewPrivs:\t1"), "{pid} {name} may get privileges");
            if bench.context.is_root() {
                ensure!(
                    has("Uid:\t65534\t65534\t65534\t65534"),
                    "{pid} {name} is root's"
                );
            }
            threads += 1;
        }
    }
    bench.ask(&["vm", "stop", "c"])?;
    ended_well(bench, guest)?;
    Ok(format!("{threads} threads"))
}
