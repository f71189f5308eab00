//! How long a machine over two hosts needs to be saved to the disks of both, to that of one, and
//! how long the same machine on one host needs.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Images, Monitor};
use weft_tests::guest::Guest;
use weft_tests::namespace;

use super::groups::Group;
use super::ping::{BOUND, LAUNCHER, NAMES, Site};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// What each host's disk writes in a second, in MB.
const DISK_MB: u64 = 100;
/// Text in the guest's memory, in MB: one half is written by each vCPU.
const TEXT_MB: u32 = 200;
/// What the guest prints again and again once its memory is filled, 10 ms apart.
const LINE: &str = "still here";

/// By its column: what the command that starts and restores the machine is told, and what the
/// save.
const WAYS: [(&str, &[&str], &[&str]); 3] = [
    ("one host", &["--cpus", "2", "--memory", "384M"], &[]),
    ("two hosts, one disk", &TWO_HOSTS, &[]),
    ("two hosts, two disks", &TWO_HOSTS, &["--each-host"]),
];
const TWO_HOSTS: [&str; 6] = [
    "--cpus",
    "1,1",
    "--memory",
    "192M,192M",
    "--on",
    NAMES[LAUNCHER + 1],
];

/// By its name in the samples: what the row is called, and what the last column may be of the
/// first.
const FIGURES: [(&str, &str, &str, Goal); 5] = [
    ("save", "saved", "s", Goal::AtMost(0.6)),
    ("stands", "of that, the guest stands", "s", Goal::None),
    ("live", "saved with `--live`", "s", Goal::AtMost(0.6)),
    ("pause", "of that, the guest stands", "s", Goal::None),
    ("line", "restarted to its first line", "s", Goal::None),
];

type Samples = BTreeMap<String, Vec<f64>>;

/// The table `vm-save-hosts`.
pub fn save_hosts(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let mut samples = Samples::new();
    for round in 0..repeat {
        for (way, (name, ..)) in WAYS.iter().enumerate() {
            let site = Site::new(
                place,
                &format!("save-hosts-{round}-{way}"),
                &[LAUNCHER, LAUNCHER + 1],
            )?;
            let limit = |name| Group::of_a_disk(name, &place.work, DISK_MB);
            let limits = [limit("one")?, limit("two")?];
            let figures = measure(&site, &limits, images, way);
            let figures = figures.with_context(|| (*name).to_owned())?;
            site.clear()?;
            // Their processes have ended.
            drop(limits);
            for (figure, value) in figures {
                let key = format!("{name}: {figure}");
                samples.entry(key).or_default().push(value);
            }
        }
    }
    Ok(table(&samples))
}

fn measure(
    site: &Site<'_>,
    [own, other]: &[Group; 2],
    images: &Images,
    way: usize,
) -> Result<Vec<(&'static str, f64)>> {
    let (_, shape, saves) = WAYS[way];
    for daemon in &site.daemons {
        other.add(daemon)?;
    }
    let script = format!(
        "mkdir /m; mount -t tmpfs -o size=300M none /m; for cpu in 1 2; do \
         taskset $cpu sh -c 'textfile {} >/m/'$cpu & done; wait; \
         while :; do echo {LINE}; usleep 10000; done",
        TEXT_MB / 2
    );
    let boot = images.small(&site.place.weft)?.running(&script);
    let command = boot.command(Monitor::Soft);
    let words = command.get_args().map(|word| word.to_string_lossy());
    let mut run: Vec<String> = words.map(Into::into).collect();
    // The shape is given below.
    for option in ["--cpus", "--memory"] {
        if let Some(at) = run.iter().position(|word| word == option) {
            run.drain(at..at + 2);
        }
    }
    let end = run
        .iter()
        .position(|word| word == "--")
        .unwrap_or(run.len());
    let options = shape
        .iter()
        .chain(&["--name", "m"])
        .map(ToString::to_string);
    run.splice(end..end, options);
    let mut guest = Guest::start(&mut weft(site, own, &run)?)?;
    let filled = guest.wait_for(LINE, BOUND);
    ensure!(
        filled.is_some(),
        "the guest does not come up: {}",
        guest.finish(std::time::Duration::ZERO)?.stderr
    );
    let save = |name: &str, options: &[&str]| -> Result<Value> {
        let set = site.disks(LAUNCHER).join(name);
        let path = set.to_string_lossy();
        let words = [&["vm", "save", "m", &path, "--json"], saves, options].concat();
        settle(&site.directory)?;
        let output = weft(site, own, &words)?.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{said}");
        Ok(serde_json::from_slice(&output.stdout)?)
    };
    let live = save("live", &["--live"])?;
    let standing = save("standing", &["--stop"])?;
    guest.finish(BOUND)?;
    let set = site.disks(LAUNCHER).join("standing");
    let path = set.to_string_lossy();
    let restore = ["vm", "run", "--name", "m", "--restore", &path];
    let words = [&restore[..], shape].concat();
    let mut restored = Guest::start(&mut weft(site, own, &words)?)?;
    let line = restored.wait_for(LINE, BOUND);
    let line = line.context("the restored guest does not continue")?.at;
    let stop = ["vm", "stop", "--timeout", "0", "m"];
    let stopped = weft(site, own, &stop)?.output()?;
    ensure!(stopped.status.success(), "it cannot be stopped");
    restored.finish(BOUND)?;
    let of = |view: &Value, name: &str| view[name].as_f64().context("no such part of a save");
    Ok(vec![
        ("save", of(&standing, "seconds")?),
        ("stands", of(&standing, "pause_seconds")?),
        ("live", of(&live, "seconds")?),
        ("pause", of(&live, "pause_seconds")?),
        ("line", line.as_secs_f64()),
        ("bytes", of(&standing, "bytes")?),
    ])
}

/// `weft` on the launcher's host, limited.
fn weft<S: AsRef<str>>(site: &Site<'_>, limit: &Group, words: &[S]) -> Result<Command> {
    // The namespace has no groups in its /sys.
    let mut prefix = limit.prefix();
    prefix.extend(site.star.prefix(LAUNCHER));
    let mut command = Command::new(&prefix[0]);
    command.args(&prefix[1..]).arg(&site.place.weft);
    command.args(words.iter().map(AsRef::as_ref));
    site.at(LAUNCHER, &mut command)?;
    Ok(command)
}

/// What was written before is on the disk.
fn settle(directory: &Path) -> Result<()> {
    let directory = File::open(directory)?;
    nix::unistd::syncfs(&directory).context("cannot write what is in the page cache")
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-save-hosts",
        "A Linux of two vCPUs (software vCPUs, 384 MiB) is saved after each vCPU has written 100 MB of text: on one host; on two hosts, where the second sends its pages to the first; and on two hosts with `--each-host`. The hosts are network namespaces of this machine with a sealed link. There is one disk, of which each host may write 100 MB/s (`blkio` of cgroup v1, which limits what a process flushes). *Saved*: `weft vm save`, from its start to the complete set, which is on disk. *Restarted*: from the start of `weft vm run --restore` on the same hosts to the first line on the console; the guest prints one every 10 ms; reading is not limited. Medians, in alternation; the goal is for two disks ÷ one host.",
        &[
            "what",
            "one host",
            "two hosts, one disk",
            "two hosts, two disks",
            "one disk ÷ one host",
            "two disks ÷ one host",
            "goal",
            "met",
        ],
    );
    let of = |way: &str, figure: &str| {
        let found = samples.get(&format!("{way}: {figure}"));
        median(found.map_or(&[][..], Vec::as_slice))
    };
    for (figure, what, unit, goal) in FIGURES {
        let values = WAYS.map(|(way, ..)| of(way, figure));
        let [one, sent, each] = values;
        let to_one = |value: Option<f64>| value.zip(one).map(|(value, one)| value / one);
        let bytes = digits(of(WAYS[0].0, "bytes").map(|bytes| bytes / 1e6));
        let mut row = vec![format!("{bytes} MB {what}")];
        row.extend(values.map(|value| format!("{} {unit}", digits(value))));
        row.extend([digits(to_one(sent)), digits(to_one(each))]);
        row.extend(goal.cells(to_one(each)));
        table.rows.push(row);
    }
    table.samples = json!(samples);
    table
}
