//! `weft vm save --live` and `--since`, of a Linux whose programs write to their memory all the
//! time and check every page at the end: on the machine that was saved, and on each one that
//! continues from a checkpoint.

mod given_up;
mod meanwhile;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::checkpoints::{refusal, restore, save};
use super::{BOUND, Bench, Runner, code, ended_with, wait_until};
use crate::boot::{Images, SMALL};
use crate::context::{kvm_missing, works};
use crate::guest::{Ended, Guest, until_told};
use crate::random::Random;

/// The guest's program has filled its memory.
const AT_WORK: &str = "dirty: at work";
/// All of its pages are as it wrote them.
const RIGHT: &str = "dirty: right";
/// Of a command that refuses.
const EXIT_REFUSED: i32 = 1;
/// Why a machine that is being saved refuses another save.
const BUSY: [&str; 3] = [
    "is being saved already",
    "save is under way",
    "too many requests wait",
];

type Test = fn(&Bench, &Images) -> Result<String>;

const TESTS: [(&str, Test); 9] = [
    (
        "what changed, and again, on two nodes, continues on 1 to 3",
        increments,
    ),
    ("a chain of ten", chain),
    ("what changed since it was restored", since_restored),
    ("given up at any moment", given_up::given_up),
    (
        "what is refused meanwhile changes nothing",
        meanwhile::meanwhile,
    ),
    ("another save meanwhile changes nothing", meanwhile::twice),
    (
        "others that are given up meanwhile change nothing",
        given_up::rivals,
    ),
    ("a machine that ends meanwhile", meanwhile::ends),
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
            meanwhile::unable,
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

/// `weft vm save m DIRECTORY`, which goes on.
fn begin(bench: &Bench, directory: &Path, options: &[&str]) -> Result<Child> {
    let mut command = bench.weft(&["vm", "save", "m", "--json"]);
    command.arg(directory).args(options);
    Ok(command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?)
}

fn is_running(bench: &Bench) -> Result<bool> {
    Ok(bench
        .ask(&["vm", "list", "--json"])?
        .contains("\"running\""))
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
