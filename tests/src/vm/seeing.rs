//! `weft vm top` and `weft vm trace`, with Linux over two nodes of this host.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::{BOUND, Bench, Runner, ended_with, wait_until};
use crate::boot::{Images, SMALL, USER_SPACE};
use crate::guest::Guest;

const NAME: &str = "what runs is seen";
/// Two busy programs, one on each vCPU, which share nothing but the kernel.
const COMMAND_LINE: &str = "console=ttyS0 quiet weft.run=\"taskset 1 sh -c %22while :; do :; \
                            done%22 & taskset 2 sh -c %22while :; do :; done%22 & sleep 100\"";

/// The test, on the software vCPU.
pub(super) fn run(runner: &Runner<'_>) {
    let name = format!("vm, soft, two nodes: {NAME}");
    let missing = runner.images.missing(&SMALL);
    runner.run("soft", &name, missing, |bench| seen(bench, runner.images));
}

fn seen(bench: &Bench, images: &Images) -> Result<String> {
    let [kernel, initrd] = SMALL;
    let file = bench.directory.join("trace.json");
    let mut command = bench.weft(&["vm", "run", "--backend", "soft", "--nodes", "2"]);
    command
        .args(["--cpus", "2", "--memory", "256M", "--late-cpus", "no"])
        .args(["--name", "seen", "--cmdline", COMMAND_LINE])
        .arg("--kernel")
        .arg(images.file(kernel)?)
        .arg("--initrd")
        .arg(images.file(initrd)?)
        .arg("--trace")
        .arg(&file);
    let mut guest = Guest::start(&mut command)?;
    ensure!(
        guest.wait_for(USER_SPACE, BOUND).is_some(),
        "the guest does not come up"
    );
    sampled(bench)?;
    traced(&ask_json(
        bench,
        &["vm", "trace", "--for", "1", "--json", "seen"],
    )?)?;

    // It ends with the machine, by itself.
    let mut top = bench.weft(&["vm", "top", "seen"]);
    let top = Guest::start(top.stdin(Stdio::null()))?;
    std::thread::sleep(Duration::from_millis(1500));
    bench.ask(&["vm", "stop", "--timeout", "0", "seen"])?;
    ended_with(&guest.finish(BOUND)?, 120, &["stopped", "Table 2"])?;
    let ended = top.finish(BOUND)?;
    ended_with(&ended, 0, &["vm seen has ended"])?;
    ensure!(ended.console().contains("faults/s"), "{}", ended.console());

    let path = file.to_string_lossy();
    let whole = ask_json(bench, &["vm", "trace", "--json", "--file", &path])?;
    traced(&whole)?;
    let faults = whole["faults"].as_u64().unwrap_or_default();
    Ok(format!("{faults} faults"))
}

fn ask_json(bench: &Bench, words: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&bench.ask(words)?)?)
}

/// Each vCPU is on its node, works, and waits for pages; nodes talk.
fn sampled(bench: &Bench) -> Result<()> {
    // The programs start a little after the guest says that it is there.
    wait_until("faults of both vCPUs", || {
        let sample = ask_json(bench, &["vm", "top", "--once", "--json"])?;
        let (vcpus, nodes) = (&sample["vcpus"], &sample["nodes"]);
        ensure!(vcpus[1]["node"] == 1 && nodes[1]["node"] == 1, "{sample}");
        ensure!(vcpus[1]["epoch"] == 0, "{sample}");
        let positive = |value: &Value| value.as_f64().is_some_and(|rate| rate > 0.0);
        let both = |list: &Value, field: &str| (0..2).all(|index| positive(&list[index][field]));
        Ok(both(vcpus, "interrupts")
            && both(vcpus, "faults")
            && both(vcpus, "waited")
            && both(nodes, "messages_sent")
            && both(nodes, "bytes_received")
            && both(nodes, "pages_sent"))
    })
}

/// Both vCPUs faulted, and the page with the kernel's clock is among the hottest.
fn traced(tables: &Value) -> Result<()> {
    let vcpus = tables["by_vcpu"].as_array().map_or(0, |rows| {
        let of_vcpu = |row: &&Value| row["vcpu"].is_u64();
        rows.iter().filter(of_vcpu).count()
    });
    ensure!(vcpus == 2, "faults of {vcpus} vCPUs: {tables}");
    let names = tables["by_page"].to_string();
    ensure!(names.contains("jiffies"), "no page has jiffies: {names}");
    ensure!(names.contains("of CPU 1"), "no page is CPU 1's: {names}");
    Ok(())
}
