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

/// What one transport's round trips take, microseconds.
struct Latencies {
    blocking: Series,
    busy: Series,
    pull: Series,
    jump: Series,
}

fn measure_latencies(
    place: &Place,
    transport: &str,
    kind: Option<Kind>,
    repeat: usize,
) -> Result<Latencies> {
    let empty = || Series(vec![]);
    let mut all = Latencies {
        blocking: empty(),
        busy: empty(),
        pull: empty(),
        jump: empty(),
    };
    let alone = format!("--transport {transport} --read-ahead 0");
    for _ in 0..repeat {
        if let Some(kind) = kind {
            let raw = raw::measure(kind, &place.work)?;
            all.blocking.0.push(raw.blocking_ns / 1000.0);
            all.busy.0.push(raw.busy_ns / 1000.0);
        }
        let run = place.weft(
            &Call::new(PULL_MEMORY).with(&alone),
            &format!("pull {PULL_MIB} 1 random"),
        )?;
        all.pull.0.push(run.number_after("median ")? / 1000.0);
        let call = Call::new("--nodes 2 --memory 20M,64M --jump 4").with(&alone);
        let run = place.weft(&call, "search_rounds 48 1 20")?;
        let nodes = run.counters.nodes.iter();
        let jumps = nodes.filter_map(|node| node.jump_p50_ns);
        all.jump.0.extend(jumps.map(|ns| ns as f64 / 1000.0));
    }
    Ok(all)
}

/// One pull, and one jump, per transport, against a raw request and reply.
pub fn latency(place: &Place, repeat: usize) -> Result<Table> {
    let mut table = Table::new(
        "latency",
        "One 4 KiB pull as the faulting instruction sees it, reading random pages of which each is \
         elsewhere, and one jump, against an 8-byte request with a 4 KiB reply over the same kind of \
         socket, waiting in the kernel and busily, in alternation; medians of medians.",
        &HEAD,
    );
    let transports = [
        ("tcp", Some(Kind::Tcp), 1.15),
        ("tcp-sealed", Some(Kind::Tcp), 1.35),
        ("unix", Some(Kind::Unix), 1.15),
        ("ring", None, 6.0),
    ];
    let mut all = serde_json::Map::new();
    for (transport, kind, goal) in transports {
        let found = measure_latencies(place, transport, kind, repeat)?;
        for (what, series, goal) in [
            ("pull", &found.pull, Some(goal)),
            ("jump", &found.jump, kind.map(|_| 1.5)),
        ] {
            let name = format!("{what}, {transport}");
            let value = series.median();
            let goal = || goal.map_or(Goal::None, Goal::AtMost);
            let Some(kind) = kind else {
                let cells = row(&name, value, "µs", "—", None, value, goal());
                table.rows.push(cells);
                continue;
            };
            for (wait, baseline) in [("blocking", &found.blocking), ("busy", &found.busy)] {
                let baseline = baseline.median();
                let against = format!("raw {}, {wait}", kind.name());
                let shown = ratio(value, baseline);
                table
                    .rows
                    .push(row(&name, value, "µs", &against, baseline, shown, goal()));
            }
        }
        let samples = samples(&[
            ("raw_blocking_us", &found.blocking),
            ("raw_busy_us", &found.busy),
            ("pull_us", &found.pull),
            ("jump_us", &found.jump),
        ]);
        all.insert(transport.to_string(), samples);
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
    let mut dispatch = Series(vec![]);
    let (mut native_step, mut weft_step) = (Series(vec![]), Series(vec![]));
    let (mut native_search, mut weft_search) = (Series(vec![]), Series(vec![]));
    for _ in 0..repeat {
        native_call.0.push(
            place
                .native("syscalls 1000")?
                .number_before(" ns per call")?
                / 1000.0,
        );
        dispatch.0.push(
            place
                .native("dispatch 300")?
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
            "system call",
            weft_call.median(),
            "µs",
            "a handler that does nothing",
            dispatch.median(),
            ratio(weft_call.median(), dispatch.median()),
            Goal::None,
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
        ("dispatch_us", &dispatch),
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
         against one raw stream: between two warm buffers, and from memory written a while ago into \
         memory not touched before, as pages go; in alternation.",
        &HEAD,
    );
    let mut all = serde_json::Map::new();
    for transport in ["tcp", "tcp-sealed", "unix", "ring"] {
        let kind = if transport == "unix" {
            Kind::Unix
        } else {
            Kind::Tcp
        };
        let (mut warm, mut cold, mut weft) = (Series(vec![]), Series(vec![]), Series(vec![]));
        for _ in 0..repeat {
            let raw = raw::measure(kind, &place.work)?;
            warm.0.push(raw.warm_bytes_per_s / 1e6);
            cold.0.push(raw.cold_bytes_per_s / 1e6);
            let run = run_pull(place, &format!("--transport {transport}"), "sequential")?;
            weft.0.push(run.number_before(" MB/s")?);
        }
        for (ends, baseline) in [("buffer to buffer", &warm), ("memory to memory", &cold)] {
            // The goal is set for TCP in the clear; the others are shown.
            let goal = match transport {
                "tcp" => Goal::AtLeast(0.8),
                _ => Goal::None,
            };
            table.rows.push(row(
                &format!("sequential read, {transport}"),
                weft.median(),
                "MB/s",
                &format!("raw {}, {ends}", kind.name()),
                baseline.median(),
                ratio(weft.median(), baseline.median()),
                goal,
            ));
        }
        all.insert(
            transport.to_string(),
            samples(&[
                ("raw_warm_mb_per_s", &warm),
                ("raw_cold_mb_per_s", &cold),
                ("weft_mb_per_s", &weft),
            ]),
        );
    }
    table.samples = Value::Object(all);
    Ok(table)
}
