//! Roles of node 0 that other nodes take over while Linux runs: the timekeeper, and the
//! platform with the serial console and the I/O APIC. The guest notices nothing.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::moves::{begin, begin_with, finish, sleeps_during};
use super::{BOUND, Bench, Check, EXIT_FAILED, THREE, TWO, code};
use crate::boot::USER_SPACE;
use crate::devices::sha256;

pub(super) const CHECKS: [(&str, Check); 4] = [
    ("roles, the timekeeper during sleeps", time),
    ("roles, the platform under a console", platform),
    ("roles that cannot move", refused),
    ("roles, a platform that is killed", killed),
];

/// Moves of a role in a test.
const MOVES: u64 = 60;
/// Bytes of the disk that are read after each line.
const PIECE: usize = 64 << 10;

/// Has a role (`--time`, `--platform`) go to a node, and checks the report.
fn move_role(bench: &Bench<'_>, role: &str, (from, to): (u64, u64), epoch: u64) -> Result<Value> {
    let node = to.to_string();
    let words = ["vm", "move", "m", role, "--to", &node, "--json"];
    let moved: Value = serde_json::from_str(&bench.ask(&words)?)?;
    let wanted = serde_json::json!({ "from": from, "to": to, "epoch": epoch });
    for (name, value) in wanted.as_object().into_iter().flatten() {
        ensure!(moved[name] == *value, "{name} of {moved}, not {value}");
    }
    Ok(moved)
}

/// A sleep whose timer is lost does not end.
fn time(bench: &Bench<'_>) -> Result<String> {
    sleeps_during(bench, THREE, || {
        for round in 0..MOVES {
            move_role(bench, "--time", (round % 3, (round + 1) % 3), round + 1)?;
        }
        Ok(String::new())
    })
}

/// Answers each line with a sum of a piece of the disk, and ends with one line more.
fn script(lines: u64) -> String {
    format!(
        "stty -echo; echo at work; i=0; while [ $i -lt {lines} ]; do read line; \
        echo heard $line; usleep 500; dd if=/dev/vda bs=64k skip=$((i%32)) count=1 \
        iflag=direct 2>/dev/null | sha256sum; i=$((i+1)); done; read line"
    )
}

/// Each line that is typed is heard once, in order, and what the guest says is right, while
/// the serial port goes from node to node under both. The guest powers off by the devices of
/// another node.
fn platform(bench: &Bench<'_>) -> Result<String> {
    let file = bench.run_directory.with_file_name("disk");
    let content: Vec<u8> = (0..32 * PIECE as u32)
        .map(|byte| (byte.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    fs::write(&file, &content)?;
    let model = file.with_extension("model");
    let mut sums = Vec::new();
    for piece in content.chunks(PIECE) {
        fs::write(&model, piece)?;
        sums.push(sha256(&model)?);
    }
    let disk = file.display().to_string();
    let script = script(MOVES);
    let options = ["--disk", &disk];
    let mut guest = begin_with(bench, "soft", (THREE, &options), (&script, "at work"))?;
    let (mut stops, mut from) = (Vec::new(), 0);
    for round in 0..MOVES {
        guest.write(&format!("line {round} of the console\n"))?;
        let to = (from + 1 + round % 2) % 3;
        let moved = move_role(bench, "--platform", (from, to), round + 1)?;
        stops.push(moved["stopped_ns"].as_u64().context("no stop")?);
        let heard = format!("heard line {round} of");
        ensure!(
            guest.wait_for(&heard, BOUND).is_some(),
            "no `{heard}` with the platform on node {to}"
        );
        from = to;
    }
    if from == 0 {
        move_role(bench, "--platform", (0, 2), MOVES + 1)?;
    }
    guest.write("over\n")?;
    let ended = finish(bench, guest)?;
    let said: Vec<&str> = ended
        .lines
        .iter()
        .map(|line| line.text.as_str())
        .filter(|text| text.starts_with("heard ") || text.ends_with("  -"))
        .collect();
    let wanted: Vec<String> = (0..MOVES)
        .flat_map(|round| {
            let sum = &sums[round as usize % sums.len()];
            [
                format!("heard line {round} of the console"),
                format!("{sum}  -"),
            ]
        })
        .collect();
    ensure!(said == wanted, "{said:?}, not {wanted:?}");
    stops.sort_unstable();
    let median = Duration::from_nanos(stops[stops.len() / 2]);
    Ok(format!("median stop {} µs", median.as_micros()))
}

fn refused(bench: &Bench<'_>) -> Result<String> {
    let guest = begin(bench, "soft", TWO, ("echo idle; sleep 4", "idle"))?;
    for (words, said) in [
        (
            &["--platform", "--to", "0"][..],
            "node 0 has the platform already",
        ),
        (
            &["--platform", "--to", "2"],
            "node 2 does not exist: there are 0, 1",
        ),
        (&["--time", "--to", "0"], "node 0 keeps the time already"),
        (
            &["--time", "--platform", "--to", "1"],
            "cannot be used with",
        ),
        (&["--to", "1"], "required"),
    ] {
        let words = [&["vm", "move", "m"][..], words].concat();
        let output = bench.weft(&words).output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && error.contains(said), "{error}");
    }
    // A user's pause stays.
    bench.ask(&["vm", "pause", "m"])?;
    let moved = move_role(bench, "--platform", (0, 1), 1)?;
    ensure!(moved["stopped_ns"] == 0, "{moved}");
    let views: Value = serde_json::from_str(&bench.ask(&["vm", "list", "--json"])?)?;
    ensure!(views[0]["state"] == "paused", "{views}");
    bench.ask(&["vm", "resume", "m"])?;
    finish(bench, guest)?;
    Ok(String::new())
}

/// The node that has the platform is lost: the machine ends and says so.
fn killed(bench: &Bench<'_>) -> Result<String> {
    let script = format!("echo {USER_SPACE}; echo at work; while :; do echo more; done");
    let guest = begin(bench, "soft", THREE, (&script, "at work"))?;
    let mut processes = bench.processes(&guest, THREE.nodes)?;
    processes.rotate_right(1);
    move_role(bench, "--platform", (0, 2), 1)?;
    kill(Pid::from_raw(processes[2].identity.pid), Signal::SIGKILL)?;
    let pid = guest.pid();
    let ended = guest.finish(BOUND)?;
    ensure!(code(&ended)? == EXIT_FAILED, "{}", ended.stderr);
    ensure!(ended.stderr.contains("lost node 2 ("), "{}", ended.stderr);
    bench.nothing_left(pid)?;
    Ok(String::new())
}
