//! Of S-memV's figures, those that `vm-split` does not have: a `sort` that goes on behind a
//! split (figures 11 and 13), and machines of two sizes (9).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weft_tests::boot::{Boot, Disk, Images, Monitor};
use weft_tests::guest::Guest;

use super::migrate::gap_us;
use super::split::{READY as IDLE_READY, Way, grow_by_two, remote_faults, waited_s};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Memory of the machine that sorts, in MiB.
pub(super) const SORT_MIB: u64 = 512;
/// Files of 4 MB that nobody reads again. Between each two of them one of the same size was
/// removed, so what the sort uses is spread over all of the memory.
const COLD_FILES: u32 = 50;
/// They are used no more for so long before the sort.
const COLD_S: u32 = 10;
/// The sorted text, in MB, and the length of its lines, in characters.
const LINES_MB: u32 = 36;
const LINE: u32 = 20;
/// The guest boots and fills its memory, or sorts, within this.
pub(super) const BOUND: Duration = Duration::from_secs(300);

pub(super) const READY: &str = "sort: ready";
pub(super) const BEGINS: &str = "sort: begins";
pub(super) const ENDS: &str = "sort: ends";
pub(super) const SUM: &str = "sort: sum ";

/// Two machines, the second with six times the memory of the first, as in the paper: MiB, MB
/// that the program has, and MB of them that it writes to. The kernel and the initial RAM disk
/// have about 48 MB, so five sixths of each memory have a content.
const SIZES: [(u64, u64, u64); 2] = [(192, 112, 28), (1152, 912, 28)];
/// Pages that it writes to in a second: next to nothing.
const IDLE: u32 = 100;
/// The program stops when it is told to; this is for a benchmark that fails before.
const IDLE_S: u32 = 600;

type Samples = BTreeMap<String, Vec<f64>>;

/// Whose `sort` it is.
#[derive(Debug, Clone, Copy)]
enum Sorter {
    Busybox,
    /// Debian's, S-memV's own program.
    Gnu,
}

const SORTERS: [Sorter; 2] = [Sorter::Busybox, Sorter::Gnu];

/// Where a machine goes during its sort, and whether its nodes exchange pages then.
#[derive(Debug, Clone, Copy)]
enum Course {
    One,
    History,
    Order,
    /// By page numbers, and pages stay with their nodes.
    OrderKept,
}

const COURSES: [Course; 4] = [
    Course::One,
    Course::History,
    Course::Order,
    Course::OrderKept,
];

impl Course {
    fn way(self) -> Way {
        match self {
            Self::One => Way::One,
            Self::History => Way::History,
            Self::Order | Self::OrderKept => Way::Order,
        }
    }

    fn exchange(self) -> &'static str {
        match self {
            Self::OrderKept => "never",
            _ => "auto",
        }
    }
}

/// The table `vm-smemv`.
pub fn smemv(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut debian = small.clone();
    debian.disks = vec![Disk::new(&images.file("debian/root.ext4")?).read_only()];
    debian.words = "root=/dev/vda ro".into();
    let sorters = SORTERS.map(|sorter| match sorter {
        Sorter::Busybox => (sorter, &small),
        Sorter::Gnu => (sorter, &debian),
    });
    let mut samples = Samples::new();
    let mut add = |key: String, value| samples.entry(key).or_default().push(value);
    for round in 0..repeat {
        for (sorter, boot) in sorters {
            let name = format!("{sorter:?}{round}").to_lowercase();
            let (figures, sum) = sort(place, boot, &name, None)?;
            let run = figures.iter().find(|(figure, _)| *figure == "run");
            let (_, run_s) = run.context("a sort without its time")?;
            add(format!("{sorter:?} Still run"), *run_s);
            let half = Duration::from_secs_f64(run_s / 2.0);
            for course in COURSES {
                let name = format!("{name}-{course:?}");
                let (figures, other) = sort(place, boot, &name, Some((course, half)))?;
                ensure!(sum == other, "{name}: {other}, not {sum}");
                for (figure, value) in figures {
                    add(format!("{sorter:?} {course:?} {figure}"), value);
                }
            }
        }
        for (number, (memory_mib, megabytes, hot)) in SIZES.into_iter().enumerate() {
            for way in [Way::One, Way::History] {
                let mut boot = small.running(&format!(
                    "dirty {megabytes} {IDLE} {IDLE_S} {hot} & \
                     read line; touch /tmp/told; wait"
                ));
                boot.memory_mib = memory_mib;
                let name = format!("size{round}-{number}-{way:?}");
                let (total_s, pause_ms) = idle(place, boot, &name, way)?;
                add(format!("size {number} {way:?} total"), total_s);
                add(format!("size {number} {way:?} pause"), pause_ms);
            }
        }
    }
    Ok(table(&samples))
}

/// A machine that goes elsewhere, for how long and with which pause: in s and ms.
fn idle(place: &Place, boot: Boot, name: &str, way: Way) -> Result<(f64, f64)> {
    let memory_mib = boot.memory_mib;
    let mut guest = start(place, boot, name, "auto")?;
    let ready = guest.wait_for(IDLE_READY, BOUND);
    ensure!(ready.is_some(), "the guest does not come up");
    grow_by_two(place, name)?;
    let figures = go(place, name, way, memory_mib)?;
    guest.tell()?;
    gap_us(&guest.finish(BOUND)?)?;
    Ok(figures)
}

fn start(place: &Place, mut boot: Boot, name: &str, exchange: &str) -> Result<Guest> {
    let options = ["--growable", "yes", "--name", name, "--exchange", exchange];
    boot.options.extend(options.map(Into::into));
    let mut command = boot.command(Monitor::Soft);
    Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))
}

/// How long the machine took to go elsewhere, and its pause: in s and ms.
fn go(place: &Place, name: &str, way: Way, memory_mib: u64) -> Result<(f64, f64)> {
    let job = way.migrate(place, name, memory_mib)?;
    let of = |figure: &str| {
        let value = job["migrated"][figure].as_f64();
        value.with_context(|| format!("no {figure} in {job}"))
    };
    Ok((of("total_s")?, of("pause_ns")? / 1e6))
}

type Figures = Vec<(&'static str, f64)>;

/// A machine that fills its memory, waits for a line, and sorts; it ends after another line.
pub(super) fn sorting(base: &Boot) -> Boot {
    let mut boot = base.running(&format!(
        "cd /run || mkdir /run; mount -t tmpfs -o size=100% none /run; cd /run; \
         export LC_ALL=C TMPDIR=/run; i=0; while [ $i -lt {COLD_FILES} ]; do \
         textfile 4 >cold$i; textfile 4 >removed$i; i=$((i + 1)); done; \
         rm removed*; textfile {LINES_MB} | fold -w {LINE} >lines; \
         sleep {COLD_S}; echo {READY}; read line; echo {BEGINS}; \
         sort lines | md5sum | sed 's/^/{SUM}/'; echo {ENDS}; read line"
    ));
    boot.memory_mib = SORT_MIB;
    boot
}

/// A sort in a machine that goes elsewhere, if at all, this long after its begin; and the sum
/// of its output.
fn sort(
    place: &Place,
    base: &Boot,
    name: &str,
    split: Option<(Course, Duration)>,
) -> Result<(Figures, String)> {
    let boot = sorting(base);
    let started = Instant::now();
    let exchange = split.map_or("auto", |(course, _)| course.exchange());
    let mut guest = start(place, boot, name, exchange)?;
    let ready = guest.wait_for(READY, BOUND);
    ensure!(ready.is_some(), "the guest does not come up");
    grow_by_two(place, name)?;
    guest.write("begin\n")?;
    let begins = guest.wait_for(BEGINS, BOUND).context("no sort")?.at;
    let mut figures = Figures::new();
    let (mut asked, mut faults, mut waited) = (begins, 0.0, 0.0);
    if let Some((course, half)) = split {
        std::thread::sleep((begins + half).saturating_sub(started.elapsed()));
        asked = started.elapsed();
        let (total_s, pause_ms) = go(place, name, course.way(), SORT_MIB)?;
        faults = remote_faults(place, name)?;
        waited = waited_s(place, name)?;
        figures.extend([("total", total_s), ("pause", pause_ms)]);
    }
    let done = started.elapsed();
    let ends = guest
        .wait_for(ENDS, BOUND)
        .context("the sort does not end")?;
    ensure!(
        done < ends.at,
        "the sort ended before the machine was elsewhere"
    );
    figures.extend([
        ("run", (ends.at - begins).as_secs_f64()),
        ("rest", (ends.at - asked).as_secs_f64()),
        ("faults", remote_faults(place, name)? - faults),
        ("waited", waited_s(place, name)? - waited),
    ]);
    guest.tell()?;
    let ended = guest.finish(BOUND)?;
    let sum = ended.line(SUM);
    let sum = sum.with_context(|| format!("no sum: {}", ended.tail(12)))?;
    Ok((figures, sum.text.clone()))
}

/// What a row compares the split by history with.
#[derive(Debug, Clone, Copy)]
enum With {
    One,
    OrderKept,
    /// What exchanges change: both splits are by page numbers.
    Exchanges,
    /// One node, by the difference instead of the ratio.
    LessOne,
}

/// Of the sort: text, figure, unit.
const SORT_ROWS: [(&str, &str, &str, With, Goal); 8] = [
    ("whole time", "run", "s", With::One, Goal::AtMost(1.035)),
    (
        "whole time, by history and by order without exchanges",
        "run",
        "s",
        With::OrderKept,
        Goal::AtMost(0.943),
    ),
    (
        "from the split on",
        "rest",
        "s",
        With::One,
        Goal::AtMost(1.035),
    ),
    (
        "from the split on, by history and by order without exchanges",
        "rest",
        "s",
        With::OrderKept,
        Goal::AtMost(0.943),
    ),
    (
        "from the split on, by order, with exchanges and without",
        "rest",
        "s",
        With::Exchanges,
        Goal::None,
    ),
    ("remote faults", "faults", "", With::OrderKept, Goal::None),
    (
        "remote faults, by order, with exchanges and without",
        "faults",
        "",
        With::Exchanges,
        Goal::None,
    ),
    (
        "waits for pages",
        "waited",
        "s",
        With::OrderKept,
        Goal::None,
    ),
];

/// The same of a machine that is idle.
const IDLE_ROWS: [(&str, &str, &str, With, Goal); 2] = [
    ("total time", "total", "s", With::One, Goal::AtMost(1.05)),
    (
        "pause of the vCPU",
        "pause",
        "ms",
        With::LessOne,
        Goal::AtMost(7.0),
    ),
];

fn table(samples: &Samples) -> Table {
    let about = format!(
        "S-memV's figures that `vm-split` does not have, on one host: all nodes are its processes (software vCPU, links over TCP without encryption). *sort*: busybox's, and GNU's in Debian, of {LINES_MB} MB of random lines of up to {LINE} characters, in a Linux of one vCPU ({SORT_MIB} MiB). Before, the guest writes {COLD_FILES} files of 4 MB that it does not read again, and removes as many between them, so that what the sort uses is spread over all of the memory. At half of the time that the sort takes without a migration in the same repetition, the machine goes from one node to another with room for all, or to two with half of its memory each, by access history and by page numbers, in alternation; medians. *No exchange*: with `--exchange never`, pages stay with their nodes. All sorts must have the same output. *From the split on*: from the command to the end of the sort. *Remote faults*, *waits for pages*: of the vCPU, from the end of the migration on. *Idle*: five sixths of the memory have a content, and a program writes {IDLE} pages a second of {} MB. Goals are S-memV's figures, except for the last row: the time grows at most as the memory does.",
        SIZES[0].2
    );
    let columns = [
        "what",
        "without",
        "one node",
        "history",
        "order",
        "order, no exchange",
        "figure",
        "goal",
        "met",
    ];
    let mut table = Table::new("vm-smemv", &about, &columns);
    let of = |key: String| median(samples.get(&key).map_or(&[], |v| v));
    let mut row = |what: String, subject: &str, figure: &str, unit: &str, with, goal: Goal| {
        let still = of(format!("{subject} Still {figure}"));
        let found = COURSES.map(|course| of(format!("{subject} {course:?} {figure}")));
        let [one, history, order, kept] = found;
        let ratio = |value: Option<f64>, other: Option<f64>| {
            let other = other.filter(|other| *other > 0.0);
            value.zip(other).map(|(value, other)| value / other)
        };
        let (text, value) = match with {
            With::One => ("history/one", ratio(history, one)),
            With::OrderKept => ("history/order, no exchange", ratio(history, kept)),
            With::Exchanges => ("order/order, no exchange", ratio(order, kept)),
            With::LessOne => (
                "history − one, ms",
                history.zip(one).map(|(h, one)| h - one),
            ),
        };
        let cell = |value: Option<f64>| match value {
            Some(_) => format!("{} {unit}", digits(value)),
            None => "—".to_owned(),
        };
        let mut row = vec![what];
        row.push(cell(still));
        row.extend(found.map(cell));
        row.push(format!("{text}: {}", digits(value)));
        row.extend(goal.cells(value));
        table.rows.push(row);
    };
    for sorter in SORTERS {
        let name = match sorter {
            Sorter::Busybox => "busybox",
            Sorter::Gnu => "GNU",
        };
        for (what, figure, unit, with, goal) in SORT_ROWS {
            let what = format!("{name} sort: {what}");
            row(what, &format!("{sorter:?}"), figure, unit, with, goal);
        }
    }
    for (number, (memory_mib, ..)) in SIZES.iter().enumerate() {
        let subject = format!("size {number}");
        for (what, figure, unit, with, goal) in IDLE_ROWS {
            let what = format!("idle, {memory_mib} MiB: {what}");
            row(what, &subject, figure, unit, with, goal);
        }
    }
    let [(small_mib, ..), (large_mib, ..)] = SIZES;
    let memory = large_mib as f64 / small_mib as f64;
    let grown = |way: Way| {
        let [small, large] = [0, 1].map(|number| of(format!("size {number} {way:?} total")));
        small.zip(large).map(|(small, large)| large / small)
    };
    let [one, history] = [Way::One, Way::History].map(grown);
    let mut cells = vec![format!("idle: total time, {memory} times the memory")];
    cells.extend(["—".to_owned(), digits(one), digits(history)]);
    cells.extend(["—".to_owned(), "—".to_owned()]);
    cells.push(format!("history: {}", digits(history)));
    cells.extend(Goal::AtMost(memory).cells(history));
    table.rows.push(cells);
    table.samples = json!(samples);
    table
}
