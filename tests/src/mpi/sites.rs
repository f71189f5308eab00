//! Batch systems as they are, each in namespaces of its own (`batch/tests`). The check runs once
//! more, as a child of the script that makes the site.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::user::{Launcher, Status, User, text};
use super::{Bench, Lacks, PROGRAM_BOUND, Plan, STEP_BOUND, ep, run_check};
use crate::context::{Context, works};
use crate::executable;
use crate::report::Report;

/// Names the site that a run is inside of, and its folder.
const INSIDE: &str = "WEFT_E2E_SITE";
/// Slurm and Grid Engine look at their queues every few seconds.
const HOSTS_BOUND: Duration = Duration::from_secs(120);
const LOG_PAIRS: u32 = 31;

pub fn inside() -> Option<(String, PathBuf)> {
    let value = std::env::var(INSIDE).ok()?;
    let (name, folder) = value.split_once(' ')?;
    Some((name.to_owned(), folder.into()))
}

/// The part of a check that runs in the site.
pub fn run_inside(context: &Context, plan: &Plan, inside: &(String, PathBuf), report: &Report) {
    let check: super::Check = match inside.0.as_str() {
        "slurm" => |bench| batch(bench, "slurm", &[]),
        "slurm-more" => more,
        "slurm-stray" => stray,
        _ => |bench| {
            batch(
                bench,
                "gridengine",
                &["--batch=-pe", "--batch=weft", "--batch=2"],
            )
        },
    };
    run_check(context, plan, report, "inside", check);
}

pub fn slurm(bench: &Bench<'_>) -> Result<String> {
    in_slurm(bench, "slurm")
}

pub fn slurm_more(bench: &Bench<'_>) -> Result<String> {
    in_slurm(bench, "slurm-more")
}

pub fn slurm_stray(bench: &Bench<'_>) -> Result<String> {
    in_slurm(bench, "slurm-stray")
}

fn in_slurm(bench: &Bench<'_>, site: &str) -> Result<String> {
    for command in ["slurmctld", "slurmd"] {
        if bench.context.tool(command).is_none() {
            bail!(Lacks(format!("{command} (Debian package slurm-wlm)")));
        }
    }
    if !works("unshare", &["-Urnmp", "--fork", "true"]) {
        bail!(Lacks("user namespaces".into()));
    }
    in_site(bench, site, "slurm-site")
}

pub fn grid_engine(bench: &Bench<'_>) -> Result<String> {
    bench.needs_root()?;
    if !Path::new("/usr/lib/gridengine/sge_qmaster").exists() {
        bail!(Lacks(
            "Grid Engine (Debian packages gridengine-master, -exec, -client)".into()
        ));
    }
    in_site(bench, "gridengine", "gridengine-site")
}

fn in_site(bench: &Bench<'_>, site: &str, script: &str) -> Result<String> {
    let folder = bench.folder()?.join("site");
    let script = bench.context.sources.join("../../batch/tests").join(script);
    // The site's user may not get to where this program is.
    let programs = bench.folder()?;
    let from = bench.context.weft.parent().context("weft is in a folder")?;
    for name in ["weft", "weft-monitor", "weft-runtime"] {
        executable::copy(&from.join(name), &programs.join(name))?;
    }
    let suite = programs.join("weft-e2e");
    executable::copy(&std::env::current_exe()?, &suite)?;
    let outcome = Command::new("timeout")
        .arg("500")
        .arg(&script)
        .arg(&folder)
        .arg(&suite)
        .arg("--weft")
        .arg(programs.join("weft"))
        .arg("--programs")
        .arg(&bench.context.programs)
        .arg("--sources")
        .arg(&bench.context.sources)
        .arg("--guest")
        .arg(fs::canonicalize(&bench.plan.images.folder)?)
        .args(["--suite", "mpi", "--seed", &bench.context.seed.to_string()])
        .env(INSIDE, format!("{site} {}", folder.display()))
        .output()?;
    let (said, errors) = (text(&outcome.stdout), text(&outcome.stderr));
    let passed = said
        .lines()
        .find_map(|line| line.strip_prefix("ok    inside"));
    match (outcome.status.success(), passed) {
        (true, Some(note)) => Ok(note
            .split_once(" s  ")
            .map_or("", |(_, note)| note)
            .to_owned()),
        _ => bail!("{}\n{said}\n{errors}", outcome.status),
    }
}

/// A cluster of four machines on two hosts.
fn start(bench: &Bench<'_>, system: &str, batch: &[&str]) -> Result<(User, Launcher)> {
    let user = bench.user()?;
    let (program, size) = (user.ep(), LOG_PAIRS.to_string());
    let mut words = vec![
        "--on", system, "--hosts", "2", "--vms", "4", "--time", "10", "--margin", "10", "--wait",
        "120",
    ];
    words.extend(batch);
    words.extend(["--", &program, &size]);
    let mut launcher = user.run("c", &words)?;
    user.until(&mut launcher, "it runs", HOSTS_BOUND, Status::is_running)?;
    Ok((user, launcher))
}

fn ends_right(user: &User, mut launcher: Launcher) -> Result<()> {
    launcher.must_end(0, PROGRAM_BOUND)?;
    ep::judge(&launcher.output(), LOG_PAIRS, 4)?;
    user.nothing_left(false)
}

/// Two hosts, three, one.
fn batch(bench: &Bench<'_>, system: &str, options: &[&str]) -> Result<String> {
    let (user, mut launcher) = start(bench, system, options)?;
    user.must(&["hosts", "3"])?;
    user.until(
        &mut launcher,
        "machines on three hosts",
        HOSTS_BOUND,
        |status| {
            let hosts = status.hosts();
            hosts.len() == 3 && hosts.iter().all(|host| status.machines_on(host) > 0)
        },
    )?;
    user.must(&["shrink", "1"])?;
    let status = user.until(&mut launcher, "all on one host", HOSTS_BOUND, |status| {
        let hosts = status.hosts();
        hosts.len() == 1 && status.machines_on(hosts[0]) == 4
    })?;
    let moves = status.moves();
    ends_right(&user, launcher)?;
    let jobs = jobs_left(system)?;
    ensure!(jobs.is_empty(), "{system} has jobs still: {jobs}");
    Ok(format!("{moves} moves"))
}

/// What the system has for its user still, after a moment in which jobs end.
fn jobs_left(system: &str) -> Result<String> {
    let begun = Instant::now();
    loop {
        let output = match system {
            "slurm" => Command::new("squeue")
                .args(["-h", "-o", "%i %j %T"])
                .output()?,
            _ => Command::new("qstat").output()?,
        };
        let said = text(&output.stdout);
        if said.trim().is_empty() || begun.elapsed() > Duration::from_secs(20) {
            return Ok(said);
        }
        thread::sleep(Duration::from_millis(500));
    }
}

/// The launcher is killed when Slurm has a job of it, and the launcher does not know that yet: the
/// next one gives the job back.
fn stray(bench: &Bench<'_>) -> Result<String> {
    let mut user = bench.user()?;
    let asked = user.folder.join("asked");
    let slow = user.folder.join("slow");
    let sbatch = bench.context.tool("sbatch").context("no sbatch")?;
    fs::create_dir(&slow)?;
    let script = format!(
        "#!/bin/sh\nid=$({} \"$@\") || exit\necho $id >{asked}.new\nmv {asked}.new {asked}\n\
         sleep 5\necho $id\n",
        sbatch.display(),
        asked = asked.display()
    );
    executable::write(&slow.join("sbatch"), script.as_bytes())?;
    let path = std::env::var("PATH")?;
    user.prefix = [
        "env".into(),
        format!("PATH={}:{path}", slow.display()).into(),
    ]
    .into();
    // It waits in the queue for as long as nobody gives it back.
    let words = [
        "--on",
        "slurm",
        "--time",
        "10",
        "--batch=--begin=now+1hour",
        "--",
    ];
    let mut first = user.run("c", &[&words[..], &[&user.ep(), "20"]].concat())?;
    let begun = Instant::now();
    while !asked.exists() {
        ensure!(begun.elapsed() < HOSTS_BOUND, "{}", first.errors());
        thread::sleep(Duration::from_millis(20));
    }
    let job = fs::read_to_string(&asked)?.trim().to_owned();
    first.kill()?;
    user.prefix.clear();
    ensure!(
        jobs_of(&user)?.contains(&job),
        "job {job} is not in the queue"
    );
    let mut second = user.launch("c", &["attach", "c"])?;
    let begun = Instant::now();
    while jobs_of(&user)?.contains(&job) {
        ensure!(second.code()?.is_none(), "{}", second.errors());
        ensure!(begun.elapsed() < HOSTS_BOUND, "{}", second.errors());
        thread::sleep(Duration::from_millis(100));
    }
    let after_s = begun.elapsed().as_secs_f64();
    second.says(&format!("job {job} was asked for without an answer"))?;
    user.must(&["exit"])?;
    second.ends_within(PROGRAM_BOUND)?;
    user.nothing_left(false)?;
    let jobs = jobs_left("slurm")?;
    ensure!(jobs.is_empty(), "Slurm has jobs still: {jobs}");
    Ok(format!("given back after {after_s:.1} s"))
}

/// Numbers of the jobs that wait or run.
fn jobs_of(user: &User) -> Result<Vec<String>> {
    let mut squeue = user.command(Path::new("squeue"));
    let output = squeue
        .args(["--noheader", "--me", "--format=%i"])
        .output()?;
    ensure!(output.status.success(), "{}", text(&output.stderr));
    Ok(text(&output.stdout)
        .lines()
        .map(|id| id.trim().to_owned())
        .collect())
}

/// `slurmctld` is killed and started again; a job is cancelled by hand.
fn more(bench: &Bench<'_>) -> Result<String> {
    let (user, mut launcher) = start(bench, "slurm", &[])?;
    let folder = inside().context("not inside")?.1;
    let pid = fs::read_to_string(folder.join("slurmctld.pid"))?;
    ensure!(
        Command::new("kill")
            .args(["-9", pid.trim()])
            .status()?
            .success()
    );
    user.until(&mut launcher, "Slurm is missed", HOSTS_BOUND, |status| {
        status.0["trouble"]
            .as_str()
            .is_some_and(|why| why.contains("does not answer"))
    })?;
    ensure!(
        Command::new("slurmctld").status()?.success(),
        "slurmctld does not start"
    );
    let status = user.until(&mut launcher, "Slurm is back", HOSTS_BOUND, |status| {
        status.0["trouble"].is_null() && status.is_running()
    })?;
    // This user may do what operators may.
    let host = &status.0["hosts"][0];
    let left = host["left"].as_f64().context("no end is known")?;
    user.must(&["extend", host["name"].as_str().context("no host")?, "30"])?;
    user.until(&mut launcher, "a later end", STEP_BOUND, |status| {
        status.0["hosts"][0]["left"]
            .as_f64()
            .is_some_and(|now| now > left + 1500.0)
    })?;
    // TERM, and KILL after 5 s: machines have that time to leave.
    let (name, job) = (host["name"].as_str(), host["job"].as_str());
    let (name, job) = (name.context("no host")?, job.context("no job")?);
    ensure!(Command::new("scancel").arg(job).status()?.success());
    let begun = Instant::now();
    let ended = loop {
        if let Some(code) = launcher.code()? {
            break Some(code);
        }
        // If a machine is lost, it says that before its host is forgotten.
        if let Ok(status) = user.status("c")
            && status.0["exit_code"].is_null()
            && !status.0["hosts"]
                .to_string()
                .contains(&format!("\"{name}\""))
        {
            break None;
        }
        ensure!(begun.elapsed() < HOSTS_BOUND, "{}", launcher.errors());
        thread::sleep(Duration::from_millis(100));
    };
    let note = match ended {
        None => {
            ends_right(&user, launcher)?;
            "machines left in time"
        }
        Some(code) => {
            ensure!(code == 122, "{code}: {}", launcher.errors());
            launcher.says(" is lost: ")?;
            launcher.says(name)?;
            user.nothing_left(true)?;
            user.must(&["forget", "c"])?;
            "machines were lost"
        }
    };
    let jobs = jobs_left("slurm")?;
    ensure!(jobs.is_empty(), "Slurm has jobs still: {jobs}");
    Ok(format!("a job was cancelled: {note}"))
}
