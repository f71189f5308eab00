//! How long a machine needs to be saved and restored, on two nodes against one.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::guest::Guest;

use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Text in the guest's memory, in MB.
const FILLS: [u32; 2] = [16, 160];
const NODES: [usize; 2] = [1, 2];
const BOUND: Duration = Duration::from_secs(120);
/// What the guest prints again and again once its memory is filled, 10 ms apart.
const LINE: &str = "still here";

/// What is measured: its name in the samples, in the table, what it may be on two nodes as a
/// ratio to one, and the most that it may be in seconds on either.
const FIGURES: [(&str, &str, Goal, Goal); 3] = [
    ("save", "saved", Goal::AtMost(1.1), Goal::None),
    (
        "stands",
        "of that, the guest stands",
        Goal::None,
        Goal::None,
    ),
    (
        "restart",
        "restarted to its first line",
        Goal::None,
        Goal::AtMost(0.2),
    ),
];

/// The table `vm-checkpoint`.
pub fn checkpoint(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut samples: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for round in 0..repeat {
        for fill in FILLS {
            for nodes in NODES {
                let name = format!("saved-{round}-{fill}-{nodes}");
                for (figure, value) in save_and_restart(place, &small, &name, fill, nodes)? {
                    let key = format!("{fill} MB, {nodes}: {figure}");
                    samples.entry(key).or_default().push(value);
                }
            }
        }
    }
    Ok(table(&samples))
}

/// The figures of one machine, keyed by name.
fn save_and_restart(
    place: &Place,
    small: &Boot,
    name: &str,
    fill: u32,
    nodes: usize,
) -> Result<[(&'static str, f64); 4]> {
    let mut boot = small.running(&format!(
        "mkdir /m; mount -t tmpfs -o size=200M none /m; textfile {fill} >/m/a; \
         while :; do echo {LINE}; usleep 10000; done"
    ));
    boot.cpus = 2;
    boot.options.extend(["--name".into(), name.to_owned()]);
    let nodes = nodes.to_string();
    let on_nodes = ["--nodes", &nodes];
    let on_nodes = if nodes == "1" { &[] } else { &on_nodes[..] };
    boot.options
        .extend(on_nodes.iter().map(ToString::to_string));
    let mut command = boot.command(Monitor::Soft);
    let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
    let filled = guest.wait_for(LINE, BOUND);
    ensure!(filled.is_some(), "the guest does not come up");
    let directory = place.work.join(name);
    let path = directory.to_str().context("a path that is no text")?;
    let saved = place.ask_machine(&["save", name, path])?;
    guest.kill()?;
    drop(guest);

    let mut command = Command::new(&place.weft);
    command
        .args(["vm", "run", "--name", &format!("{name}-again"), "--restore"])
        .arg(&directory)
        .args(on_nodes)
        .env("XDG_RUNTIME_DIR", &place.work);
    let mut restored = Guest::start(&mut command)?;
    let line = restored.wait_for(LINE, BOUND);
    let restart = line.context("the restored guest does not continue")?.at;
    restored.kill()?;
    std::fs::remove_dir_all(&directory)?;
    let of = |figure: &str| saved[figure].as_f64().context("no such part of a save");
    Ok([
        ("save", of("seconds")?),
        ("stands", of("pause_seconds")?),
        ("restart", restart.as_secs_f64()),
        ("bytes", of("bytes")?),
    ])
}

fn table(samples: &BTreeMap<String, Vec<f64>>) -> Table {
    let mut table = Table::new(
        "vm-checkpoint",
        "A Linux of two vCPUs (software vCPUs, 256 MiB) whose memory holds a text, on one node and on two nodes of this host (TCP), is saved and restored on as many nodes, in alternation; medians. All files are on one disk, to which they are flushed. *Saved*: `weft vm save`, from its start to the complete set. *Restarted*: from the start of `weft vm run --restore` to the first line on the console; the guest prints one every 10 ms.",
        &[
            "what",
            "one node",
            "two nodes",
            "goal",
            "met",
            "two/one",
            "goal",
            "met",
        ],
    );
    for fill in FILLS {
        let of = |nodes: usize, figure: &str| {
            let key = format!("{fill} MB, {nodes}: {figure}");
            median(samples.get(&key).map_or(&[][..], Vec::as_slice))
        };
        for (figure, what, ratio_goal, seconds_goal) in FIGURES {
            let [one, two] = NODES.map(|nodes| of(nodes, figure));
            let ratio = two.zip(one).map(|(two, one)| two / one);
            let longest = two.zip(one).map(|(two, one)| two.max(one));
            let written = of(1, "bytes").map(|bytes| bytes / 1e6);
            let mut row = vec![format!(
                "{fill} MB of text ({} MB written) {what}",
                digits(written)
            )];
            row.extend([one, two].map(|seconds| format!("{} s", digits(seconds))));
            row.extend(seconds_goal.cells(longest));
            row.push(digits(ratio));
            row.extend(ratio_goal.cells(ratio));
            table.rows.push(row);
        }
    }
    table.samples = json!(samples);
    table
}
