//! One machine over all hosts (`--one-machine`), which changes its hosts while EP runs in it.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::ends::no_overrun;
use super::launcher::{COUNTED, COUNTS};
use super::processes::{self, Observer};
use super::user::{Launcher, Status, User};
use super::{BOOT_BOUND, Bench, END_BOUND, PROGRAM_BOUND, STEP_BOUND, ep};

const RANKS: u32 = 4;

fn run(user: &User, minutes: &str, more: &[&str]) -> Result<Launcher> {
    let image = user.image.to_string_lossy().into_owned();
    let words = ["run", "--name", "c", "--image", &image, "--one-machine"];
    let shape = ["--cpus", "4", "--memory", "192M", "--margin", "5", "--time"];
    user.launch("c", &[&words[..], &shape, &[minutes], more].concat())
}

/// Whether it is on `count` hosts, and at rest.
fn is_on(status: &Status, count: usize) -> bool {
    let machine = &status.0["machines"][0];
    let others = machine["others"].as_array().map_or(0, Vec::len);
    let hosts = usize::from(!machine["host"].is_null()) + others;
    hosts == count && machine["moves_to"].is_null()
}

fn home(status: &Status) -> String {
    let host = &status.0["machines"][0]["host"];
    host.as_str().unwrap_or_default().to_owned()
}

/// Two hosts, three, two without the first, one, two.
pub fn life(bench: &Bench<'_>) -> Result<String> {
    const LOG_PAIRS: u32 = 30;
    let user = bench.user()?;
    let (size, program) = (LOG_PAIRS.to_string(), user.ep());
    let mut launcher = run(&user, "10", &["--hosts", "2", "--", &program, &size])?;
    let on = |launcher: &mut Launcher, count: usize| {
        let what = format!("it is on {count} hosts");
        user.until(launcher, &what, STEP_BOUND, |status| {
            status.is_running() && is_on(status, count)
        })
    };
    user.until(&mut launcher, "it runs", BOOT_BOUND, Status::is_running)?;
    let status = on(&mut launcher, 2)?;
    let first = home(&status);
    let shown = user.must(&["status", "c"])?;
    ensure!(shown.matches(" vm-0").count() == 2, "{shown}");
    let boot = "cat /proc/sys/kernel/random/boot_id; nproc";
    let before = user.must(&["ssh", "c", "--", boot])?;
    ensure!(before.ends_with("\n4\n"), "{before:?}");

    user.must(&["hosts", "3"])?;
    on(&mut launcher, 3)?;
    user.must(&["release", &first])?;
    let status = user.until(&mut launcher, "its home has moved", STEP_BOUND, |status| {
        !home(status).is_empty() && home(status) != first && is_on(status, 3)
    })?;
    let second = home(&status);
    user.must(&["shrink", "1"])?;
    let status = on(&mut launcher, 1)?;
    let third = home(&status);
    user.must(&["hosts", "2"])?;
    let status = on(&mut launcher, 2)?;
    let after = user.must(&["ssh", "c", "--", boot])?;
    ensure!(after == before, "it was {before:?} and is {after:?}");
    launcher.must_end(0, PROGRAM_BOUND)?;
    ep::judge_on(&launcher.output(), LOG_PAIRS, RANKS, |_| 0)?;
    user.nothing_left(false)?;
    Ok(format!(
        "{} changes, its home on {first}, {second}, {third}",
        status.moves()
    ))
}

/// A host that has a part of it is killed.
pub fn host_killed(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let program = user.ep();
    let mut launcher = run(&user, "10", &["--hosts", "2", "--", &program, "34"])?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, Status::is_running)?;
    let mut random = bench.random.clone();
    thread::sleep(Duration::from_millis(random.below(3000)));
    let agents: Vec<i32> = processes::agents(&user.tag).into_values().collect();
    ensure!(agents.len() == 2, "agents: {agents:?}");
    let agent = agents.get(random.below(2) as usize).context("no agent")?;
    kill(Pid::from_raw(*agent), Signal::SIGKILL)?;
    launcher.must_end(122, END_BOUND)?;
    launcher.says("vm-0 is lost: ")?;
    user.no_process_left()?;
    user.must(&["forget", "c"])?;
    Ok(String::new())
}

/// The launcher is killed while the machine changes its hosts, and another one goes on.
pub fn launcher_killed(bench: &Bench<'_>) -> Result<String> {
    const LOG_PAIRS: u32 = 29;
    let user = bench.user()?;
    let (size, program) = (LOG_PAIRS.to_string(), user.ep());
    let mut first = run(&user, "10", &["--hosts", "2", "--", &program, &size])?;
    let status = user.until(&mut first, "it runs", BOOT_BOUND, |status| {
        status.is_running() && is_on(status, 2)
    })?;
    user.must(&["release", &home(&status)])?;
    user.until(&mut first, "a change", STEP_BOUND, |status| {
        status.is_moving() || status.moves() > 0
    })?;
    let ms = bench.random.clone().below(1500);
    thread::sleep(Duration::from_millis(ms));
    first.kill()?;
    let mut second = user.launch("c", &["attach", "c"])?;
    second.must_end(0, PROGRAM_BOUND)?;
    let output = first.output() + &second.output();
    ep::judge_on(&output, LOG_PAIRS, RANKS, |_| 0)?;
    user.nothing_left(false)?;
    Ok(format!("{ms} ms after it began"))
}

/// Reservations end one after the other; in the end there is no host, and it goes on from files.
pub fn ends(bench: &Bench<'_>) -> Result<String> {
    const LOG_PAIRS: u32 = 32;
    let user = bench.user()?;
    let list = user.folder.join("list");
    let mut random = bench.random.clone();
    let hosts = (1..=6).map(|host| format!("h{host} max={}\n", 30 + random.below(31)));
    fs::write(&list, hosts.collect::<String>())?;
    let observer = Observer::start(&user.tag, &user.state());
    let (program, size, list) = (user.ep(), LOG_PAIRS.to_string(), list.to_string_lossy());
    let words = [
        "--hosts",
        "3",
        "--list",
        &list,
        "--address",
        "127.0.0.1",
        "--",
        &program,
        &size,
    ];
    let mut launcher = run(&user, "2", &words)?;
    launcher.must_end(0, PROGRAM_BOUND * 2)?;
    ep::judge_on(&launcher.output(), LOG_PAIRS, RANKS, |_| 0)?;
    user.nothing_left(false)?;
    let note = no_overrun(&observer.seen())?;
    let changes = launcher.errors().matches("vm-0 goes to ").count();
    Ok(format!("{note}, {changes} changes"))
}

/// No host is left: it is saved, and goes on over several hosts.
pub fn resume(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let (list, saves) = (user.folder.join("list"), user.folder.join("saves"));
    fs::write(&list, "one max=26\ntwo max=26\n")?;
    let (list, saves) = (list.to_string_lossy(), saves.to_string_lossy());
    let words = [
        "--hosts",
        "2",
        "-n",
        "1",
        "--list",
        &list,
        "--address",
        "127.0.0.1",
        "--save-to",
        &saves,
        "--no-copy",
        "--",
        "sh",
        "-c",
        COUNTS,
    ];
    let mut launcher = run(&user, "5", &words)?;
    let (mut output, mut saved) = (String::new(), 0);
    loop {
        let code = launcher.ends_within(PROGRAM_BOUND)?;
        output += &launcher.output();
        if code == 0 {
            break;
        }
        ensure!(code == 121, "ended with {code}: {}", launcher.errors());
        saved += 1;
        ensure!(saved < 12, "saved again and again");
        user.no_process_left()?;
        launcher = user.launch("c", &["resume", "c"])?;
    }
    let counted: String = (1..=COUNTED).map(|number| format!("{number}\n")).collect();
    ensure!(output == counted, "{output:?}");
    ensure!(saved > 0, "it was never saved");
    user.nothing_left(false)?;
    Ok(format!("saved {saved} times"))
}
