//! What it gains that vCPUs move by themselves to where their remote faults go.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::namespace;

use super::aggregate::{Counted, number_after};
use super::ping::{LAUNCHER, NAMES, Site};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// What the guest runs, with how the table calls it.
struct Work {
    what: &'static str,
    cpus: usize,
    /// Added to the initial RAM disk, if any.
    program: Option<&'static str>,
    script: &'static str,
    /// In the line with this start, the figure is behind this word.
    figure: (&'static str, &'static str),
    unit: &'static str,
    /// The most that `auto` may take, as a ratio to `never`.
    goal: f64,
}

/// Memory of which nearly half is on the other node, and its one vCPU keeps little of it.
const TEXT: &str = "mkdir /m; mount -t tmpfs -o size=200M none /m; textfile 160 >/m/a";

const WORKS: [Work; 10] = [
    elastic(
        "linear search",
        "linear_search-static",
        "/linear_search-static 150",
        0.1,
    ),
    elastic(
        "depth first search",
        "depth_first_search-static",
        "/depth_first_search-static 150",
        1.05,
    ),
    elastic(
        "Dijkstra's paths",
        "dijkstra-static",
        "/dijkstra-static 150",
        1.05,
    ),
    elastic(
        "block sort",
        "block_sort-static",
        "/block_sort-static 150",
        1.05,
    ),
    elastic(
        "heap sort",
        "heap_sort-static",
        "/heap_sort-static 120",
        1.05,
    ),
    elastic(
        "count sort",
        "count_sort-static",
        "/count_sort-static 150",
        1.05,
    ),
    Work {
        what: "reads 160 MB 16 times (`dd`)",
        cpus: 1,
        program: None,
        script: "bench -t search sh -c 'for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do \
            dd if=/m/a of=/dev/null bs=64k 2>/dev/null; done'",
        figure: ("search", "search"),
        unit: "s",
        goal: 0.1,
    },
    Work {
        what: "the sum of 160 MB, 4 times (`sha256sum`)",
        cpus: 1,
        program: None,
        script: "bench -t search sh -c 'for i in 1 2 3 4; do sha256sum </m/a >/dev/null; done'",
        figure: ("search", "search"),
        unit: "s",
        goal: 1.05,
    },
    Work {
        what: "two threads increment one word",
        cpus: 2,
        program: None,
        script: "sharing -t 2 -s 5 -l true",
        figure: ("sharing true", "threads 2"),
        unit: "ns",
        goal: 1.05,
    },
    Work {
        what: "two threads, pages of their own",
        cpus: 2,
        program: None,
        script: "sharing -t 2 -s 5 -l none",
        figure: ("sharing none", "threads 2"),
        unit: "ns",
        goal: 1.05,
    },
];

/// A program of ElasticOS's table 1; its set-up does not count.
const fn elastic(
    what: &'static str,
    program: &'static str,
    script: &'static str,
    goal: f64,
) -> Work {
    Work {
        what,
        cpus: 1,
        program: Some(program),
        script,
        figure: ("set-up", "measured"),
        unit: "s",
        goal,
    }
}

/// Parts of the texts above the tables.
const COMPARED: &str = "with `--follow never` and `auto`, and the same Linux on one node with all the memory, in alternation; medians.";
const ELASTIC: &str = "The first six are those of ElasticOS's table 1 with 150 MiB of data (heap sort: 120), without their set-up, which the guest's node 0 has not enough memory for.";
const COLUMNS: &str = "*Fetched* is what the remote faults of all vCPUs brought from start to power-off, with the pages that were read ahead; pages that were exchanged are not counted. *Moves* are those of `auto`.";
/// A machine that takes longer has failed.
const BOUND: Duration = Duration::from_secs(300);

const FOLLOW: [&str; 2] = ["never", "auto"];
/// How a machine runs: on one node, as the most that can be reached, or on two.
const MODES: [&str; 3] = ["one", FOLLOW[0], FOLLOW[1]];

/// Where the second node is.
#[derive(Clone, Copy)]
enum Second<'a> {
    /// On the host of the first.
    Here,
    /// On another host, at the other end of a link of [`RATE`].
    There(&'a Site<'a>),
}

/// What a link carries that is like that of ElasticOS's evaluation.
const RATE: &str = "1gbit";

/// The table `vm-follow`.
pub fn follow(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let works: Vec<&Work> = WORKS.iter().collect();
    let samples = measure(place, images, repeat, &works, Second::Here)?;
    let about = format!(
        "A Linux on two nodes of this host (TCP, software vCPUs, 128 MiB each and 16 MiB to spare), {COMPARED} {ELASTIC} They and the next two run on one vCPU, which begins on node 0. {COLUMNS} Both nodes use the same processors: on hosts of their own, two vCPUs that meet on a node would have one processor less."
    );
    Ok(table("vm-follow", &about, &works, &samples))
}

/// The table `vm-follow-gigabit`.
pub fn follow_gigabit(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let works: Vec<&Work> = WORKS.iter().filter(|work| work.cpus == 1).collect();
    let site = Site::new(place, "follow", &[])?;
    site.star.shape(RATE)?;
    let samples = measure(place, images, repeat, &works, Second::There(&site));
    let samples = samples.with_context(|| site.said())?;
    site.clear()?;
    let about = format!(
        "As `vm-follow`, with the second node on another host: network namespaces of this machine with a sealed link of 1 Gbit/s in both directions (`tc tbf`), the rate of ElasticOS's evaluation (section 5). One vCPU, {COMPARED} {ELASTIC} {COLUMNS}"
    );
    Ok(table("vm-follow-gigabit", &about, &works, &samples))
}

type Samples = BTreeMap<String, Vec<f64>>;

fn measure(
    place: &Place,
    images: &Images,
    repeat: usize,
    works: &[&Work],
    second: Second<'_>,
) -> Result<Samples> {
    let small = images.small(&place.weft)?;
    let mut samples = Samples::new();
    for _ in 0..repeat {
        for (number, work) in works.iter().enumerate() {
            for mode in MODES {
                let boot = machine(place, &small, work, (mode, second))?;
                let counted = Counted::of(&boot, Monitor::Soft, place)?;
                let (line, word) = work.figure;
                let line = counted.run.ended.line(line).context("no figure")?;
                let figure = number_after(&line.text, word).context("no number")?;
                let mut add = |name: &str, value: f64| {
                    let key = format!("{number} {mode} {name}");
                    samples.entry(key).or_default().push(value);
                };
                add("figure", figure);
                if mode == MODES[0] {
                    continue;
                }
                add("moves", of_vcpus(&counted, work.cpus, &MOVES));
                add("bytes", of_vcpus(&counted, work.cpus, &BYTES));
            }
        }
    }
    Ok(samples)
}

fn machine(
    place: &Place,
    small: &Boot,
    work: &Work,
    (mode, second): (&str, Second<'_>),
) -> Result<Boot> {
    let script = match (work.cpus, work.program) {
        (1, None) => format!("{TEXT}; {}", work.script),
        _ => work.script.to_owned(),
    };
    let mut boot = small.running(&script);
    boot.bound = BOUND;
    if let Some(program) = work.program {
        boot = boot.with_program(&place.programs.join(program), &place.work)?;
    }
    boot.cpus = work.cpus;
    if mode == MODES[0] {
        return Ok(boot);
    }
    let options = ["--spare", "16M", "--follow", mode];
    boot.options.extend(options.map(Into::into));
    let nodes = match second {
        Second::Here => ["--nodes", "2"],
        Second::There(site) => {
            boot.prefix = site.prefix(LAUNCHER)?;
            ["--on", NAMES[LAUNCHER + 1]]
        }
    };
    boot.options.extend(nodes.map(Into::into));
    Ok(boot)
}

const MOVES: [&str; 2] = ["follow.jumps", "follow.returns"];
const BYTES: [&str; 2] = ["from0.bytes", "from1.bytes"];

/// The sum of these counters over all vCPUs.
fn of_vcpus(counted: &Counted, cpus: usize, names: &[&str]) -> f64 {
    let vcpus = (0..cpus).flat_map(|vcpu| names.iter().map(move |name| (vcpu, name)));
    vcpus
        .map(|(vcpu, name)| counted.value(&format!("vcpu{vcpu}.{name}")))
        .sum()
}

fn table(name: &str, about: &str, works: &[&Work], samples: &Samples) -> Table {
    let mut table = Table::new(
        name,
        about,
        &[
            "what",
            "one node",
            "never",
            "auto",
            "one/never",
            "auto/never",
            "goal",
            "met",
            "fetched, never",
            "fetched, auto",
            "moves",
        ],
    );
    for (number, work) in works.iter().enumerate() {
        let of = |follow: &str, name: &str| {
            let key = format!("{number} {follow} {name}");
            median(samples.get(&key).map_or(&[][..], Vec::as_slice))
        };
        let [one, never, auto] = MODES.map(|mode| of(mode, "figure"));
        let to_never = |value: Option<f64>| value.zip(never).map(|(value, never)| value / never);
        let ratio = to_never(auto);
        let fetched = FOLLOW.map(|follow| {
            let bytes = of(follow, "bytes").map(|bytes| bytes / 1e6);
            format!("{} MB", digits(bytes))
        });
        let mut row = vec![
            work.what.to_owned(),
            format!("{} {}", digits(one), work.unit),
            format!("{} {}", digits(never), work.unit),
            format!("{} {}", digits(auto), work.unit),
            digits(to_never(one)),
            digits(ratio),
        ];
        row.extend(Goal::AtMost(work.goal).cells(ratio));
        row.extend(fetched);
        row.push(digits(of("auto", "moves")));
        table.rows.push(row);
    }
    table.samples = json!(samples);
    table
}
