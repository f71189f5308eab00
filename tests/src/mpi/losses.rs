//! An agent that is killed, so that its host is lost; and a machine that ends while no launcher
//! is there.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{BOOT_BOUND, Bench, END_BOUND, PROGRAM_BOUND, processes};

/// A new launcher gives machines a minute to be seen.
const UNSEEN_BOUND: Duration = Duration::from_secs(150);

pub fn agent(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let program = user.ep();
    let words = ["--hosts", "2", "--vms", "4", "--", &program, "32"];
    let mut launcher = user.run("c", &words)?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    thread::sleep(Duration::from_millis(bench.random.clone().below(3000)));
    let agents = processes::agents(&user.tag);
    ensure!(agents.len() == 2, "agents: {agents:?}");
    let agent = agents.values().next().context("no agent")?;
    kill(Pid::from_raw(*agent), Signal::SIGKILL)?;
    launcher.must_end(122, END_BOUND)?;
    launcher.says("vm-")?;
    launcher.says(" is lost: ")?;
    let said = launcher.errors();
    ensure!(
        said.lines()
            .any(|line| line.contains("is lost") && line.contains("local-")),
        "no host is named: {said}"
    );
    // The logs of jobs are kept for their user.
    user.no_process_left()?;
    ensure!(user.state().join("c/job-2.log").exists(), "there is no log");
    user.must(&["forget", "c"])?;
    // The folder of an agent that was killed is removed by the next one there, some seconds later.
    thread::sleep(Duration::from_secs(10));
    let mut next = user.run("c", &["--", &program, "24"])?;
    next.must_end(0, PROGRAM_BOUND)?;
    user.nothing_left(false)?;
    let lost = said
        .lines()
        .find(|line| line.contains("is lost"))
        .unwrap_or_default();
    Ok(lost.trim_start_matches("weft: ").to_owned())
}

/// The next launcher misses it.
pub fn alone(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let mut launcher = user.run("c", &["--vms", "2", "--", &user.ep(), "36"])?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    launcher.kill()?;
    let is_machine = |pid: &i32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains("vm\0start\0")
    };
    let machine = processes::tagged_pids(&user.tag)
        .into_iter()
        .find(is_machine);
    kill(
        Pid::from_raw(machine.context("no machine")?),
        Signal::SIGKILL,
    )?;
    let mut next = user.launch("c", &["attach", "c"])?;
    next.must_end(122, UNSEEN_BOUND)?;
    next.says(" is lost: it ended on ")?;
    user.must(&["forget", "c"])?;
    user.nothing_left(false)?;
    Ok(String::new())
}
