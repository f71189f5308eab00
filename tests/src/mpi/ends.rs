//! Reservations that end one after the other, for two minutes.

use std::fs;

use anyhow::{Result, ensure};

use super::processes::{Observer, Seen};
use super::{Bench, PROGRAM_BOUND, ep};

const LOG_PAIRS: u32 = 32;

pub fn all(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let list = user.folder.join("list");
    let mut random = bench.random.clone();
    let hosts = (1..=6).map(|host| format!("h{host} max={}\n", 20 + random.below(21)));
    fs::write(&list, hosts.collect::<String>())?;
    let observer = Observer::start(&user.tag, &user.state());
    let (program, size, list) = (user.ep(), LOG_PAIRS.to_string(), list.to_string_lossy());
    let words = [
        "--hosts",
        "2",
        "--vms",
        "4",
        "--list",
        &list,
        "--address",
        "127.0.0.1",
        "--time",
        "1.5",
        "--margin",
        "5",
        "--",
        &program,
        &size,
    ];
    let mut launcher = user.run("c", &words)?;
    launcher.must_end(0, PROGRAM_BOUND * 2)?;
    ep::judge(&launcher.output(), LOG_PAIRS, 4)?;
    user.nothing_left(false)?;
    let note = no_overrun(&observer.seen())?;
    let moves = launcher.errors().matches(" moves from ").count();
    Ok(format!("{note}, {moves} moves"))
}

/// No process of a job lived longer than the job.
pub fn no_overrun(seen: &Seen) -> Result<String> {
    ensure!(
        seen.overruns.is_empty(),
        "overrun:\n{}",
        seen.overruns.join("\n")
    );
    let left = seen.jobs.values().filter_map(|job| job.machines_until);
    let least = left.fold(f64::MAX, f64::min);
    let count = seen.jobs.len();
    ensure!(count > 1, "only {count} reservations");
    Ok(format!(
        "{count} reservations, the last machine left {least:.1} s before an end"
    ))
}
