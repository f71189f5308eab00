//! `weft vm save` and `weft vm run --restore`, with Linux that computes and writes to a disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};

use super::{BOUND, Bench, Runner, ended_with};
use crate::boot::{Images, SMALL, USER_SPACE};
use crate::guest::Guest;

/// Each of two programs fills a file in memory with numbers, reads it back, and prints the
/// sum of what it read; a third does the same on a disk. They print one line for each round.
const WORK: &str = "console=ttyS0 quiet weft.run=\"work() { i=0; while [ $i -lt 8 ]; do \
     seq 60000 > /tmp/$1; echo $1 $i $(md5sum < /tmp/$1); i=$((i+1)); done; }; \
     disk() { i=0; while [ $i -lt 8 ]; do seq 60000 | dd of=/dev/vda bs=16k conv=fsync 2>/dev/null; \
     echo disk $i $(dd if=/dev/vda bs=16k 2>/dev/null | head -c 348894 | md5sum); i=$((i+1)); done; }; \
     work a & work b & disk & wait; echo all done\"";
/// Lines of all three.
const LINES: usize = 24;
/// Of the numbers 1 to 60000, a line each: 348,894 bytes.
const SUM: &str = "32e8d2bbb8984bd14d9ad0ccf2a33ea5";

type Test = fn(&Bench, &Images) -> Result<String>;

const TESTS: [(&str, Test); 5] = [
    ("a checkpoint of two nodes continues on 1 to 3", other_nodes),
    ("a chain of ten checkpoints", chain),
    ("one node, growable or not", growable),
    ("a save that is killed", killed),
    ("damaged and unfit checkpoints are refused", refused),
];

/// All tests, on the software vCPU.
pub(super) fn run(runner: &Runner<'_>) {
    for (name, test) in TESTS {
        let name = format!("vm, soft, saved: {name}");
        let missing = runner.images.missing(&SMALL);
        runner.run("soft", &name, missing, |bench| test(bench, runner.images));
    }
}

/// A machine of two nodes at work, with a disk.
fn start(bench: &Bench, images: &Images, name: &str) -> Result<Guest> {
    start_on(bench, images, name, &["--nodes", "2"])
}

fn start_on(bench: &Bench, images: &Images, name: &str, nodes: &[&str]) -> Result<Guest> {
    let disk = bench.directory.join("disk.img");
    fs::File::create(&disk)?.set_len(8 << 20)?;
    let [kernel, initrd] = SMALL;
    let mut command = bench.weft(&["vm", "run", "--backend", "soft"]);
    command.args(nodes);
    command
        .args(["--cpus", "2", "--memory", "128M", "--late-cpus", "no"])
        .args(["--name", name, "--cmdline", WORK, "--disk"])
        .arg(&disk)
        .arg("--kernel")
        .arg(images.file(kernel)?)
        .arg("--initrd")
        .arg(images.file(initrd)?);
    let mut guest = Guest::start(command.stdin(Stdio::piped()))?;
    ensure!(
        guest.wait_for(USER_SPACE, BOUND).is_some(),
        "the guest does not come up"
    );
    Ok(guest)
}

pub(super) fn restore(
    bench: &Bench,
    directory: &Path,
    name: &str,
    options: &[&str],
) -> Result<Guest> {
    let mut command = bench.weft(&["vm", "run", "--name", name, "--restore"]);
    Guest::start(command.arg(directory).args(options))
}

pub(super) fn save(
    bench: &Bench,
    name: &str,
    directory: &Path,
    options: &[&str],
) -> Result<String> {
    let directory = directory.to_string_lossy();
    let words = [&["vm", "save", name, &directory], options].concat();
    bench.ask(&words)
}

/// The lines of work on a console, or on those of machines that continued each other: a save
/// may come in the middle of a line. Each must have the right sum.
fn lines(console: &str) -> Result<usize> {
    let is_work = |line: &&str| {
        ["a ", "b ", "disk "]
            .iter()
            .any(|word| line.starts_with(word))
    };
    let work: Vec<&str> = console.lines().filter(is_work).collect();
    for line in &work {
        ensure!(line.contains(SUM), "a wrong sum: {line}");
    }
    Ok(work.len())
}

/// Fails unless the whole work was done, and once.
fn all_done(console: &str) -> Result<()> {
    let found = lines(console)?;
    ensure!(
        found == LINES && console.contains("all done"),
        "{found} lines: {console}"
    );
    Ok(())
}

/// The disk belongs to the moment of the checkpoint, so it is put back after the work, with
/// its time.
fn with_disk<T>(bench: &Bench, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let [disk, copy] = ["disk.img", "disk.saved"].map(|name| bench.directory.join(name));
    fs::copy(&disk, &copy)?;
    let modified = fs::metadata(&disk)?.modified()?;
    let result = work()?;
    fs::copy(&copy, &disk)?;
    fs::File::options()
        .write(true)
        .open(&disk)?
        .set_modified(modified)?;
    Ok(result)
}

fn other_nodes(bench: &Bench, images: &Images) -> Result<String> {
    let mut guest = start(bench, images, "saved")?;
    ensure!(
        guest.wait_for("disk 1", BOUND).is_some(),
        "the guest does not work"
    );
    let directory = bench.directory.join("set");
    let report = save(bench, "saved", &directory, &["--stop", "--json"])?;
    let ended = guest.finish(BOUND)?;
    ended_with(&ended, 120, &["stopped"])?;
    let before = ended.written();
    for nodes in ["1", "2", "3"] {
        let options: &[&str] = match nodes {
            "1" => &[],
            "2" => &["--nodes", nodes],
            // A copy, for example.
            _ => &["--nodes", nodes, "--changed-disks"],
        };
        if nodes == "3" {
            let disk = fs::File::open(bench.directory.join("disk.img"))?;
            disk.set_modified(SystemTime::now())?;
        }
        let ended = with_disk(bench, || {
            restore(bench, &directory, "next", options)?.finish(BOUND)
        })?;
        ended_with(&ended, 0, &["restored from", "powered off by the guest"])?;
        let console = format!("{before}{}", ended.written());
        all_done(&console).with_context(|| format!("on {nodes} nodes"))?;
    }
    let report: serde_json::Value = serde_json::from_str(&report)?;
    Ok(format!(
        "{} pages, paused for {} s",
        report["pages"], report["pause_seconds"]
    ))
}

/// Saves a machine and continues it. What it wrote before, and the next machine, which runs.
fn continued(
    bench: &Bench,
    guest: Guest,
    (name, set): (&str, &str),
    options: &[&str],
) -> Result<(String, Guest)> {
    let directory = bench.directory.join(set);
    if let Err(error) = save(bench, name, &directory, &["--stop"]) {
        bail!("{error:#}: {}", guest.finish(BOUND)?.stderr);
    }
    let written = guest.finish(BOUND)?.written();
    let next = restore(bench, &directory, name, options)?;
    // It runs for a little: the next save finds it at another place.
    std::thread::sleep(Duration::from_millis(100));
    super::wait_until("the next machine", || {
        Ok(bench
            .ask(&["vm", "list", "--json"])?
            .contains("\"running\""))
    })?;
    Ok((written, next))
}

fn chain(bench: &Bench, images: &Images) -> Result<String> {
    let mut guest = start(bench, images, "link")?;
    let mut console = String::new();
    for link in 0..10 {
        let nodes = ["2", "3", "4"][link % 3];
        let options: &[&str] = match link % 4 {
            0 => &[],
            _ => &["--nodes", nodes],
        };
        let set = format!("set{link}");
        let (written, next) = continued(bench, guest, ("link", &set), options)?;
        console += &written;
        guest = next;
    }
    // Nearly all of its work is left.
    let ended = guest.finish(4 * BOUND)?;
    ended_with(&ended, 0, &["powered off by the guest"])?;
    all_done(&(console + &ended.written()))?;
    Ok(String::new())
}

/// A machine on one node is saved and continues with and without a controller of its memory,
/// also after other nodes came and went. Its network has as many queues either way.
fn growable(bench: &Bench, images: &Images) -> Result<String> {
    const YES: [&str; 2] = ["--growable", "yes"];
    const NO: [&str; 2] = ["--growable", "no"];
    let options = [&["--net", "user"], &NO[..]].concat();
    let mut guest = start_on(bench, images, "one", &options)?;
    let mut console = String::new();
    for step in 0..6 {
        let is_growable = step % 2 == 1;
        if is_growable {
            for words in [
                &["vm", "grow", "one", "--memory", "64M"][..],
                &["vm", "move", "one", "--vcpu", "1", "--to", "1"],
                &["vm", "release", "one", "1"],
            ] {
                bench.ask(words)?;
            }
        }
        let options = if is_growable { &NO } else { &YES };
        let set = format!("set{step}");
        let (written, next) = continued(bench, guest, ("one", &set), options)?;
        console += &written;
        guest = next;
    }
    let ended = guest.finish(4 * BOUND)?;
    ended_with(&ended, 0, &["powered off by the guest"])?;
    all_done(&(console + &ended.written()))?;
    Ok(String::new())
}

/// The set is complete or refused; the machine continues; the set before it stays.
fn killed(bench: &Bench, images: &Images) -> Result<String> {
    let guest = start(bench, images, "kept")?;
    let first = bench.directory.join("first");
    save(bench, "kept", &first, &[])?;
    let (mut complete, mut partial) = (0, 0);
    for round in 0..8 {
        let directory = bench.directory.join(format!("set{round}"));
        let mut command = bench.weft(&["vm", "save", "kept"]);
        let mut saving = command.arg(&directory).stderr(Stdio::null()).spawn()?;
        std::thread::sleep(Duration::from_millis(round * 30));
        saving.kill()?;
        saving.wait()?;
        let said = refusal(bench, &directory, &["--cpus", "7"])?;
        match said.contains("2 vCPUs, not 7") {
            true => complete += 1,
            false => {
                let named = said.contains("is incomplete") || said.contains("does not hold");
                ensure!(named, "{said}");
                partial += 1;
            }
        }
    }
    let ended = guest.finish(BOUND)?;
    ended_with(&ended, 0, &["powered off by the guest"])?;
    ensure!(lines(&ended.console())? == LINES, "{}", ended.console());
    let said = refusal(bench, &first, &["--cpus", "7"])?;
    ensure!(said.contains("2 vCPUs, not 7"), "{said}");
    Ok(format!("{partial} incomplete, {complete} complete"))
}

/// Why a machine does not start from a directory.
pub(super) fn refusal(bench: &Bench, directory: &Path, options: &[&str]) -> Result<String> {
    let mut command = bench.weft(&["vm", "run", "--restore"]);
    let output = command.arg(directory).args(options).output()?;
    ensure!(output.status.code() == Some(125), "{output:?}");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A disk that was written or resized since is refused.
fn changed_disk(bench: &Bench, directory: &Path) -> Result<()> {
    let disk = fs::File::options()
        .write(true)
        .open(bench.directory.join("disk.img"))?;
    let modified = disk.metadata()?.modified()?;
    disk.set_modified(modified + Duration::from_secs(1))?;
    let said = refusal(bench, directory, &[])?;
    ensure!(
        said.contains("disk.img is not as it was") && said.contains("--changed-disks"),
        "{said}"
    );
    disk.set_len(4 << 20)?;
    let said = refusal(bench, directory, &[])?;
    ensure!(said.contains("its length is now 4194304 bytes"), "{said}");
    disk.set_len(8 << 20)?;
    disk.set_modified(modified)?;
    Ok(())
}

fn refused(bench: &Bench, images: &Images) -> Result<String> {
    let guest = start(bench, images, "one")?;
    let directory = bench.directory.join("set");
    save(bench, "one", &directory, &["--stop"])?;
    drop(guest.finish(BOUND)?);
    let said = refusal(bench, &directory, &["--memory", "64M"])?;
    ensure!(said.contains("--memory: the saved machine has"), "{said}");
    changed_disk(bench, &directory)?;
    let path = |name: &str| -> PathBuf { directory.join(name) };
    for name in ["pages.0", "pages.1", "machine", "manifest"] {
        let good = fs::read(path(name))?;
        let mut bad = good.clone();
        bad[good.len() / 2] ^= 1;
        fs::write(path(name), &bad)?;
        let is_named = |said: &str| said.contains(name) && said.contains("damaged");
        let said = refusal(bench, &directory, &["--verify"])?;
        ensure!(is_named(&said), "{name}: {said}");
        // Without it, a damaged page ends the machine when it is read.
        if name.starts_with("pages") {
            let mut command = bench.weft(&["vm", "run", "--restore"]);
            let output = command.arg(&directory).output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            let ended = output.status.code() == Some(124);
            ensure!(ended && is_named(&said), "{name}: {output:?}");
        }
        fs::remove_file(path(name))?;
        let said = refusal(bench, &directory, &[])?;
        let named = said.contains(name) && said.contains("missing") || said.contains("incomplete");
        ensure!(named, "{name}: {said}");
        fs::write(path(name), &good)?;
    }
    let bytes = fs::read(path("manifest"))?;
    let line = b"weft-checkpoint 3 ";
    ensure!(bytes.starts_with(line), "the manifest's first line");
    let later = [b"weft-checkpoint 4 ".as_slice(), &bytes[line.len()..]].concat();
    fs::write(path("manifest"), later)?;
    let said = refusal(bench, &directory, &[])?;
    ensure!(said.contains("has format 4"), "{said}");
    Ok(String::new())
}
