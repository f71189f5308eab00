//! The pages that a vCPU used follow it to another node.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::moves::{begin, finish, move_vcpu};
use super::work::sums;
use super::{Bench, Check, TWO};

pub(super) const CHECKS: [(&str, Check); 1] =
    [("moves, the pages of vCPU 1 follow it", pages_follow)];

/// Pages of the text that vCPU 1 reads.
const TEXT_PAGES: u64 = 16 << 8;
/// vCPU 1, which begins on node 1, reads a text until it is told to stop.
const READS: &str = "mkdir /m; mount -t tmpfs -o size=60M none /m; taskset 2 sh -c '\
    textfile 16 >/m/a; echo sum: $(sha256sum /m/a); echo at work; \
    for i in 1 2 3 4 5 6 7 8 9 10; do sha256sum /m/a >/m/s; done; \
    echo read; read line; for i in 1 2 3; do sha256sum /m/a >/m/s; done; \
    echo sum: $(cat /m/s); echo done'";
/// The pages come in some tenths of a second.
const PATIENCE: Duration = Duration::from_secs(20);

fn counter(bench: &Bench<'_>, name: &str) -> Result<u64> {
    let view: Value = serde_json::from_str(&bench.ask(&["vm", "counters", "m", "--json"])?)?;
    let counters = view["counters"].as_object().context("no counters")?;
    Ok(counters.get(name).and_then(Value::as_u64).unwrap_or(0))
}

/// Waits until a counter has not grown between two looks.
fn settled(bench: &Bench<'_>, name: &str) -> Result<u64> {
    let until = Instant::now() + PATIENCE;
    let mut before = counter(bench, name)?;
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let now = counter(bench, name)?;
        if now > 0 && now == before {
            return Ok(now);
        }
        ensure!(Instant::now() < until, "{name} is {now} and grows");
        before = now;
    }
}

fn pages_follow(bench: &Bench<'_>) -> Result<String> {
    let mut guest = begin(bench, "soft", TWO, (READS, "read"))?;
    move_vcpu(bench, 1, 0)?;
    let followed = settled(bench, "slice0.memory.prefetched")?;
    ensure!(followed >= TEXT_PAGES / 2, "{followed} pages followed");
    // Without that it fetches the whole text.
    guest.write("\n")?;
    guest.wait_for("done", PATIENCE).context("no end")?;
    let fetched = counter(bench, "vcpu1.from1.bytes")? / 4096;
    ensure!(
        fetched <= TEXT_PAGES / 2,
        "{followed} pages followed, and {fetched} were fetched"
    );
    let ended = finish(bench, guest)?;
    let found = sums(&ended);
    ensure!(found.len() == 2 && found[0] == found[1], "{found:?}");
    Ok(format!("{followed} pages followed, {fetched} were fetched"))
}
