//! How long a vCPU stands when it moves to another node of its running machine.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Images, Monitor};
use weft_tests::guest::Guest;

use super::aggregate::Where;
use super::pages_follow;
use crate::program::Place;
use crate::raw::{self, Kind};
use crate::results::{Goal, Table, digits, median};

/// What vCPU 1 does meanwhile, by what the table calls it.
const WORK: [(&str, &str); 2] = [
    ("it computes", "while :; do :; done"),
    ("it is idle", "while :; do sleep 1; done"),
];
const MOVES: usize = 100;
/// Beyond one raw round trip, in microseconds.
const ALLOWANCE_US: f64 = 50.0;
const BOOT_BOUND: Duration = Duration::from_secs(60);
/// As `weft vm move --json` names them, in order: the sum, and its parts.
const PARTS: [&str; 5] = [
    "stopped_ns",
    "save_ns",
    "send_ns",
    "resume_ns",
    "install_ns",
];

/// The tables `vm-vcpu-move` and `vm-vcpu-move-pages`.
pub fn vcpu_move(place: &Place, images: &Images, repeat: usize) -> Result<Vec<Table>> {
    let small = images.small(&place.weft)?;
    let mut samples: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut paces = BTreeMap::new();
    let mut streams = Vec::new();
    for round in 0..repeat {
        for (number, (what, work)) in WORK.into_iter().enumerate() {
            // The last machine may not have gone yet.
            let name = format!("moved-{round}-{number}");
            let script = format!("taskset 2 sh -c 'echo at work; {work}'");
            let mut boot = Where::TwoNodes.boot(&small).running(&script);
            boot.options.extend(["--name".into(), name.clone()]);
            let mut command = boot.command(Monitor::Soft);
            let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
            let at_work = guest.wait_for("at work", BOOT_BOUND);
            ensure!(at_work.is_some(), "the guest does not come up");
            for number in 0..MOVES {
                let moved = move_vcpu(place, &name, number % 2)?;
                for part in PARTS {
                    let ns = moved[part].as_f64().context("no such part of a move")?;
                    let of = samples.entry(format!("{what} {part}")).or_default();
                    of.push(ns / 1000.0);
                }
            }
            guest.kill()?;
        }
        pages_follow::measure(place, images, round, &mut paces)?;
        streams.push(raw::measure(Kind::Tcp, &place.work)?);
    }
    let raw_us: Vec<f64> = streams.iter().map(|raw| raw.blocking_ns / 1000.0).collect();
    Ok(vec![
        table(&samples, &raw_us),
        pages_follow::table(&paces, &streams),
    ])
}

/// Moves vCPU 1, which starts on node 1.
fn move_vcpu(place: &Place, name: &str, to: usize) -> Result<Value> {
    let to = to.to_string();
    place.ask_machine(&["move", name, "--vcpu", "1", "--to", &to])
}

fn table(samples: &BTreeMap<String, Vec<f64>>, raw_us: &[f64]) -> Table {
    let about = format!(
        "vCPU 1 of a Linux on two nodes of this host (TCP, software vCPUs) moves to and fro, {MOVES} times a run; medians of all moves, in µs. *Stands*: no instruction of it is executed anywhere; *save*, *send*, *wake*, *install* are its parts. The raw round trip is a request of 8 bytes answered with 4096 over one TCP connection between two processes, in the same run, both on one processor where the scheduler puts them there; the goal is that and {ALLOWANCE_US} µs."
    );
    let head = [
        "what",
        "stands",
        "save",
        "send",
        "wake",
        "install",
        "raw round trip",
        "ratio",
        "goal",
        "met",
    ];
    let mut table = Table::new("vm-vcpu-move", &about, &head);
    let raw = median(raw_us);
    for (what, _) in WORK {
        let parts = PARTS.map(|part| {
            let key = format!("{what} {part}");
            median(samples.get(&key).map_or(&[][..], Vec::as_slice))
        });
        let goal = match raw {
            Some(raw) => Goal::AtMost((raw + ALLOWANCE_US).round()),
            None => Goal::None,
        };
        let mut row = vec![format!("a vCPU moves while {what}")];
        row.extend(parts.map(digits));
        row.push(digits(raw));
        row.push(digits(parts[0].zip(raw).map(|(stands, raw)| stands / raw)));
        row.extend(goal.cells(parts[0]));
        table.rows.push(row);
    }
    table.samples = json!({"us": samples, "raw_us": raw_us});
    table
}
