//! What is refused, each with its own sentence.

use std::fs;
use std::process::Output;

use anyhow::{Result, ensure};

use super::user::{User, text};
use super::{BOOT_BOUND, Bench, END_BOUND};
use crate::executable;

pub fn all(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    before_the_start(&user)?;
    user.nothing_left(false)?;
    without_a_batch_system(&user)?;
    of_a_cluster_that_runs(&user)?;
    of_a_damaged_record(&user)?;
    user.nothing_left(false)?;
    Ok(String::new())
}

fn before_the_start(user: &User) -> Result<()> {
    let (image, program) = (user.image.to_string_lossy().into_owned(), user.ep());
    let refused = |words: &[&str], sentence: &str| {
        let mut all = vec!["run", "--name", "x", "--image", &image];
        all.extend(words);
        user.refused(&all, 125, sentence)
    };
    refused(
        &["--time", "0.5", "--margin", "10", "--", &program],
        "--time 0.5 (30 s) is too short",
    )?;
    refused(
        &["--vms", "2", "-n", "3", "--", &program],
        "3 processes do not fit on 2 machines with 1 slots each",
    )?;
    refused(&["--", "no-such"], "there is no program no-such here")?;
    refused(
        &["-np", "4", &program],
        "`-np` is no option of `weft mpi run`",
    )?;
    refused(
        &["--memory", "1M", "--", &program],
        "--memory 1.0 MiB is too little",
    )?;
    refused(&["--batch=-p", "--", &program], "--batch is for --on slurm")?;
    refused(
        &["--static", "--grow", "2@9", "--", &program],
        "--static has machines stay on the hosts that they begin on",
    )?;
    refused(
        &["--on", "slurm", "--list", "x", "--", &program],
        "--list is for --on local",
    )?;
    refused(&["--list", "no-list", "--", &program], "no-list")?;
    refused(&["--with", "no-file", "--", &program], "no-file")?;
    refused(
        &["--save-to", "/proc/x", "--", &program],
        "cannot make /proc/x",
    )?;
    let other = user.folder.join("other");
    let mut bytes = fs::read(&program)?;
    bytes[18] = 183;
    executable::write(&other, &bytes)?;
    refused(
        &["--", &other.to_string_lossy()],
        "is a program for another machine",
    )?;
    let words = ["run", "--name", "x", "--image", "/nowhere", "--", &program];
    user.refused(&words, 125, "/nowhere")?;
    user.refused(&words, 125, "make guest-mpi")?;
    let words = ["run", "--name", "a/b", "--image", &image, "--", &program];
    user.refused(&words, 125, "`a/b` is no name of a cluster")?;
    user.refused(&["run", "--hosts", "0", "--", &program], 2, "--hosts")?;
    let one = ["run", "--one-machine", "--image", &image];
    let refused = |words: &[&str], code, sentence| {
        let words = [&one[..], words, &["--", &program]].concat();
        user.refused(&words, code, sentence)
    };
    refused(&["--vms", "2"], 2, "--vms")?;
    let sentence = "--one-machine with --cpus 2 is on 2 hosts at most";
    refused(&["--cpus", "2", "--hosts", "3"], 125, sentence)?;
    refused(&["--cpus", "2", "--grow", "3@9"], 125, sentence)?;
    refused(&["--cpus", "2", "-n", "3"], 125, "ask for more --cpus")?;
    for words in [
        ["attach", "nobody"],
        ["resume", "nobody"],
        ["forget", "nobody"],
    ] {
        user.refused(&words, 1, "there is no cluster nobody")?;
    }
    user.refused(&["status", "nobody"], 1, "there is no cluster nobody")?;
    user.refused(
        &["status"],
        1,
        "there is no cluster: `weft mpi run` starts one",
    )
}

/// Its commands are not in PATH, or refuse.
fn without_a_batch_system(user: &User) -> Result<()> {
    let tools = user.folder.join("tools");
    fs::create_dir_all(&tools)?;
    let run = |system: &str| -> Result<Output> {
        let mut command = user.command(std::path::Path::new("/usr/bin/timeout"));
        command.env("PATH", &tools).arg("60").arg(&user.weft);
        command.args(["mpi", "run", "--name", "x", "--on", system, "--image"]);
        Ok(command.arg(&user.image).arg("--").arg(user.ep()).output()?)
    };
    let check = |system: &str, sentence: &str| -> Result<()> {
        let output = run(system)?;
        let said = text(&output.stderr);
        ensure!(
            output.status.code() == Some(125) && said.contains(sentence),
            "{system}: {}: {said}",
            output.status
        );
        user.nothing_left(true)?;
        // Nothing was had, so there is nothing to look at.
        if user.state().join("x").exists() {
            user.must(&["forget", "x"])?;
        }
        Ok(())
    };
    check("slurm", "its command sbatch is not in PATH")?;
    check("gridengine", "its command qsub is not in PATH")?;
    let sbatch = tools.join("sbatch");
    executable::write(
        &sbatch,
        b"#!/bin/sh\necho 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1\n",
    )?;
    check("slurm", "invalid partition specified: nowhere")
}

fn of_a_cluster_that_runs(user: &User) -> Result<()> {
    let mut launcher = user.run("c", &["--vms", "1"])?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    let image = user.image.to_string_lossy().into_owned();
    let again = ["run", "--name", "c", "--image", &image];
    user.refused(
        &again,
        125,
        "there is a cluster c: `weft mpi attach c` goes on with it",
    )?;
    for words in [["attach", "c"], ["resume", "c"], ["forget", "c"]] {
        user.refused(&words, 1, "a launcher has the cluster c already")?;
    }
    user.refused(
        &["release", "nowhere"],
        1,
        "the cluster has no host nowhere; it has local-",
    )?;
    user.refused(&["extend", "nowhere", "5"], 1, "no host nowhere")?;
    user.refused(
        &["extend", "local-1", "5"],
        1,
        "the list of hosts cannot extend a job that runs",
    )?;
    user.refused(&["hosts", "99"], 1, "a cluster has 1 to 60 hosts, not 99")?;
    user.refused(&["shrink", "0"], 1, "a cluster has 1 to 60 hosts, not 0")?;
    user.refused(&["deploy", "no-such-file"], 1, "no-such-file")?;
    user.refused(&["ssh", "c", "7"], 1, "c has machines 0 to 0")?;
    // A launcher that is gone: its hosts are still had.
    launcher.kill()?;
    user.refused(
        &["forget", "c"],
        1,
        "the batch system has hosts for c still",
    )?;
    user.refused(&["resume", "c"], 1, "are not saved: `weft mpi attach c`")?;
    let listed = user.must(&["list"])?;
    ensure!(listed.contains("no launcher"), "{listed}");
    of_a_launcher_elsewhere(user)?;
    let mut launcher = user.launch("c", &["attach", "c"])?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    user.must(&["exit"])?;
    launcher.must_end(0, END_BOUND)
}

/// As if the user had come to another login node.
fn of_a_launcher_elsewhere(user: &User) -> Result<()> {
    let path = user.state().join("c/cluster.json");
    let text = fs::read_to_string(&path)?;
    let mut record: serde_json::Value = serde_json::from_str(&text)?;
    record["host"] = "login2".into();
    fs::write(&path, record.to_string())?;
    let sentence = "the launcher of c was on login2, and its hosts look for it there";
    user.refused(&["attach", "c"], 1, sentence)?;
    user.refused(&["status", "c"], 1, "the launcher of c is on login2")?;
    fs::write(&path, text)?;
    Ok(())
}

fn of_a_damaged_record(user: &User) -> Result<()> {
    let folder = user.state().join("d");
    fs::create_dir_all(&folder)?;
    let record = folder.join("cluster.json");
    for (damaged, sentence) in [
        ("{\"version\": 1, \"opt", "cluster.json is damaged"),
        ("", "cluster.json is damaged"),
        ("[]", "cluster.json is damaged"),
        (
            "{\"version\": 1, \"wanted\": 2}",
            "has version 1, and this launcher reads 2: use the Weft that made it",
        ),
    ] {
        fs::write(&record, damaged)?;
        user.refused(&["attach", "d"], 1, sentence)?;
        user.refused(&["resume", "d"], 1, sentence)?;
    }
    // It can be removed; what it had is not known.
    user.must(&["forget", "d"])?;
    ensure!(!folder.exists(), "{} is there still", folder.display());
    Ok(())
}
