//! No host is left in time: machines are saved, or cannot be.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::processes::Observer;
use super::user::{Launcher, User};
use super::{BOOT_BOUND, Bench, END_BOUND, Lacks, PROGRAM_BOUND, ep};

/// On two processors some 30 s; the list's only host is there for 24 s, and is left 10 s before.
const LOG_PAIRS: u32 = 30;
/// Longer than any host is there.
const LOG_PAIRS_ENDLESS: u32 = 36;

fn start(user: &User, seconds: u32, saves: &str, log_pairs: u32) -> Result<Launcher> {
    let list = user.folder.join("list");
    fs::write(&list, format!("one max={seconds}\n"))?;
    let (program, list) = (user.ep(), list.to_string_lossy());
    user.run(
        "c",
        &[
            "--vms",
            "2",
            "--list",
            &list,
            "--save-to",
            saves,
            "--margin",
            "5",
            "--time",
            "5",
            "--address",
            "127.0.0.1",
            "--",
            &program,
            &log_pairs.to_string(),
        ],
    )
}

/// Saved as often as it takes, and the result is right.
pub fn resume(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let observer = Observer::start(&user.tag, &user.state());
    let saves = user.folder.join("saves");
    let mut launcher = start(&user, 24, &saves.to_string_lossy(), LOG_PAIRS)?;
    launcher.must_end(121, PROGRAM_BOUND)?;
    let mut output = launcher.output();
    never_answers(&user)?;
    // On two hosts instead of one.
    let list = user.folder.join("two");
    fs::write(&list, "two max=24\nthree max=24\n")?;
    let list = list.to_string_lossy();
    let again = ["resume", "c", "--hosts", "2", "--list", &list];
    interrupted_while_booting(&user, &again)?;
    launcher = user.launch("c", &again)?;
    let mut times = 1;
    loop {
        let code = launcher.ends_within(PROGRAM_BOUND)?;
        output += &launcher.output();
        if code == 0 {
            break;
        }
        ensure!(code == 121, "{code}: {}", launcher.errors());
        launcher.says("weft mpi resume c")?;
        user.nothing_left(true)?;
        user.refused(&["attach", "c"], 1, "are saved: `weft mpi resume c`")?;
        times += 1;
        ensure!(times < 15, "it is saved again and again");
        launcher = user.launch("c", &["resume", "c"])?;
    }
    ep::judge(&output, LOG_PAIRS, 2)?;
    let overruns = observer.seen().overruns;
    ensure!(overruns.is_empty(), "{}", overruns.join("\n"));
    user.nothing_left(false)?;
    Ok(format!("saved {times} times"))
}

/// Goes on on a host whose agent never comes, and is interrupted: the machines stay saved.
fn never_answers(user: &User) -> Result<()> {
    let list = user.folder.join("never");
    fs::write(&list, "silent tail -n0 -f --\n")?;
    let list = list.to_string_lossy();
    user.refused(
        &["resume", "c", "--batch", "x"],
        1,
        "--batch is for a cluster on Slurm or Grid Engine",
    )?;
    let mut launcher = user.launch("c", &["resume", "c", "--list", &list])?;
    user.until(
        &mut launcher,
        "its host was asked for",
        BOOT_BOUND,
        |status| {
            status.phase() == "gathering" && !status.0["hosts"].to_string().contains("\"job\":null")
        },
    )?;
    kill(Pid::from_raw(launcher.pid()), Signal::SIGINT)?;
    launcher.must_end(130, END_BOUND)?;
    launcher.says("all machines are saved: `weft mpi resume c`")?;
    user.nothing_left(true)
}

/// Interrupted before the program has gone on: the machines stay saved.
fn interrupted_while_booting(user: &User, again: &[&str]) -> Result<()> {
    let mut launcher = user.launch("c", again)?;
    user.until(&mut launcher, "machines go on", BOOT_BOUND, |status| {
        status.phase() == "booting"
    })?;
    kill(Pid::from_raw(launcher.pid()), Signal::SIGINT)?;
    launcher.must_end(130, END_BOUND)?;
    launcher.says("all machines are saved: `weft mpi resume c`")?;
    user.nothing_left(true)
}

/// A file system that is mounted for a check.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Machines that cannot be saved go on for as long as their host is there, and then are lost.
pub fn full(bench: &Bench<'_>) -> Result<String> {
    bench.needs_root()?;
    let user = bench.user()?;
    let saves = user.folder.join("saves");
    fs::create_dir(&saves)?;
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "none"])
        .arg(&saves)
        .status()?;
    if !mounted.success() {
        bail!(Lacks("a tmpfs that it may mount".into()));
    }
    let _mounted = Mounted(saves.clone());
    let observer = Observer::start(&user.tag, &user.state());
    let mut launcher = start(&user, 24, &saves.to_string_lossy(), LOG_PAIRS_ENDLESS)?;
    user.until(&mut launcher, "a save that failed", BOOT_BOUND, |status| {
        status.log().contains("was not saved: ")
    })?;
    launcher.must_end(122, END_BOUND + Duration::from_secs(10))?;
    launcher.says("No space left on device")?;
    launcher.says(" is lost: ")?;
    let seen = observer.seen();
    ensure!(seen.overruns.is_empty(), "{}", seen.overruns.join("\n"));
    let left = seen.jobs.values().filter_map(|job| job.machines_until);
    let left = left.fold(f64::MAX, f64::min);
    ensure!(
        left < 4.0,
        "machines were gone {left:.1} s before their host's end"
    );
    user.nothing_left(true)?;
    user.must(&["forget", "c"])?;
    // What could not be written whole is not kept.
    let rest: Vec<_> = fs::read_dir(&saves)?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    ensure!(rest.is_empty(), "{rest:?}");
    Ok(format!("machines went on until {left:.1} s before the end"))
}
