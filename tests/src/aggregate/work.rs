//! Work in a guest whose vCPUs are on different nodes: the memory model, and
//! results that must be those of a machine on one node.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{Bench, Check, TWO};
use crate::guest::{Ended, Guest};

pub(super) const CHECKS: [(&str, Check); 3] = [
    ("x86-TSO litmus tests, 500 rounds", |bench| {
        litmus(bench, 500, &[])
    }),
    (
        "x86-TSO litmus tests, links slow by up to 0.2 ms",
        |bench| litmus(bench, 20, &["--link-delay", "200"]),
    ),
    ("the same sums as on one node", same_sums),
];

pub(super) const LONG: [(&str, Check); 4] = [
    ("x86-TSO litmus tests, links slow by up to 2 ms", |bench| {
        litmus(bench, 20, &["--link-delay", "2000"])
    }),
    ("x86-TSO litmus tests, 20000 rounds", |bench| {
        litmus(bench, 20_000, &[])
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

/// How long the rounds may take; the guest itself gives up nothing.
const LITMUS: Duration = Duration::from_secs(900);

pub(super) fn litmus(bench: &Bench<'_>, rounds: usize, options: &[&str]) -> Result<String> {
    let mut guest = bench.start(TWO, options, &format!("litmus {rounds}"))?;
    let said = guest.wait_for("weft-guest: exit", LITMUS);
    ensure!(said.is_some(), "it did not end: {:?}", guest.lines().last());
    judge_litmus(&bench.finish(guest)?)
}

/// Some tests were run, and none saw what the model forbids.
pub(super) fn judge_litmus(ended: &Ended) -> Result<String> {
    let results: Vec<&str> = ended
        .lines
        .iter()
        .map(|line| line.text.as_str())
        .filter(|text| text.starts_with("litmus ") && text.contains(" rounds "))
        .collect();
    ensure!(results.len() >= 20, "only {} tests", results.len());
    for result in &results {
        ensure!(result.ends_with(" forbidden 0"), "{result}");
    }
    Ok(format!("{} tests", results.len()))
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

fn same_sums(bench: &Bench<'_>) -> Result<String> {
    let one = ["--cpus", "2", "--memory", "256M"];
    let alone = Guest::start(&mut bench.machine(&one, SUMS, "")?)?;
    let alone = sums(&bench.finish(alone)?);
    ensure!(alone.len() == 8, "sums on one node: {alone:?}");
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
