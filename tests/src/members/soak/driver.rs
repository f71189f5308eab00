//! What happens in the cluster: starts, ends, drains, joins, kills, stops, cuts, as a seed says.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::ledger::{AFTERMATH, Harm, Ledger};
use super::observer::{self, Observer, Sight};
use super::site::{GUEST, HOSTS, Site};
use super::work::{Aggregate, Kind, Told, Wanted};
use crate::fleet::{ETCD_MEMBERS, Started, words};
use crate::random::Random;
use crate::run::End;

/// How often the observer looks.
const LOOK: Duration = Duration::from_millis(500);
/// More failures say no more.
const FAILURES_MAX: usize = 40;

/// What puts harm right again, later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Later {
    StartDaemon(usize),
    Continue(usize),
    StartEtcd(usize),
    ContinueEtcd(usize),
    Heal,
    Uncordon(usize),
    Leave,
    KillLauncher(usize),
}

/// A command in the background.
pub(super) struct Task {
    pub(super) what: String,
    process: Started,
    /// When the test gives it up.
    end: Instant,
}

pub(super) struct Driver<'a> {
    pub(super) site: Site<'a>,
    pub(super) images: (String, String),
    pub(super) random: Random,
    pub(super) ledger: Ledger,
    pub(super) aggregates: Vec<Aggregate>,
    pub(super) later: Vec<(Instant, Later)>,
    pub(super) tasks: Vec<Task>,
    /// Pairs of places of which the first one's packets to the second vanish.
    pub(super) cut: Vec<(usize, Vec<usize>)>,
    pub(super) cordoned: Vec<usize>,
    pub(super) sight: Sight,
    looked: Instant,
    observer: Observer,
    /// Machines that cannot live on, until when they must have ended, and why.
    doomed: Vec<(String, Instant, String)>,
    pub(super) started: usize,
    /// Events and ends by kind.
    pub(super) counts: BTreeMap<String, usize>,
    pub(super) failures: Vec<String>,
    log: File,
    begun: Instant,
}

impl<'a> Driver<'a> {
    pub(super) fn new(site: Site<'a>, images: (String, String), seed: u64) -> Result<Driver<'a>> {
        let path = site.fleet.directory.join("log");
        let log = OpenOptions::new().create(true).append(true).open(&path);
        Ok(Driver {
            site,
            images,
            random: Random::new(seed),
            ledger: Ledger::default(),
            aggregates: Vec::new(),
            later: Vec::new(),
            tasks: Vec::new(),
            cut: Vec::new(),
            cordoned: Vec::new(),
            sight: Sight::default(),
            looked: Instant::now(),
            observer: Observer::default(),
            doomed: Vec::new(),
            started: 0,
            counts: BTreeMap::new(),
            failures: Vec::new(),
            log: log.with_context(|| path.display().to_string())?,
            begun: Instant::now(),
        })
    }

    pub(super) fn note(&mut self, what: &str) {
        let at = self.begun.elapsed().as_secs_f64();
        // A log that cannot be written changes nothing of the test.
        let _ = writeln!(self.log, "{at:8.1} {what}");
    }

    pub(super) fn count(&mut self, kind: &str) {
        *self.counts.entry(kind.to_owned()).or_default() += 1;
    }

    pub(super) fn fail(&mut self, why: String) {
        self.note(&format!("FAILURE {why}"));
        if self.failures.len() < FAILURES_MAX {
            eprintln!("soak: {:.0} s: {why}", self.begun.elapsed().as_secs_f64());
            self.failures.push(why);
        }
    }

    pub(super) fn pick(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    pub(super) fn after(&mut self, what: Later, least_ms: u64, most_ms: u64) {
        let wait = least_ms + self.random.below(most_ms - least_ms);
        self.later
            .push((Instant::now() + Duration::from_millis(wait), what));
    }

    /// Looks at everything once. Called several times a second.
    pub(super) fn tick(&mut self) -> Result<()> {
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.later)
            .into_iter()
            .partition(|of| of.0 <= now);
        self.later = later;
        let due: Vec<(Instant, Later)> = due;
        for (_, what) in due {
            self.put_right(what)?;
        }
        if self.looked.elapsed() > LOOK {
            self.look();
        }
        for fault in self.site.hear_daemons() {
            self.fail(fault);
        }
        self.end_tasks();
        std::thread::sleep(Duration::from_millis(100));
        Ok(())
    }

    pub(super) fn look(&mut self) {
        self.sight = observer::look(&self.site.fleet.namespaces());
        self.looked = Instant::now();
        for fault in self.observer.faults(&self.sight) {
            self.fail(fault);
        }
        let now = self.looked;
        for aggregate in &mut self.aggregates {
            let Wanted { token, home, .. } = &aggregate.wanted;
            let Some(home) = self.sight.home(token, *home) else {
                continue;
            };
            aggregate.ran.get_or_insert(now);
            for &other in home.others.iter().filter(|other| **other != home.host) {
                aggregate.places.retain(|(host, _)| *host != other);
                aggregate.places.push((other, now));
            }
        }
        self.judge_ends();
        self.check_doomed();
    }

    fn is_over(&mut self, number: usize) -> Option<Option<End>> {
        let aggregate = &mut self.aggregates[number];
        let end = aggregate.command.end()?;
        if aggregate.wanted.kind != Kind::Detached || end != End::Exit(0) {
            return Some(Some(end));
        }
        let launchers = self.sight.launchers.get(&aggregate.wanted.token);
        let home = aggregate.wanted.home;
        let lives = launchers.is_some_and(|all| all.iter().any(|(host, _)| *host == home));
        // The sight may be older than the end of the command.
        (!lives && self.looked.elapsed() < LOOK && aggregate.ran.is_some()).then_some(None)
    }

    fn judge_ends(&mut self) {
        let mut number = 0;
        while number < self.aggregates.len() {
            let Some(end) = self.is_over(number) else {
                let aggregate = &self.aggregates[number];
                if aggregate.overdue() {
                    let Wanted { token, home, .. } = &aggregate.wanted;
                    let why = format!("{token} of {} does not end", HOSTS[*home]);
                    self.aggregates[number].told = Some((Instant::now(), Told::Kill));
                    self.aggregates[number].command.signal(Signal::SIGKILL);
                    self.fail(why);
                }
                number += 1;
                continue;
            };
            let aggregate = self.aggregates.swap_remove(number);
            match aggregate.judge(&self.site, &self.ledger, end) {
                Ok(how) => {
                    let said = aggregate.said(&self.site);
                    let last = said.lines().last().unwrap_or_default().to_owned();
                    self.note(&format!("{} {how}: {last}", aggregate.wanted.token));
                    self.count(&format!("end: {how}"));
                }
                Err(why) => self.fail(why),
            }
        }
    }

    fn check_doomed(&mut self) {
        let lives = |token: &str| self.sight.homes.contains_key(token);
        self.doomed.retain(|(token, _, _)| lives(token));
        let now = Instant::now();
        let (late, rest) = std::mem::take(&mut self.doomed)
            .into_iter()
            .partition(|of| of.1 < now);
        self.doomed = rest;
        let late: Vec<(String, Instant, String)> = late;
        for (token, _, why) in late {
            self.fail(format!("{token} runs on after {why}"));
        }
    }

    fn end_tasks(&mut self) {
        let mut number = 0;
        while number < self.tasks.len() {
            let task = &mut self.tasks[number];
            let end = task.process.end();
            if end.is_none() && Instant::now() < task.end {
                number += 1;
                continue;
            }
            let task = self.tasks.swap_remove(number);
            let said = task.process.said();
            let last = said.lines().last().unwrap_or_default().to_owned();
            match end {
                None => self.fail(format!("{}: it hangs: {last}", task.what)),
                Some(_) if said.contains("panicked") => {
                    self.fail(format!("{}: {said}", task.what));
                }
                Some(end) => {
                    self.note(&format!("{}: {end}: {last}", task.what));
                    self.go_on(&task.what, end);
                }
            }
        }
    }

    /// What follows the end of a task. Where the store did not answer, nothing was done.
    fn go_on(&mut self, what: &str, end: End) {
        let succeeded = end == End::Exit(0);
        if what.starts_with("join") && succeeded {
            self.site.fleet.hosts[GUEST].is_member = true;
            if let Err(error) = self.site.fleet.start_daemon(GUEST) {
                self.fail(format!("{error:#}"));
            }
        } else if what.starts_with("leave") && succeeded {
            self.site.fleet.hosts[GUEST].is_member = false;
            self.end_daemon(GUEST);
        } else if what == format!("end the daemon of {}", HOSTS[GUEST]) {
            self.ledger.put_right(|harm| harm == Harm::Ended(GUEST));
        }
    }

    /// Runs `weft` on a host in the background.
    pub(super) fn background(
        &mut self,
        what: &str,
        host: usize,
        line: &str,
        bound: u64,
    ) -> Result<()> {
        self.note(&format!("{what} ({line} on {})", HOSTS[host]));
        let name = format!("task-{}", self.counts.values().sum::<usize>());
        let process = self.site.fleet.begin(host, &name, &words(line))?;
        self.take_on(what, process, bound);
        Ok(())
    }

    pub(super) fn take_on(&mut self, what: &str, process: Started, bound: u64) {
        self.tasks.push(Task {
            what: what.to_owned(),
            process,
            end: Instant::now() + Duration::from_secs(bound),
        });
    }

    pub(super) fn start(&mut self, wanted: Wanted) -> Result<()> {
        let Wanted {
            kind,
            home,
            cores,
            memory_mib,
            seconds,
            ref token,
            ..
        } = wanted;
        let name = HOSTS[home];
        self.note(&format!(
            "start {kind:?} {token} of {name}: {cores} cores, {memory_mib} MiB, {seconds} s"
        ));
        self.count(&format!("start {kind:?}"));
        let images = (&self.images.0[..], &self.images.1[..]);
        let aggregate = Aggregate::start(&self.site, images, wanted)?;
        self.aggregates.push(aggregate);
        Ok(())
    }

    /// Ends an aggregate.
    pub(super) fn stop(&mut self, number: usize) -> Result<()> {
        let aggregate = &mut self.aggregates[number];
        aggregate.told = Some((Instant::now(), Told::Stop));
        let Wanted {
            token, home, kind, ..
        } = &aggregate.wanted;
        let (token, home, kind) = (token.clone(), *home, *kind);
        let by_command = kind != Kind::Program && aggregate.ran.is_some() && self.pick(3) > 0;
        if by_command || kind == Kind::Detached && self.aggregates[number].ran.is_some() {
            return self.background("stop", home, &format!("vm stop --timeout 5 {token}"), 60);
        }
        self.note(&format!("stop {token} by a signal"));
        self.aggregates[number].command.signal(Signal::SIGTERM);
        Ok(())
    }

    /// By SIGKILL; its agent lives on, and says that it has ended.
    pub(super) fn kill_launcher(&mut self, number: usize) {
        let aggregate = &mut self.aggregates[number];
        aggregate.told = Some((Instant::now(), Told::Kill));
        let token = aggregate.wanted.token.clone();
        aggregate.command.signal(Signal::SIGKILL);
        let home = aggregate.wanted.home;
        let all = self.sight.launchers.get(&token).into_iter().flatten();
        for (_, pid) in all.filter(|(host, _)| *host == home) {
            // Gone in the meantime is fine: that was the purpose.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        self.note(&format!("kill the launcher of {token}"));
    }

    /// Machines with a part there, which is about to be killed, must end.
    pub(super) fn doom(&mut self, host: usize, why: &str) {
        self.look();
        let deadline = Instant::now() + AFTERMATH;
        for (token, homes) in &self.sight.homes {
            let there = homes.iter().any(|home| home.others.contains(&host));
            let mut all = self.aggregates.iter();
            let is_machine =
                all.any(|of| of.wanted.token == *token && of.wanted.kind != Kind::Program);
            if there && is_machine {
                let why = format!("{why} of {}", HOSTS[host]);
                self.doomed.push((token.clone(), deadline, why));
            }
        }
    }

    /// Asks a daemon to end.
    pub(super) fn end_daemon(&mut self, host: usize) {
        if let Some(mut daemon) = self.site.fleet.hosts[host].daemon.take() {
            self.ledger.begin(Harm::Ended(host));
            daemon.signal(Signal::SIGTERM);
            // What continues a stopped daemon later looks for it among the hosts' daemons.
            if std::mem::take(&mut self.site.fleet.hosts[host].is_stopped) {
                daemon.signal(Signal::SIGCONT);
                self.ledger.put_right(|harm| harm == Harm::Stopped(host));
            }
            // It waits for its borrowers for half a minute.
            self.take_on(&format!("end the daemon of {}", HOSTS[host]), daemon, 75);
        }
    }

    fn put_right(&mut self, what: Later) -> Result<()> {
        self.note(&format!("{what:?}"));
        match what {
            Later::StartDaemon(host) => {
                let ending = format!("end the daemon of {}", HOSTS[host]);
                if self.tasks.iter().any(|task| task.what == ending) {
                    self.after(Later::StartDaemon(host), 2000, 3000);
                } else if self.site.fleet.hosts[host].daemon.is_none() {
                    self.site.fleet.start_daemon(host)?;
                    let of = [Harm::Daemon(host), Harm::Host(host), Harm::Ended(host)];
                    self.ledger.put_right(|harm| of.contains(&harm));
                }
            }
            Later::Continue(host) => {
                self.site.fleet.hosts[host].is_stopped = false;
                if let Some(daemon) = &mut self.site.fleet.hosts[host].daemon {
                    daemon.signal(Signal::SIGCONT);
                }
                self.ledger.put_right(|harm| harm == Harm::Stopped(host));
            }
            Later::StartEtcd(member) => {
                if !self.site.fleet.etcd.runs(member) {
                    self.site.fleet.etcd.run(&self.site.fleet.star, member)?;
                }
                if (0..ETCD_MEMBERS).all(|member| self.site.fleet.etcd.runs(member)) {
                    self.ledger.put_right(|harm| harm == Harm::Store);
                }
            }
            Later::ContinueEtcd(member) => {
                self.site.fleet.etcd.signal(member, Signal::SIGCONT);
                if (0..ETCD_MEMBERS).all(|member| self.site.fleet.etcd.runs(member)) {
                    self.ledger.put_right(|harm| harm == Harm::Store);
                }
            }
            Later::Heal => {
                for (place, others) in std::mem::take(&mut self.cut) {
                    self.site.fleet.star.mislead(place, &others, false)?;
                }
                self.ledger.put_right(|harm| matches!(harm, Harm::Cut(..)));
            }
            Later::Uncordon(host) => {
                let line = format!("node uncordon {}", HOSTS[host]);
                self.background("uncordon", host, &line, 60)?;
            }
            Later::Leave => {
                let host = self.pick(GUEST);
                let line = format!("cluster leave {}", HOSTS[GUEST]);
                self.background("leave", host, &line, 60)?;
            }
            Later::KillLauncher(pid) => {
                let all = self.aggregates.iter();
                let number = all
                    .enumerate()
                    .find(|(_, of)| of.command.pid() == pid as i32 && of.told.is_none());
                if let Some((number, _)) = number {
                    self.kill_launcher(number);
                }
            }
        }
        Ok(())
    }

    /// Puts all harm right, now.
    pub(super) fn heal_all(&mut self) -> Result<()> {
        let later = std::mem::take(&mut self.later);
        let rest = later.into_iter().map(|(_, what)| what);
        let rest = rest.filter(|what| !matches!(what, Later::Uncordon(_) | Later::Heal));
        for what in rest.collect::<Vec<_>>() {
            self.put_right(what)?;
        }
        self.put_right(Later::Heal)
    }
}
