//! What a launcher does with the batch system: hosts are asked for, and their jobs heard of.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use weft_batch::{CALL_BOUND, Job, JobId, Wanted};
use weft_malleable::HostId;

use super::Launcher;
use super::fleet::LiveHost;
use super::options::SiteOptions;
use super::phases::EXIT_NOT_STARTED;
use super::record::Phase;
use super::site::{Ask, Refusal};
use crate::token::{self, Token};

/// Reservations at a time: hosts, and some that come before others go. A switch has 64 peers:
/// those of the other hosts, of the launcher, and a bridge.
const AT_ONCE_MAX: usize = super::HOSTS_MAX + 3;
/// A reservation is of use if it lasts this many moves: to it, from it, and the time between.
const TIMES_WORTH: u32 = 4;
/// After the batch system has refused a host.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// A cluster without a host gives up after as many hosts that cannot be used.
const MISSES_MAX: u32 = 5;
/// How long the agent of a reservation is awaited whose launcher ended before it knew the job. The
/// door sends one away that comes later.
const STRAY_MAX: Duration = Duration::from_secs(5);
/// Between two looks for its job.
const SEEK_AGAIN: Duration = Duration::from_secs(2);
/// A warning of the batch system comes this much before the end, if it can do that.
const WARNING: Duration = Duration::from_secs(60);

impl Launcher {
    /// Asks for one more host.
    pub(super) fn ask(&mut self) {
        if Instant::now() < self.asks_at {
            return;
        }
        let hosts = self.fleet.hosts.values();
        if hosts.filter(|host| host.closing.is_none()).count() >= AT_ONCE_MAX {
            self.say_once(&format!(
                "no more hosts are asked for: {AT_ONCE_MAX} are there or were asked for"
            ));
            return;
        }
        let needed = self.rules.margin + self.longest_move() * TIMES_WORTH;
        if self.record.options.time < needed {
            let sentence = format!(
                "no more hosts are asked for: a reservation has {} s, and to be of use it needs {} \
                 s, since a move takes {:.1} s",
                self.record.options.time.as_secs(),
                needed.as_secs(),
                self.longest_move().as_secs_f64()
            );
            self.asks_at = Instant::now() + ASK_AGAIN;
            self.say_once(&sentence);
            return;
        }
        if let Err(error) = self.try_ask() {
            self.asks_at = Instant::now() + ASK_AGAIN;
            self.say(&format!("cannot ask for a host: {error:#}"));
        }
    }

    /// A host was asked for, and cannot be used: the next is not asked for at once.
    pub(super) fn missed(&mut self, why: &str) {
        self.misses += 1;
        self.asks_at = Instant::now() + ASK_AGAIN;
        let has_come = self.fleet.hosts.values().any(LiveHost::has_come);
        match self.misses >= MISSES_MAX && self.is_in(Phase::Gathering) && !has_come {
            true => self.end(
                EXIT_NOT_STARTED,
                &format!(
                    "{} hosts in a row could not be used, the last since {why}",
                    self.misses
                ),
            ),
            false => self.say(why),
        }
    }

    /// What nine of ten moves do not exceed, of the machine for which that is longest.
    fn longest_move(&self) -> Duration {
        let cluster = self.cluster();
        let moves = cluster.machines.values();
        let moves = moves.map(|machine| self.forecast.bound(machine));
        moves.max().unwrap_or_default()
    }

    fn try_ask(&mut self) -> anyhow::Result<()> {
        let number = self.next_number() as u32;
        let host = LiveHost::new(token::secret()?);
        let options = &self.record.options;
        let token = Token {
            key: self.key,
            addresses: self.addresses.clone(),
            secret: host.secret.clone(),
            lasts_s: options.time.as_secs() + 120,
            tap: options.tap.clone(),
        };
        let path = self.folder.file(&format!("token-{number}"));
        token.write(&path)?;
        let own = std::env::current_exe()?;
        let more = match &options.site {
            SiteOptions::Slurm { options } | SiteOptions::GridEngine { options } => options.clone(),
            SiteOptions::Local(_) => Vec::new(),
        };
        let wanted = Wanted {
            name: self.job_name(HostId(number)),
            time: options.time,
            warning: WARNING.min(options.time / 4),
            command: [
                own.into_os_string(),
                "mpi".into(),
                "host".into(),
                path.into_os_string(),
            ]
            .into(),
            output: self.folder.file(&format!("job-{number}.log")),
            options: more,
        };
        self.guests.expect(host.secret.clone(), number, None);
        self.fleet.hosts.insert(HostId(number), host);
        // Another launcher must know that there may be a job.
        self.write();
        self.site.send(Ask::Host {
            reservation: number,
            wanted,
        })?;
        Ok(())
    }

    /// No other cluster's job has this name, also if a cluster in another state folder of the user
    /// has the same name.
    pub(super) fn job_name(&self, id: HostId) -> String {
        let key = &self.key.0[..4];
        let key = u32::from_be_bytes([key[0], key[1], key[2], key[3]]);
        format!("weft-{}-{key:08x}-{}", self.folder.name(), id.0)
    }

    /// Looks for the jobs of strays, one look at a time.
    pub(super) fn seek(&mut self) {
        let mut hosts = self.fleet.hosts.values();
        let is_due = self.seeks_at.is_some_and(|at| Instant::now() >= at);
        if is_due && hosts.any(LiveHost::is_sought) {
            self.seeks_at = None;
            let _ = self.site.send(Ask::Names);
        }
    }

    /// Gives the jobs of strays back that are among the user's jobs. A stray that is not there is
    /// forgotten, once the command that asked for it must have ended before the look `began`.
    pub(super) fn found(&mut self, began: Instant, names: Result<Vec<(String, JobId)>, String>) {
        self.seeks_at = Some(Instant::now() + SEEK_AGAIN);
        let names = match names {
            Ok(names) => names,
            Err(why) => return self.silent(why),
        };
        let patience = match self.record.options.site {
            // An agent of a list comes at once.
            SiteOptions::Local(_) => STRAY_MAX,
            SiteOptions::Slurm { .. } | SiteOptions::GridEngine { .. } => CALL_BOUND + STRAY_MAX,
        };
        let strays = self.fleet.hosts.iter().filter(|(_, host)| host.is_sought());
        let strays: Vec<(HostId, Option<Instant>)> =
            strays.map(|(id, host)| (*id, host.closing)).collect();
        for (id, since) in strays {
            let name = self.job_name(id);
            let job = names.iter().find(|(its, _)| *its == name);
            match (job, self.fleet.hosts.get_mut(&id)) {
                (Some((_, job)), Some(host)) => {
                    host.job = Some(job.clone());
                    host.leaves = true;
                    self.say(&format!(
                        "job {job} was asked for without an answer, and goes back"
                    ));
                    self.watch();
                }
                _ if since.is_none_or(|since| began > since + patience) => self.forget(id),
                _ => {}
            }
        }
    }

    /// The batch system is asked about the jobs of all hosts.
    pub(super) fn watch(&self) {
        let jobs = self.fleet.hosts.values();
        let jobs = jobs.filter_map(|host| host.job.clone()).collect();
        let _ = self.site.send(Ask::Watch(jobs));
    }

    pub(super) fn asked(&mut self, id: HostId, result: Result<JobId, Refusal>) {
        match result {
            Ok(job) => match self.fleet.hosts.get_mut(&id) {
                Some(host) => {
                    host.job = Some(job);
                    // A list that was sent meanwhile lacks it.
                    self.watch();
                }
                None => drop(self.site.send(Ask::GiveBack(job))),
            },
            Err(Refusal { why, is_lasting }) => {
                match self.fleet.hosts.get_mut(&id) {
                    // Slurm may have taken the job before its answer was lost.
                    Some(host) if !is_lasting => host.becomes_stray(),
                    _ => self.forget(id),
                }
                self.asks_at = Instant::now() + ASK_AGAIN;
                let has_none = self.fleet.hosts.is_empty() && self.is_in(Phase::Gathering);
                match is_lasting && has_none {
                    // Asking again would not help.
                    true => self.end(EXIT_NOT_STARTED, &format!("no host can be had: {why}")),
                    false => self.say_once(&format!("no host can be had now: {why}")),
                }
            }
        }
    }

    pub(super) fn jobs(&mut self, jobs: Result<BTreeMap<JobId, Job>, String>) {
        let jobs = match jobs {
            Ok(jobs) => jobs,
            Err(why) => return self.silent(why),
        };
        if self.trouble.take().is_some() {
            self.say("the batch system answers again");
        }
        let of_job: Vec<(HostId, Job)> = self
            .fleet
            .hosts
            .iter()
            .filter_map(|(id, host)| Some((*id, jobs.get(host.job.as_ref()?)?.clone())))
            .collect();
        for (id, job) in of_job {
            self.job(id, job);
        }
    }

    /// The batch system does not answer, which is said once.
    fn silent(&mut self, why: String) {
        if self.trouble.as_ref() != Some(&why) {
            self.say(&why);
            self.trouble = Some(why);
        }
    }

    fn job(&mut self, id: HostId, job: Job) {
        let Some(host) = self.fleet.hosts.get(&id) else {
            return;
        };
        let (until, ended, waits) = (host.until, host.ended.is_some(), host.waits.clone());
        self.fleet.heard(id, job);
        let Some(host) = self.fleet.hosts.get_mut(&id) else {
            return;
        };
        if host.until != until {
            host.tell_end();
        }
        let news = match (&host.ended, &host.waits) {
            (Some((how, _)), _) if !ended && host.closing.is_none() => {
                Some(format!("has ended as the batch system says: {how}"))
            }
            (_, Some(why)) if waits.as_ref() != Some(why) => Some(format!("waits: {why}")),
            _ => None,
        };
        if let Some(news) = news {
            let job = host.job.as_ref().map_or("", JobId::as_str);
            let sentence = format!("job {job} {news}");
            self.say(&sentence);
        }
    }
}
