//! Machines as others see them: list, pause, resume, stop, counters, console,
//! and what their process may do.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{BOUND, Bench, Check, code, ended_with, leftovers, wait_until};
use crate::guest::Guest;

pub(super) const CHECKS: [(&str, Check); 7] = [
    ("list, pause, resume, counters", paused),
    ("stop asks, then ends", stop),
    ("the console at a socket", console),
    ("weft vm console", attached),
    ("names and sockets", names),
    ("the process is confined", confined),
    ("more vCPUs", more_cpus),
];

/// What the API says of a machine.
pub(super) fn view(bench: &Bench, name: &str) -> Result<Value> {
    let views: Value = serde_json::from_str(&bench.ask(&["vm", "list", "--json"])?)?;
    let found = views.as_array().and_then(|views| {
        let mut found = views.iter().filter(|view| view["name"] == name);
        found.next()
    });
    found
        .cloned()
        .with_context(|| format!("{name} is not in {views}"))
}

/// The process that is the machine.
pub(super) fn machine_pid(bench: &Bench, name: &str) -> Result<u64> {
    let view = view(bench, name)?;
    view["machine_pid"]
        .as_u64()
        .with_context(|| format!("no machine_pid in {view}"))
}

fn quit(mut guest: Guest) -> Result<()> {
    guest.write("q")?;
    ended_with(&guest.finish(BOUND)?, 0, &[])
}

fn paused(bench: &Bench) -> Result<String> {
    let mut guest = bench.start(&["--name", "p"])?;
    let listed = bench.ask(&["vm", "list"])?;
    for text in ["p", "running", bench.back_end, "16.0 MiB"] {
        ensure!(listed.contains(text), "`{text}` is not in {listed}");
    }
    bench.ask(&["vm", "pause", "p"])?;
    ensure!(view(bench, "p")?["state"] == "paused");
    let again = bench.weft(&["vm", "pause", "p"]).output()?;
    ensure!(!again.status.success(), "paused twice");
    let time = view(bench, "p")?["guest_time_s"].clone();
    // No key of the guest's is in it.
    guest.write("again\n")?;
    ensure!(
        guest
            .wait_for("again", Duration::from_millis(300))
            .is_none(),
        "a paused guest answers"
    );
    ensure!(
        view(bench, "p")?["guest_time_s"] == time,
        "guest time goes on"
    );
    let pid = guest.pid().to_string();
    bench.ask(&["vm", "resume", &pid])?;
    ensure!(
        guest.wait_for("again", BOUND).is_some(),
        "what was typed meanwhile is lost"
    );
    let counters: Value = serde_json::from_str(&bench.ask(&["vm", "counters", "--json", "p"])?)?;
    ensure!(counters["counters"]["vcpu0.ports"].is_u64(), "{counters}");
    quit(guest)?;
    Ok(String::new())
}

fn stop(bench: &Bench) -> Result<String> {
    let guest = bench.start(&["--name", "s"])?;
    bench.ask(&["vm", "stop", "s"])?;
    ended_with(&guest.finish(BOUND)?, 0, &["powered off by the guest"])?;
    let mut deaf = bench.start(&["--name", "s"])?;
    deaf.write("d")?;
    std::thread::sleep(Duration::from_millis(200));
    let before = Instant::now();
    bench.ask(&["vm", "stop", "--timeout", "0.5", "s"])?;
    ensure!(before.elapsed() >= Duration::from_millis(500), "not asked");
    ended_with(&deaf.finish(BOUND)?, 120, &["stopped"])?;
    let atonce = bench.start(&["--name", "s"])?;
    bench.ask(&["vm", "stop", "--timeout", "0", "s"])?;
    ended_with(&atonce.finish(BOUND)?, 120, &["stopped"])?;
    Ok(String::new())
}

/// A machine whose console is a socket, and that socket.
fn with_socket(bench: &Bench) -> Result<(Guest, String)> {
    let guest = Guest::start(&mut bench.run(&["--name", "c", "--console", "socket"]))?;
    let path = bench.run_directory.join("weft/vm/c.console");
    wait_until("the console's socket", || Ok(path.exists()))?;
    Ok((guest, path.to_string_lossy().into_owned()))
}

fn read_until(stream: &mut UnixStream, text: &str) -> Result<String> {
    stream.set_read_timeout(Some(BOUND))?;
    let mut got = String::new();
    let mut byte = [0];
    while !got.contains(text) {
        ensure!(stream.read(&mut byte)? == 1, "closed after {got:?}");
        got.push(char::from(byte[0]));
    }
    Ok(got)
}

fn console(bench: &Bench) -> Result<String> {
    let (guest, path) = with_socket(bench)?;
    ensure!(
        fs::metadata(&path)?.permissions().mode() & 0o777 == 0o600,
        "{path} is open"
    );
    let mut first = UnixStream::connect(&path)?;
    read_until(&mut first, "ready\r\n")?;
    first.write_all(b"abc")?;
    read_until(&mut first, "abc")?;
    let mut second = UnixStream::connect(&path)?;
    read_until(&mut second, "another client")?;
    drop(first);
    // What it showed is shown to the next, who may be early.
    wait_until("the place to be free", || {
        let mut next = UnixStream::connect(&path)?;
        next.set_read_timeout(Some(BOUND))?;
        let mut start = [0; 5];
        next.read_exact(&mut start)?;
        Ok(&start == b"ready")
    })?;
    let views = view(bench, "c")?;
    ensure!(views["console"]["path"] == path.as_str(), "{views}");
    bench.ask(&["vm", "stop", "c"])?;
    ended_with(&guest.finish(BOUND)?, 0, &[])?;
    ensure!(
        leftovers(&bench.run_directory)?.is_empty(),
        "left: {:?}",
        leftovers(&bench.run_directory)?
    );
    Ok(String::new())
}

fn attached(bench: &Bench) -> Result<String> {
    let (guest, _) = with_socket(bench)?;
    let mut client = bench.weft(&["vm", "console", "c"]);
    let mut client = Guest::start(client.stdin(Stdio::piped()))?;
    ensure!(
        client.wait_for("ready", BOUND).is_some(),
        "the console shows nothing"
    );
    client.write("q")?;
    let ended = client.finish(BOUND)?;
    ended_with(&ended, 0, &["vm c closed its console"])?;
    ended_with(&guest.finish(BOUND)?, 0, &[])?;
    let guest = bench.start(&["--name", "here"])?;
    let refused = bench.weft(&["vm", "console", "here"]).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(said.contains("--console socket"), "{said}");
    quit(guest)?;
    Ok(String::new())
}

fn names(bench: &Bench) -> Result<String> {
    let api = bench.directory.join("api").to_string_lossy().into_owned();
    let guest = bench.start(&["--name", "n", "--api", &api])?;
    ensure!(
        fs::metadata(&api)?.permissions().mode() & 0o777 == 0o600,
        "{api} is open"
    );
    let second = Guest::start(&mut bench.run(&["--name", "n"]))?.finish(BOUND)?;
    ended_with(&second, 125, &["`n` is running", "--name"])?;
    view(bench, "n")?;
    let refused = bench.weft(&["vm", "stop", "m"]).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        said.contains("name or pid m") && said.contains("weft vm list"),
        "{said}"
    );
    quit(guest)?;
    ensure!(!std::path::Path::new(&api).exists(), "{api} is left");
    ensure!(
        leftovers(&bench.run_directory)?.is_empty(),
        "left: {:?}",
        leftovers(&bench.run_directory)?
    );
    Ok(String::new())
}

/// Every thread has a filter and no way to new privileges; a machine that root
/// started is not root's.
fn confined(bench: &Bench) -> Result<String> {
    let guest = bench.start(&["--name", "jail"])?;
    let pid = machine_pid(bench, "jail")?;
    let mut kinds = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        let name = fs::read_to_string(task.join("comm"))?.trim().to_owned();
        // The kernel's own, which KVM adds to the process.
        if name.starts_with("kvm-") {
            continue;
        }
        let status = fs::read_to_string(task.join("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        ensure!(field("Seccomp:") == "2", "{name} has no filter");
        ensure!(field("NoNewPrivs:") == "1", "{name} may get privileges");
        if bench.context.is_root() {
            let user = field("Uid:");
            ensure!(user == "65534 65534 65534 65534", "{name} is user {user}");
            ensure!(field("Groups:").is_empty(), "{name} is in groups");
            ensure!(
                field("CapEff:").trim_matches('0').is_empty(),
                "{name} has capabilities"
            );
        }
        kinds.push(name);
    }
    ensure!(kinds.len() >= 5, "only {kinds:?}");
    let core = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let core = core
        .lines()
        .find(|line| line.starts_with("Max core file size"));
    ensure!(core.is_some_and(|line| line.contains(" 0 ")), "{core:?}");
    quit(guest)?;
    kinds.sort();
    Ok(kinds.join(" "))
}

fn more_cpus(bench: &Bench) -> Result<String> {
    for cpus in ["2", "8"] {
        let mut guest = bench.start(&["--cpus", cpus])?;
        guest.write("q")?;
        let ended = guest.finish(BOUND)?;
        ensure!(code(&ended)? == 0, "{cpus}: {}", ended.stderr);
    }
    Ok(String::new())
}
