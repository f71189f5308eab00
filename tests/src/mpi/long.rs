//! What takes long: ELViC's scenario, and moves by the hundred.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};

use super::ends::no_overrun;
use super::processes::Observer;
use super::user::Status;
use super::{BOOT_BOUND, Bench, END_BOUND, PROGRAM_BOUND, STEP_BOUND, ep};
use crate::random::Random;

const MOVES: usize = 200;
/// Hosts of the list of the scenario: some are in use, others come.
const HOSTS: u32 = 14;
/// Pairs of EP that two processors do in a second, about, in the machines of several scenarios.
const PAIRS: f64 = 26e6;

/// Machines of two hosts go to a third, again and again: predicted and real times.
pub fn moves(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let program = user.ep();
    let words = [
        "--hosts", "3", "--vms", "2", "--time", "120", "--", &program, "36",
    ];
    let mut launcher = user.run("c", &words)?;
    let mut ratios = Vec::new();
    while ratios.len() < MOVES {
        let status = user.until(&mut launcher, "hosts are there", BOOT_BOUND, |status| {
            status.is_running() && !status.is_moving() && status.hosts().len() == 3
        })?;
        let hosts = status.0["hosts"].as_array().context("no hosts")?;
        let full = hosts.iter().find(|host| {
            let name = host["name"].as_str().unwrap_or("");
            host["leaves"] == false && status.machines_on(name) == 1
        });
        let full = full.with_context(|| format!("no host with one machine: {}", status.0))?;
        let bound = full["leaving_takes"].as_f64().context("no forecast")?;
        let before = status.moves();
        user.must(&["release", full["name"].as_str().unwrap_or("")])?;
        let status = user.until(&mut launcher, "a move", STEP_BOUND, |status| {
            status.moves() > before
        })?;
        let log = status.log();
        let took = log.lines().rev().find_map(|line| {
            let (_, rest) = line.split_once(" after ")?;
            let seconds = rest.split(' ').next()?;
            line.contains(" is on ")
                .then(|| seconds.parse::<f64>().ok())?
        });
        ratios.push(took.with_context(|| format!("no time of a move: {log}"))? / bound);
    }
    user.must(&["exit"])?;
    launcher.must_end(130, END_BOUND)?;
    user.nothing_left(false)?;
    ratios.sort_by(f64::total_cmp);
    let part = |tenths: usize| ratios[(ratios.len() - 1) * tenths / 10];
    let near = ratios
        .iter()
        .filter(|ratio| (0.75..=1.25).contains(*ratio))
        .count();
    Ok(format!(
        "took {:.2} of what nine of ten should not exceed in the median, {:.2} to {:.2} in eight of \
         ten; within 25 %: {near} of {}",
        part(5),
        part(1),
        part(9),
        ratios.len()
    ))
}

/// Eight machines on two hosts, four, eight, three, while one reservation ends each minute.
pub fn scenario(bench: &Bench<'_>) -> Result<String> {
    let (rounds, begun) = (bench.plan.rounds, AtomicUsize::new(0));
    let (context, plan) = (bench.context, bench.plan);
    let share = || -> Result<Vec<String>> {
        let bench = Bench {
            context,
            plan,
            random: Random::new(context.seed),
        };
        let mut notes = Vec::new();
        while begun.fetch_add(1, Ordering::Relaxed) < rounds {
            notes.push(one_round(&bench)?);
        }
        Ok(notes)
    };
    let notes: Vec<Vec<String>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.at_once).map(|_| scope.spawn(share)).collect();
        let ends = threads.into_iter().map(ScopedJoinHandle::join);
        let ends = ends.map(|end| end.map_err(|_| anyhow!("a round has panicked"))?);
        ends.collect::<Result<_>>()
    })?;
    Ok(notes.concat().join("; "))
}

fn one_round(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let lasts = Duration::from_secs(bench.plan.seconds);
    let minute = (bench.plan.seconds / 30).max(20);
    let list = user.folder.join("list");
    let hosts =
        (1..=u64::from(HOSTS)).map(|host| format!("h{host} max={}\n", minute * (1 + host % 8)));
    fs::write(&list, hosts.collect::<String>())?;
    let observer = Observer::start(&user.tag, &user.state());
    // All who take part work while they are there; what is left of it at the end is done then.
    let size = (bench.plan.seconds as f64 * PAIRS / bench.plan.at_once as f64)
        .log2()
        .ceil()
        .clamp(26.0, 36.0) as u32;
    let (program, size_text, list) = (user.ep(), size.to_string(), list.to_string_lossy());
    let words = [
        "--hosts",
        "2",
        "--vms",
        "8",
        "--list",
        &list,
        "--address",
        "127.0.0.1",
        "--time",
        "120",
        "--margin",
        "5",
        "--",
        &program,
        &size_text,
    ];
    let mut launcher = user.run("c", &words)?;
    let begun = Instant::now();
    user.until(&mut launcher, "it runs", BOOT_BOUND, Status::is_running)?;
    let mut released = false;
    for (part, count) in [(1, "4"), (3, "8"), (6, "3")] {
        while begun.elapsed() < lasts * part / 10 && launcher.code()?.is_none() {
            thread::sleep(Duration::from_millis(200));
        }
        if launcher.code()?.is_some() {
            break;
        }
        user.must(&[if count == "3" { "shrink" } else { "hosts" }, count])?;
        if count == "8" {
            let status = user.until(&mut launcher, "a host", STEP_BOUND, |status| {
                !status.hosts().is_empty()
            })?;
            let answered = user.ask(&["release", status.hosts()[0]])?;
            released = answered.status.success();
        }
    }
    launcher.must_end(0, lasts * 3 + PROGRAM_BOUND)?;
    ep::judge(&launcher.output(), size, 8)?;
    user.nothing_left(false)?;
    ensure!(released, "no host was released: {}", launcher.errors());
    let note = no_overrun(&observer.seen())?;
    let moves = launcher.errors().matches(" moves from ").count();
    Ok(format!(
        "{:.0} s, {note}, {moves} moves",
        begun.elapsed().as_secs_f64()
    ))
}
