//! What a user at the terminal asks for that several nodes cannot be.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{Bench, Check, ended_with};
use crate::guest::Guest;

/// The exit code when nothing was started.
const EXIT_NOT_STARTED: i32 = 125;
/// The exit code when the line cannot be read.
const EXIT_USAGE: i32 = 2;
/// Nothing is started, so nothing takes longer.
const BOUND: Duration = Duration::from_secs(10);

pub(super) const CHECKS: [(&str, Check); 1] = [("what is refused before the start", refused)];

/// Options, the exit code, and what must be said.
const REFUSED: [(&str, i32, &[&str]); 16] = [
    (
        "--cpus 2 --growable no --update jiffies",
        EXIT_NOT_STARTED,
        &["--update", "add --nodes, --on or --growable yes"],
    ),
    (
        "--nodes 2 --update jiffies,no_such_thing",
        EXIT_NOT_STARTED,
        &["--update: no_such_thing", "no such symbol"],
    ),
    (
        "--nodes 2 --update runqueues",
        EXIT_NOT_STARTED,
        &["--update: runqueues", "per-CPU variable"],
    ),
    (
        "--nodes 2 --update 0x2000-0x1000",
        EXIT_NOT_STARTED,
        &["0x2000-0x1000", "0xSTART-0xEND"],
    ),
    (
        "--nodes 2 --update jiffies --system-map /dev/null",
        EXIT_NOT_STARTED,
        &["--update", "/dev/null"],
    ),
    (
        "--nodes 2 --system-map /dev/null",
        EXIT_USAGE,
        &["--update"],
    ),
    (
        "--nodes 1",
        EXIT_NOT_STARTED,
        &["--nodes says 1", "2 to 16"],
    ),
    (
        "--nodes 17",
        EXIT_NOT_STARTED,
        &["--nodes says 17", "2 to 16"],
    ),
    (
        "--nodes 3 --cpus 1,1",
        EXIT_NOT_STARTED,
        &["--cpus 1,1 names 2 nodes", "says 3"],
    ),
    ("--cpus 0,1", EXIT_NOT_STARTED, &["--cpus 0,1", "node 0"]),
    (
        "--nodes 2 --memory 64M",
        EXIT_NOT_STARTED,
        &["--memory 64M", "node 1"],
    ),
    (
        "--nodes 2 --deterministic",
        EXIT_NOT_STARTED,
        &["--deterministic", "several nodes"],
    ),
    (
        "--on a --cpus 2 --backend kvm",
        EXIT_NOT_STARTED,
        &["--backend soft"],
    ),
    (
        "--nodes 2 --lease 0.1",
        EXIT_NOT_STARTED,
        &["--lease 0.1 s", "0.5"],
    ),
    ("--nodes 2 --transport ring", EXIT_USAGE, &["tcp-sealed"]),
    (
        "--nodes 2 --link-delay 200000",
        EXIT_USAGE,
        &["--link-delay", "100000"],
    ),
];

fn refused(bench: &Bench<'_>) -> Result<String> {
    for (options, code, says) in REFUSED {
        let mut command = bench.weft(&["vm", "run"]);
        command
            .arg("--kernel")
            .arg(bench.plan.images.file("vmlinux")?);
        command.args(options.split(' '));
        let guest = Guest::start(&mut command)?;
        let pid = guest.pid();
        let ended = guest.finish(BOUND)?;
        ended_with(&ended, code, says).context(options)?;
        bench.nothing_left(pid).context(options)?;
    }
    Ok(format!("{} lines", REFUSED.len()))
}
