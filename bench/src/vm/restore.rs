//! How long a restored machine's guest waits for its first instruction, by the memory that it
//! uses.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::{Value, json};
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::guest::Guest;
use weft_tests::namespace;

use super::ping::{LAUNCHER, NAMES, Site, in_namespace};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Memory that the guest's program has filled, in MB.
const FILLS: [u32; 3] = [64, 256, 1024];
const MEMORY_MIB: u64 = 1280;
const BOUND: Duration = Duration::from_secs(120);
/// What the guest prints again and again once its memory is filled, 10 ms apart.
const LINE: &str = "still here";
/// How long the restored guest runs after its first line: then it is ended.
const AFTER: Duration = Duration::from_millis(100);

/// Where the files are when the machine starts.
const PLACES: [(&str, bool); 2] = [("in the page cache", false), ("on the disk", true)];

/// How memory is read: what the columns are called, and the options. The last needs another host.
const WAYS: [(&str, &[&str]); 4] = [
    ("all is read first", &["--growable", "no"]),
    ("read when needed, one node", &["--growable", "yes"]),
    ("two nodes", &["--nodes", "2"]),
    (
        "two hosts",
        &["--on", NAMES[LAUNCHER + 1], "--memory", "640M,640M"],
    ),
];
const TWO_HOSTS: usize = 3;

/// Key and text, and the most that it may be for a node that reads pages when they are
/// needed, in ms.
const FIGURES: [(&str, &str, Goal); 2] = [
    ("start", "to its first instruction", Goal::AtMost(100.0)),
    ("line", "to its first line", Goal::None),
];

type Samples = BTreeMap<String, Vec<f64>>;

fn key(fill: u32, is_cold: bool, way: usize, figure: &str) -> String {
    format!(
        "{fill} MB, {}, {way}: {figure}",
        PLACES[usize::from(is_cold)].0
    )
}

/// The table `vm-restore`.
pub fn restore(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let site = match namespace::missing() {
        None => Some(Site::new(place, "restore", &[])?),
        Some(why) => {
            eprintln!("weft-bench: without two hosts: {why}");
            None
        }
    };
    let mut samples = Samples::new();
    for fill in FILLS {
        let set = place.work.join(format!("restore-{fill}"));
        save(place, &small, fill, &set)?;
        for round in 0..repeat {
            for (_, is_cold) in PLACES {
                for (way, (_, options)) in WAYS.iter().enumerate() {
                    let site = site.as_ref().filter(|_| way == TWO_HOSTS);
                    if way == TWO_HOSTS && site.is_none() {
                        continue;
                    }
                    prepare(&set, is_cold)?;
                    let name = format!("restore-{fill}-{round}-{way}");
                    for (figure, value) in start(place, site, &name, &set, options)? {
                        let key = key(fill, is_cold, way, figure);
                        samples.entry(key).or_default().push(value);
                    }
                }
            }
        }
        fs::remove_dir_all(&set)?;
    }
    site.map(Site::clear).transpose()?;
    Ok(table(&samples))
}

/// Makes the checkpoint of a machine with so much memory in use.
fn save(place: &Place, small: &Boot, fill: u32, set: &Path) -> Result<()> {
    let mut boot = small.running(&format!(
        "dirty {fill} 100 1000 & sleep 1; while :; do echo {LINE}; usleep 10000; done"
    ));
    boot.memory_mib = MEMORY_MIB;
    let name = format!("restore-{fill}");
    boot.options.extend(["--name".into(), name.clone()]);
    let mut command = boot.command(Monitor::Soft);
    let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
    for text in [super::migrate::AT_WORK, LINE] {
        let line = guest.wait_for(text, BOUND);
        ensure!(line.is_some(), "the guest does not come up");
    }
    let path = set.to_str().context("a path that is no text")?;
    place.ask_machine(&["save", &name, path, "--stop"])?;
    guest.finish(BOUND)?;
    Ok(())
}

/// Has the files in the page cache, or not.
fn prepare(set: &Path, is_cold: bool) -> Result<()> {
    for entry in fs::read_dir(set)? {
        let path = entry?.path();
        match is_cold {
            true => {
                let file = File::open(&path)?;
                posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
                    .with_context(|| format!("cannot evict {}", path.display()))?;
            }
            false => drop(fs::read(&path)?),
        }
    }
    Ok(())
}

/// Milliseconds from the start of the command.
fn start(
    place: &Place,
    site: Option<&Site<'_>>,
    name: &str,
    set: &Path,
    options: &[&str],
) -> Result<[(&'static str, f64); 2]> {
    let statistics = place.work.join("restore.json");
    let mut command = weft(place, site)?;
    command
        .args(["vm", "run", "--name", name, "--restore"])
        .arg(set)
        .args(["--stats", &format!("json={}", statistics.display())])
        .args(options);
    let mut guest = Guest::start(&mut command)?;
    let line = guest.wait_for(LINE, BOUND);
    let Some(line) = line else {
        let ended = guest.finish(Duration::ZERO)?;
        anyhow::bail!("the guest does not continue: {}", ended.stderr);
    };
    std::thread::sleep(AFTER);
    let stop = ["vm", "stop", "--timeout", "0", name];
    let stopped = weft(place, site)?.args(stop).output()?;
    ensure!(stopped.status.success(), "it cannot be stopped");
    guest.finish(BOUND)?;
    let report: Value = serde_json::from_slice(&fs::read(&statistics)?)?;
    let start_s = report["start_time_s"].as_f64();
    Ok([
        ("start", 1e3 * start_s.context("no start_time_s")?),
        ("line", 1e3 * line.at.as_secs_f64()),
    ])
}

/// The command, here or on the first host of several.
fn weft(place: &Place, site: Option<&Site<'_>>) -> Result<Command> {
    let Some(site) = site else {
        let mut command = Command::new(&place.weft);
        command.env("XDG_RUNTIME_DIR", &place.work);
        return Ok(command);
    };
    let mut command = in_namespace(&site.star, LAUNCHER, &place.weft);
    site.at(LAUNCHER, &mut command)?;
    Ok(command)
}

fn table(samples: &Samples) -> Table {
    let mut head = vec!["memory in use, where the files are"];
    head.extend(WAYS.map(|(name, _)| name));
    head.extend(["one node, ratio", "goal", "met"]);
    let mut table = Table::new(
        "vm-restore",
        "A Linux of one vCPU (software vCPU, 1280 MiB), whose program has filled the memory that the row names, continues from a checkpoint, in alternation; medians. *First instruction*: from the start of `weft vm run --restore`, as it reports it. *First line*: on the console, from the same moment; the guest prints one every 10 ms. A machine of one node that cannot grow (`--growable no`) reads all of its memory before the first instruction. Others read pages when they are needed, and all of them meanwhile; on another host (a network namespace, sealed link) they come from the first one. The goal is for one node, in ms. Files *on the disk* were evicted from the host's page cache before.",
        &head,
    );
    for fill in FILLS {
        for (place, is_cold) in PLACES {
            for (figure, what, goal) in FIGURES {
                let of = |way: usize| {
                    let found = samples.get(&key(fill, is_cold, way, figure));
                    median(found.map_or(&[][..], Vec::as_slice))
                };
                let values = [0, 1, 2, TWO_HOSTS].map(of);
                let mut row = vec![format!("{fill} MB, {place}: {what}")];
                let with_unit = |value: Option<f64>| match value {
                    Some(_) => format!("{} ms", digits(value)),
                    None => digits(None),
                };
                row.extend(values.map(with_unit));
                let [first, needed, ..] = values;
                row.push(digits(
                    needed.zip(first).map(|(needed, first)| needed / first),
                ));
                row.extend(goal.cells(needed));
                table.rows.push(row);
            }
        }
    }
    table.samples = json!(samples);
    table
}
