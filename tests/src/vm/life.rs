//! How machines end, restart, and are asked to end.

use std::os::unix::process::CommandExt;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::{SigHandler, SigSet, Signal, kill, raise, signal as disposition};
use nix::unistd::Pid;

use super::{BOUND, Bench, Check, ended_with, leftovers, wait_until};
use crate::guest::Guest;

pub(super) const CHECKS: [(&str, Check); 14] = [
    ("a guest that powers off", powers_off),
    ("a guest's exit code", debug_exit),
    ("a guest that restarts", restarts),
    ("a restart that is not wanted", no_reboot),
    ("triple faults", triple_faults),
    (
        "no restart once the end was asked for",
        no_restart_after_stop,
    ),
    ("a signal asks the guest", signal_asks),
    ("a signal ends a guest that does not listen", signal_ends),
    ("a signal before the start", signal_before_start),
    ("a signal that is ignored", signal_ignored),
    ("the machine dies with its parent", dies_with_parent),
    ("a machine outlives its command", outlives_its_command),
    ("a start that fails leaves nothing", failed_start),
    ("statistics", statistics),
];

fn powers_off(bench: &Bench) -> Result<String> {
    let mut guest = bench.start(&[])?;
    guest.write("hello q")?;
    let ended = guest.finish(BOUND)?;
    ended_with(
        &ended,
        0,
        &["powered off by the guest", "start ", "run ", "back end"],
    )?;
    ensure!(ended.console().contains("hello"), "{}", ended.console());
    ensure!(
        leftovers(&bench.run_directory)?.is_empty(),
        "left: {:?}",
        leftovers(&bench.run_directory)?
    );
    Ok(last_line(&ended.stderr))
}

fn last_line(text: &str) -> String {
    text.lines().last().unwrap_or_default().to_owned()
}

fn debug_exit(bench: &Bench) -> Result<String> {
    let mut guest = bench.start(&[])?;
    guest.write("x")?;
    ended_with(&guest.finish(BOUND)?, 43, &["debug exit with code 43"])?;
    Ok(String::new())
}

fn restarts(bench: &Bench) -> Result<String> {
    let mut guest = bench.start(&["--name", "again"])?;
    guest.write("1r")?;
    // Found all the time, by the same name.
    wait_until("its restart", || {
        let views = bench.ask(&["vm", "list", "--json"])?;
        Ok(views.contains("\"restarts\": 1") && views.contains("\"again\""))
    })?;
    guest.write("2t")?;
    wait_until("its second restart", || {
        Ok(bench
            .ask(&["vm", "list", "--json"])?
            .contains("\"restarts\": 2"))
    })?;
    guest.write("3q")?;
    let ended = guest.finish(BOUND)?;
    ended_with(
        &ended,
        0,
        &["reset by the guest", "triple fault", "restarting"],
    )?;
    let greetings = ended.console().matches("ready").count();
    ensure!(greetings == 3, "{greetings} lives: {}", ended.console());
    Ok(String::new())
}

fn no_reboot(bench: &Bench) -> Result<String> {
    for (key, code) in [("r", 116), ("F", 116), ("I", 116), ("t", 118)] {
        let mut guest = bench.start(&["--no-reboot"])?;
        guest.write(key)?;
        ended_with(&guest.finish(BOUND)?, code, &["reset"])?;
    }
    Ok(String::new())
}

/// A guest that does nothing but crash is given up.
fn triple_faults(bench: &Bench) -> Result<String> {
    let mut guest = Guest::start(&mut bench.run(&[]))?;
    // Typed ahead: each life takes one.
    for life in 1..=3 {
        wait_until("a life", || {
            Ok(bench.ask(&["vm", "list", "--json"])?.contains("running"))
        })?;
        guest.write("t")?;
        let text = format!("\"restarts\": {life}");
        if life < 3 {
            wait_until("a restart", || {
                Ok(bench.ask(&["vm", "list", "--json"])?.contains(&text))
            })?;
        }
    }
    ended_with(&guest.finish(BOUND)?, 118, &["triple fault"])?;
    Ok(String::new())
}

/// A guest that restarts when it is asked to power off.
fn no_restart_after_stop(bench: &Bench) -> Result<String> {
    for by_signal in [false, true] {
        let mut guest = bench.start(&["--name", "again"])?;
        guest.write("R!\n")?;
        ensure!(guest.wait_for("R!", BOUND).is_some(), "no answer");
        match by_signal {
            true => signal(&guest, Signal::SIGTERM)?,
            false => drop(bench.ask(&["vm", "stop", "again"])?),
        }
        let ended = guest.finish(BOUND)?;
        ended_with(&ended, 116, &["reset by the guest", "was requested"])?;
        let greetings = ended.console().matches("ready").count();
        ensure!(greetings == 1, "{greetings} lives: {}", ended.console());
    }
    Ok(String::new())
}

fn signal(guest: &Guest, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(guest.pid() as i32), signal)?)
}

fn signal_asks(bench: &Bench) -> Result<String> {
    for kind in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let guest = bench.start(&[])?;
        signal(&guest, kind)?;
        let ended = guest.finish(BOUND)?;
        ended_with(&ended, 0, &["asking the guest", "powered off by the guest"])?;
    }
    Ok(String::new())
}

fn signal_ends(bench: &Bench) -> Result<String> {
    let mut guest = bench.start(&[])?;
    guest.write("d!")?;
    std::thread::sleep(Duration::from_millis(200));
    signal(&guest, Signal::SIGTERM)?;
    std::thread::sleep(Duration::from_millis(500));
    signal(&guest, Signal::SIGTERM)?;
    let ended = guest.finish(Duration::from_secs(8))?;
    ended_with(&ended, 143, &["stopped by signal 15"])?;
    Ok(String::new())
}

/// The signal waits for the command from its first instruction on.
fn signal_before_start(bench: &Bench) -> Result<String> {
    let mut command = bench.run(&[]);
    let wait = || {
        SigSet::from(Signal::SIGTERM).thread_block()?;
        Ok(raise(Signal::SIGTERM)?)
    };
    // SAFETY: both calls are safe in a signal handler; nothing is allocated.
    unsafe { command.pre_exec(wait) };
    let ended = Guest::start(&mut command)?.finish(BOUND)?;
    ended_with(&ended, 143, &["ended by SIGTERM before the start"])?;
    Ok(String::new())
}

/// What `nohup` does.
fn signal_ignored(bench: &Bench) -> Result<String> {
    let mut command = bench.run(&["--name", "nohup"]);
    let ignore = || {
        // SAFETY: no handler is involved.
        unsafe { disposition(Signal::SIGHUP, SigHandler::SigIgn)? };
        Ok(())
    };
    // SAFETY: safe in a signal handler; nothing is allocated.
    unsafe { command.pre_exec(ignore) };
    let mut guest = Guest::start(&mut command)?;
    ensure!(guest.wait_for("ready", BOUND).is_some(), "it is not ready");
    let machine = super::outside::machine_pid(bench, "nohup")?;
    signal(&guest, Signal::SIGHUP)?;
    kill(Pid::from_raw(machine as i32), Signal::SIGHUP)?;
    guest.write("hello x")?;
    let ended = guest.finish(BOUND)?;
    ended_with(&ended, 43, &["debug exit with code 43"])?;
    let said = &ended.stderr;
    ensure!(!said.contains("asking the guest"), "{said}");
    Ok(String::new())
}

fn dies_with_parent(bench: &Bench) -> Result<String> {
    let mut guest = bench.start(&["--name", "orphan"])?;
    let machine = super::outside::machine_pid(bench, "orphan")?;
    guest.kill()?;
    wait_until("the machine's end", || {
        // The first thread may be gone before those that hold the socket.
        let threads = std::fs::read_dir(format!("/proc/{machine}/task"));
        let state = std::fs::read_to_string(format!("/proc/{machine}/stat")).unwrap_or_default();
        let alone = threads.map_or(0, Iterator::count) <= 1;
        Ok(state.is_empty() || alone && state.contains(") Z "))
    })?;
    // Nobody could remove its socket: the next who looks does.
    ensure!(
        !leftovers(&bench.run_directory)?.is_empty(),
        "the socket went by itself"
    );
    ensure!(!bench.ask(&["vm", "list"])?.contains("orphan"));
    ensure!(
        leftovers(&bench.run_directory)?.is_empty(),
        "left: {:?}",
        leftovers(&bench.run_directory)?
    );
    // And its name is free.
    let mut next = bench.start(&["--name", "orphan"])?;
    next.write("q")?;
    ended_with(&next.finish(BOUND)?, 0, &[])?;
    Ok(String::new())
}

/// `weft vm start` of the guest.
fn start_detached(bench: &Bench, options: &[&str]) -> Result<std::process::Output> {
    let mut command = bench.weft(&["vm", "start", "--memory", "16M", "--backend"]);
    command.args([bench.back_end, "--kernel"]);
    command.arg(bench.context.programs.join("typed-guest"));
    Ok(command.args(options).output()?)
}

fn outlives_its_command(bench: &Bench) -> Result<String> {
    let output = start_detached(bench, &["--name", "free", "--json"])?;
    ensure!(output.status.success(), "{output:?}");
    let view: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(
        view["name"] == "free" && view["state"] == "running",
        "{view}"
    );
    // The command has ended, and the launcher has a session of its own.
    let launcher = view["pid"].as_i64().unwrap_or_default() as i32;
    let session = nix::unistd::getsid(Some(Pid::from_raw(launcher)))?;
    ensure!(session.as_raw() == launcher, "its session is {session}");
    let taken = start_detached(bench, &["--name", "free"])?;
    ensure!(taken.status.code() == Some(125), "{taken:?}");
    // The log is that of the machine that runs, not of the one that was refused.
    let log = bench.run_directory.join("weft/vm/free.log");
    ensure!(std::fs::read_to_string(&log)?.contains("back end"));
    bench.ask(&["vm", "stop", "--timeout", "0", "free"])?;
    for _ in 0..5 {
        // Its name is free, although its process may not have ended.
        let next = start_detached(bench, &["--name", "free"])?;
        ensure!(next.status.success(), "{next:?}");
        bench.ask(&["vm", "stop", "--timeout", "0", "free"])?;
    }
    wait_until("its end", || {
        Ok(std::fs::read_to_string(&log)?.contains("start "))
    })?;
    wait_until("its sockets' end", || {
        Ok(leftovers(&bench.run_directory)? == ["free.log"])
    })?;
    Ok(String::new())
}

fn failed_start(bench: &Bench) -> Result<String> {
    for options in [
        &["--disk", "/nonexistent/disk"][..],
        &["--cpus", "0"],
        &["--console", "socket=/nonexistent/socket"],
    ] {
        let output = start_detached(bench, options)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(125), "{options:?}: {output:?}");
        ensure!(said.starts_with("weft: "), "{options:?}: {said}");
        let left = leftovers(&bench.run_directory)?;
        ensure!(left.is_empty(), "{options:?} left {left:?}");
    }
    Ok(String::new())
}

fn statistics(bench: &Bench) -> Result<String> {
    let file = bench.directory.join("stats.json");
    let option = format!("json={}", file.display());
    let mut guest = bench.start(&["--stats", &option, "--ready", "ready"])?;
    guest.write("q")?;
    ended_with(&guest.finish(BOUND)?, 0, &[", boot "])?;
    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(file)?)?;
    ensure!(stats["back_end"]["name"] == bench.back_end, "{stats}");
    ensure!(stats["exit_code"] == 0 && stats["format"] == 1, "{stats}");
    for field in ["start_time_s", "boot_time_s", "run_time_s"] {
        ensure!(
            stats[field].as_f64().is_some_and(|time| time > 0.0),
            "{field}: {stats}"
        );
    }
    let counters = stats["counters"].as_object();
    ensure!(
        counters.is_some_and(|counters| !counters.is_empty()),
        "{stats}"
    );
    Ok(format!("start {} s", stats["start_time_s"]))
}
