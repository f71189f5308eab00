//! An agent that is killed: its host is lost.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{BOOT_BOUND, Bench, END_BOUND, PROGRAM_BOUND, processes};

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
