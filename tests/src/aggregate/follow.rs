//! vCPUs that move by themselves to where their remote faults go: they move, and results
//! stay right.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::work::{judge_litmus, sums};
use super::{Bench, Check, Shape, TWO};

pub(super) const CHECKS: [(&str, Check); 6] = [
    ("follow, a search of far memory", search),
    ("follow, a working set of both nodes", both_nodes),
    (
        "follow, after each 5 faults during litmus tests",
        litmus_by_count,
    ),
    ("follow, litmus tests whose vCPUs learn", litmus_auto),
    ("follow, two vCPUs that write one word", one_word),
    ("follow, values that are refused", refused),
];

/// One vCPU, and most of the memory on the other node. Pages do not come to it by themselves, or
/// a search of two seconds ends while the vCPU still learns which of the two pays.
const FAR: Shape = Shape {
    name: "1 vCPU, 64M and 192M",
    options: &[
        "--cpus",
        "1,0",
        "--memory",
        "64M,192M",
        "--spare",
        "16M",
        "--exchange",
        "never",
    ],
    nodes: 2,
    cpus: 1,
};
/// One vCPU, and as much memory on each node.
const EVEN: Shape = Shape {
    name: "1 vCPU, twice 128M",
    options: &["--cpus", "1,0", "--memory", "128M,128M", "--spare", "16M"],
    nodes: 2,
    cpus: 1,
};
/// Writes at random to 60 of 160 MiB, in stripes on both nodes; each node has room for them.
const STRIPES: &str = "echo sum: $(dirty 160 20000 15 60 | tail -n 1)";
/// Fewest pages that come to the vCPU's node.
const CAME_MIN: u64 = 2048;
/// A text of which node 0 can keep little, read from its start to its end again and again.
const SEARCH: &str = "mkdir /m; mount -t tmpfs -o size=200M none /m; textfile 80 >/m/a; \
    for i in 1 2 3 4 5 6; do dd if=/m/a of=/dev/null bs=64k 2>/dev/null; done; \
    echo sum: $(sha256sum </m/a)";
/// Runs of the litmus tests whose vCPUs learn, with `--long`.
const LONG_TIMES: usize = 20;
/// Most moves of two vCPUs that work 5 s on one word.
const SHARED_MOVES_MAX: u64 = 100;

/// Runs a script with these options; its counters, and the lines that begin with `sum: `.
fn counted(
    bench: &Bench<'_>,
    shape: Shape,
    follow: &str,
    script: &str,
) -> Result<(Value, Vec<String>)> {
    let stats = bench.run_directory.join(format!("stats-{follow}.json"));
    let option = format!("json={}", stats.display());
    let ended = bench.run(shape, &["--follow", follow, "--stats", &option], script)?;
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&stats)?)?;
    std::fs::remove_file(&stats)?;
    Ok((figures["counters"].clone(), sums(&ended)))
}

fn counter(counters: &Value, name: &str) -> Result<u64> {
    let count = counters[name].as_u64();
    count.with_context(|| format!("no {name} in {counters}"))
}

fn search(bench: &Bench<'_>) -> Result<String> {
    let (never, expected) = counted(bench, FAR, "never", SEARCH)?;
    ensure!(never["vcpu0.follow.jumps"].is_null(), "{never}");
    let fetched = |counters: &Value| {
        let from = |slice| counters[format!("vcpu0.from{slice}.bytes")].as_u64();
        (0..FAR.nodes).filter_map(from).sum::<u64>() >> 20
    };
    let most = fetched(&never);
    let mut notes = vec![format!("never: {most} MB")];
    // With a number nothing depends on time.
    for (follow, moves_min, part) in [("100", 10, 2), ("auto", 1, 1)] {
        let (counters, found) = counted(bench, FAR, follow, SEARCH)?;
        ensure!(
            found == expected && found.len() == 1,
            "{found:?}, without moves {expected:?}"
        );
        let count = |name: &str| counter(&counters, &format!("vcpu0.{name}"));
        let moves = count("follow.jumps")? + count("follow.returns")?;
        let bytes = fetched(&counters);
        notes.push(format!("{follow}: {moves} moves, {bytes} MB"));
        ensure!(
            moves >= moves_min && bytes * part <= most,
            "{}",
            notes.join("; ")
        );
    }
    Ok(notes.join("; "))
}

/// No move helps a program that uses memory of both nodes alike, and the vCPU learns that: pages
/// come to it instead.
fn both_nodes(bench: &Bench<'_>) -> Result<String> {
    let (counters, found) = counted(bench, EVEN, "auto", STRIPES)?;
    ensure!(
        found.len() == 1 && found[0].contains("dirty: right"),
        "{found:?}"
    );
    let came = (0..EVEN.nodes)
        .map(|slice| counter(&counters, &format!("slice{slice}.memory.exchanged-in")));
    let came = came.sum::<Result<u64>>()?;
    ensure!(came >= CAME_MIN, "{came} pages came");
    Ok(format!("{came} pages came; {}", found[0]))
}

fn litmus_by_count(bench: &Bench<'_>) -> Result<String> {
    litmus(bench, "5", 8)
}

fn litmus_auto(bench: &Bench<'_>) -> Result<String> {
    let times = if bench.plan.long { LONG_TIMES } else { 1 };
    let notes = (0..times).map(|_| litmus(bench, "auto", 0));
    let notes = notes.collect::<Result<Vec<_>>>()?;
    Ok(notes.join("; "))
}

/// Litmus tests on two nodes whose vCPUs move by themselves at least this often.
fn litmus(bench: &Bench<'_>, follow: &str, least: u64) -> Result<String> {
    let stats = bench.run_directory.join("stats.json");
    let option = format!("json={}", stats.display());
    let options = ["--follow", follow, "--stats", &option];
    let rounds = if bench.plan.long { 10_000 } else { 2500 };
    let ended = bench.run(TWO, &options, &format!("litmus -d 100 -r {rounds}"))?;
    let tests = judge_litmus(&ended)?;
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&stats)?)?;
    std::fs::remove_file(&stats)?;
    let (moves, refused) = moves_of_two(&figures["counters"])?;
    ensure!(moves >= least, "{moves} moves, {refused} refused");
    Ok(format!("{tests}, {moves} moves, {refused} refused"))
}

/// Moves of two vCPUs by themselves, and requests that were refused.
fn moves_of_two(counters: &Value) -> Result<(u64, u64)> {
    let (mut moves, mut refused) = (0, 0);
    for vcpu in 0..2 {
        let count = |name: &str| counter(counters, &format!("vcpu{vcpu}.follow.{name}"));
        moves += count("jumps")? + count("returns")?;
        refused += count("refused")?;
    }
    Ok((moves, refused))
}

/// They meet on one node, or work on where they are; they do not pass each other all the time.
fn one_word(bench: &Bench<'_>) -> Result<String> {
    let script = "sharing -t 2 -s 5 -l true && echo sum: shared";
    let (counters, done) = counted(bench, TWO, "auto", script)?;
    ensure!(done.len() == 1, "the guest's own check failed");
    let (moves, refused) = moves_of_two(&counters)?;
    ensure!(
        moves <= SHARED_MOVES_MAX,
        "{moves} moves, {refused} refused"
    );
    Ok(format!("{moves} moves, {refused} refused"))
}

fn refused(bench: &Bench<'_>) -> Result<String> {
    for (options, words) in [
        (
            &["--growable", "no", "--follow", "auto"][..],
            "a machine on one node has no remote faults",
        ),
        (
            &["--nodes", "2", "--cpus", "2", "--follow", "0"],
            "from 1 to 4194304",
        ),
        (
            &["--nodes", "2", "--cpus", "2", "--follow", "atuo"],
            "write auto, never",
        ),
    ] {
        let output = bench.machine(options, "true", "")?.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() || !said.contains(words) {
            bail!("{options:?}: {said}");
        }
    }
    Ok(String::new())
}
