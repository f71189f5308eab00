//! What a split over two nodes costs, against one node with room for all, and what access
//! history is worth, against page order: after S-memV's figures 7, 8, 13 and 14.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU8;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use weft_dsm::controller::{Choice, ColdLook, Histogram, Homes, Rights, thresholds};
use weft_dsm::history::{ChunkHistory, History};
use weft_dsm::{CHUNK_PAGES, NodeId, Page};
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::counters;
use weft_tests::guest::{Ended, Guest};

use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Pages that the guest writes to in a second, of 100 of its 430 MB: nearly all of its memory
/// has a content.
const LOADS: [(&str, u32); 2] = [("idle", 100), ("50,000 pages/s", 50_000)];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// To one node with room for all.
    One,
    /// To two, half of the memory to each, by access history.
    History,
    /// The same, by page numbers.
    Order,
}

pub(super) const WAYS: [Way; 3] = [Way::One, Way::History, Way::Order];

impl Way {
    /// Asks for it: a machine with this much memory, on node 0, which nodes 1 and 2 have joined.
    pub fn migrate(self, place: &Place, name: &str, memory_mib: u64) -> Result<Value> {
        let half = memory_mib / 2;
        let halves = format!("1={half}M,2={half}M");
        let words: &[&str] = match self {
            Way::One => &["1"],
            Way::History => &[&halves, "--choose", "history"],
            Way::Order => &[&halves, "--choose", "order"],
        };
        place.ask_machine(&[&["migrate", name], words].concat())
    }
}

/// How long the guest writes.
const SECONDS: u32 = 24;
/// By then the rest of its memory has not been used for two epochs of the history.
pub(super) const READY: &str = "dirty: second 9:";
/// From the end of the split to the first of the counted seconds, and to the last.
const AFTER: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
/// The guest boots, writes and checks within this.
const BOUND: Duration = Duration::from_secs(180);

/// Nodes of the simulated machine of 2 TB.
const LARGE_NODES: usize = 8;
const LARGE_PAGES: u64 = (2 << 40) / 4096 / LARGE_NODES as u64;
/// Of this many chunks, one was used since the last look.
const LARGE_USED: u64 = 10;
/// Pages that are exchanged at a time, and blocks that a look finds at most, as in
/// `weft_coherent_memory`.
const BLOCK_PAGES: u64 = 64;
const BLOCKS_MAX: usize = 1024;

type Samples = BTreeMap<String, Vec<f64>>;

fn key(load: usize, way: Way, figure: &str) -> String {
    format!("{load} {way:?} {figure}")
}

/// The table `vm-split`.
pub fn split(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut samples = Samples::new();
    for round in 0..repeat {
        for (number, (_, rate)) in LOADS.iter().enumerate() {
            for way in WAYS {
                let mut boot = small.running(&format!("dirty 430 {rate} {SECONDS} 100"));
                boot.memory_mib = 512;
                let name = format!("s{round}-{number}-{way:?}");
                for (figure, value) in measure(place, boot, &name, way)? {
                    let samples = samples.entry(key(number, way, figure)).or_default();
                    samples.push(value);
                }
            }
        }
        for (figure, seconds) in ["look", "split", "cold"].into_iter().zip(large()?) {
            samples.entry(figure.into()).or_default().push(seconds);
        }
    }
    Ok(table(&samples))
}

/// One node is left for others that have joined before; then all comes back to it.
fn measure(
    place: &Place,
    mut boot: Boot,
    name: &str,
    way: Way,
) -> Result<Vec<(&'static str, f64)>> {
    let options = ["--growable", "yes", "--name", name];
    boot.options.extend(options.map(Into::into));
    let mut command = boot.command(Monitor::Soft);
    let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
    let started = Instant::now();
    let works = guest.wait_for(READY, BOUND);
    ensure!(works.is_some(), "the guest does not come up");
    grow_by_two(place, name)?;
    let away = way.migrate(place, name, boot.memory_mib)?;
    let window = AFTER.map(|after| started.elapsed() + after);
    std::thread::sleep(AFTER[0]);
    let before = remote_faults(place, name)?;
    std::thread::sleep(AFTER[1] - AFTER[0]);
    let faults = remote_faults(place, name)? - before;
    let back = place.ask_machine(&["consolidate", name])?;
    let ended = guest.finish(BOUND)?;
    ensure!(
        ended.line("dirty: right").is_some(),
        "the pages were not right: {}",
        ended.tail(12)
    );
    let seconds = (AFTER[1] - AFTER[0]).as_secs_f64();
    let of = |job: &Value, figure: &str| {
        let value = job["migrated"][figure].as_f64();
        value.with_context(|| format!("no {figure} in {job}"))
    };
    Ok(vec![
        ("total", of(&away, "total_s")?),
        ("pause", of(&away, "pause_ns")? / 1e6),
        ("back", of(&back, "total_s")?),
        ("faults", faults / seconds),
        ("writes", writes(&ended, window) / seconds),
    ])
}

/// Two nodes join.
pub(super) fn grow_by_two(place: &Place, name: &str) -> Result<()> {
    for _ in 0..2 {
        // To spare for pages of others, beside those that it will manage.
        place.ask_machine(&["grow", name, "--memory", "16M"])?;
    }
    Ok(())
}

/// Faults of the vCPU that other nodes served so far.
pub(super) fn remote_faults(place: &Place, name: &str) -> Result<f64> {
    let view = place.ask_machine(&["counters", name])?;
    Ok(counters::remote_faults(&view)? as f64)
}

/// How long the vCPU waited for pages so far, in seconds.
pub(super) fn waited_s(place: &Place, name: &str) -> Result<f64> {
    let view = place.ask_machine(&["counters", name])?;
    let waited_ns = counters::sum(&view, |counter| counter == "vcpu0.waited-ns")?;
    Ok(waited_ns as f64 / 1e9)
}

/// What the program wrote, by its lines of that time.
fn writes(ended: &Ended, [from, to]: [Duration; 2]) -> f64 {
    let lines = ended.lines.iter();
    let lines = lines.filter(|line| (from..to).contains(&line.at));
    let writes = lines.filter_map(|line| {
        line.text.contains("dirty: second").then_some(())?;
        let (_, writes) = line.text.rsplit_once(": ")?;
        writes.split(' ').next()?.parse::<f64>().ok()
    });
    writes.sum()
}

/// A look at the marks of use of 2 TB, the decision what of them goes where, and a look for the
/// blocks that were used least, in seconds.
fn large() -> Result<[f64; 3]> {
    let (mut look_s, mut split_s, mut cold_s) = (0.0, 0.0, 0.0);
    let populated = vec![BLOCK_PAGES; (LARGE_PAGES / BLOCK_PAGES) as usize];
    let chunks = (LARGE_PAGES / CHUNK_PAGES) as usize;
    let mut histograms = Vec::new();
    let mut nodes = Vec::new();
    for _ in 0..LARGE_NODES {
        let rights = Rights::new((0..LARGE_PAGES).map(|_| AtomicU8::new(0)).collect());
        let used = |page: &u64| (page / CHUNK_PAGES).is_multiple_of(LARGE_USED);
        let homes = Homes::new(0..LARGE_PAGES, LARGE_PAGES);
        let mut pages = vec![0; LARGE_PAGES as usize];
        let mut records = vec![ChunkHistory::default(); chunks];
        let mut history = History::new(&mut pages, &mut records)?;
        for epoch in 1..3 {
            // The second look finds tables that are there.
            (0..LARGE_PAGES)
                .filter(used)
                .for_each(|page| rights.touch(page));
            let begun = Instant::now();
            rights.take_touched(|page| history.touch(Page(page), epoch));
            if epoch == 2 {
                look_s += begun.elapsed().as_secs_f64();
            }
        }
        let begun = Instant::now();
        let mut histogram = Histogram::default();
        let values = (0..chunks as u64).map(|chunk| {
            let first = chunk * CHUNK_PAGES;
            let managed = homes.count(&(first..first + CHUNK_PAGES));
            (history.chunk(chunk, 2), managed)
        });
        let values: Vec<(u8, u64)> = values.collect();
        values
            .iter()
            .for_each(|(bits, pages)| histogram.add(*bits, *pages));
        split_s += begun.elapsed().as_secs_f64();
        histograms.push(histogram);
        nodes.push(values);
        let begun = Instant::now();
        let values: Vec<u8> = (0..chunks as u64).map(|at| history.chunk(at, 2)).collect();
        let look = ColdLook {
            homes: &homes,
            chunks: &values,
            populated: &populated,
            block_pages: BLOCK_PAGES,
            most: 0x3f,
            free: 0x3f,
        };
        let cold = look.coldest(BLOCKS_MAX, |pages| {
            pages.fold(0, |bits, page| bits | history.page(Page(page), 2))
        });
        cold_s += begun.elapsed().as_secs_f64();
        ensure!(
            cold.len() == BLOCKS_MAX && cold.iter().all(|block| !used(&(block * BLOCK_PAGES))),
            "blocks that were used are cold"
        );
    }
    let begun = Instant::now();
    let all = LARGE_PAGES * LARGE_NODES as u64;
    let parts = thresholds(&histograms, all / 2);
    let choices = nodes.into_iter().zip(parts);
    let choices: Vec<Choice> = choices
        .map(|(values, threshold)| Choice::new(NodeId(0), threshold, values.into_iter()))
        .collect();
    split_s += begun.elapsed().as_secs_f64();
    ensure!(
        choices
            .iter()
            .all(|choice| choice.wants(Page(0), NodeId(0))),
        "what was used does not go to the first node"
    );
    Ok([look_s, split_s, cold_s])
}

fn table(samples: &Samples) -> Table {
    let about = format!(
        "A Linux of one vCPU (512 MiB) goes while it runs from one node of this host to another with room for all, or to two with half of its memory each (`1=256M,2=256M`), by access history and by page numbers, in alternation; medians. All nodes are processes of this host (software vCPU, links over TCP without encryption), with 16 MiB for pages of others. Its program has 430 MB, writes at the given rate to 100 MB of them, in stripes of 4 MiB that are spread over all, and checks every page at the end. *Afterwards*: in the seconds 2 to 5 after the split. *Back*: `weft vm consolidate`. The last rows are no machine: the code of a look at the marks of use, of a split, and of a look for blocks to give away, with the tables of 2 TB over {LARGE_NODES} nodes, one after the other, one in {LARGE_USED} chunks used; the goals are S-memV's figures. It decides for each chunk anew, and a node here for {BLOCKS_MAX} blocks at once, at most once a second."
    );
    let columns = [
        "what", "one node", "history", "order", "figure", "goal", "met",
    ];
    let mut table = Table::new("vm-split", &about, &columns);
    let of = |load: usize, way: Way, figure: &str| {
        median(samples.get(&key(load, way, figure)).map_or(&[], |v| v))
    };
    for (number, (load, _)) in LOADS.iter().enumerate() {
        let mut row = |what: &str, figure: &str, unit: &str, value: &str, goal: Goal| {
            let [one, history, order] = WAYS.map(|way| of(number, way, figure));
            let both = |other: Option<f64>| history.zip(other);
            let (text, value) = match value {
                "to one" => ("history/one", both(one).map(|(h, one)| h / one)),
                "to order" => {
                    let order = order.filter(|order| *order > 0.0);
                    ("history/order", both(order).map(|(h, order)| h / order))
                }
                "more" => ("history − one, ms", both(one).map(|(h, one)| h - one)),
                _ => ("—", None),
            };
            let mut row = vec![format!("{load}: {what}")];
            row.extend([one, history, order].map(|v| format!("{} {unit}", digits(v))));
            row.push(match value {
                Some(_) => format!("{text}: {}", digits(value)),
                None => text.into(),
            });
            row.extend(goal.cells(value));
            table.rows.push(row);
        };
        row("total time", "total", "s", "to one", Goal::AtMost(1.05));
        row(
            "pause of the vCPU",
            "pause",
            "ms",
            "more",
            Goal::AtMost(7.0),
        );
        row(
            "back, total time",
            "back",
            "s",
            "to one",
            Goal::AtMost(1.05),
        );
        row(
            "remote faults a second afterwards",
            "faults",
            "",
            "to order",
            Goal::None,
        );
        row(
            "writes a second afterwards",
            "writes",
            "",
            "to one",
            Goal::AtLeast(0.99),
        );
        row(
            "writes, by history and by order",
            "writes",
            "",
            "to order",
            Goal::AtLeast(1.0),
        );
    }
    for (what, figure, goal) in [
        (
            "2 TB: a look at the marks of use",
            "look",
            Goal::AtMost(0.6),
        ),
        (
            "2 TB: histogram, threshold, choice",
            "split",
            Goal::AtMost(0.8),
        ),
        (
            "2 TB: a look for the 1,024 coldest blocks of each node",
            "cold",
            Goal::None,
        ),
    ] {
        let seconds = median(samples.get(figure).map_or(&[], |v| v));
        let mut row = vec![what.to_string(), "—".into()];
        row.extend([format!("{} s", digits(seconds)), "—".into(), "s".into()]);
        row.extend(goal.cells(seconds));
        table.rows.push(row);
    }
    let blocks = (BLOCKS_MAX * LARGE_NODES) as f64;
    let decision_ms = median(samples.get("cold").map_or(&[], |found| found));
    let decision_ms = decision_ms.map(|seconds| seconds * 1e3 / blocks);
    let mut row = vec!["2 TB: for each of these blocks".into(), "—".into()];
    row.extend([
        format!("{} ms", digits(decision_ms)),
        "—".into(),
        "ms".into(),
    ]);
    row.extend(Goal::AtMost(12.7).cells(decision_ms));
    table.rows.push(row);
    table.samples = json!(samples);
    table
}
