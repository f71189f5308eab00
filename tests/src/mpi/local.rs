//! Hosts of a list that come and go while EP runs, and what else is asked of a launcher.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{BOOT_BOUND, Bench, END_BOUND, PROGRAM_BOUND, STEP_BOUND, ep};

/// On two processors some 20 s.
const LOG_PAIRS: u32 = 30;

/// One host, two, others, one again; the program's result is right.
pub fn life(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let (size, program) = (LOG_PAIRS.to_string(), user.ep());
    let options = [
        "--vms", "4", "--time", "5", "--margin", "5", "--", &program, &size,
    ];
    let mut launcher = user.run("c", &options)?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    let listed = user.must(&["list", "--json"])?;
    ensure!(listed.contains("\"running\""), "{listed}");

    user.must(&["hosts", "1", "--cluster", "c"])?;
    user.must(&["newnode"])?;
    user.until(
        &mut launcher,
        "two on each of two hosts",
        STEP_BOUND,
        |status| {
            let hosts = status.hosts();
            hosts.len() == 2 && hosts.iter().all(|host| status.machines_on(host) == 2)
        },
    )?;
    // Before and after a move the machine is the same.
    let boot = "cat /proc/sys/kernel/random/boot_id; hostname";
    let before = user.must(&["ssh", "c", "3", "--", boot])?;
    ensure!(before.ends_with("\nvm-3\n"), "{before:?}");
    let file = user.folder.join("a file");
    fs::write(&file, "deployed")?;
    user.must(&["deploy", &file.to_string_lossy()])?;

    let first = user.status("c")?.hosts()[0].to_owned();
    user.must(&["release", &first])?;
    user.until(
        &mut launcher,
        "the released host is gone",
        STEP_BOUND,
        |status| {
            !status.0["hosts"]
                .to_string()
                .contains(&format!("\"{first}\""))
                && status.hosts().len() == 2
        },
    )?;
    user.must(&["shrink", "1"])?;
    let last = user.until(&mut launcher, "all on one host", STEP_BOUND, |status| {
        let hosts = status.hosts();
        hosts.len() == 1 && status.machines_on(hosts[0]) == 4
    })?;
    for machine in ["0", "1", "2", "3"] {
        let read = user.must(&["ssh", "c", machine, "--", "cat 'a file'"])?;
        ensure!(read == "deployed", "{read:?}");
    }
    let after = user.must(&["ssh", "c", "3", "--", boot])?;
    ensure!(after == before, "vm-3 was {before:?} and is {after:?}");
    ensure!(last.moves() >= 6, "{} moves: {}", last.moves(), last.log());

    launcher.must_end(0, PROGRAM_BOUND)?;
    ep::judge(&launcher.output(), LOG_PAIRS, 4)?;
    ensure!(!launcher.errors().contains("ep:"), "{}", launcher.errors());
    user.nothing_left(false)?;
    Ok(format!("{} moves", last.moves()))
}

/// The exit code of the program, whose outputs stay apart, and the end by a user.
pub fn exit_code(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let program = user.ep();
    let mut wrong = user.run("c", &["--vms", "2", "--", &program, "wrong"])?;
    wrong.must_end(2, PROGRAM_BOUND)?;
    ensure!(wrong.output().is_empty(), "{}", wrong.output());
    wrong.says("usage: ep")?;
    user.nothing_left(false)?;

    let script = "echo out; echo err >&2; printf last; exit 7";
    let mut both = user.run("c", &["--no-copy", "--", "sh", "-c", script])?;
    both.must_end(7, PROGRAM_BOUND)?;
    ensure!(both.output() == "out\nlast", "{:?}", both.output());
    both.says("\nerr\n")?;
    user.nothing_left(false)?;

    let mut idle = user.run("c", &["--vms", "1"])?;
    user.until(&mut idle, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    user.must(&["exit"])?;
    idle.must_end(0, END_BOUND)?;
    user.nothing_left(false)?;

    let mut interrupted = user.run("c", &["--vms", "1"])?;
    std::thread::sleep(Duration::from_millis(bench.random.clone().below(4000)));
    // To all of its group, as a terminal does.
    let group = nix::unistd::Pid::from_raw(interrupted.pid());
    nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGINT)?;
    interrupted.must_end(130, END_BOUND)?;
    user.nothing_left(false)?;
    Ok(String::new())
}
