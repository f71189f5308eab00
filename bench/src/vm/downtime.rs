//! How often the pause of a migration is within `--downtime`, of a guest that writes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::guest::Guest;

use super::migrate::{AT_WORK, gap_us};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median, quantile};

/// What the guest writes to, and at which rate.
const MEGABYTES: u32 = 200;
const PAGES_PER_S: u32 = 20_000;
/// It stops when it is told to; this is for a benchmark that fails before.
const SECONDS: u32 = 900;
/// `--downtime`: between the defaults of both modes, 20 and 100 ms.
const DOWNTIME_MS: u32 = 50;
const MODES: [&str; 2] = ["hybrid", "pre-copy"];
/// Migrations of one guest, half of them in each direction.
const MIGRATIONS: usize = 20;
/// From one migration to the next, in which the guest writes to most of its pages.
const BETWEEN: Duration = Duration::from_secs(1);
/// The guest boots, or checks its pages, within this.
const BOUND: Duration = Duration::from_secs(120);
/// The part of all migrations whose pause must be within `--downtime`.
const WITHIN_MIN: f64 = 0.99;

/// What the machine stands for, with the field of the report that has its end.
const PARTS: [(&str, &str); 5] = [
    ("standing", "paused_ns"),
    ("last pages", "copied_ns"),
    ("rest", "rested_ns"),
    ("relocation", "relocated_ns"),
    ("roles and vCPU", "stopped_ns"),
];

type Samples = BTreeMap<String, Vec<f64>>;

fn key(mode: &str, figure: &str) -> String {
    format!("{mode} {figure}")
}

/// The table `vm-downtime`.
pub fn downtime(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut samples = Samples::new();
    for round in 0..repeat {
        for mode in MODES {
            let name = format!("d{round}-{mode}");
            for (figure, value) in measure(place, &small, &name, mode)? {
                samples.entry(key(mode, figure)).or_default().push(value);
            }
        }
    }
    Ok(table(&samples))
}

type Figures = Vec<(&'static str, f64)>;

/// A guest that goes to and fro between node 0 and nodes that join for it.
fn measure(place: &Place, small: &Boot, name: &str, mode: &str) -> Result<Figures> {
    // All is hot: with the fourth argument the program heeds /tmp/told.
    let mut boot = small.running(&format!(
        "dirty {MEGABYTES} {PAGES_PER_S} {SECONDS} {MEGABYTES} & \
         read line; touch /tmp/told; wait"
    ));
    boot.memory_mib = 512;
    let options = ["--growable", "yes", "--name", name];
    boot.options.extend(options.map(Into::into));
    let mut command = boot.command(Monitor::Soft);
    let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
    let works = guest.wait_for(AT_WORK, BOUND);
    ensure!(works.is_some(), "the guest does not come up");
    let mut figures = Figures::new();
    // The node that has joined, and whether the machine is there.
    let (mut joined, mut is_away) = (None, false);
    for _ in 0..MIGRATIONS {
        if joined.is_none() {
            joined = Some(join(place, name)?);
        }
        std::thread::sleep(BETWEEN);
        let node = joined.filter(|_| !is_away).unwrap_or(0);
        match go(place, name, node, mode) {
            Ok(job) => {
                figures.extend(of_migration(&job)?);
                is_away = !is_away;
                if !is_away {
                    // It was given back.
                    joined = None;
                }
            }
            // The machine goes on where it was. If it does not, the next command fails.
            Err(error) => {
                eprintln!("{name}: {error:#}");
                figures.push(("undone", 1.0));
            }
        }
    }
    guest.tell()?;
    figures.push(("gap", gap_us(&guest.finish(BOUND)?)? / 1e3));
    Ok(figures)
}

/// The number of a node with room for all.
fn join(place: &Place, name: &str) -> Result<u64> {
    let view = place.ask_machine(&["grow", name, "--memory", "512M"])?;
    let node = view["grown"]["node"].as_u64();
    node.with_context(|| format!("no node joined: {view}"))
}

fn go(place: &Place, name: &str, node: u64, mode: &str) -> Result<Value> {
    let (node, limit) = (node.to_string(), DOWNTIME_MS.to_string());
    let words = ["consolidate", name, &node, "--mode", mode];
    place.ask_machine(&[&words[..], &["--downtime", &limit]].concat())
}

fn of_migration(job: &Value) -> Result<Figures> {
    let of = |report: &Value, figure: &str| {
        let value = report[figure].as_f64();
        value.with_context(|| format!("no {figure} in {job}"))
    };
    let report = &job["migrated"];
    let mut figures = vec![
        ("total", of(report, "total_s")?),
        ("pause", of(report, "pause_ns")? / 1e6),
    ];
    let mut before = 0.0;
    for (part, until) in PARTS {
        let until_ms = of(&report["switch"], until)? / 1e6;
        figures.push((part, until_ms - before));
        before = until_ms;
    }
    Ok(figures)
}

fn table(samples: &Samples) -> Table {
    let about = format!(
        "A Linux of one vCPU (512 MiB, software vCPU) goes to and fro between two nodes of this host (links over TCP without encryption), {MIGRATIONS} times in each run, with `--downtime {DOWNTIME_MS}`. Its program writes {PAGES_PER_S} randomly chosen pages a second of {MEGABYTES} MB, and checks every page at the end. The two modes alternate. *Pause*: the longest time that the vCPU stood, as the command reports it. *In parts*: until all stands, the last pages, the rest of the nodes, the relocation, and roles and vCPU with the start; medians of each, of the last switch. In the mode `pre-copy` one that was given up before can have been longer. *Undone*: migrations that did not come about; they count as missed. *Gap*: the longest time between two rounds of 1 ms that the program saw in each run, without the pause, in which its clock stands; the median and the worst of all runs. The goal is that the pause is within `--downtime` in 99 of 100 migrations."
    );
    let columns = [
        "mode",
        "migrations",
        "within",
        "part within",
        "goal",
        "met",
        "pause",
        "99th percentile",
        "longest",
        "in parts",
        "total time",
        "undone",
        "gap",
        "worst gap",
    ];
    let mut table = Table::new("vm-downtime", &about, &columns);
    for mode in MODES {
        let found = |figure: &str| samples.get(&key(mode, figure)).map_or(&[][..], |v| v);
        let cell = |value: Option<f64>, unit: &str| format!("{} {unit}", digits(value));
        let pauses = found("pause");
        let limit_ms = f64::from(DOWNTIME_MS);
        let within = pauses.iter().filter(|pause| **pause <= limit_ms).count();
        let undone = found("undone").len();
        let all = pauses.len() + undone;
        let part = (all > 0).then(|| within as f64 / all as f64);
        let parts = PARTS.map(|(part, _)| digits(median(found(part))));
        let mut row = vec![mode.to_owned(), all.to_string(), within.to_string()];
        row.push(digits(part));
        row.extend(Goal::AtLeast(WITHIN_MIN).cells(part));
        row.extend([
            cell(median(pauses), "ms"),
            cell(quantile(pauses, 0.99), "ms"),
            cell(quantile(pauses, 1.0), "ms"),
            parts.join(" + ") + " ms",
            cell(median(found("total")), "s"),
            undone.to_string(),
            cell(median(found("gap")), "ms"),
            cell(quantile(found("gap"), 1.0), "ms"),
        ]);
        table.rows.push(row);
    }
    table.samples = json!(samples);
    table
}
