//! Work in a guest whose vCPUs are on different nodes: the memory model, and
//! results that must be those of a machine on one node.

use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{Bench, Check, Shape, TWO};
use crate::guest::{Ended, Guest, until_told};

pub(super) const CHECKS: [(&str, Check); 4] = [
    ("x86-TSO litmus tests", |bench| {
        litmus_rounds(bench, [1200, 5000], "-d 100", &[])
    }),
    (
        "x86-TSO litmus tests, links slow by up to 0.2 ms",
        |bench| litmus(bench, "-d 400 -r 300", &["--link-delay", "200"]),
    ),
    ("litmus tests that are wrong are found", planted),
    ("the same sums as on one node", same_sums),
];

pub(super) const LONG: [(&str, Check); 7] = [
    (
        "x86-TSO litmus tests, 20000 rounds, links slow by up to 0.2 ms",
        |bench| litmus(bench, "-d 400 -r 20000", &["--link-delay", "200"]),
    ),
    ("x86-TSO litmus tests, links slow by up to 2 ms", |bench| {
        litmus(bench, "-d 4000 -r 500", &["--link-delay", "2000"])
    }),
    ("x86-TSO litmus tests, 1000000 rounds", |bench| {
        litmus(bench, "-d 100 -r 1000000", &[])
    }),
    (
        "x86-TSO litmus tests of 3 and 4 threads, 100000 rounds",
        |bench| {
            judge(
                &run_for(bench, FOUR, &[], "litmus -d 100 -r 100000 WRC IRIW")?,
                2,
            )
        },
    ),
    ("page tables that move, 5000 rounds", |bench| {
        run_for(bench, TWO, &[], "tables 5000").map(|_| String::new())
    }),
    ("the guest's benchmarks", |bench| {
        bench.run(TWO, &[], "bench")?;
        Ok(String::new())
    }),
    ("whole programs", |bench| {
        bench.run(TWO, &[], "workloads")?;
        Ok(String::new())
    }),
];

/// Two nodes with two vCPUs each.
const FOUR: Shape = Shape {
    name: "2 nodes of 2 vCPUs",
    options: &["--nodes", "2", "--cpus", "4", "--memory", "256M"],
    nodes: 2,
    cpus: 4,
};

/// The tests of the memory model as long as a test needs them; at least once.
pub(crate) fn litmus_until_told() -> String {
    until_told(&["litmus -d 100 -s 2"])
}

/// How long a program may run that watches over itself.
const LONG_BOUND: Duration = Duration::from_secs(3600);
/// All litmus tests but those that take more than two threads.
const TESTS: usize = 24;

/// All litmus tests, with this number of rounds of each: in `make test`, and with `--long`.
pub(super) fn litmus_rounds(
    bench: &Bench<'_>,
    rounds: [u32; 2],
    words: &str,
    options: &[&str],
) -> Result<String> {
    let rounds = rounds[usize::from(bench.plan.long)];
    litmus(bench, &format!("{words} -r {rounds}"), options)
}

/// Runs a script that may take longer than others.
fn run_for(bench: &Bench<'_>, shape: Shape, options: &[&str], script: &str) -> Result<Ended> {
    let mut guest = bench.start(shape, options, script)?;
    let said = guest.wait_for("weft-guest: exit", LONG_BOUND);
    ensure!(said.is_some(), "it did not end: {:?}", guest.lines().last());
    bench.finish(guest)
}

/// All litmus tests on two nodes; `words` are the guest's program's.
pub(super) fn litmus(bench: &Bench<'_>, words: &str, options: &[&str]) -> Result<String> {
    let ended = run_for(bench, TWO, options, &format!("litmus {words}"))?;
    judge_litmus(&ended)
}

/// The lines of results.
fn results(ended: &Ended) -> impl Iterator<Item = &str> {
    let lines = ended.lines.iter().map(|line| line.text.as_str());
    lines.filter(|text| text.starts_with("litmus ") && text.contains(" rounds "))
}

/// All tests were run, on two processors or more, and none saw what the model forbids.
pub(crate) fn judge_litmus(ended: &Ended) -> Result<String> {
    judge(ended, TESTS)
}

/// The same for at least this many tests.
fn judge(ended: &Ended, tests: usize) -> Result<String> {
    let results: Vec<&str> = results(ended).collect();
    ensure!(
        results.len() >= tests,
        "{} tests, not {tests}: {results:?}",
        results.len()
    );
    for result in &results {
        ensure!(result.ends_with(" forbidden 0"), "{result}");
    }
    ensure!(ended.all_succeeded(), "{}", ended.tail(40));
    Ok(format!("{} tests", results.len()))
}

/// Tests with the wrong expectations: were none of their rounds a race, or nobody's
/// eyes on the outcomes, they would pass.
fn planted(bench: &Bench<'_>) -> Result<String> {
    const SCRIPT: &str = "for test in planted-MP planted-inc; do \
        litmus -d 100 -r 70000 $test; echo $test: $?.; done";
    let ended = bench.run(TWO, &[], SCRIPT)?;
    let found: Vec<&str> = results(&ended).collect();
    ensure!(found.len() == 2, "{found:?}");
    for result in &found {
        ensure!(!result.ends_with(" forbidden 0"), "{result}");
    }
    for test in ["planted-MP: 1.", "planted-inc: 1."] {
        ensure!(ended.line(test).is_some(), "no `{test}`: {found:?}");
    }
    Ok(found.join("; "))
}

/// What one vCPU wrote the other reads, sorts, packs and unpacks.
pub(super) const SUMS: &str = "textfile 4 >/tmp/text; for cpu in 1 2; do \
    taskset $cpu cp /tmp/text /tmp/copy-$cpu; done; \
    for cpu in 1 2; do other=$((3 - cpu)); \
    echo sum: $(taskset $cpu sha256sum </tmp/copy-$other); \
    echo sum: $(taskset $cpu gzip -c </tmp/copy-$other | taskset $other sha256sum); \
    echo sum: $(taskset $cpu gzip -c </tmp/copy-$other | taskset $other gunzip -c | sha256sum); \
    echo sum: $(taskset $cpu sort /tmp/copy-$other | taskset $other md5sum); \
    done";

/// What [`SUMS`] prints on one node, which all tests are compared with.
pub(super) fn sums_alone(bench: &Bench<'_>) -> Result<&'static [String]> {
    static ALONE: OnceLock<Vec<String>> = OnceLock::new();
    if let Some(alone) = ALONE.get() {
        return Ok(alone);
    }
    let one = ["--growable", "no", "--cpus", "2", "--memory", "256M"];
    let alone = Guest::start(&mut bench.machine(&one, SUMS, "")?)?;
    let alone = sums(&bench.finish(alone)?);
    ensure!(alone.len() == 8, "sums on one node: {alone:?}");
    Ok(ALONE.get_or_init(|| alone))
}

fn same_sums(bench: &Bench<'_>) -> Result<String> {
    let alone = sums_alone(bench)?;
    for options in [&[][..], &["--transport", "tcp-sealed"]] {
        let spread = bench.run(TWO, options, SUMS)?;
        ensure!(
            sums(&spread) == alone,
            "{options:?}: {:?}, on one node {alone:?}",
            sums(&spread)
        );
    }
    let first = alone.first().context("there are sums")?;
    ensure!(first.len() > 32, "no sum: {first}");
    Ok(format!("{} sums", alone.len()))
}

pub(super) fn sums(ended: &Ended) -> Vec<String> {
    let lines = ended.lines.iter();
    lines
        .filter_map(|line| line.text.strip_prefix("sum: "))
        .map(str::to_owned)
        .collect()
}
