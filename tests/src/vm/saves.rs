//! `weft vm save --live` and `--since`, of a Linux whose programs write to their memory all the
//! time and check every page at the end: on the machine that was saved, and on each one that
//! continues from a checkpoint.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::checkpoints::{refusal, restore, save};
use super::{BOUND, Bench, Runner, code, ended_with, heed, wait_until};
use crate::boot::{Images, SMALL};
use crate::context::{kvm_missing, works};
use crate::guest::{Ended, Guest, until_told};
use crate::processes;
use crate::random::Random;

/// The guest's program has filled its memory.
const AT_WORK: &str = "dirty: at work";
/// All of its pages are as it wrote them.
const RIGHT: &str = "dirty: right";
/// Of a command that refuses, and of one whose line cannot be read.
const EXIT_REFUSED: i32 = 1;
const EXIT_USAGE: i32 = 2;
/// Longest time until a save that was given up is over.
const OVER: Duration = Duration::from_secs(3);
/// Why a machine that is being saved refuses another save.
const BUSY: [&str; 2] = ["is being saved already", "save is under way"];

type Test = fn(&Bench, &Images) -> Result<String>;

const TESTS: [(&str, Test); 9] = [
    (
        "what changed, and again, on two nodes, continues on 1 to 3",
        increments,
    ),
    ("a chain of ten", chain),
    ("what changed since it was restored", since_restored),
    ("given up at any moment", given_up),
    ("what is refused meanwhile changes nothing", meanwhile),
    ("another save meanwhile changes nothing", twice),
    ("others that are given up meanwhile change nothing", rivals),
    ("a machine that ends meanwhile", ends),
    ("vCPUs that move meanwhile", moves),
];
const FULL_DISK: &str = "vm, soft, live save: a full disk";
const UNABLE: &str = "live save: a machine that cannot";

/// All tests, on the software vCPU, and what KVM refuses.
pub(super) fn run(runner: &Runner<'_>) {
    let missing = || runner.images.missing(&SMALL);
    for (name, test) in TESTS {
        let name = format!("vm, soft, live save: {name}");
        runner.run("soft", &name, missing(), |bench| test(bench, runner.images));
    }
    let missing = missing().or_else(tmpfs_missing);
    runner.run("soft", FULL_DISK, missing, |bench| {
        full_disk(bench, runner.images)
    });
    for (back_end, missing) in [("soft", None), ("kvm", kvm_missing())] {
        runner.run(
            back_end,
            &format!("vm, {back_end}, {UNABLE}"),
            missing,
            unable,
        );
    }
}

/// Two programs, one on each vCPU, that write to half of so much memory each, for some seconds
/// again and again.
fn on_both(megabytes: u32, pages_per_s: u32, seconds: u32) -> String {
    let one = format!("dirty {} {} {seconds}", megabytes / 2, pages_per_s / 2);
    let on = [1, 2].map(|mask| format!("taskset {mask} {one}"));
    until_told(&on.each_ref().map(String::as_str))
}

/// One program.
fn on_one(megabytes: u32) -> String {
    until_told(&[&format!("dirty {megabytes} 2000 2")])
}

/// A machine `m` whose program is at work.
fn start(bench: &Bench, images: &Images, options: &str, script: &str) -> Result<Guest> {
    let [kernel, initrd] = SMALL;
    let mut command = bench.weft(&["vm", "run", "--backend", "soft", "--name", "m"]);
    command
        .args(["--cpus", "2", "--late-cpus", "no"])
        .args(options.split(' '))
        .arg("--kernel")
        .arg(images.file(kernel)?)
        .arg("--initrd")
        .arg(images.file(initrd)?)
        .arg("--cmdline")
        .arg(format!("console=ttyS0 quiet weft.run=\"{script}\""));
    let mut guest = Guest::start(&mut command)?;
    if guest.wait_for(AT_WORK, BOUND).is_none() {
        let ended = guest.finish(Duration::ZERO)?;
        bail!("no `{AT_WORK}`: {}\n{}", ended.stderr, ended.tail(20));
    }
    Ok(guest)
}

/// Saves `m`: the report.
fn report(bench: &Bench, directory: &Path, options: &[&str]) -> Result<Value> {
    let said = save(bench, "m", directory, &[options, &["--json"]].concat())?;
    Ok(serde_json::from_str(&said)?)
}

/// The same, by what changed since another set.
fn since(bench: &Bench, [base, directory]: [&Path; 2], options: &[&str]) -> Result<Value> {
    let base = base.to_string_lossy();
    report(bench, directory, &[options, &["--since", &base]].concat())
}

fn number(report: &Value, field: &str) -> Result<f64> {
    let number = report[field].as_f64();
    number.with_context(|| format!("no {field} in {report}"))
}

fn pause_ms(report: &Value) -> Result<f64> {
    Ok(1e3 * number(report, "pause_seconds")?)
}

/// Fails unless all pages of `programs` programs were right, each time.
fn all_right(ended: &Ended, programs: usize) -> Result<()> {
    ended_with(ended, 0, &["powered off by the guest"])?;
    let right = runs(ended);
    ensure!(
        right >= programs && ended.all_succeeded() && ended.line("dirty: wrong").is_none(),
        "{programs} programs found their pages right {right} times: {}",
        ended.console()
    );
    Ok(())
}

/// How often a program found its pages right.
fn runs(ended: &Ended) -> usize {
    ended.console().matches(RIGHT).count()
}

/// Continues from each set, on its number of nodes, all at the same time: the guests are right.
fn continue_all(bench: &Bench, sets: &[(&Path, &str)], programs: usize) -> Result<()> {
    let start = |(set, nodes): &(&Path, &str)| {
        let options: &[&str] = match *nodes {
            "1" => &[],
            nodes => &["--nodes", nodes],
        };
        let name = set.file_name().and_then(OsStr::to_str);
        restore(bench, set, name.context("a set has a name")?, options)
    };
    let mut guests = sets.iter().map(start).collect::<Result<Vec<Guest>>>()?;
    guests.iter_mut().try_for_each(Guest::tell)?;
    for (guest, (set, nodes)) in guests.into_iter().zip(sets) {
        let mut ended = guest.finish(BOUND)?;
        if ended.ended_well() && runs(&ended) < programs {
            // The set is of a moment between two runs of a program.
            let mut again = start(&(*set, *nodes))?;
            again.wait_for(RIGHT, BOUND);
            again.tell()?;
            ended = again.finish(BOUND)?;
        }
        ended_with(&ended, 0, &["restored from"])
            .and_then(|()| all_right(&ended, programs))
            .with_context(|| format!("{} on {nodes} nodes", set.display()))?;
    }
    Ok(())
}

/// A full set, one of what changed, and one that was made while the machine stood. The folder
/// of all three is moved before machines continue from them.
fn increments(bench: &Bench, images: &Images) -> Result<String> {
    let script = on_both(60, 20_000, 4);
    let mut guest = start(bench, images, "--nodes 2 --memory 256M", &script)?;
    let folder = bench.directory.join("sets");
    fs::create_dir(&folder)?;
    let [full, second, third] = ["full", "second", "third"].map(|name| folder.join(name));
    let first = report(bench, &full, &["--live"])?;
    thread::sleep(Duration::from_millis(200));
    let changed = since(bench, [&full, &second], &["--live"])?;
    let stood = since(bench, [&second, &third], &[])?;
    for report in [&changed, &stood] {
        ensure!(
            number(report, "unchanged")? > 0.0
                && number(report, "bytes")? < number(&first, "bytes")?,
            "{first}, then {report}"
        );
    }
    let moved = bench.directory.join("moved");
    fs::rename(&folder, &moved)?;
    let sets = ["full", "second", "third"].map(|name| moved.join(name));
    let [full, second, third] = &sets;
    guest.tell()?;
    continue_all(bench, &[(full, "1"), (second, "2"), (third, "3")], 2)?;
    all_right(&guest.finish(BOUND)?, 2)?;
    fs::remove_dir_all(moved)?;
    Ok(format!(
        "paused for {:.1} and {:.1} ms, until all was written {:.1} ms; {:.0}, {:.0} and {:.0} MB",
        pause_ms(&first)?,
        pause_ms(&changed)?,
        pause_ms(&stood)?,
        number(&first, "bytes")? / 1e6,
        number(&changed, "bytes")? / 1e6,
        number(&stood, "bytes")? / 1e6,
    ))
}

/// Each set is based on the one before. Without one of them, or with another in its place, the
/// last is refused.
fn chain(bench: &Bench, images: &Images) -> Result<String> {
    const SETS: usize = 10;
    let mut random = Random::new(bench.context.seed ^ 0x5a7e);
    let script = on_both(30, 10_000, 2);
    let mut guest = start(bench, images, "--growable yes --memory 256M", &script)?;
    let set = |number: usize| bench.directory.join(format!("set{number}"));
    let mut longest_ms = pause_ms(&report(bench, &set(0), &["--live"])?)?;
    let mut unchanged = 0.0;
    for last in 1..SETS {
        thread::sleep(Duration::from_millis(random.below(250)));
        let report = since(bench, [&set(last - 1), &set(last)], &["--live"])?;
        longest_ms = longest_ms.max(pause_ms(&report)?);
        unchanged += number(&report, "unchanged")?;
    }
    ensure!(unchanged > 0.0, "each set has all pages");
    let last = set(SETS - 1);
    guest.tell()?;
    continue_all(bench, &[(&last, "1")], 2)?;
    let names = |said: &str, needs: usize, why: &str| {
        let [set, base] = [needs, needs - 1].map(|number| set(number).display().to_string());
        let wanted = format!("{set} needs {base}, which {why}");
        ensure!(said.contains(&wanted), "no `{wanted}`: {said}");
        Ok(())
    };
    let aside = bench.directory.join("aside");
    fs::rename(set(4), &aside)?;
    names(&refusal(bench, &last, &[])?, 5, "is missing")?;
    fs::rename(set(2), set(4))?;
    names(&refusal(bench, &last, &[])?, 5, "is another checkpoint")?;
    fs::rename(set(4), set(2))?;
    fs::rename(aside, set(4))?;
    all_right(&guest.finish(BOUND)?, 2)?;
    for number in 0..SETS {
        fs::remove_dir_all(set(number))?;
    }
    Ok(format!("paused for {longest_ms:.1} ms at most"))
}

/// A machine that continues a checkpoint is saved by what changed since that one, also at once,
/// while it still reads its memory.
fn since_restored(bench: &Bench, images: &Images) -> Result<String> {
    let script = on_both(60, 20_000, 4);
    let guest = start(bench, images, "--nodes 2 --memory 256M", &script)?;
    let [full, second, third] = ["full", "second", "third"].map(|set| bench.directory.join(set));
    let first = report(bench, &full, &["--stop"])?;
    ended_with(&guest.finish(BOUND)?, 120, &["stopped"])?;
    let mut next = restore(bench, &full, "m", &["--nodes", "2"])?;
    wait_until("the machine runs", || is_running(bench))?;
    let at_once = since(bench, [&full, &second], &["--live"])?;
    let changed = since(bench, [&second, &third], &["--live"])?;
    for report in [&at_once, &changed] {
        ensure!(
            number(report, "unchanged")? > 0.0
                && number(report, "bytes")? < number(&first, "bytes")? / 2.0,
            "{first}, then {report}"
        );
    }
    next.tell()?;
    continue_all(bench, &[(&second, "1"), (&third, "3")], 2)?;
    all_right(&next.finish(BOUND)?, 2)?;
    for directory in [full, second, third] {
        fs::remove_dir_all(directory)?;
    }
    Ok(format!(
        "{:.0} MB, then {:.0} and {:.0} MB",
        number(&first, "bytes")? / 1e6,
        number(&at_once, "bytes")? / 1e6,
        number(&changed, "bytes")? / 1e6,
    ))
}

/// `weft vm save m DIRECTORY --live`, which ends as Ctrl-C says wherever this suite was started.
fn begin(bench: &Bench, directory: &Path, options: &[&str]) -> Result<Child> {
    let mut command = bench.weft(&["vm", "save", "m", "--json"]);
    command.arg(directory).args(options);
    heed(&mut command);
    Ok(command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?)
}

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
fn once_over<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<(T, Duration)> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Ok(done) => return Ok((done, begun.elapsed())),
            Err(error) if begun.elapsed() > OVER => {
                return Err(error.context("the save that was given up is not over"));
            }
            Err(error) => {
                let said = format!("{error:#}");
                let is_busy = said.contains("is being saved") || said.contains("under way");
                ensure!(is_busy, "{said}");
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn is_running(bench: &Bench) -> Result<bool> {
    Ok(bench
        .ask(&["vm", "list", "--json"])?
        .contains("\"running\""))
}

/// Ctrl-C and `kill -9` in the middle: no set, and the machine continues as if nothing had been.
fn given_up(bench: &Bench, images: &Images) -> Result<String> {
    const TIMES: usize = 10;
    let mut random = Random::new(bench.context.seed ^ 0x91fe);
    let options = "--nodes 2 --memory 768M";
    let mut guest = start(bench, images, options, &on_one(450))?;
    let set = |name: &str| bench.directory.join(name);
    let whole = report(bench, &set("whole"), &["--live"])?;
    // The rest of the time the files are flushed, and cannot be given up.
    let written_us = (0.6e6 * number(&whole, "seconds")?) as u64;
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
            Gone::Complete => complete += 1,
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
    let (grown, _) = once_over(|| bench.ask(&["vm", "grow", "m", "--memory", "64M"]))?;
    drop(grown);
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

/// A save of two nodes that takes long enough for others to be asked meanwhile: it, and the
/// guest.
fn begin_long(bench: &Bench, images: &Images, directory: &Path) -> Result<(Child, Guest)> {
    let options = "--nodes 2 --memory 768M";
    let guest = start(bench, images, options, &on_one(400))?;
    let saving = begin(bench, directory, &["--live"])?;
    let first = directory.join("pages.0");
    wait_until("pages are written", || {
        Ok(fs::metadata(&first).is_ok_and(|file| file.len() > 1 << 20))
    })?;
    Ok((saving, guest))
}

/// The save is complete, and the guest is right there and here.
fn end_long(bench: &Bench, (saving, mut guest): (Child, Guest), directory: &Path) -> Result<()> {
    let output = saving.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the save failed: {said}");
    guest.tell()?;
    continue_all(bench, &[(directory, "2")], 1)?;
    all_right(&guest.finish(BOUND)?, 1)?;
    Ok(fs::remove_dir_all(directory)?)
}

/// Starts all commands, whose output is wanted.
fn begin_all(commands: Vec<Command>) -> Result<Vec<Child>> {
    let begin = |mut command: Command| {
        Ok(command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?)
    };
    commands.into_iter().map(begin).collect()
}

/// Fails unless a command was refused with one of these reasons.
fn refused_with(output: &Output, says: &[&str]) -> Result<()> {
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(EXIT_REFUSED) && says.iter().any(|words| said.contains(words)),
        "{}, and not one of {says:?}: {said}",
        output.status
    );
    Ok(())
}

fn meanwhile(bench: &Bench, images: &Images) -> Result<String> {
    const CHANGES: [&str; 1] = ["the machine is being saved while it runs"];
    let directory = bench.directory.join("set");
    let (mut saving, guest) = begin_long(bench, images, &directory)?;
    let other = bench.directory.join("other").display().to_string();
    let cases: [(&[&str], &[&str]); 4] = [
        (&["vm", "save", "m", &other, "--live"], &BUSY[..1]),
        (&["vm", "grow", "m", "--memory", "64M"], &CHANGES),
        (&["vm", "release", "m", "1"], &CHANGES),
        (&["vm", "migrate", "m", "1"], &CHANGES),
    ];
    let begun = begin_all(cases.map(|(words, _)| bench.weft(words)).into())?;
    let outputs = begun.into_iter().map(Child::wait_with_output);
    let outputs = outputs.collect::<std::io::Result<Vec<Output>>>()?;
    let is_long = saving.try_wait()?.is_none();
    ensure!(is_long, "the save was over before all others were asked");
    for (output, (words, says)) in outputs.iter().zip(cases) {
        refused_with(output, says).with_context(|| words.join(" "))?;
    }
    ensure!(!Path::new(&other).exists(), "the other save left files");
    end_long(bench, (saving, guest), &directory)?;
    Ok(String::new())
}

/// One for which the machine would stand is refused as well.
fn twice(bench: &Bench, images: &Images) -> Result<String> {
    let directory = bench.directory.join("set");
    let (mut saving, guest) = begin_long(bench, images, &directory)?;
    let other = bench.directory.join("other");
    let output = bench.weft(&["vm", "save", "m"]).arg(&other).output()?;
    let is_long = saving.try_wait()?.is_none();
    let outcome = refused_with(&output, &BUSY);
    end_long(bench, (saving, guest), &directory)
        .with_context(|| format!("{outcome:?}, the save was under way: {is_long}"))?;
    ensure!(is_long, "the save was over before the other was asked");
    outcome?;
    ensure!(!other.exists(), "the other save left files");
    Ok(String::new())
}

/// Saves that are refused, because one is under way, and killed while they wait for the answer.
fn rivals(bench: &Bench, images: &Images) -> Result<String> {
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

/// It is stopped, and it loses a node: the save says so, and leaves nothing.
fn ends(bench: &Bench, images: &Images) -> Result<String> {
    let directory = bench.directory.join("set");
    for (is_stopped, code, says) in [(true, 120, "stopped"), (false, 124, "lost node 1 (")] {
        let (saving, guest) = begin_long(bench, images, &directory)?;
        if is_stopped {
            bench.ask(&["vm", "stop", "--timeout", "0", "m"])?;
        } else {
            let parent = guest.pid() as i32;
            let mut nodes = processes::all();
            nodes.retain(|process| process.parent == parent);
            // Node 0's is made last.
            nodes.sort_by_key(|process| (process.identity.start, process.identity.pid));
            let node = nodes.first().context("no process")?.identity.pid;
            kill(Pid::from_raw(node), Signal::SIGKILL)?;
        }
        let output = saving.wait_with_output()?;
        refused_with(&output, &["ended", "node 1 ("])?;
        ensure!(!directory.exists(), "its files were not removed");
        ended_with(&guest.finish(BOUND)?, code, &[says])?;
    }
    Ok(String::new())
}

/// Moves vCPUs to other nodes until it is told to end: how often.
fn wander(bench: &Bench, is_over: &AtomicBool) -> Result<u32> {
    let mut random = Random::new(bench.context.seed ^ 0x30f5);
    let mut locations = [0, 1];
    let mut moves = 0;
    while !is_over.load(Ordering::Relaxed) {
        let vcpu = random.below(2);
        let place = &mut locations[vcpu as usize];
        *place = (*place + 1 + random.below(2)) % 3;
        let [vcpu, node] = [vcpu, *place].map(|number| number.to_string());
        let words = ["vm", "move", "m", "--vcpu", &vcpu, "--to", &node];
        bench
            .ask(&words)
            .with_context(|| format!("after {moves} moves"))?;
        moves += 1;
        thread::sleep(Duration::from_millis(random.below(10)));
    }
    Ok(moves)
}

fn moves(bench: &Bench, images: &Images) -> Result<String> {
    const SETS: usize = 10;
    let script = on_both(40, 10_000, 2);
    let options = "--nodes 3 --memory 256M";
    let mut guest = start(bench, images, options, &script)?;
    let set = |number: usize| -> PathBuf { bench.directory.join(format!("set{number}")) };
    let is_over = AtomicBool::new(false);
    let save_all = || -> Result<f64> {
        let mut longest_ms = pause_ms(&report(bench, &set(0), &["--live"])?)?;
        for last in 1..SETS {
            let made = match last % 4 {
                0 => report(bench, &set(last), &["--live"]),
                _ => since(bench, [&set(last - 1), &set(last)], &["--live"]),
            };
            let made = made.with_context(|| format!("save {last}"))?;
            longest_ms = longest_ms.max(pause_ms(&made)?);
        }
        Ok(longest_ms)
    };
    let (moved, longest_ms) = thread::scope(|scope| {
        let mover = scope.spawn(|| wander(bench, &is_over));
        let saved = save_all();
        is_over.store(true, Ordering::Relaxed);
        let moved = mover.join().ok().context("the mover panicked")?;
        Ok::<_, anyhow::Error>((moved?, saved?))
    })?;
    let sets = [2, 5, 8].map(set);
    let [first, second, third] = &sets;
    guest.tell()?;
    continue_all(bench, &[(first, "1"), (second, "2"), (third, "3")], 2)?;
    all_right(&guest.finish(BOUND)?, 2)?;
    for number in 0..SETS {
        fs::remove_dir_all(set(number))?;
    }
    Ok(format!(
        "{moved} moves, paused for {longest_ms:.1} ms at most"
    ))
}

/// Why no file system of memory can be mounted here, if so.
fn tmpfs_missing() -> Option<String> {
    let mounts = works("unshare", &["-m", "mount", "-t", "tmpfs", "none", "/mnt"]);
    (!mounts).then(|| "no file system can be mounted: not root?".to_owned())
}

/// The set does not fit: that is said, the machine continues, and its next save, elsewhere, has
/// all that changed meanwhile.
fn full_disk(bench: &Bench, images: &Images) -> Result<String> {
    /// The file system is gone with the command.
    const SMALL_DISK: &str = "mount -t tmpfs -o size=8M none \"$0\" && { \"$@\"; code=$?; \
         ls \"$0\"; exit $code; }";
    let script = on_both(60, 20_000, 4);
    let mut guest = start(bench, images, "--nodes 2 --memory 256M", &script)?;
    let [first, disk, last] = ["first", "disk", "last"].map(|name| bench.directory.join(name));
    fs::create_dir(&disk)?;
    report(bench, &first, &["--live"])?;
    let on_disk = disk.join("set");
    let first_too = first.display().to_string();
    for options in [&["--live"][..], &["--live", "--since", &first_too], &[]] {
        let save = bench.weft(&["vm", "save", "m"]);
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c", SMALL_DISK])
            .arg(&disk)
            .arg(save.get_program())
            .args(save.get_args())
            .arg(&on_disk)
            .args(options)
            .env("XDG_RUNTIME_DIR", &bench.run_directory);
        let output = command.output()?;
        refused_with(&output, &["No space left on device"])
            .with_context(|| format!("{options:?}"))?;
        ensure!(output.stdout.is_empty(), "its files were not removed");
        ensure!(is_running(bench)?, "the machine does not run");
    }
    since(bench, [&first, &last], &["--live"])?;
    guest.tell()?;
    continue_all(bench, &[(&last, "2")], 2)?;
    all_right(&guest.finish(BOUND)?, 2)?;
    for directory in [first, last] {
        fs::remove_dir_all(directory)?;
    }
    Ok(String::new())
}

/// What a machine without a controller of its memory, or on KVM, cannot do is refused before
/// it is stopped, and so is what makes no sense.
fn unable(bench: &Bench) -> Result<String> {
    let is_soft = bench.back_end == "soft";
    let options: &[&str] = match is_soft {
        true => &["--name", "m", "--growable", "no"],
        false => &["--name", "m"],
    };
    let guest = bench.start(options)?;
    let [full, set] = ["full", "set"].map(|name| bench.directory.join(name));
    let [full_too, set_too] = [&full, &set].map(|path| path.display().to_string());
    save(bench, "m", &full, &[])?;
    let other = bench.start(&["--name", "other"])?;
    let cannot = "that needs software vCPUs, and a machine that can grow";
    let [live, changed] =
        ["while it runs", "by what changed"].map(|how| format!("cannot be saved {how}: {cannot}"));
    let another = format!("{full_too}: it is a checkpoint of vm m, not of vm other");
    let cases: [(&str, &[&str], i32, &str); 5] = [
        ("m", &["--live"], EXIT_REFUSED, &live),
        ("m", &["--since", &full_too], EXIT_REFUSED, &changed),
        (
            "m",
            &["--live", "--stop"],
            EXIT_USAGE,
            "cannot be used with",
        ),
        ("other", &["--since", &full_too], EXIT_REFUSED, &another),
        (
            "m",
            &["--since", &set_too],
            EXIT_REFUSED,
            "does not hold a checkpoint",
        ),
    ];
    for (name, options, wanted, says) in cases {
        let mut command = bench.weft(&["vm", "save", name]);
        let output = command.arg(&set).args(options).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(wanted) && said.contains(says),
            "{name} {options:?}: {}, not {wanted} and `{says}`: {said}",
            output.status
        );
        ensure!(!set.exists(), "{name} {options:?} left files");
    }
    for mut guest in [guest, other] {
        guest.write("hello q")?;
        let ended = guest.finish(BOUND)?;
        ensure!(code(&ended)? == 0, "{}", ended.stderr);
    }
    Ok(String::new())
}
