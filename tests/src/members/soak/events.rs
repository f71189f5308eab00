//! The events, one at a time, by weight.

use anyhow::Result;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::driver::{Driver, Later};
use super::ledger::Harm;
use super::site::{GUEST, HOSTS};
use super::work::{Kind, Wanted};
use crate::fleet::ETCD_MEMBERS;

/// What runs and waits together, at most.
const AGGREGATES_MAX: usize = 18;
/// Harm that lasts, at most, at one time.
const HARMS_MAX: usize = 2;

type Event = fn(&mut Driver<'_>) -> Result<()>;

const WORK: [(&str, u64, Event); 6] = [
    ("start", 30, start),
    ("start one name on two hosts", 1, start_twice),
    ("stop", 9, stop),
    ("kill a launcher", 2, kill_launcher),
    ("kill an agent", 2, kill_agent),
    ("drain", 6, drain),
];

const HARMS: [(&str, u64, Event); 12] = [
    ("join or leave", 2, join_or_leave),
    ("kill a slice", 1, kill_slice),
    ("kill a daemon", 3, kill_daemon),
    ("kill the leader", 3, kill_leader),
    ("kill a host", 2, kill_host),
    ("end a daemon", 1, end_daemon),
    ("stop a daemon", 2, stop_daemon),
    ("kill an etcd member", 2, kill_etcd),
    ("stop an etcd member", 1, stop_etcd),
    ("kill the whole etcd", 1, kill_all_etcd),
    ("cut hosts off from hosts", 3, cut_hosts),
    ("cut the store off", 3, cut_store),
];

impl Driver<'_> {
    /// Has the next thing happen, whatever the seed says.
    pub(super) fn event(&mut self) -> Result<()> {
        let open = self
            .ledger
            .entries
            .iter()
            .filter(|entry| entry.to.is_none());
        // A cut of many pairs is one.
        let cuts = open
            .clone()
            .any(|entry| matches!(entry.harm, Harm::Cut(..)));
        let others = open
            .filter(|entry| !matches!(entry.harm, Harm::Cut(..)))
            .count();
        let harms: &[(&str, u64, Event)] = match others + usize::from(cuts) < HARMS_MAX {
            true => &HARMS,
            false => &[],
        };
        let all: Vec<(&str, u64, Event)> = WORK.iter().chain(harms).copied().collect();
        let total = all.iter().map(|(_, weight, _)| weight).sum();
        let mut at = self.random.below(total);
        for (name, weight, event) in all {
            if at < weight {
                self.count(&format!("event: {name}"));
                return event(self);
            }
            at -= weight;
        }
        Ok(())
    }

    /// A host that is a member and whose daemon runs.
    fn lender(&mut self) -> Option<usize> {
        let all = (0..HOSTS.len()).filter(|host| {
            let host = &self.site.fleet.hosts[*host];
            host.daemon.is_some() && !host.is_stopped && host.is_member
        });
        let all: Vec<usize> = all.collect();
        (!all.is_empty()).then(|| all[self.pick(all.len())])
    }

    pub(super) fn wanted(&mut self) -> Wanted {
        let kind = match self.pick(8) {
            0..3 => Kind::Program,
            3..6 => Kind::Machine,
            _ => Kind::Detached,
        };
        // A host offers some 500 MiB: the largest lie over two or three.
        let (cores, memory_mib) = match (kind, self.pick(5)) {
            (Kind::Program, 0..3) => (1, 30 + self.random.below(200)),
            (Kind::Program, _) => (1, 400 + self.random.below(500)),
            (_, 0) => (1, 96 + 2 * self.random.below(40)),
            (_, 1 | 2) => (2, 128 + 2 * self.random.below(60)),
            (_, _) => (3 + self.random.below(3), 256 + 2 * self.random.below(160)),
        };
        self.started += 1;
        let number = self.started;
        let home = match self.pick(30) {
            0 if self.site.fleet.hosts[GUEST].daemon.is_some() => GUEST,
            _ => self.pick(GUEST),
        };
        Wanted {
            kind,
            home,
            cores,
            memory_mib,
            seconds: if self.pick(2) == 0 {
                10 + self.random.below(80)
            } else {
                100_000
            },
            priority: if self.pick(6) == 0 { 5 } else { 0 },
            token: format!("t{number}x"),
            rival: false,
        }
    }

    /// One that runs or waits and was not told to end.
    fn living(&mut self) -> Option<usize> {
        let all = self.aggregates.iter().enumerate();
        let all: Vec<usize> = all
            .filter(|of| of.1.told.is_none())
            .map(|of| of.0)
            .collect();
        (!all.is_empty()).then(|| all[self.pick(all.len())])
    }
}

fn start(driver: &mut Driver<'_>) -> Result<()> {
    if driver.aggregates.len() >= AGGREGATES_MAX {
        return stop(driver);
    }
    let wanted = driver.wanted();
    driver.start(wanted)
}

/// Two hosts ask for one name at once. At most one gets it.
fn start_twice(driver: &mut Driver<'_>) -> Result<()> {
    if driver.aggregates.len() + 1 >= AGGREGATES_MAX {
        return Ok(());
    }
    let first = Wanted {
        kind: Kind::Machine,
        cores: 1,
        memory_mib: 96,
        rival: true,
        ..driver.wanted()
    };
    let second = Wanted {
        home: (first.home + 1) % GUEST,
        token: first.token.clone(),
        ..first
    };
    driver.start(first)?;
    driver.start(second)
}

fn stop(driver: &mut Driver<'_>) -> Result<()> {
    match driver.living() {
        Some(number) => driver.stop(number),
        None => Ok(()),
    }
}

fn kill_launcher(driver: &mut Driver<'_>) -> Result<()> {
    if let Some(number) = driver.living() {
        driver.look();
        // The look may have taken one away.
        if number < driver.aggregates.len() && driver.aggregates[number].told.is_none() {
            driver.kill_launcher(number);
        }
    }
    Ok(())
}

/// What runs must live on; the launcher dies later.
fn kill_agent(driver: &mut Driver<'_>) -> Result<()> {
    let Some(number) = driver.living() else {
        return Ok(());
    };
    let aggregate = &driver.aggregates[number];
    let pid = aggregate.command.pid();
    let is_program = aggregate.wanted.kind != Kind::Detached;
    let agent = crate::processes::all().into_iter().find(|process| {
        process.parent == pid
            && crate::processes::command_line(process.identity.pid).contains("cluster agent")
    });
    let Some(agent) = agent.filter(|_| is_program && aggregate.ran.is_some()) else {
        return Ok(());
    };
    let token = aggregate.wanted.token.clone();
    driver.note(&format!("kill the agent of {token}"));
    // Gone in the meantime is fine: that was the purpose.
    let _ = kill(Pid::from_raw(agent.identity.pid), Signal::SIGKILL);
    driver.after(Later::KillLauncher(pid as usize), 8_000, 40_000);
    Ok(())
}

/// An operator has all leave a host, most often because it is needed, else since it may fail.
fn drain(driver: &mut Driver<'_>) -> Result<()> {
    let (Some(any), Some(from)) = (driver.lender(), driver.lender()) else {
        return Ok(());
    };
    // Most often one that a part of a machine has to leave.
    let slices: Vec<usize> = driver.sight.slices.iter().map(|slice| slice.0).collect();
    let host = match driver.pick(4) {
        1.. if !slices.is_empty() => slices[driver.pick(slices.len())],
        _ => any,
    };
    if host == GUEST || driver.cordoned.len() > 1 {
        return Ok(());
    }
    driver.cordoned.push(host);
    let name = HOSTS[host];
    let (what, line) = match driver.pick(3) {
        0 => (
            "evacuate",
            format!("node evacuate {name} --why smoke --wait 25"),
        ),
        _ => ("drain", format!("node drain {name} --wait 25")),
    };
    driver.background(what, from, &line, 90)?;
    driver.after(Later::Uncordon(host), 15_000, 50_000);
    Ok(())
}

fn join_or_leave(driver: &mut Driver<'_>) -> Result<()> {
    let busy = ["join", "leave", "drain ivory", "end the daemon of ivory"];
    let is_busy = |what: &str| busy.iter().any(|word| what.starts_with(word));
    if driver.tasks.iter().any(|task| is_busy(&task.what)) {
        return Ok(());
    }
    let guest = &driver.site.fleet.hosts[GUEST];
    if !guest.is_member {
        driver.note("join ivory");
        let process = driver.site.fleet.join(GUEST)?;
        driver.take_on("join ivory", process, 90);
    } else if guest.daemon.is_some() && !guest.is_stopped {
        let from = driver.pick(GUEST);
        driver.background("drain ivory", from, "node drain ivory --wait 8", 60)?;
        driver.after(Later::Leave, 9_000, 15_000);
    }
    Ok(())
}

fn kill_slice(driver: &mut Driver<'_>) -> Result<()> {
    let slices = driver.sight.slices.clone();
    if !slices.is_empty() {
        let (host, pid) = slices[driver.pick(slices.len())];
        driver.note(&format!("kill slice {pid} on {}", HOSTS[host]));
        driver.ledger.note(Harm::Slice(host));
        // Gone in the meantime is fine: that was the purpose.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    Ok(())
}

fn kill_this_daemon(driver: &mut Driver<'_>, host: usize) {
    driver.doom(host, "the death of the daemon");
    driver.note(&format!("kill the daemon of {}", HOSTS[host]));
    driver.ledger.begin(Harm::Daemon(host));
    driver.site.fleet.kill_daemon(host);
    driver.after(Later::StartDaemon(host), 500, 30_000);
}

fn kill_daemon(driver: &mut Driver<'_>) -> Result<()> {
    if let Some(host) = driver.lender() {
        kill_this_daemon(driver, host);
    }
    Ok(())
}

fn kill_leader(driver: &mut Driver<'_>) -> Result<()> {
    let leader = driver.site.leader;
    if let Some(host) = leader.filter(|host| driver.site.fleet.hosts[*host].daemon.is_some()) {
        kill_this_daemon(driver, host);
    }
    Ok(())
}

fn kill_host(driver: &mut Driver<'_>) -> Result<()> {
    if let Some(host) = driver.lender() {
        driver.doom(host, "the death");
        driver.note(&format!("kill {}", HOSTS[host]));
        driver.ledger.begin(Harm::Host(host));
        let numbers: Vec<usize> = (0..driver.aggregates.len())
            .filter(|number| driver.aggregates[*number].wanted.home == host)
            .collect();
        for number in numbers {
            driver.kill_launcher(number);
        }
        driver.site.fleet.kill_host(host);
        driver.after(Later::StartDaemon(host), 500, 30_000);
    }
    Ok(())
}

fn end_daemon(driver: &mut Driver<'_>) -> Result<()> {
    if let Some(host) = driver.lender() {
        driver.note(&format!("end the daemon of {}", HOSTS[host]));
        driver.end_daemon(host);
        driver.after(Later::StartDaemon(host), 500, 20_000);
    }
    Ok(())
}

/// A short stop loses nothing; a long one does.
fn moment(driver: &mut Driver<'_>, what: Later) {
    match driver.pick(5) {
        0 | 1 => driver.after(what, 200, 2_000),
        _ => driver.after(what, 5_000, 35_000),
    }
}

fn stop_daemon(driver: &mut Driver<'_>) -> Result<()> {
    if let Some(host) = driver.lender() {
        driver.note(&format!("stop the daemon of {}", HOSTS[host]));
        driver.ledger.begin(Harm::Stopped(host));
        driver.site.fleet.hosts[host].is_stopped = true;
        if let Some(daemon) = &mut driver.site.fleet.hosts[host].daemon {
            daemon.signal(Signal::SIGSTOP);
        }
        moment(driver, Later::Continue(host));
    }
    Ok(())
}

/// While one of its members is down or cut off, the loss of another one leaves no majority.
fn etcd_is_whole(driver: &Driver<'_>) -> bool {
    let mut entries = driver.ledger.entries.iter();
    let is_broken = entries.any(|entry| entry.to.is_none() && entry.harm == Harm::Store);
    !is_broken && driver.cut.is_empty()
}

fn kill_etcd(driver: &mut Driver<'_>) -> Result<()> {
    let member = driver.pick(ETCD_MEMBERS);
    if etcd_is_whole(driver) {
        driver.note(&format!("kill etcd {member}"));
        driver.ledger.begin(Harm::Store);
        driver.site.fleet.etcd.kill(member);
        driver.after(Later::StartEtcd(member), 500, 30_000);
    }
    Ok(())
}

/// It takes connections, and answers nothing.
fn stop_etcd(driver: &mut Driver<'_>) -> Result<()> {
    let member = driver.pick(ETCD_MEMBERS);
    if etcd_is_whole(driver) {
        driver.note(&format!("stop etcd {member}"));
        driver.ledger.begin(Harm::Store);
        driver.site.fleet.etcd.signal(member, Signal::SIGSTOP);
        driver.after(Later::ContinueEtcd(member), 2_000, 30_000);
    }
    Ok(())
}

fn kill_all_etcd(driver: &mut Driver<'_>) -> Result<()> {
    driver.note("kill all of etcd");
    driver.ledger.begin(Harm::Store);
    for member in 0..ETCD_MEMBERS {
        driver.site.fleet.etcd.kill(member);
        driver.after(Later::StartEtcd(member), 1_000, 20_000);
    }
    Ok(())
}

/// Cuts places off from others, both ways or one.
fn cut(driver: &mut Driver<'_>, some: &[usize], others: &[usize]) -> Result<()> {
    if !driver.cut.is_empty() || some.is_empty() || others.is_empty() {
        return Ok(());
    }
    let one_way = driver.pick(6) == 0;
    driver.note(&format!(
        "cut {some:?} off from {others:?}, one way: {one_way}"
    ));
    for &place in some {
        for &other in others {
            driver.ledger.begin(Harm::Cut(place, other));
        }
        driver.cut.push((place, others.to_vec()));
        driver.site.fleet.star.mislead(place, others, true)?;
    }
    for &other in others.iter().filter(|_| !one_way) {
        driver.cut.push((other, some.to_vec()));
        driver.site.fleet.star.mislead(other, some, true)?;
    }
    moment(driver, Later::Heal);
    Ok(())
}

fn cut_hosts(driver: &mut Driver<'_>) -> Result<()> {
    let mut all: Vec<usize> = (0..HOSTS.len()).collect();
    for at in (1..all.len()).rev() {
        all.swap(at, driver.random.below(at as u64 + 1) as usize);
    }
    let count = 1 + driver.pick(4);
    let (some, others) = all.split_at(count);
    cut(driver, some, others)
}

fn cut_store(driver: &mut Driver<'_>) -> Result<()> {
    let members: Vec<usize> = (HOSTS.len()..HOSTS.len() + ETCD_MEMBERS).collect();
    let one = members[driver.pick(members.len())];
    let rest: Vec<usize> = members
        .iter()
        .copied()
        .filter(|other| *other != one)
        .collect();
    let hosts: Vec<usize> = (0..HOSTS.len()).collect();
    let host = driver.pick(GUEST);
    match driver.pick(5) {
        // One member from the others.
        0 => cut(driver, &[one], &rest),
        // One member from all hosts.
        1 => cut(driver, &[one], &hosts),
        // A host from the store.
        2 => cut(driver, &[host], &members),
        // A host from all others.
        3 => {
            let mut others = members;
            others.extend(hosts.into_iter().filter(|other| *other != host));
            cut(driver, &[host], &others)
        }
        // Several hosts, with one member.
        _ => {
            let (near, far) = hosts.split_at(2 + driver.pick(4));
            let near: Vec<usize> = near.iter().copied().chain([one]).collect();
            let far: Vec<usize> = far.iter().copied().chain(rest).collect();
            cut(driver, &near, &far)
        }
    }
}
