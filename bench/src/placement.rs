//! What the placement policies make of a cluster, by the simulator, and how fast they decide.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// The policies of a table, in its order.
const POLICIES: [&str; 7] = [
    "bff",
    "bff-migration",
    "overcommit",
    "fragbff-fewest-fragmentation",
    "fragbff-fewest-hosts",
    "fragbff-most-fragmentation",
    "fragbff-most-hosts",
];

/// Heading, and the simulator's field.
const FIGURES: [(&str, &str); 10] = [
    ("placed at once, %", "at_once_percent"),
    ("wait, mean s", "wait_mean_s"),
    ("wait, p99 s", "wait_p99_s"),
    ("waited core-hours", "waited_core_hours"),
    (
        "packing at the first delay, %",
        "packing_at_first_delay_percent",
    ),
    ("on several hosts", "spread_aggregates"),
    ("time there, mean s", "spread_life_mean_s"),
    ("moves an hour", "moves_an_hour"),
    ("work lost, %", "lost_percent"),
    ("work done, core-hours", "done_core_hours"),
];

/// The variable with the path of a trace, which the project does not have.
const TRACE: &str = "WEFT_TRACE";

/// The tables `placement`, `placement-speed`, and `placement-trace` where there is a trace.
pub fn placement(place: &Place, repeat: usize) -> Result<Vec<Table>> {
    let mut tables = vec![fragvisor(place, repeat)?, speed(place)?];
    match std::env::var_os(TRACE) {
        Some(trace) => tables.push(of_trace(place, trace)?),
        None => eprintln!("placement-trace: skipped, {TRACE} names no trace"),
    }
    Ok(tables)
}

/// One run of the simulator: the figures of each policy that was run.
fn simulate(place: &Place, arguments: &[OsString]) -> Result<Vec<Value>> {
    let simulator = place.weft.with_file_name("weft-place-sim");
    let output = Command::new(&simulator)
        .arg("--json")
        .args(arguments)
        .output()
        .with_context(|| format!("{}: `make build`", simulator.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the simulator failed: {said}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

fn table_of_policies(name: &str, about: &str, runs: &[Vec<Value>]) -> Table {
    let mut head = vec!["policy"];
    head.extend(FIGURES.map(|(heading, _)| heading));
    let mut table = Table::new(name, about, &head);
    table.command = "make bench BENCHMARKS=placement".into();
    for policy in POLICIES {
        let outcomes: Vec<&Value> = runs
            .iter()
            .flatten()
            .filter(|outcome| outcome["policy"] == policy)
            .collect();
        let mut row = vec![format!("`{policy}`")];
        row.extend(FIGURES.map(|(_, field)| {
            let values = outcomes
                .iter()
                .filter_map(|outcome| outcome[field].as_f64());
            digits(median(&values.collect::<Vec<f64>>()))
        }));
        table.rows.push(row);
    }
    table.samples = json!(runs);
    table
}

/// FragVisor's experiment (7.3): four hosts of 12 CPUs, bursts of 100, lifetimes divided by 100.
fn fragvisor(place: &Place, repeat: usize) -> Result<Table> {
    let seeds = 1..=repeat.max(1) * 4;
    let runs: Result<Vec<_>> = seeds
        .map(|seed| simulate(place, &words(&format!("--seed {seed}"))))
        .collect();
    Ok(table_of_policies(
        "placement",
        "FragVisor's experiment in the simulator: four hosts of 12 CPUs, twelve bursts of 100 \
         requests with the sizes and lifetimes of Azure's public dataset of 2017, lifetimes \
         divided by 100, spread machines as much slower as the paper's web server; medians over \
         seeds.",
        &runs?,
    ))
}

/// A cluster of so many hosts that is nearly full.
const SPEEDS: [(&str, &str, Goal, Goal); 2] = [
    (
        "10,000 hosts of 32 cores",
        "--hosts 10000 --cores 32 --rack 40 --bursts 600 --burst 1400 --between 1",
        Goal::AtLeast(5000.0),
        Goal::None,
    ),
    (
        "100,000 hosts of 12 cores",
        "--hosts 100000 --cores 12 --rack 40 --bursts 600 --burst 5250 --between 1",
        Goal::None,
        Goal::AtMost(5000.0),
    ),
];

fn speed(place: &Place) -> Result<Table> {
    let head = [
        "cluster",
        "policy",
        "requests",
        "decisions/s",
        "goal",
        "met",
        "median µs",
        "p99 µs",
        "goal",
        "met",
        "longest µs",
        "cores in use at the first delay, %",
    ];
    let about = "Decisions on one core, each with its sentence written down: one for each event \
                 (a request, an end, a move's end), clusters filled until requests wait.";
    let mut table = Table::new("placement-speed", about, &head);
    table.command = "make bench BENCHMARKS=placement".into();
    let mut samples = Vec::new();
    for (cluster, arguments, rate_goal, p99_goal) in SPEEDS {
        for policy in ["bff", "fragbff-fewest-fragmentation", "fragbff-most-hosts"] {
            let line = format!("{arguments} --policy {policy}");
            let outcome = simulate(place, &words(&line))?.remove(0);
            let figure = |field: &str| outcome[field].as_f64();
            let rate = figure("decisions_a_second");
            let p99 = figure("decision_p99_us");
            let [rate_goal, rate_met] = rate_goal.cells(rate);
            let [p99_goal, p99_met] = p99_goal.cells(p99);
            table.rows.push(vec![
                cluster.into(),
                format!("`{policy}`"),
                digits(figure("requests")),
                digits(rate),
                rate_goal,
                rate_met,
                digits(figure("decision_p50_us")),
                digits(p99),
                p99_goal,
                p99_met,
                digits(figure("decision_max_us")),
                digits(figure("packing_at_first_delay_percent")),
            ]);
            samples.push(outcome);
        }
    }
    table.samples = json!(samples);
    Ok(table)
}

/// A trace on so few hosts that they are nearly full.
fn of_trace(place: &Place, trace: OsString) -> Result<Table> {
    let mut arguments = words("--hosts 1800 --cores 32 --rack 40");
    arguments.extend(["--trace".into(), trace]);
    let runs = vec![simulate(place, &arguments)?];
    let mut table = table_of_policies(
        "placement-trace",
        "Azure's public dataset V1 of 2017 (E. Cortez and others, Resource Central, SOSP 2017; \
         CC BY 4.0, Microsoft), 410,276 machines in 5.7 days, on 1800 hosts of 32 cores, too few \
         for its peaks.",
        &runs,
    );
    table.command = format!("{TRACE}=FILE make bench BENCHMARKS=placement");
    Ok(table)
}
