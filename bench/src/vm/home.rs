//! How long a machine that leaves its host for good leaves pings unanswered.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::boot::Images;
use weft_tests::namespace;

use super::ping::{BETWEEN, BOUND, Client, EXCESS_MS_MAX, LAUNCHER, LOADS, NAMES, Site, judge};
use crate::ping::Track;
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Of the time in which the machine stands for its home, with the field that has the end.
const PARTS: [(&str, &str); 4] = [
    ("pause", "paused_ns"),
    ("give", "given_ns"),
    ("take", "taken_ns"),
    ("start", "stopped_ns"),
];

/// By load and figure.
type Samples = BTreeMap<String, Vec<f64>>;

fn key(load: usize, figure: &str) -> String {
    format!("{} {figure}", LOADS[load].0)
}

/// The table `vm-home`.
pub fn home(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let hosts: Vec<usize> = (0..NAMES.len()).collect();
    let mut samples = Samples::new();
    for round in 0..repeat {
        for load in 0..LOADS.len() {
            let name = format!("home-{}", round * LOADS.len() + load);
            let site = Site::new(place, &name, &hosts)?;
            let (track, reports) = measure(&site, images, load)?;
            site.clear()?;
            for (step, report) in track.steps.iter().zip(&reports) {
                let worst = track.worst(step.from_s, step.until_s);
                let mut add = |figure: &str, value: f64| {
                    samples.entry(key(load, figure)).or_default().push(value);
                };
                let of = |value: &Value| value.as_f64().unwrap_or(0.0);
                let switch_ms = of(&report["pause_ns"]) / 1e6;
                let home_ms = of(&report["home"]["stopped_ns"]) / 1e6;
                add("total_s", of(&report["total_s"]));
                let bytes = of(&report["bytes"]) + of(&report["switched_bytes"]);
                add("pages_mb", bytes / 1e6);
                add("switch_ms", switch_ms);
                add("home_ms", home_ms);
                let mut before = 0.0;
                for (part, until) in PARTS {
                    let until_ms = of(&report["home"][until]) / 1e6;
                    add(part, until_ms - before);
                    before = until_ms;
                }
                add("gap_ms", worst.gap_s * 1e3);
                add("excess_ms", worst.gap_s * 1e3 - switch_ms.max(home_ms));
                add("lost", worst.lost as f64);
                add("sent", worst.sent as f64);
            }
        }
    }
    Ok(table(&samples))
}

/// A machine that goes from host to host, asked meanwhile, and what each step reported.
fn measure(site: &Site<'_>, images: &Images, load: usize) -> Result<(Track, Vec<Value>)> {
    let (what, ..) = LOADS[load];
    site.start(&site.machine(images, load)?)?;
    let works = site.console(LAUNCHER)?.wait_for("dirty: at work", BOUND);
    ensure!(works.is_some(), "the guest does not come up");
    let measured = steps(site).with_context(|| what.to_owned())?;
    let mut last = site.console(NAMES.len() - 1)?;
    last.write("end\n")?;
    let ended = last.finish(BOUND)?;
    judge(&ended, what)?;
    Ok(measured)
}

fn steps(site: &Site<'_>) -> Result<(Track, Vec<Value>)> {
    let mut client = Client::start(site)?;
    let mut reports = Vec::new();
    for (from, to) in NAMES.iter().skip(1).enumerate() {
        std::thread::sleep(BETWEEN);
        client.say(&format!("step {to}"))?;
        let report = site.ask(from, &["migrate", "m", to])?;
        client.say("done")?;
        ensure!(report["home"]["host"] == **to, "node 0 stays: {report}");
        reports.push(report);
    }
    std::thread::sleep(BETWEEN);
    Ok((client.finish()?, reports))
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-home",
        "A Linux of two vCPUs (512 MiB, software vCPU) leaves its host for good, three times in each run, and is pinged each 10 ms through a bridge and a tap device of its host of the moment. Each host is a network namespace with a daemon; all are on this machine, with sealed links. Its program writes to randomly chosen pages at the given rate and checks every page at the end. *Switch*: how long the guest stood while pages and vCPUs changed their node; *home*: how long it stood once more for all the rest; its parts are the pause, the last pages with the state, the process there that takes these, and the end of the slice with the start of the guest. *Gap*: the longest time between two answers; without a move it is 10 ms. Medians, and the worst of all moves; lost pings of all moves. The goal, no gap longer than the longer pause and 20 ms, is for the worst move.",
        &[
            "what",
            "moves",
            "total time",
            "pages",
            "switch",
            "home",
            "home in parts",
            "worst home",
            "gap",
            "worst gap",
            "lost",
            "worst of gap − pause",
            "goal",
            "met",
        ],
    );
    for (load, (what, ..)) in LOADS.iter().enumerate() {
        let found = |figure: &str| samples.get(&key(load, figure)).map(Vec::as_slice);
        let middle = |figure: &str| median(found(figure).unwrap_or_default());
        let worst = |figure: &str| found(figure)?.iter().copied().reduce(f64::max);
        let sum = |figure: &str| found(figure).unwrap_or_default().iter().sum::<f64>();
        let cell = |value: Option<f64>, unit: &str| format!("{} {unit}", digits(value));
        let excess = worst("excess_ms");
        let parts = PARTS.map(|(part, _)| digits(middle(part)));
        let mut row = vec![
            (*what).to_owned(),
            found("gap_ms").unwrap_or_default().len().to_string(),
            cell(middle("total_s"), "s"),
            cell(middle("pages_mb"), "MB"),
            cell(middle("switch_ms"), "ms"),
            cell(middle("home_ms"), "ms"),
            parts.join(" + ") + " ms",
            cell(worst("home_ms"), "ms"),
            cell(middle("gap_ms"), "ms"),
            cell(worst("gap_ms"), "ms"),
            format!("{} of {}", sum("lost"), sum("sent")),
            cell(excess, "ms"),
        ];
        row.extend(Goal::AtMost(EXCESS_MS_MAX).cells(excess));
        table.rows.push(row);
    }
    table.samples = json!(samples);
    table
}
