//! What cannot be done while a machine is saved, or with a machine that cannot be saved while it
//! runs, is refused and changes nothing. A machine that ends ends its save.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{
    BOUND, BUSY, Bench, EXIT_REFUSED, Images, all_right, begin, code, continue_all, ended_with,
    on_one, refused_with, save, start, wait_until,
};
use crate::guest::Guest;
use crate::processes;

/// Of a command whose line cannot be read.
const EXIT_USAGE: i32 = 2;

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

pub(super) fn meanwhile(bench: &Bench, images: &Images) -> Result<String> {
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
pub(super) fn twice(bench: &Bench, images: &Images) -> Result<String> {
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

/// It is stopped, and it loses a node: the save says so, and leaves nothing.
pub(super) fn ends(bench: &Bench, images: &Images) -> Result<String> {
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

/// What a machine without a controller of its memory, or on KVM, cannot do is refused before
/// it is stopped, and so is what makes no sense.
pub(super) fn unable(bench: &Bench) -> Result<String> {
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
