//! Hosts join by a token each, lend to one another without an entry for a peer, and leave;
//! the etcd also stops answering.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Check;
use super::site::{BOUND, Host, SOON, Site};
use crate::cluster::{Identity, free_port};
use crate::run::End;

/// In this order: each goes on where the one before ended.
pub(super) const CHECKS: [(&str, Check); 6] = [
    ("join, each by a token of its own", join),
    ("lend to one another without a peer's entry", lend),
    ("cannot join by a token that was used", used_token),
    ("go on without the store", without_store),
    ("that leave are refused", leave),
    ("whose daemon ends are seen at once", ended_daemon),
];

fn join(site: &mut Site<'_>) -> Result<()> {
    let says = site.fails("home", "cluster status")?;
    ensure!(says.contains("no member of a cluster"), "{says}");
    site.init()?;
    let init = site.init_command().replace("name home", "name alpha");
    let says = site.fails("alpha", &init)?;
    ensure!(says.contains("has the cluster fragments already"), "{says}");
    site.join("alpha")?;
    site.join("beta")?;
    let (members, alive) = site.members("beta")?;
    ensure!(
        members == ["alpha", "beta", "home"] && alive.is_empty(),
        "{members:?} {alive:?}"
    );
    Ok(())
}

fn lend(site: &mut Site<'_>) -> Result<()> {
    site.lend("alpha", "600M")?;
    site.lend("beta", "600M")?;
    site.living(&["alpha", "beta"])?;
    site.runs_on("alpha")?;
    site.runs_on("beta")?;
    site.runs_on("alpha,beta")
}

fn used_token(site: &mut Site<'_>) -> Result<()> {
    let thief = Identity::new(site.context, &site.directory.join("thief"))?;
    let port = free_port()?;
    site.hosts.push(Host {
        name: "thief",
        identity: thief,
        port,
        daemon: None,
    });
    let says = site.fails("thief", &site.join_command(&site.token, "thief"))?;
    ensure!(says.contains("was used"), "{says}");
    let stranger = format!("weft-join-{}", "0".repeat(64));
    let says = site.fails("thief", &site.join_command(&stranger, "thief"))?;
    ensure!(says.contains("the token is unknown"), "{says}");
    let says = site.fails("thief", "cluster status")?;
    ensure!(says.contains("no member"), "{says}");
    let (members, _) = site.members("home")?;
    ensure!(members.len() == 3, "{members:?}");
    Ok(())
}

fn without_store(site: &mut Site<'_>) -> Result<()> {
    site.signal_etcd(Signal::SIGSTOP)?;
    let outcome = site.runs_on("alpha").and_then(|()| site.runs_on("beta"));
    let begun = Instant::now();
    let says = site.fails("home", "cluster status");
    let took = begun.elapsed();
    site.signal_etcd(Signal::SIGCONT)?;
    outcome?;
    let says = says?;
    ensure!(says.contains("the store cannot be reached"), "{says}");
    ensure!(took < BOUND, "it took {took:?}");
    site.living(&["alpha", "beta"])?;
    site.runs_on("alpha")
}

fn leave(site: &mut Site<'_>) -> Result<()> {
    site.succeeds("alpha", "cluster leave home")?;
    let begun = Instant::now();
    // The lenders learn it from the store.
    loop {
        let outcome = site.program("beta")?;
        if outcome.end != End::Exit(0) {
            ensure!(
                outcome.stderr.contains("does not let the key"),
                "{}",
                outcome.stderr
            );
            break;
        }
        ensure!(begun.elapsed() < SOON, "a host that has left still borrows");
        std::thread::sleep(Duration::from_millis(200));
    }
    // It forgets a cluster that has forgotten it.
    site.succeeds("home", "cluster leave")?;
    let invited = site.succeeds("alpha", "cluster invite --minutes 5")?;
    let token = invited
        .split_whitespace()
        .find(|word| word.starts_with("weft-join-"));
    site.succeeds(
        "home",
        &site.join_command(token.context("no token")?, "home"),
    )?;
    let begun = Instant::now();
    while let Err(error) = site.runs_on("beta") {
        ensure!(begun.elapsed() < SOON, "{error:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

fn ended_daemon(site: &mut Site<'_>) -> Result<()> {
    let host = site
        .hosts
        .iter_mut()
        .find(|host| host.name == "beta")
        .context("beta")?;
    let daemon = host.daemon.take().context("it runs")?;
    kill(Pid::from_raw(daemon.pid()), Signal::SIGTERM)?;
    let outcome = daemon.finish()?;
    ensure!(
        outcome.end == End::Exit(0),
        "{}: {}",
        outcome.end,
        outcome.stderr
    );
    let (_, alive) = site.members("home")?;
    ensure!(
        alive == ["alpha"],
        "{alive:?} live after beta's daemon has ended"
    );
    Ok(())
}
