//! memcached with a load from outside, in a machine that leaves its host: S-memV's figures 12
//! and 13.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Disk, Images, Monitor};
use weft_tests::counters;
use weft_tests::namespace::{self, Star};

use super::groups::{Group, Swap};
use super::ping::{BOUND, CLIENT, LAUNCHER, Site, TAP, in_namespace};
use super::smemv_hosts::{PROCESSES_MIB, SWAP_MIB, SWAPPING_MIB};
use crate::memcached::BIN;
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

const MEMORY_MIB: u64 = 512;
/// Each of two hosts takes half of the machine, and what it needs for pages of others.
pub(super) const HALVES: &str = "h1=260M,h2=260M";
/// What memcached holds: keys, and bytes of each. With its own overhead about 170 MB.
const KEYS: u32 = 70_000;
const VALUE_BYTES: u32 = 2_000;
/// Files of 4 MB that nobody reads again.
const COLD_FILES: u32 = 32;
/// How long it is asked before the machine leaves, and afterwards.
const BEFORE: Duration = Duration::from_secs(15);
const AFTER: Duration = Duration::from_secs(25);
/// At the end of each, this is its steady throughput.
const STEADY_S: f64 = 8.0;
/// Throughput is recovered when this part of the steady one is reached, for this time.
const RECOVERED: f64 = 0.99;
const RECOVERED_S: f64 = 1.0;

/// Where the machine goes.
struct Way {
    name: &'static str,
    to: &'static str,
    choose: &'static str,
    /// Whether its nodes exchange pages.
    exchange: &'static str,
    /// Whether the host has half of the machine's memory, and swaps.
    swaps: bool,
}

const ONE: Way = Way {
    name: "to one host",
    to: "h1",
    choose: "history",
    exchange: "auto",
    swaps: false,
};
const SPLIT: Way = Way {
    name: "split by history",
    to: HALVES,
    ..ONE
};
const WAYS: [Way; 5] = [
    ONE,
    SPLIT,
    Way {
        name: "split by page numbers",
        choose: "order",
        ..SPLIT
    },
    Way {
        name: "split by page numbers, no exchange",
        choose: "order",
        exchange: "never",
        ..SPLIT
    },
    Way {
        name: "to one host that swaps",
        swaps: true,
        ..ONE
    },
];

impl Way {
    /// Whether the goals are for it.
    fn is_ours(&self) -> bool {
        self.to == HALVES && self.exchange == "auto"
    }
}

type Samples = BTreeMap<String, Vec<f64>>;

/// The table `vm-memcached`.
pub fn memcached(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let swap = Swap::new(&place.work.join("swap"), SWAP_MIB)?;
    let mut samples = Samples::new();
    for round in 0..repeat {
        for (number, way) in WAYS.iter().enumerate() {
            let name = format!("cached-{round}-{number}");
            let site = Site::new(place, &name, &[LAUNCHER, 1])?;
            let group = match way.swaps {
                true => Some(Group::of_memory(&name, SWAPPING_MIB)?),
                false => None,
            };
            if let Some(group) = &group {
                group.add(&site.daemons[0])?;
            }
            let measured = measure(&site, images, way);
            let (load, faults, report) =
                measured.with_context(|| format!("{}; {}", way.name, site.said()))?;
            site.clear()?;
            drop(group);
            let figures = Figures::of(&load).with_context(|| way.name)?;
            let mut add = |figure: &str, value: f64| {
                let key = format!("{} {figure}", way.name);
                samples.entry(key).or_default().push(value);
            };
            add("before", figures.before);
            add("lowest", figures.lowest);
            add("recovered", figures.recovered_s);
            add("after", figures.after);
            add("faults", faults / STEADY_S / figures.after);
            add("total", report["total_s"].as_f64().unwrap_or(0.0));
        }
    }
    drop(swap);
    Ok(table(&samples))
}

/// Operations a second, and when they were back.
struct Figures {
    before: f64,
    /// In the worst second since the command.
    lowest: f64,
    /// From the end of the command; [`AFTER`]: later than that.
    recovered_s: f64,
    after: f64,
}

impl Figures {
    fn of(load: &Value) -> Result<Figures> {
        let bins = load["bins"].as_array().context("no counts")?;
        let bins: Vec<f64> = bins.iter().filter_map(Value::as_f64).collect();
        let step = &load["steps"][0];
        let time = |name: &str| step[name].as_f64().context("no step");
        let (from_s, until_s) = (time("from_s")?, time("until_s")?);
        let bin_s = BIN.as_secs_f64();
        let rate = |from_s: f64, seconds: f64| {
            let from = (from_s / bin_s) as usize;
            let part = bins.get(from..from + (seconds / bin_s) as usize)?;
            Some(part.iter().sum::<f64>() / (part.len() as f64 * bin_s))
        };
        let end_s = bins.len() as f64 * bin_s;
        let before = rate(from_s - STEADY_S, STEADY_S).context("too few counts before")?;
        let after = rate(end_s - STEADY_S - bin_s, STEADY_S).context("too few counts after")?;
        let starts = |from_s: f64| (0..).map(move |bin| from_s + f64::from(bin) * bin_s);
        let seconds = starts(from_s).map_while(|start_s| rate(start_s, 1.0));
        let lowest = seconds.fold(f64::INFINITY, f64::min);
        let recovered = starts(until_s)
            .map_while(|start_s| Some((start_s, rate(start_s, RECOVERED_S)?)))
            .find(|(_, rate)| *rate >= RECOVERED * after)
            .map_or(AFTER.as_secs_f64(), |(start_s, _)| start_s - until_s);
        Ok(Figures {
            before,
            lowest,
            recovered_s: recovered,
            after,
        })
    }
}

/// Faults of vCPUs that other nodes have served so far, of the machine on the first host.
fn remote_faults(site: &Site<'_>) -> Result<f64> {
    Ok(counters::remote_faults(&site.view(1, &["counters", "m"])?)? as f64)
}

/// A machine whose memcached is asked while it leaves: what was counted, remote faults in the last
/// [`STEADY_S`], and what the command reported.
fn measure(site: &Site<'_>, images: &Images, way: &Way) -> Result<(Value, f64, Value)> {
    let root = site.shared().join("root.ext4");
    copy(&images.file("debian/root.ext4")?, &root)?;
    let mut boot = images.small(&site.place.weft)?.running(&format!(
        "cd /run || mkdir /run; mount -t tmpfs -o size=100% none /run; cd /run; i=0; \
         while [ $i -lt {COLD_FILES} ]; do textfile 4 >cold$i; i=$((i + 1)); done; \
         memcached -u root -m 400 -t 1 & read line; kill $!; wait; echo stopped"
    ));
    boot.prefix = site.star.prefix(LAUNCHER);
    boot.memory_mib = MEMORY_MIB;
    boot.disks = vec![Disk::new(&root).read_only()];
    let address = Star::address(100);
    boot.words = format!("root=/dev/vda ro weft.net={address}/24");
    let net = format!("tap={TAP}");
    let options = ["--name", "m", "--net", &net, "--exchange", way.exchange];
    boot.options.extend(options.map(Into::into));
    site.start(&boot.command(Monitor::Soft))?;
    let counts = site.directory.join("load.json");
    let mut command = in_namespace(&site.star, CLIENT, &std::env::current_exe()?);
    command
        .args(["memcached", &format!("{address}:11211")])
        .args(["--keys", &KEYS.to_string()])
        .args(["--value-bytes", &VALUE_BYTES.to_string(), "--json"])
        .arg(&counts);
    let mut load = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = load.stdin.take().context("standard input is a pipe")?;
    let output = load.stdout.take().context("standard output is a pipe")?;
    let mut first = String::new();
    BufReader::new(output).read_line(&mut first)?;
    let mut steps = || -> Result<(f64, Value)> {
        ensure!(first.trim() == "filled", "memcached could not be filled");
        std::thread::sleep(BEFORE);
        writeln!(input, "step leave")?;
        let report = site.ask(LAUNCHER, &["migrate", "m", way.to, "--choose", way.choose])?;
        writeln!(input, "done")?;
        ensure!(report["home"]["host"] == "h1", "node 0 stays: {report}");
        let steady = Duration::from_secs_f64(STEADY_S);
        std::thread::sleep(AFTER - steady);
        let before = remote_faults(site)?;
        std::thread::sleep(steady);
        Ok((remote_faults(site)? - before, report))
    };
    let measured = steps();
    drop(input);
    let status = load.wait()?;
    let (faults, report) = measured?;
    ensure!(status.success(), "the load ended with {status}");
    let mut last = site.console(1)?;
    last.write("end\n")?;
    let ended = last.finish(BOUND)?;
    ensure!(ended.line("stopped").is_some(), "{}", ended.tail(12));
    let load = serde_json::from_slice(&fs::read(&counts)?)?;
    Ok((load, faults, report))
}

/// A copy without the holes: a host allows no file that has a second name.
pub(super) fn copy(file: &Path, copy: &Path) -> Result<()> {
    let mut command = Command::new("cp");
    command.args(["--sparse=always", "--reflink=auto"]);
    let status = command.args([file, copy]).status()?;
    ensure!(status.success(), "cp {}: {status}", file.display());
    Ok(())
}

fn table(samples: &Samples) -> Table {
    let about = format!(
        "memcached in Debian, on a Linux of one vCPU ({MEMORY_MIB} MiB, software vCPU), with {KEYS} values of {VALUE_BYTES} bytes and {COLD_FILES} files of 4 MB that nobody reads again: S-memV's figures 12 and 13. A program in the network asks for random keys over 4 connections, through a bridge and a tap device, writes with one of ten operations, and checks each value. The machine leaves its host for good: to one host with room for all, to two with half of its memory each, or to one that has half of it ({SWAPPING_MIB} MiB in a memory cgroup, of which {PROCESSES_MIB} are for the monitor and the daemon) and swaps to a file. Hosts are network namespaces of this machine with sealed links. *Before*, *after*: operations a second in the last {STEADY_S} s; *remote faults*: of the vCPU then. *Lowest*: in the worst second. *Recovered*: from the end of the command until a second has {RECOVERED} of the rate *after*; at most {} s are measured. Medians. Goals are S-memV's: 5 s, and 0.6 % less than with all of the memory on one host.",
        AFTER.as_secs()
    );
    let mut table = Table::new(
        "vm-memcached",
        &about,
        &[
            "what",
            "moves",
            "total",
            "before",
            "lowest",
            "after",
            "remote faults, each operation",
            "recovered",
            "goal",
            "met",
            "after, to one host's",
            "goal",
            "met",
        ],
    );
    let of = |way: &str, figure: &str| {
        let found = samples.get(&format!("{way} {figure}"));
        median(found.map_or(&[], |found| found))
    };
    let one = of(ONE.name, "after");
    for kind in &WAYS {
        let way = kind.name;
        let all = samples.get(&format!("{way} after")).map_or(0, Vec::len);
        let rate = |figure| format!("{} /s", digits(of(way, figure)));
        let recovered = of(way, "recovered");
        let after = of(way, "after");
        let ratio = after.zip(one).map(|(after, one)| after / one);
        let goals = match kind.is_ours() {
            true => (Goal::AtMost(5.0), Goal::AtLeast(0.994)),
            false => (Goal::None, Goal::None),
        };
        let mut row = vec![
            way.to_owned(),
            all.to_string(),
            format!("{} s", digits(of(way, "total"))),
            rate("before"),
            rate("lowest"),
            rate("after"),
            digits(of(way, "faults")),
            format!("{} s", digits(recovered)),
        ];
        row.extend(goals.0.cells(recovered));
        row.push(digits(ratio));
        row.extend(goals.1.cells(ratio));
        table.rows.push(row);
    }
    table.samples = json!(samples);
    table
}
