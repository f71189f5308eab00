//! Boots of every shape, over every transport.

use std::time::Duration;

use anyhow::{Result, bail, ensure};

use super::{Bench, Plan, Run, Shape, TWO};
use crate::boot::{AGGREGATE, SMALL};
use crate::guest::{Ended, Guest};
use crate::machines::{WARNINGS, check_boot};

/// What the kernel knows of nodes.
const TOPOLOGY: &str = "cd /sys/devices/system/node; echo online: $(cat online); \
    echo has_cpu: $(cat has_cpu); echo has_memory: $(cat has_memory); \
    for n in node*; do echo $n: $(cat $n/cpulist), $(cat $n/distance); done";

/// What the kernel says when it could not look at its clocks for a second.
const LATE: &str = "Long readout interval";

/// Boots of each shape on KVM, at most.
const KVM_BOOTS: usize = 5;
/// How long one may take on a busy host.
const KVM_BOUND: Duration = Duration::from_secs(600);

/// A shape with what the guest says of it.
struct Boot {
    shape: Shape,
    says: &'static [&'static str],
}

const TWO_SAY: &[&str] = &[
    "online: 0-1",
    "has_cpu: 0-1",
    "has_memory: 0-1",
    "node0: 0, 10 40",
    "node1: 1, 40 10",
];

const BOOTS: [Boot; 5] = [
    Boot {
        shape: TWO,
        says: TWO_SAY,
    },
    Boot {
        shape: Shape {
            name: "3 nodes of 1 vCPU",
            options: &["--nodes", "3", "--cpus", "3", "--memory", "384M"],
            nodes: 3,
            cpus: 3,
        },
        says: &["online: 0-2", "has_cpu: 0-2", "node2: 2, 40 40 10"],
    },
    Boot {
        shape: Shape {
            name: "4 nodes of 1 vCPU",
            options: &["--nodes", "4", "--cpus", "4", "--memory", "256M"],
            nodes: 4,
            cpus: 4,
        },
        says: &["online: 0-3", "has_cpu: 0-3", "node3: 3, 40 40 40 10"],
    },
    Boot {
        shape: Shape {
            name: "2 nodes of 2 vCPUs",
            options: &["--nodes", "2", "--cpus", "4", "--memory", "256M"],
            nodes: 2,
            cpus: 4,
        },
        says: &["online: 0-1", "node0: 0-1, 10 40", "node1: 2-3, 40 10"],
    },
    Boot {
        shape: Shape {
            name: "2 nodes of 1 vCPU, 1 of memory",
            options: &["--cpus", "1,1,0", "--memory", "128M,128M,64M"],
            nodes: 3,
            cpus: 2,
        },
        says: &[
            "online: 0-2",
            "has_cpu: 0-1",
            "has_memory: 0-2",
            "node2: , 40 40 10",
        ],
    },
];

pub(super) fn run(plan: &Plan, run: &Run<'_>) {
    for _ in 0..plan.boots.max(1) {
        for boot in &BOOTS {
            run(boot.shape.name, &|bench| boots(bench, boot, &[]));
        }
        // Loopback TCP is what the others use.
        for transport in ["unix", "tcp-sealed"] {
            run(&format!("{}, {transport}", TWO.name), &|bench| {
                boots(bench, &BOOTS[0], &["--transport", transport])
            });
        }
        run(
            &format!("{}, the aggregate kernel", TWO.name),
            &aggregate_kernel,
        );
        run(
            &format!("{}, links slow by up to 0.2 ms", TWO.name),
            &|bench| boots(bench, &BOOTS[0], &["--link-delay", "200"]),
        );
    }
}

/// A boot that takes a minute.
pub(super) fn run_slow(run: &Run<'_>) {
    run(
        &format!("{}, links slow by up to 2 ms", TWO.name),
        &|bench| boots(bench, &BOOTS[0], &["--link-delay", "2000"]),
    );
}

/// The kernel for several nodes, vCPUs that share a lot from the start, and memory
/// that they must agree on.
fn aggregate_kernel(bench: &Bench<'_>) -> Result<String> {
    let rounds = if bench.plan.long { 5000 } else { 2500 };
    let script = format!("{WARNINGS}; {TOPOLOGY}; uname -r; litmus -d 100 -r {rounds}");
    let mut options = TWO.options.to_vec();
    options.extend(["--late-cpus", "no"]);
    let mut machine = bench.machine_of(AGGREGATE, &options, &script, "")?;
    let ended = bench.finish(Guest::start(&mut machine)?)?;
    let mut reasons = check_boot(&ended, TWO.cpus);
    let missing = TWO_SAY.iter().filter(|text| !says(&ended, text));
    reasons.extend(missing.map(|text| format!("the guest does not say `{text}`")));
    if !ended
        .lines
        .iter()
        .any(|line| line.text.ends_with("-aggregate"))
    {
        reasons.push("it is another kernel".to_owned());
    }
    ensure!(
        reasons.is_empty(),
        "{}\n{}",
        reasons.join("\n"),
        ended.tail(20)
    );
    Ok(String::new())
}

/// Boots of every shape on KVM: half a minute each, or more, where the guest's kernel is
/// emulated.
pub(super) fn run_on_kvm(plan: &Plan, run: &Run<'_>) {
    for _ in 0..plan.boots.clamp(1, KVM_BOOTS) {
        for boot in &BOOTS {
            run(&format!("{}, kvm", boot.shape.name), &|bench| {
                let options = boot.shape.options;
                let mut machine = bench.machine_on("kvm", SMALL, options, &script(), "")?;
                let mut guest = Guest::start(&mut machine)?;
                guest.wait_for("weft-guest: exit", KVM_BOUND);
                judge(&bench.finish(guest)?, boot, &[])
            });
        }
    }
}

fn boots(bench: &Bench<'_>, boot: &Boot, options: &[&str]) -> Result<String> {
    judge(&bench.run(boot.shape, options, &script())?, boot, options)
}

fn script() -> String {
    format!("{WARNINGS}; {TOPOLOGY}")
}

fn judge(ended: &Ended, boot: &Boot, options: &[&str]) -> Result<String> {
    let mut reasons = check_boot(ended, boot.shape.cpus);
    // Only time changes where links are slow on purpose; the kernel notices.
    reasons.retain(|reason| options.is_empty() || !reason.contains(LATE));
    let missing = boot.says.iter().filter(|text| !says(ended, text));
    reasons.extend(missing.map(|text| format!("the guest does not say `{text}`")));
    let nodes = ended.lines.iter();
    let nodes = nodes.filter(|line| line.text.starts_with("node")).count();
    if nodes != boot.shape.nodes {
        reasons.push(format!("the guest sees {nodes} nodes"));
    }
    if !reasons.is_empty() {
        bail!("{}\n{}", reasons.join("\n"), ended.tail(20));
    }
    ensure!(
        ended.stderr.contains("powered off by the guest"),
        "{}",
        ended.stderr
    );
    let at = ended.line(crate::boot::USER_SPACE);
    let at = at.map_or(0.0, |line| line.at.as_secs_f64());
    Ok(format!("user space after {at:.2} s"))
}

/// Whether one of the lines is this one.
fn says(ended: &Ended, text: &str) -> bool {
    ended.lines.iter().any(|line| line.text == text)
}
