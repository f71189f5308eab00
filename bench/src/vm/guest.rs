//! What a guest kernel and its command line do about traffic between nodes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::aggregate::{Counted, Samples, npb_seconds};
use crate::program::Place;
use crate::results::{Table, digits, median};
use weft_tests::boot::{Boot, Images, Monitor};

/// Seconds over which faults of computing vCPUs are counted.
const WINDOW: f64 = 10.0;
/// What computes on both vCPUs, longer than that: two processes that share nothing.
const COMPUTE: &str =
    "for mask in 1 2; do timeout 13 taskset $mask sh -c 'while :; do :; done' & done; wait";
/// How long before the machine's end the window closes, in seconds.
const TAIL: f64 = 1.5;
/// Programs on shared memory, timed.
const PROGRAMS: &str = "npb -t 2 ep T; npb -t 2 cg T; npb -p 2 is T";

/// A guest kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Small,
    Aggregate,
}

/// What is tried: name, kernel, options, words.
const MEASURES: [(&str, Kernel, &[&str], &str); 7] = [
    (
        "nothing",
        Kernel::Small,
        &["--nodes", "2", "--late-cpus", "no"],
        // Named, they are not added.
        "numa=off hashdist=1 tsc=noirqtime",
    ),
    (
        "a NUMA node for each node",
        Kernel::Small,
        &["--nodes", "2", "--late-cpus", "no"],
        "hashdist=1 tsc=noirqtime",
    ),
    (
        "clocks not compared, tables on node 0",
        Kernel::Small,
        &["--nodes", "2", "--late-cpus", "no"],
        "",
    ),
    (
        "the aggregate kernel",
        Kernel::Aggregate,
        &["--nodes", "2", "--late-cpus", "no"],
        "",
    ),
    (
        "small kernel, vCPU 1 late, its tick stops",
        Kernel::Small,
        &["--nodes", "2"],
        "",
    ),
    (
        "aggregate kernel, vCPU 1 late, its tick stops",
        Kernel::Aggregate,
        &["--nodes", "2"],
        "",
    ),
    ("small kernel, one node", Kernel::Small, &[], ""),
];

/// The table `vm-nodes-guest`: FragVisor's figure 10, and the analysis' section 3.
pub fn guest(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let mut samples = Samples::new();
    for _ in 0..repeat {
        for (name, kernel, options, words) in MEASURES {
            let mut boot = match kernel {
                Kernel::Small => images.small(&place.weft)?,
                Kernel::Aggregate => images.aggregate(&place.weft)?,
            };
            boot.cpus = 2;
            boot.memory_mib = 512;
            boot.bound = Duration::from_secs(300);
            boot.options = options.iter().map(ToString::to_string).collect();
            boot.words = words.to_owned();
            let nodes = if options.is_empty() { 1 } else { 2 };
            for (what, value) in figures(&boot, nodes, place)? {
                samples
                    .entry(format!("{name}: {what}"))
                    .or_default()
                    .push(value);
            }
        }
    }
    let mut table = Table::new(
        "vm-nodes-guest",
        "Two vCPUs on two nodes of this host (TCP) on the software vCPU, in alternation, with what is done about traffic between them. *Boot*: faults that needed the other node from start to power-off, with nothing run between. *Computing*: such faults in a second while both vCPUs compute without sharing anything, over 10 s. The programs (sizes T) are two threads on shared memory (`-t 2`) or two processes (`-p 2`), FragVisor's figure 10; the analysis of GiantVM saw 21 % fewer faults with hot variables on pages of their own.",
        &[
            "what is done",
            "boot",
            "faults of boot",
            "faults a second, computing",
            "ep -t 2",
            "cg -t 2",
            "is -p 2",
        ],
    );
    for (name, ..) in MEASURES {
        let of = |what: &str| {
            let key = format!("{name}: {what}");
            median(samples.get(&key).map_or(&[][..], Vec::as_slice))
        };
        let count = |value: Option<f64>| value.map_or("—".into(), |value| format!("{value:.0}"));
        let seconds = |what: &str| format!("{} s", digits(of(what)));
        table.rows.push(vec![
            name.to_owned(),
            seconds("boot"),
            count(of("faults of boot")),
            count(of("faults a second")),
            seconds("ep"),
            seconds("cg"),
            seconds("is"),
        ]);
    }
    table.samples = json!(samples);
    Ok(table)
}

/// All figures of one measure.
fn figures(boot: &Boot, nodes: usize, place: &Place) -> Result<Vec<(&'static str, f64)>> {
    let counted = Counted::of(&boot.running("true"), Monitor::Soft, place)?;
    let mut figures = vec![
        ("boot", counted.seconds()),
        ("faults of boot", counted.faults()),
    ];
    let run = boot.running(PROGRAMS).run(Monitor::Soft)?;
    let seconds = npb_seconds(&run)?;
    ensure!(seconds.len() == 3, "{} figures", seconds.len());
    figures.extend(["ep", "cg", "is"].into_iter().zip(seconds));
    if nodes > 1 {
        figures.push(("faults a second", faults_a_second(boot, place)?));
    }
    Ok(figures)
}

/// Faults a second while both vCPUs compute.
fn faults_a_second(boot: &Boot, place: &Place) -> Result<f64> {
    let file = place.work.join("guest-trace.json");
    let mut boot = boot.running(COMPUTE);
    boot.options
        .extend(["--trace".into(), file.display().to_string()]);
    boot.run(Monitor::Soft)?;
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).context("no trace")?)?;
    let slices = trace["faults"]
        .as_array()
        .context("a trace without faults")?;
    let times = |slice: &Value| -> Vec<f64> {
        let faults = slice["faults"].as_array().into_iter().flatten();
        faults
            .filter_map(|fault| Some(fault["time_ns"].as_f64()? / 1e9))
            .collect()
    };
    // The slices count from moments of their own; all end together.
    let count = |times: Vec<f64>| {
        let end = times.iter().copied().fold(0.0, f64::max) - TAIL;
        let within = |time: &&f64| (end - WINDOW..end).contains(*time);
        times.iter().filter(within).count()
    };
    let faults: usize = slices.iter().map(times).map(count).sum();
    Ok(faults as f64 / WINDOW)
}
