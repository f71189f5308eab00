//! A working set that does not fit: GNU sort of 200 MB with budgets of 96 and
//! 160 MB, and visits of random pages; alone, and beside busy processes.

use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::program::{Call, Measured, Place};
use crate::raw::{self, Kind};
use crate::results::{Goal, Table, digits, median};

const TEXT_BYTES: usize = 200_000_000;
const SORT_CALL: &str = "--nodes 2 --memory 96M,160M --transport tcp";
const VISITS_CALL: &str = "--nodes 2 --memory 48M,160M --transport tcp --jump never";
const VISITS: &str = "visits 64";
/// Busy processes of the table `oversubscribed`.
const BUSY: usize = 3;
/// Rounds beside busy processes: each takes a minute or more.
const BUSY_REPEAT_MAX: usize = 3;

/// Processes that only compute, until this is dropped.
struct Busy(Vec<Child>);

impl Busy {
    fn start(count: usize) -> Result<Busy> {
        let mut busy = Busy(Vec::new());
        for _ in 0..count {
            let child = Command::new("sh")
                .args(["-c", "while :; do :; done"])
                .stdin(Stdio::null())
                .spawn()
                .context("starting a busy process")?;
            busy.0.push(child);
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Lines of hexadecimal numbers in no order.
fn text(place: &Place) -> Result<PathBuf> {
    let path = place.work.join("unsorted.txt");
    let mut file = BufWriter::new(fs::File::create(&path)?);
    let mut state = 1_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut written = 0;
    while written < TEXT_BYTES {
        let line = format!(
            "{:016x}{:016x}{:016x} {:012}\n",
            next(),
            next(),
            next(),
            next() >> 30
        );
        file.write_all(line.as_bytes())?;
        written += line.len();
    }
    file.flush()?;
    Ok(path)
}

/// Seconds of each way to sort.
#[derive(Default)]
struct Sorts {
    native: Vec<f64>,
    default: Vec<f64>,
    never: Vec<f64>,
}

fn sorted(place: &Place, call: Option<&Call>, name: &str) -> Result<f64> {
    let (from, to) = (place.work.join("unsorted.txt"), place.work.join(name));
    let words = format!(
        "/usr/bin/sort --parallel=1 -S 200M {} -o {}",
        from.display(),
        to.display()
    );
    let run: Measured = match call {
        None => place.native(&words)?,
        Some(call) => place.weft(call, &words)?,
    };
    let same = call.is_none() || {
        let native = fs::read(place.work.join("native.txt"))?;
        fs::read(&to)? == native
    };
    ensure!(same, "{words}: other lines than natively");
    eprintln!("  {name}: {:.2} s", run.wall_s);
    Ok(run.wall_s)
}

fn sort_all(place: &Place, busy: usize, pull_only: bool, repeat: usize) -> Result<Sorts> {
    let _busy = Busy::start(busy)?;
    let mut sorts = Sorts::default();
    for _ in 0..repeat {
        sorts.native.push(sorted(place, None, "native.txt")?);
        let call = Call::new(SORT_CALL);
        sorts
            .default
            .push(sorted(place, Some(&call), "default.txt")?);
        if pull_only {
            let call = call.with("--jump never");
            sorts.never.push(sorted(place, Some(&call), "never.txt")?);
        }
    }
    Ok(sorts)
}

fn row(
    what: &str,
    value: Option<f64>,
    against: &str,
    base: Option<f64>,
    goal: Goal,
) -> Vec<String> {
    let ratio = value.zip(base).map(|(value, base)| value / base);
    let [goal, met] = goal.cells(ratio);
    vec![
        what.to_string(),
        digits(value),
        against.to_string(),
        digits(base),
        digits(ratio),
        goal,
        met,
    ]
}

const HEAD: [&str; 7] = [
    "what", "measured", "against", "baseline", "ratio", "goal", "met",
];

/// The table `working-set`.
pub fn working_set(place: &Place, repeat: usize) -> Result<Table> {
    text(place)?;
    let sorts = sort_all(place, 0, true, repeat)?;
    let (mut visits, mut busy) = (Vec::new(), Vec::new());
    for _ in 0..repeat {
        busy.push(raw::measure(Kind::Tcp, &place.work)?.busy_ns / 1e3);
        let run = place.weft(&Call::new(VISITS_CALL), VISITS)?;
        visits.push(run.number_after("mean ")? / 1e3);
    }
    let mut table = Table::new(
        "working-set",
        &format!(
            "GNU sort of 200 MB (`--parallel=1 -S 200M`) on two nodes of 96 and 160 MB, in seconds \
             of the whole run against the same natively; and one visit of a random page that is \
             read and written, of 64 MiB in 48, its push included, in µs against a busy raw round \
             trip. Loopback TCP, in alternation, medians of {repeat}."
        ),
        &HEAD,
    );
    let native = median(&sorts.native);
    for (name, times) in [
        ("sort, default", &sorts.default),
        ("sort, pull-only", &sorts.never),
    ] {
        let goal = Goal::AtMost(2.5);
        table
            .rows
            .push(row(name, median(times), "native", native, goal));
    }
    let goal = Goal::AtMost(1.3);
    let round_trip = median(&busy);
    let name = "a pull with its push";
    table.rows.push(row(
        name,
        median(&visits),
        "raw tcp, busy",
        round_trip,
        goal,
    ));
    table.samples = json!({
        "native_s": sorts.native,
        "default_s": sorts.default,
        "never_s": sorts.never,
        "visit_us": visits,
        "raw_busy_us": busy,
    });
    Ok(table)
}

/// The table `oversubscribed`.
pub fn oversubscribed(place: &Place, repeat: usize) -> Result<Table> {
    let repeat = repeat.min(BUSY_REPEAT_MAX);
    text(place)?;
    let quiet = sort_all(place, 0, false, repeat)?;
    let beside = sort_all(place, BUSY, false, repeat)?;
    let mut table = Table::new(
        "oversubscribed",
        &format!(
            "The sort of `working-set` alone and beside {BUSY} processes that only compute, in \
             seconds. Medians of {repeat}."
        ),
        &HEAD,
    );
    let (native, weft) = (median(&beside.native), median(&beside.default));
    let busy = "native, beside busy";
    table
        .rows
        .push(row("sort, beside busy", weft, busy, native, Goal::None));
    let alone = median(&quiet.default);
    table.rows.push(row(
        "sort, beside busy",
        weft,
        "sort, alone",
        alone,
        Goal::None,
    ));
    let alone = median(&quiet.native);
    table
        .rows
        .push(row(busy, native, "native, alone", alone, Goal::None));
    table.samples = json!({
        "native_s": quiet.native,
        "default_s": quiet.default,
        "busy_native_s": beside.native,
        "busy_default_s": beside.default,
    });
    Ok(table)
}
