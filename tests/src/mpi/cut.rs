//! A host whose cable is pulled for a while, with a program that works and another that talks.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::user::text;
use super::{BOOT_BOUND, Bench, Lacks, PROGRAM_BOUND, ep};
use crate::namespace::{Star, missing};

const LOG_PAIRS: u32 = 30;
/// Ranks on both machines start, say who they are, and end.
pub(super) const TALK: &str =
    "for n in 1 2 3 4; do mpirun -n 2 --map-by node hostname || exit; done";

pub fn short(bench: &Bench<'_>) -> Result<String> {
    cut(bench, Duration::from_secs(2))
}

pub fn long(bench: &Bench<'_>) -> Result<String> {
    cut(bench, Duration::from_secs(20))
}

fn cut(bench: &Bench<'_>, lasts: Duration) -> Result<String> {
    if let Some(why) = missing() {
        bail!(Lacks(why));
    }
    let star = Star::new(3)?;
    let mut user = bench.user()?;
    user.prefix = star.prefix(0);
    let list = user.folder.join("list");
    fs::write(&list, star.list_line(1)? + &star.list_line(2)?)?;
    let (program, size, list) = (user.ep(), LOG_PAIRS.to_string(), list.to_string_lossy());
    let address = Star::address(0);
    let words = [
        "--hosts",
        "2",
        "--vms",
        "2",
        "--list",
        &list,
        "--address",
        &address,
        "--time",
        "10",
        "--",
        &program,
        &size,
    ];
    let mut launcher = user.run("c", &words)?;
    let status = user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    ensure!(
        ["h1", "h2"]
            .iter()
            .all(|host| status.machines_on(host) == 1),
        "{}",
        status.0
    );
    let mut random = bench.random.clone();
    let talked = thread::scope(|scope| -> Result<_> {
        let talks = scope.spawn(|| user.ask(&["ssh", "c", "0", "--", TALK]));
        thread::sleep(Duration::from_millis(random.below(2000)));
        let host = 1 + random.below(2) as usize;
        star.cut(host, true)?;
        thread::sleep(lasts);
        star.cut(host, false)?;
        talks.join().map_err(|_| anyhow::anyhow!("panicked"))?
    })?;
    let said = text(&talked.stdout);
    let of = |name: &str| said.lines().filter(|line| *line == name).count();
    ensure!(
        talked.status.success() && of("vm-0") == 4 && of("vm-1") == 4,
        "talk: {talked:?}; {}",
        launcher.errors()
    );
    launcher.must_end(0, PROGRAM_BOUND).context("EP")?;
    ep::judge(&launcher.output(), LOG_PAIRS, 2)?;
    user.nothing_left(false)?;
    let silent = launcher.errors().matches("does not answer").count();
    Ok(format!("hosts were silent {silent} times"))
}
