//! Memory that Linux frees, or gives back on request, leaves the hosts; everything else
//! keeps its content. On one node and on two.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};

use super::{BOUND, Bench, Runner, ended_with, wait_until};
use crate::boot::{Images, SMALL};
use crate::guest::Guest;

/// Fills memory, waits, frees it beside litmus tests, waits, and fills it again. What is
/// kept is read each time.
const WORK: &str = "console=ttyS0 quiet weft.run=\"mkdir /t; mount -t tmpfs -o size=90% t /t; \
     fill() { dd if=/dev/zero bs=1M count=120 2>/dev/null | tr %22\\\\000%22 a > /t/f; \
     md5sum < /t/f; }; kept() { echo kept $(md5sum < /t/keep); }; seq 60000 > /t/keep; \
     fill; echo is-full; read x; rm /t/f; litmus -s 6 MP SB | grep forbidden; kept; \
     echo is-free; read x; fill; kept; echo is-done\"";
const KEPT: &str = "kept 32e8d2bbb8984bd14d9ad0ccf2a33ea5";
/// 120 MiB of `a`.
const FILLED: &str = "f63022c57cb8266fdbfaabfb4bca967f";
const FILL: u64 = 120 << 20;

const TESTS: [(&str, &[&str]); 2] = [
    ("memory that is freed goes back, one node", &[]),
    (
        "memory that is freed goes back, two nodes",
        &["--nodes", "2"],
    ),
];

/// All tests, on the software vCPU.
pub(super) fn run(runner: &Runner<'_>) {
    for (name, options) in TESTS {
        let name = format!("vm, soft, {name}");
        let missing = runner.images.missing(&SMALL);
        runner.run("soft", &name, missing, |bench| {
            freed(bench, runner.images, options)
        });
    }
}

/// Bytes of guest memory on all hosts, and in the balloon.
fn memory(bench: &Bench) -> Result<(u64, u64)> {
    let text = bench.ask(&["vm", "counters", "--json", "m"])?;
    let all: serde_json::Value = serde_json::from_str(&text)?;
    let counters = all["counters"].as_object().context("no counters")?;
    let sum = |part: &str, name: &str| {
        let known = counters
            .iter()
            .filter(|(key, _)| key.starts_with(part) && key.ends_with(name));
        known.filter_map(|(_, count)| count.as_u64()).sum()
    };
    Ok((sum("slice", ".memory.host-bytes"), sum("balloon", ".bytes")))
}

fn freed(bench: &Bench, images: &Images, options: &[&str]) -> Result<String> {
    let [kernel, initrd] = SMALL;
    let mut command = bench.weft(&["vm", "run", "--backend", "soft", "--name", "m"]);
    command
        // Linux reports free memory of a zone that has 32 free blocks of 4 MiB.
        .args(["--cpus", "2", "--memory", "512M", "--cmdline", WORK])
        .args(options)
        .arg("--kernel")
        .arg(images.file(kernel)?)
        .arg("--initrd")
        .arg(images.file(initrd)?);
    let mut guest = Guest::start(command.stdin(Stdio::piped()))?;
    let come = |guest: &mut Guest, text| {
        // Two nodes share the pages of its pipes: to fill memory takes as long as wake-ups do.
        let line = guest.wait_for(text, 4 * BOUND);
        line.with_context(|| format!("the guest does not print {text}"))
    };
    come(&mut guest, "is-full")?;
    let (full, _) = memory(bench)?;
    guest.write("\n")?;
    wait_until("freed memory goes back", || {
        Ok(memory(bench)?.0 + FILL / 4 * 3 < full)
    })?;
    come(&mut guest, "is-free")?;
    let (free, _) = memory(bench)?;

    bench.ask(&["vm", "balloon", "m", "64M"])?;
    wait_until("the balloon grows", || Ok(memory(bench)?.1 == 64 << 20))?;
    let refused = bench.ask(&["vm", "balloon", "m", "1G"]);
    ensure!(refused.is_err(), "a balloon larger than the machine");
    bench.ask(&["vm", "balloon", "m", "0"])?;
    wait_until("the balloon shrinks", || Ok(memory(bench)?.1 == 0))?;

    guest.write("\n")?;
    come(&mut guest, "is-done")?;
    let ended = guest.finish(BOUND)?;
    ended_with(&ended, 0, &["powered off by the guest"])?;
    let console = ended.console();
    for (line, times) in [(KEPT, 2), (FILLED, 2), ("forbidden 0", 2)] {
        let found = console.matches(line).count();
        ensure!(found == times, "{line} {found} times:\n{console}");
    }
    Ok(format!("{} MiB full, {} MiB free", full >> 20, free >> 20))
}
