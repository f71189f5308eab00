//! How long a vCPU that moved is slower, until its pages have followed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::guest::{Guest, Line};

use super::aggregate::{Where, number_after};
use crate::program::Place;
use crate::raw::Raw;
use crate::results::{Table, digits, median};

/// Working sets, in MB of 1,000,000 bytes.
const MEGABYTES: [u32; 3] = [1, 10, 100];
/// Moves of a run, to and fro.
const MOVES: usize = 6;
/// From the program's start to the first move, from one to the next, and from the last to the
/// end: longer than the largest working set needs.
const BETWEEN: Duration = Duration::from_secs(3);
const SECONDS: u32 = 22;
const BOUND: Duration = Duration::from_secs(120);

/// Slots are milliseconds. The median of this number of slots before a move is the speed before
/// it, and that before the next move the speed in the end.
const SLOTS_STEADY: usize = 500;
/// Slots that must together be as fast as [`BACK`] says.
const SLOTS_BACK: usize = 10;
/// Of the speed before the move, or of that in the end if it is less.
const BACK: f64 = 0.9;
/// Of the speed before: what is slower than that in a slot has moved.
const SLOWED: f64 = 0.5;
/// How exactly the guest's clock is known here, in milliseconds.
const CLOCK_MS: f64 = 3.0;

type Samples = BTreeMap<String, Vec<f64>>;

/// Adds what one run of each working set shows.
pub(super) fn measure(
    place: &Place,
    images: &Images,
    round: usize,
    samples: &mut Samples,
) -> Result<()> {
    let small = images.small(&place.weft)?;
    let small = small.with_program(&place.programs.join("pace"), &place.work)?;
    for megabytes in MEGABYTES {
        let (pace, moves) = run(place, &small, round, megabytes)?;
        for (number, (from, until)) in moves.iter().enumerate() {
            let next = moves.get(number + 1).map(|(from, _)| *from);
            let Regained {
                before,
                after,
                slower_ms,
            } = pace.regained(*from, *until, next)?;
            let mut add = |what: &str, value| {
                let key = format!("{megabytes} {what}");
                samples.entry(key).or_default().push(value);
            };
            add("before_steps_per_ms", before);
            add("after_steps_per_ms", after);
            add("slower_ms", slower_ms);
        }
    }
    Ok(())
}

/// When moves were asked for and done: milliseconds since the program began.
type Asked = Vec<(f64, f64)>;

/// The program runs on vCPU 1, which starts on node 1.
fn run(place: &Place, small: &Boot, round: usize, megabytes: u32) -> Result<(Pace, Asked)> {
    let script = format!("taskset 2 /pace {megabytes} {SECONDS}");
    let mut boot = Where::TwoNodes.boot(&small.running(&script));
    boot.memory_mib = 768;
    // The last machine may not have gone yet.
    let name = format!("pace-{round}-{megabytes}");
    boot.options.extend(["--name".into(), name.clone()]);
    let mut command = boot.command(Monitor::Soft);
    let started = Instant::now();
    let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
    let at_work = guest.wait_for("pace: at work", BOUND);
    ensure!(at_work.is_some(), "the guest does not come up");
    let mut moves = Vec::new();
    for number in 0..MOVES {
        std::thread::sleep(BETWEEN);
        let to = (number % 2).to_string();
        let asked = started.elapsed();
        place.ask_machine(&["move", &name, "--vcpu", "1", "--to", &to])?;
        moves.push((asked, started.elapsed()));
    }
    let ended = guest.finish(BOUND)?;
    let pace = Pace::of(&ended.lines).with_context(|| ended.tail(12))?;
    let began_ms = pace.began_ms;
    let in_guest = move |at: Duration| at.as_secs_f64() * 1e3 - began_ms;
    let moves = moves.into_iter();
    let moves = moves.map(|(asked, done)| (in_guest(asked), in_guest(done)));
    Ok((pace, moves.collect()))
}

/// What the program says.
struct Pace {
    /// When it began, on the clock of the console's lines.
    began_ms: f64,
    /// In each millisecond since.
    steps: Vec<f64>,
}

/// What a move did to it.
#[derive(Debug, PartialEq)]
struct Regained {
    /// Steps in a millisecond before the move.
    before: f64,
    /// In the end.
    after: f64,
    slower_ms: f64,
}

impl Pace {
    fn of(lines: &[Line]) -> Result<Pace> {
        ensure!(
            lines.iter().any(|line| line.text.contains("pace: done")),
            "the program did not end"
        );
        // The line that came soonest tells best how the two clocks differ.
        let stamps = lines.iter().filter_map(|line| {
            let guest_us = number_after(&line.text, "pace: now")?;
            Some(line.at.as_secs_f64() * 1e3 - guest_us / 1e3)
        });
        let differ_ms = stamps.min_by(f64::total_cmp).context("no clock")?;
        let of = |line: &Line| number_after(&line.text, "pace: began at");
        let began_us = lines.iter().find_map(of).context("no beginning")?;
        let mut steps = Vec::new();
        for line in lines {
            let Some((_, numbered)) = line.text.split_once("pace: ") else {
                continue;
            };
            let Some((first, counts)) = numbered.split_once(": ") else {
                continue;
            };
            ensure!(first.parse() == Ok(steps.len()), "a line is missing");
            for count in counts.split_whitespace() {
                steps.push(count.parse().context("not a count")?);
            }
        }
        Ok(Pace {
            began_ms: began_us / 1e3 + differ_ms,
            steps,
        })
    }

    /// `from`, `until`: when the move was asked for and done; `next`: when the next one was
    /// asked for, if there was one.
    fn regained(&self, from: f64, until: f64, next: Option<f64>) -> Result<Regained> {
        let begin = |asked: f64| (asked - CLOCK_MS).max(0.0) as usize;
        let from = begin(from);
        let until = (until + CLOCK_MS) as usize;
        let end = next.map_or(self.steps.len(), begin);
        let before = self.steady(from).context("it moved too early")?;
        let after = self.steady(end).context("it ended too early")?;
        let moved = self.steps.get(from..end).context("it moved too late")?;
        let searched = moved.iter().take(until - from);
        let mut searched = searched.map(|count| *count < SLOWED * before);
        let Some(slowed) = searched.position(|is_slower| is_slower) else {
            let slower_ms = 0.0;
            return Ok(Regained {
                before,
                after,
                slower_ms,
            });
        };
        let enough = BACK * before.min(after) * SLOTS_BACK as f64;
        let mut windows = moved[slowed..].windows(SLOTS_BACK);
        let slower = windows.position(|slots| slots.iter().sum::<f64>() >= enough);
        Ok(Regained {
            before,
            after,
            slower_ms: slower.context("it never was as fast again")? as f64,
        })
    }

    /// The median of the slots before this one.
    fn steady(&self, end: usize) -> Option<f64> {
        let first = end.checked_sub(SLOTS_STEADY)?;
        median(self.steps.get(first..end)?)
    }
}

/// The table `vm-vcpu-move-pages`.
pub(super) fn table(samples: &Samples, raw: &[Raw]) -> Table {
    let about = format!(
        "How long the vCPU is slower until its pages have followed. On vCPU 1 of the same Linux (768 MiB) a program goes over a working set at full speed: a step takes a page at random, reads a word of each of its cache lines and writes one. It counts its steps in each millisecond of `CLOCK_MONOTONIC`, while the vCPU moves to and fro, {MOVES} times a run; medians of all moves. *Slower*: from the first millisecond with less than half of the median of the {SLOTS_STEADY} ms before the move, to the first {SLOTS_BACK} ms that have 90 % of it, or of the speed in the end if that is less (the median of the {SLOTS_STEADY} ms before the next move, *after*). *Raw*: the bytes of the working set, divided by the throughput of one TCP stream between two processes in the same run: from a warm buffer into another, and from memory to memory that was never touched, as pages go."
    );
    let head = [
        "working set",
        "steps in 1 ms, before",
        "after",
        "slower, pages follow",
        "raw, warm",
        "ratio",
        "raw, memory to memory",
        "ratio",
    ];
    let mut table = Table::new("vm-vcpu-move-pages", &about, &head);
    table.command = "make bench BENCHMARKS=vm-vcpu-move".into();
    let throughput = |of: fn(&Raw) -> f64| median(&raw.iter().map(of).collect::<Vec<_>>());
    let streams = [
        throughput(|raw| raw.warm_bytes_per_s),
        throughput(|raw| raw.cold_bytes_per_s),
    ];
    for megabytes in MEGABYTES {
        let of = |what: &str| {
            let key = format!("{megabytes} {what}");
            median(samples.get(&key).map_or(&[][..], Vec::as_slice))
        };
        let slower_ms = of("slower_ms");
        let mut row = vec![
            format!("{megabytes} MB"),
            digits(of("before_steps_per_ms")),
            digits(of("after_steps_per_ms")),
            format!("{} ms", digits(slower_ms)),
        ];
        for stream in streams {
            let raw_ms = stream.map(|stream| f64::from(megabytes) * 1e9 / stream);
            let ratio = slower_ms.zip(raw_ms).map(|(slower, raw)| slower / raw);
            row.extend([format!("{} ms", digits(raw_ms)), digits(ratio)]);
        }
        table.rows.push(row);
    }
    let streams = |of: fn(&Raw) -> f64| raw.iter().map(of).collect::<Vec<_>>();
    table.samples = json!({
        "pace": samples,
        "warm_bytes_per_s": streams(|raw| raw.warm_bytes_per_s),
        "cold_bytes_per_s": streams(|raw| raw.cold_bytes_per_s),
    });
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(at_ms: u64, text: &str) -> Line {
        Line {
            at: Duration::from_millis(at_ms),
            text: text.into(),
            is_whole: true,
        }
    }

    #[test]
    fn the_programs_lines_are_read() {
        let lines = [
            line(110, "pace: now 5000 us"),
            line(125, "pace: now 25000 us"),
            line(130, "pace: at work"),
            line(900, "pace: began at 31000 us"),
            line(901, "pace: 0: 7 8"),
            line(901, "pace: 2: 9"),
            line(902, "pace: done"),
        ];
        let pace = Pace::of(&lines).unwrap();
        assert_eq!(pace.began_ms, 131.0);
        assert_eq!(pace.steps, [7.0, 8.0, 9.0]);
        assert!(Pace::of(&lines[..6]).is_err());
        let without_a_line = [&lines[..4], &lines[5..]].concat();
        assert!(Pace::of(&without_a_line).is_err());
    }

    #[test]
    fn a_move_is_over_when_the_speed_is_back() {
        let mut steps = vec![100.0; 2000];
        // Another program had the processor, long before.
        steps[300..305].fill(0.0);
        let pace = |steps: &[f64]| Pace {
            began_ms: 0.0,
            steps: steps.to_vec(),
        };
        let regained = |steps: &[f64]| pace(steps).regained(600.0, 606.0, None);
        let slower_ms = |steps: &[f64]| regained(steps).unwrap().slower_ms;
        assert_eq!(slower_ms(&steps), 0.0);
        steps[604..624].fill(10.0);
        steps[624..630].fill(80.0);
        // With five slots of 80, ten have 900 steps.
        assert_eq!(slower_ms(&steps), 21.0);
        steps[624..630].fill(70.0);
        assert_eq!(slower_ms(&steps), 23.0);
        // What it has in the end counts if that is less.
        steps[624..].fill(80.0);
        let slower = regained(&steps).unwrap();
        assert_eq!((slower.before, slower.after), (100.0, 80.0));
        assert_eq!(slower.slower_ms, 19.0);
        assert!(pace(&steps).regained(100.0, 106.0, None).is_err());
        assert!(pace(&steps).regained(600.0, 606.0, Some(620.0)).is_err());
    }
}
