//! Runs seeds through the simulator: `weft-dsm-sim --seeds A..B`. Prints how
//! many a second, and the first failure with its last events. Exit code 1 when
//! a seed failed, 2 when the command line is wrong.
//!
//! `weft-dsm-sim --check` runs the large model check (3 nodes, 2 pages) instead.

use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;
use weft_dsm::check::{Bounds, explore};
use weft_dsm::sim::{Outcome, run};
use weft_dsm::{ManagerOf, NodeId};

const USAGE: &str = "usage: weft-dsm-sim --seeds FIRST..END | --check";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--seeds", range] => match parse(range) {
            Some(seeds) => simulate(seeds),
            None => usage(),
        },
        ["--check"] => check(),
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn parse(range: &str) -> Option<Range<u64>> {
    let (first, end) = range.split_once("..")?;
    let range = first.parse().ok()?..end.parse().ok()?;
    (!range.is_empty()).then_some(range)
}

fn simulate(seeds: Range<u64>) -> ExitCode {
    let start = Instant::now();
    let count = seeds.end - seeds.start;
    let mut total = Outcome::default();
    for seed in seeds {
        match run(seed) {
            Ok(outcome) => {
                total.events += outcome.events;
                total.messages += outcome.messages;
                total.losses += outcome.losses;
            }
            Err(failure) => {
                eprintln!("{failure}");
                return ExitCode::FAILURE;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{count} seeds in {seconds:.1} s: {:.0} seeds/s, {} events, {} messages, {} named losses",
        count as f64 / seconds,
        total.events,
        total.messages,
        total.losses
    );
    ExitCode::SUCCESS
}

fn check() -> ExitCode {
    for bounds in Bounds::large(ManagerOf::Fixed(NodeId(0))) {
        let start = Instant::now();
        match explore(&bounds) {
            Ok(explored) => println!("{bounds:?}\n  {explored:?} in {:.1?}", start.elapsed()),
            Err(found) => {
                eprintln!("{bounds:?}\n{}{}", found.trace, found.flaw);
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
