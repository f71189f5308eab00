//! One Linux over two nodes of this host, against the same Linux on one.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::program::Place;
use crate::raw::{self, Kind};
use crate::results::{Goal, Table, digits, median};
use weft_tests::boot::{Boot, Images, Monitor, Run};

/// A host processor for what is to share one.
const ONE_CORE: [&str; 3] = ["taskset", "-c", "0"];

/// Samples, keyed by name.
pub(super) type Samples = BTreeMap<String, Vec<f64>>;

/// Where two vCPUs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Where {
    /// On two nodes.
    TwoNodes,
    /// On one node, on whatever processors the host gives.
    OneNode,
    /// On one node, on one processor: what is free on a fragmented host.
    OneCore,
}

impl Where {
    const ALL: [Where; 3] = [Where::TwoNodes, Where::OneNode, Where::OneCore];

    fn name(self) -> &'static str {
        match self {
            Where::TwoNodes => "two nodes",
            Where::OneNode => "one node",
            Where::OneCore => "one node, one core",
        }
    }

    pub fn boot(self, small: &Boot) -> Boot {
        let mut boot = small.clone();
        boot.cpus = 2;
        match self {
            Where::TwoNodes => boot.options.extend(["--nodes".into(), "2".into()]),
            Where::OneNode => {}
            Where::OneCore => boot.prefix = ONE_CORE.map(Into::into).to_vec(),
        }
        boot
    }
}

/// A run, with what its machine counted.
pub(super) struct Counted {
    pub run: Run,
    counters: BTreeMap<String, u64>,
}

impl Counted {
    pub fn of(boot: &Boot, monitor: Monitor, place: &Place) -> Result<Counted> {
        let file = place.work.join("aggregate.json");
        let mut boot = boot.clone();
        boot.options
            .extend(["--stats".into(), format!("json={}", file.display())]);
        let run = boot.run(monitor)?;
        let text = std::fs::read(&file).context("no statistics")?;
        let report: Value = serde_json::from_slice(&text)?;
        let counters = report["counters"].as_object().context("no counters")?;
        let counters = counters
            .iter()
            .filter_map(|(name, value)| Some((name.clone(), value.as_u64()?)))
            .collect();
        Ok(Counted { run, counters })
    }

    /// A counter; one that there is not has counted nothing.
    pub fn value(&self, name: &str) -> f64 {
        self.counters.get(name).map_or(0.0, |value| *value as f64)
    }

    /// The sum of a counter over all slices.
    fn sum(&self, name: &str) -> f64 {
        let of_a_slice = |counter: &str| {
            counter
                .split_once('.')
                .is_some_and(|(slice, rest)| slice.starts_with("slice") && rest == name)
        };
        let counters = self.counters.iter();
        counters
            .filter(|(counter, _)| of_a_slice(counter))
            .fold(0.0, |sum, (_, value)| sum + *value as f64)
    }

    /// Faults that needed another node, of all slices.
    pub fn faults(&self) -> f64 {
        ["read", "write", "upgrade"].iter().fold(0.0, |sum, kind| {
            sum + self.sum(&format!("memory.{kind}-faults"))
        })
    }

    /// From the start of the monitor to its end, in seconds.
    pub fn seconds(&self) -> f64 {
        self.run.ended.took.as_secs_f64()
    }
}

/// What boots on one node, the small kernel and the aggregate one.
const ONE_NODE: [&str; 2] = ["one node", "one node, aggregate kernel"];
/// The same on two.
const TWO_NODES: [&str; 2] = ["two nodes", "two nodes, aggregate kernel"];

/// Whether this one boots the aggregate kernel.
fn is_aggregate(name: &str) -> bool {
    name == ONE_NODE[1] || name == TWO_NODES[1]
}

/// What is tried to have a boot share less: name, options, words.
const MEASURES: [(&str, &[&str], &str); 7] = [
    (TWO_NODES[0], &["--nodes", "2"], ""),
    (TWO_NODES[1], &["--nodes", "2"], ""),
    (
        "two nodes, vCPU 1 up from the start",
        &["--nodes", "2", "--late-cpus", "no"],
        "",
    ),
    (
        "the same, one NUMA node",
        &["--nodes", "2", "--late-cpus", "no"],
        "numa=off",
    ),
    (
        "the same, ticks of the two apart",
        &["--nodes", "2", "--late-cpus", "no"],
        "skew_tick=1",
    ),
    (ONE_NODE[0], &[], ""),
    (ONE_NODE[1], &[], ""),
];

/// The table `vm-nodes-boot`: boot and power-off of two vCPUs.
pub fn boots(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let aggregate = images.aggregate(&place.weft)?;
    let (mut times, mut faults, mut bytes) = (Samples::new(), Samples::new(), Samples::new());
    for _ in 0..repeat {
        for (name, options, words) in MEASURES {
            let kernel = match is_aggregate(name) {
                true => &aggregate,
                false => &small,
            };
            let mut boot = kernel.running("true");
            boot.cpus = 2;
            boot.options = options.iter().map(ToString::to_string).collect();
            boot.words = words.to_owned();
            let counted = Counted::of(&boot, Monitor::Soft, place)?;
            for (samples, value) in [
                (&mut times, counted.seconds()),
                (&mut faults, counted.faults()),
                (&mut bytes, counted.sum("sent-bytes")),
            ] {
                samples.entry(name.to_owned()).or_default().push(value);
            }
        }
    }
    let mut table = Table::new(
        "vm-nodes-boot",
        "Two vCPUs, each on a node of its own on this host (TCP), from the start of the monitor to its end with nothing run between, in alternation; the small kernel on the software vCPU, or the same with `guest/patches` (the aggregate kernel), each against itself on one node. Faults are those that needed the other node, on both. GiantVM counted 973,542 for a boot and shutdown, 63,927 after its changes (analysis of GiantVM, table 2).",
        &[
            "what",
            "time",
            "against one node",
            "goal",
            "met",
            "faults",
            "goal",
            "met",
            "MB sent",
        ],
    );
    for (name, ..) in MEASURES {
        let of_name =
            |samples: &Samples, name| median(samples.get(name).map_or(&[], Vec::as_slice));
        let of = |samples| of_name(samples, name);
        let time = of(&times);
        let baseline = of_name(&times, ONE_NODE[usize::from(is_aggregate(name))]);
        let ratio = time.zip(baseline).map(|(time, baseline)| time / baseline);
        let (time_goal, fault_goal) = match TWO_NODES.contains(&name) {
            true => (Goal::AtMost(1.3), Goal::AtMost(10_000.0)),
            false => (Goal::None, Goal::None),
        };
        let [goal, met] = time_goal.cells(ratio);
        let [faults_goal, faults_met] = fault_goal.cells(of(&faults));
        table.rows.push(vec![
            name.to_owned(),
            format!("{} s", digits(time)),
            digits(ratio),
            goal,
            met,
            of(&faults).map_or("—".into(), |faults| format!("{faults:.0}")),
            faults_goal,
            faults_met,
            digits(of(&bytes).map(|bytes| bytes / 1e6)),
        ]);
    }
    table.samples = json!({"seconds": times, "faults": faults, "bytes": bytes});
    Ok(table)
}

/// A program of `npb`, how it uses two vCPUs, its size, its goal against one core.
type Program = (&'static str, &'static str, &'static str, Goal);

const PROGRAMS: [Program; 10] = [
    ("ep", "-p 2", "S", Goal::AtLeast(1.9)),
    ("is", "-p 2", SIZE, Goal::None),
    ("cg", "-p 2", SIZE, Goal::None),
    ("mg", "-p 2", SIZE, Goal::None),
    ("ft", "-p 2", SIZE, Goal::None),
    ("ep", "-t 2", SIZE, Goal::None),
    ("is", "-t 2", "Q", Goal::None),
    ("cg", "-t 2", SIZE, Goal::None),
    ("mg", "-t 2", SIZE, Goal::None),
    ("ft", "-t 2", SIZE, Goal::None),
];
/// The size that they run in: about a second. What has a goal runs for longer, so that a
/// moment's other work on the host counts for less; sorting on shared memory, where both
/// threads write to all pages all the time, takes a second in the smallest.
const SIZE: &str = "T";

/// Seconds of `npb KERNEL SIZE MODE N: SECONDS s, verified, …`, in order.
pub fn npb_seconds(run: &Run) -> Result<Vec<f64>> {
    let lines = run.ended.lines.iter().map(|line| line.text.trim());
    lines
        .filter(|line| line.starts_with("npb "))
        .map(|line| {
            ensure!(line.contains("verified"), "{line}");
            let seconds = line
                .split_once(": ")
                .and_then(|(_, rest)| rest.split_once(" s"));
            Ok(seconds
                .context("a line of another form")?
                .0
                .trim()
                .parse()?)
        })
        .collect()
}

/// Two independent processes for KVM, which is far from native where it has no
/// hardware to use: long enough that its noise does not matter.
const KVM_PROGRAMS: [Program; 3] = [
    ("ep", "-p 2", "S", Goal::AtLeast(1.9)),
    ("cg", "-p 2", SIZE, Goal::None),
    ("ft", "-p 2", SIZE, Goal::None),
];

/// The table `vm-nodes-cpu`: FragVisor's figure 8.
pub fn cpu(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let samples = computed(place, images, repeat, Monitor::Soft, &PROGRAMS)?;
    Ok(computing_table(
        "vm-nodes-cpu",
        "Programs after the NAS benchmarks in a guest of two vCPUs on the software vCPU, sizes S, T and Q: both vCPUs on two nodes of this host (TCP), on one node, and on one node that has one processor, in alternation. `-p 2`: two processes that share nothing (FragVisor's figure 8); `-t 2`: one program on shared memory.",
        &PROGRAMS,
        &samples,
    ))
}

/// The table `vm-nodes-kvm`: the same on KVM, for programs that share nothing.
pub fn cpu_on_kvm(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let samples = computed(place, images, repeat, Monitor::Kvm, &KVM_PROGRAMS)?;
    Ok(computing_table(
        "vm-nodes-kvm",
        "Two processes of a program after the NAS benchmarks in a guest of two vCPUs on KVM: on two nodes of this host (TCP), on one node, and on one node that has one processor, in alternation.",
        &KVM_PROGRAMS,
        &samples,
    ))
}

/// By place: the seconds of each program, run by run.
type Computed = BTreeMap<&'static str, Vec<Vec<f64>>>;

fn computed(
    place: &Place,
    images: &Images,
    repeat: usize,
    monitor: Monitor,
    programs: &[Program],
) -> Result<Computed> {
    let small = images.small(&place.weft)?;
    let script: Vec<String> = programs
        .iter()
        .map(|(kernel, mode, size, _)| format!("npb {mode} {kernel} {size}"))
        .collect();
    let script = script.join("; ");
    let mut samples = Computed::new();
    for _ in 0..repeat {
        for place_of in Where::ALL {
            let mut boot = place_of.boot(&small).running(&script);
            boot.memory_mib = 512;
            boot.bound = std::time::Duration::from_secs(600);
            let seconds = npb_seconds(&boot.run(monitor)?)?;
            ensure!(seconds.len() == programs.len(), "{} figures", seconds.len());
            samples.entry(place_of.name()).or_default().push(seconds);
        }
    }
    Ok(samples)
}

fn computing_table(name: &str, text: &str, programs: &[Program], samples: &Computed) -> Table {
    let mut table = Table::new(
        name,
        text,
        &[
            "program",
            "two nodes",
            "one node",
            "one node, one core",
            "against one core",
            "goal",
            "met",
            "against one node",
        ],
    );
    for (index, (kernel, mode, size, goal)) in programs.iter().enumerate() {
        let of = |name: &str| {
            let runs = samples.get(name)?;
            let values: Vec<f64> = runs.iter().map(|run| run[index]).collect();
            median(&values)
        };
        let [two, one, core] = Where::ALL.map(|place_of| of(place_of.name()));
        let ratio = |other: Option<f64>| other.zip(two).map(|(other, two)| other / two);
        let [goal, met] = goal.cells(ratio(core));
        table.rows.push(vec![
            format!("{kernel} {mode} {size}"),
            format!("{} s", digits(two)),
            format!("{} s", digits(one)),
            format!("{} s", digits(core)),
            digits(ratio(core)),
            goal,
            met,
            digits(ratio(one)),
        ]);
    }
    table.samples = json!(samples);
    table
}

/// What `sharing` is asked, and how the row is called.
const SHARING: [(&str, &str); 6] = [
    ("none", "pages of their own"),
    ("false", "one page, two lines"),
    ("true", "one word"),
    ("writes 0", "no shared writes"),
    ("writes 50", "half of the writes shared"),
    ("writes 100", "all writes shared"),
];
const SHARING_SECONDS: &str = "2";

/// The number before `unit` in the line of a run that begins with `sharing MODE`.
fn sharing_figure(run: &Run, mode: &str, unit: &str) -> Option<f64> {
    let start = format!("sharing {mode} ");
    let lines = run.ended.lines.iter().map(|line| line.text.trim());
    let line = lines.into_iter().find(|line| line.starts_with(&start))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words
        .iter()
        .position(|word| word.trim_end_matches(',') == unit)?;
    words.get(at.checked_sub(1)?)?.parse().ok()
}

/// The table `vm-nodes-sharing`: FragVisor's figures 4 and 5, and one page that
/// two nodes fight over.
pub fn sharing(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let modes: Vec<String> = SHARING
        .iter()
        .map(|(mode, _)| format!("sharing -t 2 -s {SHARING_SECONDS} -l {mode}"))
        .collect();
    let script = modes.join("; ");
    let bounce = "sharing bounce";
    let (mut costs, mut bounces) = (Samples::new(), Samples::new());
    let mut raw_us = Vec::new();
    for _ in 0..repeat {
        for place_of in [Where::TwoNodes, Where::OneNode] {
            let run = place_of.boot(&small).running(&script).run(Monitor::Soft)?;
            for (mode, _) in SHARING {
                let key = format!("{} {mode}", place_of.name());
                let cost = sharing_figure(&run, mode, "ns/op").context("no figure")?;
                costs.entry(key).or_default().push(cost);
            }
            let run = place_of.boot(&small).running(bounce).run(Monitor::Soft)?;
            let line = run.ended.line("sharing bounce").context("no bounce")?;
            let median_us = number_after(&line.text, "median").context("no median")?;
            let key = place_of.name().to_owned();
            bounces.entry(key).or_default().push(median_us);
        }
        raw_us.push(raw::measure(Kind::Tcp, &place.work)?.blocking_ns / 1000.0);
    }
    let mut table = Table::new(
        "vm-nodes-sharing",
        "Two threads, one on each vCPU, that increment words with locked instructions; and one word handed back and forth (a bounce is half of the round). Two nodes of this host (TCP) against one node, in alternation; the raw round trip is a request of 8 bytes answered with 4096 over one TCP connection between two processes, in the same run.",
        &["what", "two nodes", "one node", "ratio"],
    );
    let of = |samples: &Samples, key: &str| median(samples.get(key).map_or(&[][..], Vec::as_slice));
    for (mode, what) in SHARING {
        let two = of(&costs, &format!("{} {mode}", Where::TwoNodes.name()));
        let one = of(&costs, &format!("{} {mode}", Where::OneNode.name()));
        let ratio = two.zip(one).map(|(two, one)| two / one);
        table.rows.push(vec![
            what.to_owned(),
            format!("{} ns", digits(two)),
            format!("{} ns", digits(one)),
            digits(ratio),
        ]);
    }
    let half = |value: Option<f64>| value.map(|round| round / 2.0);
    let two = half(of(&bounces, Where::TwoNodes.name()));
    let one = half(of(&bounces, Where::OneNode.name()));
    let raw = median(&raw_us);
    table.rows.push(vec![
        "a bounce of one word".into(),
        format!("{} µs", digits(two)),
        format!("{} µs", digits(one)),
        digits(two.zip(one).map(|(two, one)| two / one)),
    ]);
    let ratio = two.zip(raw).map(|(two, raw)| two / raw);
    let [goal, met] = Goal::AtMost(3.0).cells(ratio);
    table.rows.push(vec![
        format!("a bounce against a raw round trip (goal {goal}: {met})"),
        format!("{} µs", digits(two)),
        format!("{} µs", digits(raw)),
        digits(ratio),
    ]);
    table.samples = json!({"ns": costs, "bounce_us": bounces, "raw_us": raw_us});
    Ok(table)
}

pub(super) fn number_after(text: &str, word: &str) -> Option<f64> {
    let (_, rest) = text.split_once(word)?;
    let number: String = rest
        .trim_start_matches([' ', ':', '='])
        .chars()
        .take_while(|c| c.is_ascii_digit() || *c == '.')
        .collect();
    number.parse().ok()
}
