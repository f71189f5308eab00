//! A guest on KVM: its user-mode code against the same program on the host, in
//! alternation while the guest waits; its boot; and what its exits cost.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::program::Place;
use crate::results::{Goal, Table, digits, median};
use weft_tests::boot::{Boot, Images, Monitor, USER_SPACE, figure};
use weft_tests::context::kvm_missing;
use weft_tests::guest::Guest;

/// A KVM without hardware virtualisation needs most of a minute for a boot.
const BOOTS_MAX: usize = 3;
/// Turns of guest and host in each boot.
const TURNS: usize = 4;
/// Longest that a boot or a turn may take.
const BOUND: Duration = Duration::from_secs(180);

/// Figures of the guest's `bench` that hardly enter the kernel.
const FIGURES: [(&str, &str, &str, Goal); 4] = [
    ("spin_100M", "user mode, spinning", "s", Goal::AtLeast(0.95)),
    (
        "mandelbrot_100k",
        "user mode, floating point",
        "ms",
        Goal::None,
    ),
    ("sort_4096", "user mode, sorting numbers", "ms", Goal::None),
    (
        "pointer_chase",
        "user mode, chasing pointers",
        "ns",
        Goal::None,
    ),
];

/// What all boots gave.
#[derive(Debug, Default)]
struct Samples {
    guest: BTreeMap<String, Vec<f64>>,
    native: BTreeMap<String, Vec<f64>>,
    boot_s: Vec<f64>,
    boot_soft_s: Vec<f64>,
    /// Exits a second, and their cost in microseconds, by kind.
    exits: BTreeMap<String, (Vec<f64>, Vec<f64>)>,
}

/// The table `vm-kvm`.
pub fn kvm(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = kvm_missing() {
        bail!(why);
    }
    let bench = place.work.join("bench");
    images.program("bench", &bench)?;
    let mut samples = Samples::default();
    let mut reason = String::new();
    for _ in 0..repeat.min(BOOTS_MAX) {
        let soft = images.small(&place.weft)?.running("true");
        let run = soft.run(Monitor::Soft)?;
        samples
            .boot_soft_s
            .push(run.user_space_s().context("no first line")?);
        let stats = place.work.join("kvm.json");
        take_turns(&images.small(&place.weft)?, &bench, &stats, &mut samples)?;
        let stats: Value = serde_json::from_slice(&std::fs::read(&stats)?)?;
        count_exits(&stats, &mut samples)?;
        reason = stats["back_end"]["reason"].as_str().unwrap_or("").into();
    }
    Ok(table(&samples, &reason))
}

fn names() -> Vec<&'static str> {
    FIGURES.iter().map(|(name, ..)| *name).collect()
}

fn record(into: &mut BTreeMap<String, Vec<f64>>, text: &str) {
    if let Some((name, (value, _))) = figure(text) {
        into.entry(name).or_default().push(value);
    }
}

/// One boot, in which guest and host take turns.
fn take_turns(small: &Boot, bench: &Path, stats: &Path, samples: &mut Samples) -> Result<()> {
    let mut boot = small.running(&format!(
        "while read turn && [ $turn != end ]; do bench {}; echo did-turn-$turn; done",
        names().join(" ")
    ));
    boot.options
        .extend(["--stats".into(), format!("json={}", stats.display())]);
    let mut guest = boot.start(Monitor::Kvm)?;
    let wait = |guest: &mut Guest, text: &str| {
        guest
            .wait_for(text, BOUND)
            .with_context(|| format!("the guest does not say `{text}`"))
    };
    let hello = wait(&mut guest, USER_SPACE)?;
    samples.boot_s.push(hello.at.as_secs_f64());
    for turn in 0..TURNS {
        guest.write(&format!("{turn}\n"))?;
        wait(&mut guest, &format!("did-turn-{turn}"))?;
        let output = Command::new(bench).args(names()).output()?;
        let text = String::from_utf8(output.stdout)?;
        text.lines()
            .for_each(|line| record(&mut samples.native, line));
    }
    guest.write("end\n")?;
    let ended = guest.finish(BOUND)?;
    ensure!(ended.ended_well(), "{}\n{}", ended.stderr, ended.tail(8));
    for line in &ended.lines {
        record(&mut samples.guest, &line.text);
    }
    Ok(())
}

/// Takes the exits of the only vCPU out of `--stats json`.
fn count_exits(stats: &Value, samples: &mut Samples) -> Result<()> {
    let run_s = stats["run_time_s"].as_f64().context("no `run_time_s`")?;
    let counters = stats["counters"].as_object().context("no `counters`")?;
    let (mut all, mut all_ns) = (0.0, 0.0);
    let mut add = |kind: &str, exits: f64, ns: f64| {
        let (rates, costs) = samples.exits.entry(kind.to_string()).or_default();
        rates.push(exits / run_s);
        costs.push(ns / exits / 1e3);
    };
    for (name, exits) in counters {
        let Some(kind) = name.strip_prefix("vcpu0.exits-") else {
            continue;
        };
        // The times have no such partner.
        let Some(ns) = counters.get(&format!("{name}-ns")).and_then(Value::as_f64) else {
            continue;
        };
        let exits = exits.as_f64().context("a counter is a number")?;
        add(kind, exits, ns);
        (all, all_ns) = (all + exits, all_ns + ns);
    }
    ensure!(all > 0.0, "no exits are counted");
    add(ALL, all, all_ns);
    Ok(())
}

/// Exits of every kind.
const ALL: &str = "all";

fn table(samples: &Samples, reason: &str) -> Table {
    let about = format!(
        "A guest with one vCPU on KVM ({reason}). User mode: the guest's `bench` against the same file run on the host, in alternation while the guest waits; ratios are speeds. Exits: of boot, work and end together, by `--stats json`; the cost is what user space takes for one."
    );
    let head = [
        "what",
        "measured",
        "against",
        "baseline",
        "ratio or value",
        "goal",
        "met",
    ];
    let mut table = Table::new("vm-kvm", &about, &head);
    let of = |map: &BTreeMap<String, Vec<f64>>, key: &str| median(map.get(key)?);
    for (key, what, unit, goal) in FIGURES {
        let (guest, native) = (of(&samples.guest, key), of(&samples.native, key));
        let ratio = guest.zip(native).map(|(guest, native)| native / guest);
        let (guest, native) = (digits(guest), digits(native));
        let [goal, met] = goal.cells(ratio);
        let cells = [
            what,
            &format!("{guest} {unit}"),
            "native",
            &format!("{native} {unit}"),
            &digits(ratio),
            &goal,
            &met,
        ];
        table.rows.push(cells.map(str::to_string).to_vec());
    }
    let (boot, soft) = (median(&samples.boot_s), median(&samples.boot_soft_s));
    let ratio = boot.zip(soft).map(|(boot, soft)| boot / soft);
    let mut row = |what: &str, measured: String, against: &str, baseline: String, value: String| {
        let cells = [what, &measured, against, &baseline, &value, "—", "—"];
        table.rows.push(cells.map(str::to_string).to_vec());
    };
    row(
        "boot to user space",
        format!("{} s", digits(boot)),
        "weft, soft",
        format!("{} s", digits(soft)),
        digits(ratio),
    );
    for (kind, (rates, costs)) in &samples.exits {
        let rate = digits(median(rates));
        row(
            &format!("exits, {}", kind.replace('-', " ")),
            format!("{rate} /s"),
            "—",
            "—".to_string(),
            format!("{} µs each", digits(median(costs))),
        );
    }
    table.samples = json!({
        "guest": samples.guest,
        "native": samples.native,
        "boot_s": samples.boot_s,
        "boot_soft_s": samples.boot_soft_s,
        "exits_per_second_and_us": samples.exits,
    });
    table
}
