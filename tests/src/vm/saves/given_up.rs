//! Saves that are given up at random moments, by Ctrl-C and by `kill -9`: no set, and the machine
//! continues as if nothing had been.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{
    BOUND, BUSY, Bench, Images, all_right, begin, continue_all, is_running, number, on_one,
    refusal, refused_with, report, start, wait_until,
};
use crate::random::Random;

/// Longest time until a save that was given up is over.
const OVER: Duration = Duration::from_secs(3);

/// What came of a save that was given up.
#[derive(Debug, PartialEq)]
enum Gone {
    /// It was over before.
    Complete,
    /// There is no set.
    Nothing,
    /// It was refused, because the one before was not over.
    Refused,
}

/// Has a save end by a signal after some time.
fn give_up(bench: &Bench, directory: &Path, signal: Signal, after: Duration) -> Result<Gone> {
    let saving = begin(bench, directory, &["--live"])?;
    thread::sleep(after);
    kill(Pid::from_raw(saving.id() as i32), signal)?;
    let output = saving.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let has_manifest = directory.join("manifest").exists();
    if output.status.success() || has_manifest {
        let said = refusal(bench, directory, &["--cpus", "7"])?;
        ensure!(said.contains("2 vCPUs, not 7"), "{said}");
        return Ok(Gone::Complete);
    }
    if BUSY.iter().any(|words| said.contains(words)) {
        return Ok(Gone::Refused);
    }
    // By the signal itself, or by what the command does with it.
    let is_killed = output.status.code().is_none();
    ensure!(
        is_killed || said.contains("the save was given up"),
        "{}: {said}",
        output.status
    );
    ensure!(
        is_killed || !directory.exists(),
        "its files were not removed"
    );
    Ok(Gone::Nothing)
}

/// Repeats what a save that is not over refuses.
fn once_over(mut attempt: impl FnMut() -> Result<String>) -> Result<()> {
    let until = Instant::now() + OVER;
    while let Err(error) = attempt() {
        let said = format!("{error:#}");
        let is_busy = said.contains("is being saved") || said.contains("under way");
        ensure!(is_busy && Instant::now() < until, "{said}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The machine can be changed and saved afterwards.
pub(super) fn given_up(bench: &Bench, images: &Images) -> Result<String> {
    const TIMES: usize = 10;
    let mut random = Random::new(bench.context.seed ^ 0x91fe);
    let options = "--nodes 2 --memory 768M";
    let mut guest = start(bench, images, options, &on_one(450))?;
    let set = |name: &str| bench.directory.join(name);
    let whole = report(bench, &set("whole"), &["--live"])?;
    // The rest of the time the files are flushed, and cannot be given up.
    let mut written_us = (0.6e6 * number(&whole, "seconds")?) as u64;
    fs::remove_dir_all(set("whole"))?;
    let (mut gone, mut complete, mut refused) = (0, 0, 0);
    while gone < TIMES {
        // The command looks for Ctrl-C four times a second.
        let signal = match (gone + complete) % 4 {
            0 => Signal::SIGINT,
            _ => Signal::SIGKILL,
        };
        let after = Duration::from_micros(random.below(written_us));
        let directory = set("given-up");
        match give_up(bench, &directory, signal, after)? {
            Gone::Nothing => gone += 1,
            Gone::Complete => {
                complete += 1;
                // The first save may have taken longer than all others.
                written_us = written_us * 3 / 4;
            }
            Gone::Refused => refused += 1,
        }
        ensure!(refused < 10 * TIMES, "saves that were given up go on");
        ensure!(complete <= TIMES, "{complete} came too late");
        // Files that nobody removes when the command is killed.
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        wait_until("the machine runs", || is_running(bench))?;
    }
    once_over(|| bench.ask(&["vm", "grow", "m", "--memory", "64M"]))?;
    bench.ask(&["vm", "release", "m", "2"])?;
    report(bench, &set("last"), &["--live"])?;
    guest.tell()?;
    continue_all(bench, &[(&set("last"), "2")], 1)?;
    all_right(&guest.finish(BOUND)?, 1)?;
    fs::remove_dir_all(set("last"))?;
    Ok(format!(
        "{gone} were given up, {complete} were complete; {refused} came too early after one"
    ))
}

/// Saves that are refused, because one is under way, and killed while they wait for the answer.
pub(super) fn rivals(bench: &Bench, images: &Images) -> Result<String> {
    const ROUNDS: usize = 6;
    const RIVALS: usize = 6;
    let mut random = Random::new(bench.context.seed ^ 0x714a);
    let options = "--nodes 2 --memory 512M";
    let mut guest = start(bench, images, options, &on_one(200))?;
    let set = |name: &str| bench.directory.join(name);
    let (mut complete, mut refused) = (0, 0);
    while complete < ROUNDS {
        let saving = begin(bench, &set("set"), &["--live"])?;
        let begin_rival = |number| begin(bench, &set(&format!("rival{number}")), &["--live"]);
        let others = (0..RIVALS)
            .map(begin_rival)
            .collect::<Result<Vec<Child>>>()?;
        for mut other in others {
            thread::sleep(Duration::from_millis(random.below(10)));
            // It may have ended.
            let _ = other.kill();
            other.wait()?;
        }
        let output = saving.wait_with_output()?;
        match output.status.success() {
            true => complete += 1,
            // One of the others came first.
            false => {
                refused_with(&output, &BUSY)?;
                refused += 1;
                ensure!(refused < 10 * ROUNDS, "it is never its turn");
            }
        }
        let rivals = (0..RIVALS).map(|number| set(&format!("rival{number}")));
        let last = (complete < ROUNDS).then(|| set("set"));
        for directory in rivals.chain(last).filter(|set| set.exists()) {
            fs::remove_dir_all(directory)?;
        }
    }
    guest.tell()?;
    continue_all(bench, &[(&set("set"), "1")], 1)?;
    all_right(&guest.finish(BOUND)?, 1)?;
    fs::remove_dir_all(set("set"))?;
    Ok(format!("{complete} complete, {refused} refused"))
}
