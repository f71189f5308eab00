//! Nodes that may keep much less than their vCPUs work with: results are right, and
//! the host's memory stays within the budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::work::{SUMS, judge_litmus, litmus_rounds, litmus_until_told, sums, sums_alone};
use super::{Bench, Check, Shape, TWO};

pub(super) const CHECKS: [(&str, Check); 5] = [
    ("140 MB on a node that may keep 80", far_more_than_fits),
    ("x86-TSO litmus tests, 1.3 MB to spare", |bench| {
        litmus_rounds(bench, [1000, 3000], "-d 100", &SCARCE)
    }),
    ("page tables that move, 1.3 MB to spare", tables),
    ("sums on a node without memory, 2 MB to spare", no_memory),
    ("pauses while pages leave", pauses),
];

/// As little as a node with one vCPU may have.
const SCARCE: [&str; 2] = ["--spare", "1280K"];

/// The first node has little memory, and the guest uses much there.
const LOPSIDED: Shape = Shape {
    name: "2 nodes of 1 vCPU, 64M and 192M",
    options: &["--cpus", "1,1", "--memory", "64M,192M", "--spare", "16M"],
    nodes: 2,
    cpus: 2,
};
/// What of it node 0 may keep, in KiB.
const KEPT_KIB: u64 = 80 << 10;
/// Shared memory of the process that is not the guest's: translated code.
const BESIDE_KIB: u64 = 16 << 10;

/// 140 MB are written on vCPU 0 and read twice; then made once more without memory.
const WALK: &str = "mkdir /m; mount -t tmpfs -o size=200M none /m; \
    taskset 1 textfile 140 >/m/a; \
    for i in 1 2; do echo sum: $(taskset 1 sha256sum </m/a); done; \
    echo sum: $(taskset 1 textfile 140 | taskset 1 sha256sum)";

fn far_more_than_fits(bench: &Bench<'_>) -> Result<String> {
    let stats = bench.run_directory.join("stats.json");
    let option = format!("json={}", stats.display());
    let guest = bench.start(LOPSIDED, &["--stats", &option], WALK)?;
    let processes = bench.processes(&guest, LOPSIDED.nodes)?;
    let first = processes.last().context("node 0 has a process")?;
    let (pid, done) = (first.identity.pid, Arc::new(AtomicBool::new(false)));
    let watcher = std::thread::spawn({
        let done = done.clone();
        move || most_shared_kib(pid, &done)
    });
    let ended = bench.finish(guest);
    done.store(true, Ordering::Relaxed);
    let most = watcher.join().ok().context("the watcher ended")?;
    let sums = sums(&ended?);
    ensure!(sums.len() == 3, "{sums:?}");
    ensure!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&stats)?)?;
    let figure = |name: &str| {
        let name = format!("slice0.memory.{name}");
        figures["counters"][&name]
            .as_u64()
            .with_context(|| format!("no {name} in {figures}"))
    };
    let (sent, dropped) = (figure("evicted-sent")?, figure("evicted-dropped")?);
    ensure!(figure("budget-pages")? * 4 == KEPT_KIB, "{figures}");
    // What does not fit goes home once, and is dropped after each reading.
    ensure!(
        sent > 15_000 && dropped > 15_000,
        "{sent} pages sent, {dropped} dropped"
    );
    ensure!(most > KEPT_KIB / 2, "{most} KiB of shared memory at most");
    ensure!(
        most <= KEPT_KIB + BESIDE_KIB,
        "node 0 had {most} KiB of shared memory, and may keep {KEPT_KIB}"
    );
    Ok(format!("{} MiB at most, {sent} pages sent", most >> 10))
}

/// Most shared memory that a process had resident until it is `done`, in KiB.
fn most_shared_kib(pid: i32, done: &AtomicBool) -> u64 {
    let mut most = 0;
    while !done.load(Ordering::Relaxed) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssShmem:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        most = most.max(number.unwrap_or(0));
        std::thread::sleep(Duration::from_millis(5));
    }
    most
}

fn tables(bench: &Bench<'_>) -> Result<String> {
    bench.run(TWO, &SCARCE, "tables 60")?;
    Ok(String::new())
}

fn no_memory(bench: &Bench<'_>) -> Result<String> {
    const SHAPE: Shape = Shape {
        name: "2 nodes of 1 vCPU, 256M and none",
        options: &["--cpus", "1,1", "--memory", "256M,0", "--spare", "2M"],
        nodes: 2,
        cpus: 2,
    };
    let alone = sums_alone(bench)?;
    let spread = sums(&bench.run(SHAPE, &[], SUMS)?);
    ensure!(spread == alone, "{spread:?}, on one node {alone:?}");
    Ok(String::new())
}

/// Nothing that is on its way when the vCPUs stop is lost.
fn pauses(bench: &Bench<'_>) -> Result<String> {
    let options = [&SCARCE[..], &["--name", "e"]].concat();
    let mut guest = bench.start_until(TWO, &options, &litmus_until_told(), " rounds ")?;
    for _ in 0..10 {
        bench.ask(&["vm", "pause", "e"])?;
        bench.ask(&["vm", "resume", "e"])?;
        std::thread::sleep(Duration::from_millis(20));
    }
    guest.tell()?;
    judge_litmus(&bench.finish(guest)?)
}
