//! Runs seeds through the simulator: `weft-dsm-sim --seeds A..B`. Prints how
//! many a second, and the first failure with its last events. Exit code 1 when
//! a seed failed, 2 when the command line is wrong.
//!
//! `weft-dsm-sim --controller A..B` runs the simulator of controllers: operations outside
//! the lock, frames that leave after it, budgets, subscriptions.
//!
//! `weft-dsm-sim --check` runs the large model check (3 nodes, 2 pages) instead, from the
//! search of that number on (0 is the first);
//! `weft-dsm-sim --speed` measures what one event costs on the hot paths.

use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;
use weft_dsm::check::{Bounds, explore};
use weft_dsm::controller;
use weft_dsm::sim::{Outcome, run};
use weft_dsm::{Access, Action, Config, Event, ManagerOf, Node, NodeId, Page, VecTables};

const USAGE: &str =
    "usage: weft-dsm-sim --seeds FIRST..END | --controller FIRST..END | --check [SEARCH] | --speed";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--seeds", range] => match parse(range) {
            Some(seeds) => simulate(seeds),
            None => usage(),
        },
        ["--controller", range] => match parse(range) {
            Some(seeds) => simulate_controllers(seeds),
            None => usage(),
        },
        ["--check"] => check(0),
        ["--check", first] => match first.parse() {
            Ok(first) => check(first),
            Err(_) => usage(),
        },
        ["--speed"] => speed(),
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
                total.standing += outcome.standing;
                total.handed_over += outcome.handed_over;
            }
            Err(failure) => {
                eprintln!("{failure}");
                return ExitCode::FAILURE;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{count} seeds in {seconds:.1} s: {:.0} seeds/s, {} events, {} messages, {} named losses, \
         {} standing requests, {} managers handed over",
        count as f64 / seconds,
        total.events,
        total.messages,
        total.losses,
        total.standing,
        total.handed_over
    );
    ExitCode::SUCCESS
}

fn simulate_controllers(seeds: Range<u64>) -> ExitCode {
    let start = Instant::now();
    let count = seeds.end - seeds.start;
    let mut total = controller::sim::Outcome::default();
    for seed in seeds {
        match controller::sim::run(seed) {
            Ok(outcome) => total.add(&outcome),
            Err(failure) => {
                eprintln!("{failure}");
                return ExitCode::FAILURE;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{count} seeds in {seconds:.1} s: {total:?}");
    ExitCode::SUCCESS
}

fn check(first: usize) -> ExitCode {
    let searches = Bounds::large(ManagerOf::Fixed(NodeId(0)));
    for bounds in searches.into_iter().skip(first) {
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

const SPEED_PAGES: u64 = 100_000;

/// Home and one other node take all pages from each other, by turns, for writing.
fn speed() -> ExitCode {
    let node = |me: u8| {
        let config = Config::new(NodeId(me), 2, ManagerOf::Fixed(NodeId(0)));
        Node::new(&config, VecTables::new(SPEED_PAGES as usize))
    };
    let mut nodes = [node(0), node(1)];
    let mut best = [f64::INFINITY; 2];
    for round in 0..20 {
        let asker = round % 2;
        let start = Instant::now();
        let mut events = 0;
        for page in 0..SPEED_PAGES {
            events += take(&mut nodes, asker, Page(page));
        }
        let each = start.elapsed().as_secs_f64() * 1e9 / events as f64;
        best[asker] = best[asker].min(each);
    }
    println!("home takes from a slice: {:.1} ns per event", best[0]);
    println!("a slice takes from home: {:.1} ns per event", best[1]);
    ExitCode::SUCCESS
}

/// One write fault and the messages it causes. Returns how many events that was.
fn take(nodes: &mut [Node<VecTables>; 2], asker: usize, page: Page) -> u32 {
    let mut at = asker;
    let mut event = Some(Event::Fault {
        page,
        access: Access::Write,
        ahead: false,
    });
    let mut events = 0;
    while let Some(now) = event.take() {
        events += 1;
        let mut next = None;
        nodes[at].step(now, &mut |action| {
            if let Action::Send { to, message } | Action::Give { to, message, .. } = action {
                next = Some((to, message));
            }
        });
        if let Some((to, message)) = next {
            let from = NodeId(at as u8);
            at = to.index();
            event = Some(Event::Message { from, message });
        }
    }
    events
}
