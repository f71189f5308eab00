//! The primitives: pull, jump, system call, computing, reading in sequence.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::program::{Call, Measured, Place};
use crate::raw::{self, Kind};
use crate::results::{Goal, Table, digits, median};

/// How much `pull` sends away and reads back. Home's budget has room for it and
/// a little more, the other node's for all that the program ever has.
const PULL_MIB: u64 = 48;
const PULL_MEMORY: &str = "--nodes 2 --memory 60M,200M --jump never";

/// A run of `pull` that found this part of its pages present measured something
/// else.
const REMOTE_MIN: f64 = 0.9;

/// Runs `pull`, and makes sure that it pulled.
fn run_pull(place: &Place, options: &str, order: &str) -> Result<Measured> {
    let call = Call::new(PULL_MEMORY).with(options);
    let run = place.weft(&call, &format!("pull {PULL_MIB} 1 {order}"))?;
    let pages = (PULL_MIB * 256) as f64;
    let pulled = run.counters.total(|node| node.pulls + node.read_ahead) as f64;
    ensure!(
        pulled >= pages * REMOTE_MIN,
        "pull {options}: only {pulled} of {pages} pages were elsewhere"
    );
    Ok(run)
}

struct Series(Vec<f64>);

impl Series {
    fn median(&self) -> Option<f64> {
        median(&self.0)
    }
}

fn ratio(value: Option<f64>, baseline: Option<f64>) -> Option<f64> {
    Some(value? / baseline?)
}

fn samples(series: &[(&str, &Series)]) -> Value {
    series
        .iter()
        .map(|(name, series)| (name.to_string(), json!(series.0)))
        .collect()
}

fn row(
    name: &str,
    value: Option<f64>,
    unit: &str,
    against: &str,
    baseline: Option<f64>,
    shown: Option<f64>,
    goal: Goal,
) -> Vec<String> {
    let [goal, met] = goal.cells(shown);
    vec![
        name.to_string(),
        format!("{} {unit}", digits(value)),
        against.to_string(),
        baseline.map_or("—".to_string(), |b| format!("{} {unit}", digits(Some(b)))),
        digits(shown),
        goal,
        met,
    ]
}

const HEAD: [&str; 7] = [
    "what",
    "measured",
    "against",
    "baseline",
    "ratio or value",
    "goal",
    "met",
];

/// One pull, and one jump, per transport, against a raw request and reply.
pub fn latency(place: &Place, repeat: usize) -> Result<Table> {
    let mut table = Table::new(
        "latency",
        "One 4 KiB pull as the faulting instruction sees it, reading random pages of which each is \
         elsewhere, and one jump, against an 8-byte request with a 4 KiB reply over the same kind of \
         socket with blocking calls, in alternation; medians of medians.",
        &HEAD,
    );
    let transports = [
        ("tcp", Some(Kind::Tcp), Goal::AtMost(1.15)),
        ("tcp-sealed", Some(Kind::Tcp), Goal::AtMost(1.35)),
        ("unix", Some(Kind::Unix), Goal::AtMost(1.15)),
        ("ring", None, Goal::AtMost(6.0)),
    ];
    let mut all = serde_json::Map::new();
    for (transport, kind, goal) in transports {
        let (mut raw, mut pull, mut jump) = (Series(vec![]), Series(vec![]), Series(vec![]));
        for _ in 0..repeat {
            if let Some(kind) = kind {
                raw.0
                    .push(raw::measure(kind, &place.work)?.round_trip_ns / 1000.0);
            }
            let call =
                Call::new(PULL_MEMORY).with(&format!("--transport {transport} --read-ahead 0"));
            let run = place.weft(&call, &format!("pull {PULL_MIB} 1 random"))?;
            pull.0.push(run.number_after("median ")? / 1000.0);
            let call = Call::new("--nodes 2 --memory 20M,64M --jump 4")
                .with(&format!("--transport {transport} --read-ahead 0"));
            let run = place.weft(&call, "search_rounds 48 1 20")?;
            let jumps = run
                .counters
                .nodes
                .iter()
                .filter_map(|node| node.jump_p50_ns);
            jump.0.extend(jumps.map(|ns| ns as f64 / 1000.0));
        }
        let against = kind.map_or("—".to_string(), |kind| format!("raw {}", kind.name()));
        let baseline = raw.median();
        let shown = if kind.is_some() {
            ratio(pull.median(), baseline)
        } else {
            pull.median()
        };
        table.rows.push(row(
            &format!("pull, {transport}"),
            pull.median(),
            "µs",
            &against,
            baseline,
            shown,
            goal,
        ));
        if kind.is_some() {
            let shown = ratio(jump.median(), baseline);
            table.rows.push(row(
                &format!("jump, {transport}"),
                jump.median(),
                "µs",
                &against,
                baseline,
                shown,
                Goal::AtMost(1.5),
            ));
        } else {
            table.rows.push(vec![
                format!("jump, {transport}"),
                format!("{} µs", digits(jump.median())),
                "—".into(),
                "—".into(),
                digits(jump.median()),
                "—".into(),
                "—".into(),
            ]);
        }
        all.insert(
            transport.to_string(),
            samples(&[("raw_us", &raw), ("pull_us", &pull), ("jump_us", &jump)]),
        );
    }
    table.samples = Value::Object(all);
    Ok(table)
}

/// A program that has not stretched, against the same program without Weft.
pub fn unstretched(place: &Place, repeat: usize) -> Result<Table> {
    let mut table = Table::new(
        "unstretched",
        "A program that fits its home's budget, against the same program natively, in alternation.",
        &HEAD,
    );
    let call = Call::new("--nodes 2 --memory 256M");
    let (mut native_call, mut weft_call) = (Series(vec![]), Series(vec![]));
    let (mut native_step, mut weft_step) = (Series(vec![]), Series(vec![]));
    let (mut native_search, mut weft_search) = (Series(vec![]), Series(vec![]));
    for _ in 0..repeat {
        native_call.0.push(
            place
                .native("syscalls 1000")?
                .number_before(" ns per call")?
                / 1000.0,
        );
        weft_call.0.push(
            place
                .weft(&call, "syscalls 300")?
                .number_before(" ns per call")?
                / 1000.0,
        );
        native_step
            .0
            .push(place.native("spin 500")?.number_before(" ns per step")?);
        weft_step.0.push(
            place
                .weft(&call, "spin 500")?
                .number_before(" ns per step")?,
        );
        native_search.0.push(
            place
                .native("search_rounds 128 1 20")?
                .number_after("measured ")?,
        );
        weft_search.0.push(
            place
                .weft(&call, "search_rounds 128 1 20")?
                .number_after("measured ")?,
        );
    }
    table.rows = vec![
        row(
            "system call",
            weft_call.median(),
            "µs",
            "native",
            native_call.median(),
            weft_call.median(),
            Goal::AtMost(2.0),
        ),
        row(
            "computing, one step",
            weft_step.median(),
            "ns",
            "native",
            native_step.median(),
            ratio(weft_step.median(), native_step.median()),
            Goal::AtMost(1.02),
        ),
        row(
            "reading memory",
            weft_search.median(),
            "s",
            "native",
            native_search.median(),
            ratio(weft_search.median(), native_search.median()),
            Goal::AtMost(1.02),
        ),
    ];
    table.samples = samples(&[
        ("native_call_us", &native_call),
        ("weft_call_us", &weft_call),
        ("native_step_ns", &native_step),
        ("weft_step_ns", &weft_step),
        ("native_search_s", &native_search),
        ("weft_search_s", &weft_search),
    ]);
    Ok(table)
}

/// Sequential remote read against one raw stream.
pub fn throughput(place: &Place, repeat: usize) -> Result<Table> {
    let mut table = Table::new(
        "throughput",
        "Reading in sequence what is elsewhere, one word of every page, with the default read-ahead, \
         against one raw TCP stream, in alternation.",
        &HEAD,
    );
    let mut all = serde_json::Map::new();
    for transport in ["tcp", "tcp-sealed", "unix", "ring"] {
        let kind = if transport == "unix" {
            Kind::Unix
        } else {
            Kind::Tcp
        };
        let (mut raw, mut weft) = (Series(vec![]), Series(vec![]));
        for _ in 0..repeat {
            raw.0
                .push(raw::measure(kind, &place.work)?.bytes_per_s / 1e6);
            let run = run_pull(place, &format!("--transport {transport}"), "sequential")?;
            weft.0.push(run.number_before(" MB/s")?);
        }
        let shown = ratio(weft.median(), raw.median());
        let mut cells = row(
            &format!("sequential read, {transport}"),
            weft.median(),
            "MB/s",
            &format!("raw {}", kind.name()),
            raw.median(),
            shown,
            Goal::AtLeast(0.8),
        );
        if transport != "tcp" {
            // The goal is set for TCP in the clear; the others are shown.
            cells[5] = "—".to_string();
            cells[6] = "—".to_string();
        }
        table.rows.push(cells);
        all.insert(
            transport.to_string(),
            samples(&[("raw_mb_per_s", &raw), ("weft_mb_per_s", &weft)]),
        );
    }
    table.samples = Value::Object(all);
    Ok(table)
}
