//! Pages that are kept up to date: how they are listed, whether it helps, and whether
//! a read is ever stale.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::work::litmus_rounds;
use super::{Bench, Check, TWO};
use crate::boot::{AGGREGATE, SMALL};
use crate::guest::Guest;
use crate::machines::{WARNINGS, check_boot};

pub(super) const CHECKS: [(&str, Check); 5] = [
    (
        "hot words, named by nobody, by --update, by the kernel",
        named,
    ),
    ("litmus tests, all memory kept up to date", |bench| {
        litmus_rounds(bench, [500, 4000], "-d 100", &ALL)
    }),
    (
        "litmus tests, all memory kept up to date, slow links",
        |bench| {
            // vCPU 1 comes after the boot, which takes much longer otherwise.
            let all = if bench.plan.long { &ALL[..] } else { &ALL[..2] };
            let slow = [all, &["--link-delay", "200"]].concat();
            litmus_rounds(bench, [30, 100], "-d 400", &slow)
        },
    ),
    (
        "page tables that move, all memory kept up to date",
        |bench| {
            let rounds = if bench.plan.long { 60 } else { 12 };
            bench.run(TWO, &ALL, &format!("tables {rounds}"))?;
            Ok(String::new())
        },
    ),
    (
        "litmus tests with little memory, all kept up to date",
        |bench| {
            let little = [&ALL[..], &["--spare", "1280K"]].concat();
            litmus_rounds(bench, [400, 3000], "-d 100", &little)
        },
    ),
];

pub(super) const ON_KVM: &str = "hot words, named by the kernel, kvm";

/// All of the machine's memory, and vCPUs that share a lot from the start.
const ALL: [&str; 4] = ["--update", "0x0-0x10000000", "--late-cpus", "no"];

/// How long a guest may take, where its kernel is emulated on a busy host.
const PATIENCE: Duration = Duration::from_secs(600);

/// Both vCPUs compute while ticks go on.
const COMPUTE: &str = "for mask in 1 2; do \
    timeout 2 taskset $mask sh -c 'while :; do :; done' & done; wait";

/// Requests for pages that were taken by a write, and how many of those were of use.
struct Standing {
    requests: u64,
    used: u64,
}

fn standing(
    bench: &Bench<'_>,
    back_end: &str,
    image: [&str; 2],
    options: &[&str],
) -> Result<Standing> {
    let stats = bench.run_directory.with_file_name("stats.json");
    let option = format!("json={}", stats.display());
    let common = ["--stats", &option];
    let all = [TWO.options, &common, options].concat();
    let script = format!("{COMPUTE}; {WARNINGS}");
    let mut machine = bench.machine_on(back_end, image, &all, &script, "")?;
    let mut guest = Guest::start(&mut machine)?;
    guest.wait_for("weft-guest: exit", PATIENCE);
    let reasons = check_boot(&bench.finish(guest)?, TWO.cpus);
    ensure!(reasons.is_empty(), "{}", reasons.join("; "));
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&stats)?)?;
    let sum = |name: &str| {
        let of = |slice: usize| {
            figures["counters"][&format!("slice{slice}.memory.{name}")]
                .as_u64()
                .with_context(|| format!("no {name} of slice {slice} in {figures}"))
        };
        anyhow::Ok(of(0)? + of(1)?)
    };
    Ok(Standing {
        requests: sum("subscription-requests")?,
        used: sum("subscription-hits")?,
    })
}

impl Standing {
    /// Ticks go on for two seconds, at 100 Hz; a busy host leaves some out.
    fn check(&self, who: &str) -> Result<()> {
        let Self { requests, used } = self;
        ensure!(
            *requests > 20 && *used > requests / 8,
            "{who}: {requests} requests, {used} of use"
        );
        Ok(())
    }
}

fn named(bench: &Bench<'_>) -> Result<String> {
    const TICKS: [&str; 2] = ["--late-cpus", "no"];
    let none = standing(bench, "soft", SMALL, &TICKS)?;
    ensure!(
        (none.requests, none.used) == (0, 0),
        "nobody named a page, and {} were asked for",
        none.requests
    );
    let hint = [&TICKS[..], &["--update", "jiffies,jiffies_lock,tk_core"]].concat();
    let hint = standing(bench, "soft", SMALL, &hint)?;
    hint.check("--update")?;
    let kernel = standing(bench, "soft", AGGREGATE, &TICKS)?;
    kernel.check("the kernel's note")?;
    Ok(format!(
        "--update: {} of {} requests of use; by the kernel: {} of {}",
        hint.used, hint.requests, kernel.used, kernel.requests
    ))
}

/// Where hardware, or its emulation, runs the vCPUs. The second one comes after the boot,
/// which takes minutes otherwise where the guest's kernel is emulated.
pub(super) fn on_kvm(bench: &Bench<'_>) -> Result<String> {
    let kernel = standing(bench, "kvm", AGGREGATE, &[])?;
    ensure!(
        kernel.requests > 0 && kernel.used > 0,
        "nothing was asked for"
    );
    let Standing { requests, used } = kernel;
    Ok(format!("{used} of {requests} requests of use"))
}
