//! Of S-memV's figures, those that need links of a known rate or a host that swaps: idle machines
//! over two links (figures 7 and 10), and a `sort` (11).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Boot, Disk, Images, Monitor};
use weft_tests::counters;
use weft_tests::guest::Guest;
use weft_tests::namespace;

use super::groups::{Group, Swap};
use super::memcached::{HALVES, copy};
use super::migrate::gap_us;
use super::ping::{LAUNCHER, Site};
use super::smemv::{BEGINS, BOUND, ENDS, READY, SORT_MIB, SUM, sorting};
use super::split::READY as IDLE_READY;
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// The host that the machine goes to, or its vCPU does.
const MAIN: usize = LAUNCHER + 1;
/// What a host that swaps has: half of the machine's memory, and what processes need.
pub(super) const SWAPPING_MIB: u64 = SORT_MIB / 2 + PROCESSES_MIB;
/// The monitor's own memory is 20 to 30 MB, and the daemon has some.
pub(super) const PROCESSES_MIB: u64 = 32;
/// The file that it swaps to.
pub(super) const SWAP_MIB: u64 = 1024;

/// What a link carries, and its name for `tc`.
const RATES: [(&str, &str); 2] = [("1 Gbit/s", "1gbit"), ("10 Gbit/s", "10gbit")];
const FAST: (&str, &str) = RATES[1];

/// Megabytes that the idle machine's program has, and those of them that it writes to.
const IDLE_MB: [u32; 2] = [430, 28];
/// Pages that it writes to in a second: next to nothing.
const IDLE_RATE: u32 = 100;
/// It stops when it is told to; this is for a benchmark that fails before.
const IDLE_S: u32 = 600;
/// A console repeats what a machine printed before within this.
const REPEATED: Duration = Duration::from_millis(20);

/// Where the machine goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    /// To one host with room for all.
    One,
    /// To two with half of its memory each.
    Split,
    /// To one that has half of its memory, and swaps.
    Swap,
}

const COURSES: [Course; 3] = [Course::One, Course::Split, Course::Swap];

impl Course {
    fn to(self) -> &'static str {
        match self {
            Self::One | Self::Swap => "h1",
            Self::Split => HALVES,
        }
    }
}

type Samples = BTreeMap<String, Vec<f64>>;

/// The table `vm-smemv-hosts`.
pub fn smemv_hosts(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let swap = Swap::new(&place.work.join("swap"), SWAP_MIB)?;
    let mut samples = Samples::new();
    let mut add = |key: String, value| samples.entry(key).or_default().push(value);
    for round in 0..repeat {
        for (number, (rate, shape)) in RATES.into_iter().enumerate() {
            for course in COURSES {
                let name = format!("idle{round}-{number}-{course:?}");
                let hosts = Hosts::new(place, &name, shape, course)?;
                let report = hosts.measure(|hosts| hosts.idle(images))?;
                let of = |figure| report[figure].as_f64().context("no such figure");
                add(format!("{rate} {course:?} total"), of("total_s")?);
                add(format!("{rate} {course:?} pause"), of("pause_ns")? / 1e6);
            }
        }
        let hosts = Hosts::new(place, &format!("still{round}"), FAST.1, Course::One)?;
        let still = hosts.measure(|hosts| hosts.sort(images, None))?;
        add("sort Still run".into(), still.run_s);
        let half = Duration::from_secs_f64(still.run_s / 2.0);
        for course in COURSES {
            let name = format!("sort{round}-{course:?}");
            let hosts = Hosts::new(place, &name, FAST.1, course)?;
            let sorted = hosts.measure(|hosts| hosts.sort(images, Some(half)))?;
            ensure!(sorted.sum == still.sum, "{name}: {}", sorted.sum);
            add(format!("sort {course:?} run"), sorted.run_s);
            add(format!("sort {course:?} rest"), sorted.rest_s);
            add(format!("sort {course:?} pages"), sorted.pages);
        }
    }
    drop(swap);
    Ok(table(&samples))
}

/// The hosts of one machine.
struct Hosts<'a> {
    site: Site<'a>,
    course: Course,
    /// Dropped after the daemons have ended.
    group: Option<Group>,
}

/// What a sort took, and the sum of its output.
struct Sorted {
    run_s: f64,
    /// From the command on.
    rest_s: f64,
    /// That the vCPU waited for, from the end of the command on: from another host, or the disk.
    pages: f64,
    sum: String,
}

impl<'a> Hosts<'a> {
    fn new(place: &'a Place, name: &str, shape: &str, course: Course) -> Result<Hosts<'a>> {
        let site = Site::new(place, name, &[LAUNCHER, MAIN])?;
        site.star.shape(shape)?;
        let is_small = course == Course::Swap;
        let group = is_small.then(|| Group::of_memory(name, SWAPPING_MIB));
        let group = group.transpose()?;
        if let Some(group) = &group {
            group.add(&site.daemons[MAIN - 1])?;
        }
        Ok(Hosts {
            site,
            course,
            group,
        })
    }

    fn measure<T>(self, measured: impl FnOnce(&Hosts<'a>) -> Result<T>) -> Result<T> {
        let measured = measured(&self).with_context(|| self.site.said())?;
        self.site.clear()?;
        drop(self.group);
        Ok(measured)
    }

    fn start(&self, mut boot: Boot) -> Result<Guest> {
        boot.prefix = self.site.star.prefix(LAUNCHER);
        boot.memory_mib = SORT_MIB;
        boot.options.extend(["--name", "m"].map(Into::into));
        self.site.start(&boot.command(Monitor::Soft))?;
        self.site.console(LAUNCHER)
    }

    /// The machine leaves its host for good; what the command reports.
    fn leave(&self) -> Result<Value> {
        let words = ["migrate", "m", self.course.to(), "--timeout", "120"];
        let report = self.site.ask(LAUNCHER, &words)?;
        ensure!(report["home"]["host"] == "h1", "node 0 stays: {report}");
        Ok(report)
    }

    /// What its migration reports.
    fn idle(&self, images: &Images) -> Result<Value> {
        let [all, hot] = IDLE_MB;
        let boot = images.small(&self.site.place.weft)?.running(&format!(
            "dirty {all} {IDLE_RATE} {IDLE_S} {hot} & read line; touch /tmp/told; wait"
        ));
        let ready = self.start(boot)?.wait_for(IDLE_READY, BOUND);
        ensure!(ready.is_some(), "the guest does not come up");
        let report = self.leave()?;
        let mut console = self.site.console(MAIN)?;
        console.tell()?;
        gap_us(&console.finish(BOUND)?)?;
        Ok(report)
    }

    /// A sort in a machine that leaves, if at all, this long after its begin.
    fn sort(&self, images: &Images, leaves: Option<Duration>) -> Result<Sorted> {
        let root = self.site.shared().join("root.ext4");
        copy(&images.file("debian/root.ext4")?, &root)?;
        let mut boot = sorting(&images.small(&self.site.place.weft)?);
        boot.disks = vec![Disk::new(&root).read_only()];
        boot.words = "root=/dev/vda ro".into();
        let mut console = self.start(boot)?;
        let ready = console.wait_for(READY, BOUND);
        ensure!(ready.is_some(), "the guest does not come up");
        console.write("begin\n")?;
        console.wait_for(BEGINS, BOUND).context("no sort")?;
        let begun = Instant::now();
        let (mut asked, mut before) = (begun, None);
        if let Some(after) = leaves {
            std::thread::sleep(after.saturating_sub(begun.elapsed()));
            asked = Instant::now();
            self.leave()?;
            before = Some(self.pages()?);
            console = self.site.console(MAIN)?;
        }
        // On another host first what the machine printed before.
        let begins = console.wait_for(BEGINS, BOUND).context("no sort")?.at;
        let ends = console.wait_for(ENDS, BOUND);
        let ended = Instant::now();
        let ends = ends.context("the sort does not end")?.at;
        ensure!(
            ends > begins + REPEATED,
            "the sort ended before the machine was elsewhere"
        );
        let pages = match before {
            Some(before) => self.pages()? - before,
            None => 0.0,
        };
        console.tell()?;
        let output = console.finish(BOUND)?;
        let sum = output.line(SUM);
        let sum = sum.with_context(|| format!("no sum: {}", output.tail(12)))?;
        Ok(Sorted {
            run_s: (ended - begun).as_secs_f64(),
            rest_s: (ended - asked).as_secs_f64(),
            pages,
            sum: sum.text.clone(),
        })
    }

    /// Pages that came from another host, or the disk, so far.
    fn pages(&self) -> Result<f64> {
        match self.course {
            Course::Swap => Swap::pages_in(),
            Course::One | Course::Split => {
                let view = self.site.view(MAIN, &["counters", "m"])?;
                Ok(counters::remote_faults(&view)? as f64)
            }
        }
    }
}

/// Of a row: what it is, its figure, its unit, and the goals for a split and for a host that
/// swaps, as a ratio to one host, or as the difference where `is_difference`.
struct Row {
    what: &'static str,
    figure: &'static str,
    unit: &'static str,
    goal: Goal,
    is_difference: bool,
}

const IDLE_ROWS: [Row; 2] = [
    Row {
        what: "total time",
        figure: "total",
        unit: "s",
        goal: Goal::AtMost(1.05),
        is_difference: false,
    },
    Row {
        what: "pause of the vCPU",
        figure: "pause",
        unit: "ms",
        goal: Goal::AtMost(7.0),
        is_difference: true,
    },
];

const SORT_ROWS: [Row; 2] = [
    Row {
        what: "whole time",
        figure: "run",
        unit: "s",
        goal: Goal::AtMost(1.035),
        is_difference: false,
    },
    Row {
        what: "from the command on",
        figure: "rest",
        unit: "s",
        goal: Goal::None,
        is_difference: false,
    },
];

fn table(samples: &Samples) -> Table {
    let [idle_mb, hot_mb] = IDLE_MB;
    let about = format!(
        "S-memV's figures 7, 10 and 11: a Linux of one vCPU ({SORT_MIB} MiB, software vCPU) leaves its host for good, to one host with room for all, to two with half of its memory each by access history, or to one that has half of it ({SWAPPING_MIB} MiB in a memory cgroup, of which {PROCESSES_MIB} are for the monitor and the daemon) and swaps to a file on this machine's disk. Hosts are network namespaces of this machine with sealed links, shaped in both directions (`tc tbf`). *Idle*: the program has {idle_mb} MB and writes {IDLE_RATE} pages a second of {hot_mb} of them. *Sort*: GNU sort in Debian as in `vm-smemv`, which the machine leaves with at half of its time; over {}. All sorts have the same output. *Pages waited for*: after the migration, of the vCPU from another host, or swapped in. Medians, in alternation. Goals are S-memV's, for the split against one host; it had 2.2 times the time and 3.4 s more of a pause with an SSD (idle), and 1.36 times (sort). In it, an idle machine of 2 GB went 7 times as fast over the faster link.",
        FAST.0
    );
    let columns = [
        "what",
        "one host",
        "split",
        "swap",
        "split, to one",
        "goal",
        "met",
        "swap, to one",
    ];
    let mut table = Table::new("vm-smemv-hosts", &about, &columns);
    let of = |key: String| median(samples.get(&key).map_or(&[], |found| found));
    let mut row = |subject: &str, text: &str, row: &Row| {
        let found = COURSES.map(|course| of(format!("{subject} {course:?} {}", row.figure)));
        let [one, split, swap] = found;
        let against = |value: Option<f64>| {
            let (value, one) = value.zip(one)?;
            Some(match row.is_difference {
                true => value - one,
                false => value / one,
            })
        };
        let compared = |value: Option<f64>| match row.is_difference {
            true => format!("{} {} more", digits(value), row.unit),
            false => digits(value),
        };
        let mut cells = vec![format!("{text}: {}", row.what)];
        cells.extend(found.map(|value| format!("{} {}", digits(value), row.unit)));
        cells.push(compared(against(split)));
        cells.extend(row.goal.cells(against(split)));
        cells.push(compared(against(swap)));
        table.rows.push(cells);
    };
    for (rate, _) in RATES {
        for line in &IDLE_ROWS {
            row(rate, &format!("idle, {rate}"), line);
        }
    }
    for line in &SORT_ROWS {
        row("sort", "sort", line);
    }
    let dash = || "—".to_owned();
    let mut cells = vec!["sort: pages waited for".to_owned()];
    cells.extend(COURSES.map(|course| digits(of(format!("sort {course:?} pages")))));
    cells.extend([dash(), dash(), dash(), dash()]);
    table.rows.push(cells);
    let mut cells = vec![format!("idle: {} ÷ {}, total time", RATES[0].0, RATES[1].0)];
    cells.extend(COURSES.map(|course| {
        let [slow, fast] = RATES.map(|(rate, _)| of(format!("{rate} {course:?} total")));
        digits(slow.zip(fast).map(|(slow, fast)| slow / fast))
    }));
    cells.extend([dash(), dash(), dash(), dash()]);
    table.rows.push(cells);
    let still = digits(of("sort Still run".into()));
    table.rows.push(vec![
        "sort: whole time without a migration".to_owned(),
        format!("{still} s"),
        dash(),
        dash(),
        dash(),
        dash(),
        dash(),
        dash(),
    ]);
    table.samples = json!(samples);
    table
}
