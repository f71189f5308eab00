//! The daemon as a member of a cluster: it says that this host lives, and learns who the
//! other members are.
//!
//! One thread asks the store, a few times within each lease. While the store cannot be
//! reached, the members that were known last stay peers, and everything that runs goes on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use weft_cluster::{ALIVE_LEASE, Cluster, ClusterError, HostRecord, HostReport, Member};
use weft_store::{LeaseId, StoreError};

use super::health::Health;
use super::shared::{Alive, Shared};
use crate::error::sentence;
use crate::host;
use crate::mark;
use crate::member::{self, MemberError, Membership};
use crate::size::PAGE_BYTES;
use crate::sys;

/// A turn of the thread: the lease is renewed, and what has changed is learned.
const TURN: Duration = ALIVE_LEASE.checked_div(3).expect("not by zero");

/// Begins with the members that were known last, and starts the thread.
pub(super) fn start(
    shared: &Arc<Shared>,
    directory: PathBuf,
    membership: Membership,
) -> std::io::Result<()> {
    let known = membership.peers(&member::remembered(&directory), &shared.config.peers);
    shared.set_members(known);
    let shared = shared.clone();
    let mut thread = Heartbeat {
        shared,
        directory,
        membership,
        health: Health::new(Path::new("/")),
        reported: None,
        missing: BTreeSet::new(),
        seen: 0,
        trouble: None,
    };
    std::thread::Builder::new()
        .name("weft-cluster".into())
        .spawn(move || thread.run())?;
    Ok(())
}

/// This host ends by itself: the others need not wait for its lease.
pub(super) fn end(shared: &Shared) {
    for lease in [&shared.leading, &shared.alive] {
        let held = lease.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(held) = held {
            // Else the lease ends by itself.
            let _ = held.cluster.end_lease(held.lease);
        }
    }
}

/// How old a report may be that differs only a little from what is now.
const REPORT_AGE_MAX: Duration = Duration::from_secs(30);

/// What this host said last of itself.
struct Reported {
    report: HostReport,
    lease: LeaseId,
    at: Instant,
}

impl Reported {
    /// Whether it has to be said again. A store keeps each version for some time, so small
    /// changes of load and free memory have to wait.
    fn is_old(&self, now: &HostReport) -> bool {
        let known = &self.report;
        let small = HostReport {
            free_bytes: known.free_bytes,
            load: known.load,
            ..now.clone()
        };
        let free = known.free_bytes.abs_diff(now.free_bytes);
        let load = (known.load - now.load).abs();
        small != *known
            || free > known.free_bytes / 16
            || load > 0.1 + known.load / 8.0
            || self.at.elapsed() > REPORT_AGE_MAX
    }
}

struct Heartbeat {
    shared: Arc<Shared>,
    directory: PathBuf,
    membership: Membership,
    health: Health,
    reported: Option<Reported>,
    /// What of this host's work had no launcher and no agent in the last turn.
    missing: BTreeSet<u64>,
    /// The revision of the members that are known.
    seen: u64,
    /// What was said last: the same is not said again and again.
    trouble: Option<String>,
}

impl Heartbeat {
    fn run(&mut self) {
        loop {
            let pause = match self.turn() {
                Ok(()) => {
                    if self.trouble.take().is_some() {
                        self.shared.say("cluster: the store answers again");
                    }
                    Duration::ZERO
                }
                // The daemon has given its lease back.
                Err(MemberError::Ending) => return,
                Err(error) => {
                    self.tell(&error);
                    TURN
                }
            };
            let ended = sys::wait_readable(&[self.shared.ending()], pause);
            if ended.map_or(true, |ready| ready[0]) {
                return;
            }
        }
    }

    /// Says once what is wrong. If the store answers that this host is no member, no member is
    /// trusted any more. A store that does not answer changes nothing.
    fn tell(&mut self, error: &MemberError) {
        let what = match error.is_silence() {
            true => "what runs goes on, with the members known so far",
            false => {
                self.shared.set_members(Vec::new());
                self.shared.budget.set_all_leave(false);
                member::remember_new(&self.directory, &[]);
                "no member of the cluster may borrow from this host until that changes"
            }
        };
        let text = sentence(error);
        if self.trouble.as_ref() != Some(&text) {
            self.shared.say(&format!("cluster: {text}; {what}"));
            self.trouble = Some(text);
        }
    }

    fn turn(&mut self) -> Result<(), MemberError> {
        let (cluster, lease) = self.lease()?;
        let key = self.shared.keys.public().to_string();
        match self.report(&cluster, lease, &key) {
            Ok(()) => {}
            Err(ClusterError::Store(StoreError::LeaseGone(_))) => {
                // It ran out: the next turn asks for another one.
                self.shared
                    .alive
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        let members = cluster.members()?;
        let is_own = |record: &HostRecord| record.name == self.membership.host && record.key == key;
        if !members.iter().any(|member| is_own(&member.record)) {
            return Err(ClusterError::NoSuchHost(self.membership.host.clone()).into());
        }
        let newest = members
            .iter()
            .map(|member| member.revision)
            .max()
            .unwrap_or(0);
        self.leave_host(&cluster, &members)?;
        let hosts: Vec<HostRecord> = members.into_iter().map(|member| member.record).collect();
        let peers = self.membership.peers(&hosts, &self.shared.config.peers);
        self.shared.set_members(peers);
        member::remember_new(&self.directory, &hosts);
        if let Err(error) = self.end_what_is_gone(&cluster) {
            let text = sentence(&error);
            self.shared
                .say(&format!("cluster: cannot look at what runs: {text}"));
        }
        self.seen = cluster.wait_for_change(self.seen.max(newest), TURN)?;
        Ok(())
    }

    /// Says how this host is, if that is news.
    fn report(&mut self, cluster: &Cluster, lease: LeaseId, key: &str) -> Result<(), ClusterError> {
        let report = self.host_report();
        let known = self.reported.as_ref();
        if known.is_some_and(|known| known.lease == lease && !known.is_old(&report)) {
            return Ok(());
        }
        cluster.report(&self.membership.host, key, &report, lease)?;
        self.reported = Some(Reported {
            report,
            lease,
            at: Instant::now(),
        });
        Ok(())
    }

    /// Has slices of programs leave while this host is drained, or expected to fail.
    fn leave_host(&self, cluster: &Cluster, members: &[Member]) -> Result<(), MemberError> {
        let mut members = members.iter();
        let own = members.find(|member| member.record.name == self.membership.host);
        let all_leave = match own {
            Some(own) if own.cordon.draining => true,
            Some(own) if own.trouble().is_some() => !cluster.hands_off()?,
            _ => false,
        };
        self.shared.budget.set_all_leave(all_leave);
        Ok(())
    }

    /// Says for launchers of this host that were killed with their agents that what they ran
    /// has ended.
    fn end_what_is_gone(&mut self, cluster: &Cluster) -> Result<(), MemberError> {
        let placed = cluster.work()?.placed;
        let here = placed
            .values()
            .filter(|placed| placed.request.watched_by() == self.membership.host);
        let missing = std::mem::take(&mut self.missing);
        for placed in here {
            let name = &placed.request.name;
            if !mark::is_gone(&placed.request.mark).unwrap_or(false) {
                continue;
            }
            if !missing.contains(&placed.id) {
                self.missing.insert(placed.id);
            } else {
                cluster.work_ended(name, placed.id)?;
                self.shared.say(&format!(
                    "cluster: {name} has ended without a word: its room is free"
                ));
            }
        }
        Ok(())
    }

    /// Renews this host's lease. Opens the cluster and asks for a lease if it has none.
    fn lease(&self) -> Result<(Cluster, LeaseId), MemberError> {
        let known = {
            let alive = self
                .shared
                .alive
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            alive
                .as_ref()
                .map(|alive| (alive.cluster.clone(), alive.lease))
        };
        if let Some((cluster, lease)) = known {
            match cluster.renew(lease) {
                Ok(()) => return Ok((cluster, lease)),
                Err(ClusterError::Store(StoreError::LeaseGone(_))) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let cluster = self.membership.cluster()?;
        // Its lease was given back: it gets no other.
        let ending = sys::wait_readable(&[self.shared.ending()], Duration::ZERO);
        if ending.map_or(true, |ready| ready[0]) {
            return Err(MemberError::Ending);
        }
        let lease = cluster.lease()?;
        let alive = Alive {
            cluster: cluster.clone(),
            lease,
        };
        *self
            .shared
            .alive
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(alive);
        Ok((cluster, lease))
    }

    fn host_report(&mut self) -> HostReport {
        let (limit_pages, _) = self.shared.budget.pages();
        let budget = &self.shared.budget;
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load
            .split_whitespace()
            .next()
            .and_then(|load| load.parse().ok());
        HostReport {
            lends_bytes: limit_pages * PAGE_BYTES,
            may_lend_bytes: self.shared.limit.may_lend_bytes(),
            lent_bytes: budget.used_pages() * PAGE_BYTES,
            trouble: self.health.look(Instant::now()),
            wanted_back_bytes: budget.wanted_back(Instant::now()) * PAGE_BYTES,
            cores: self.shared.config.cores,
            slices: budget.slots_used(),
            free_bytes: host::available_memory_bytes(),
            load: load.unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_changes_are_not_news() {
        let report = HostReport {
            lends_bytes: 1 << 30,
            free_bytes: 16 << 30,
            load: 1.0,
            ..HostReport::default()
        };
        let known = Reported {
            report: report.clone(),
            lease: LeaseId(1),
            at: Instant::now(),
        };
        let now = |change: fn(&mut HostReport)| {
            let mut now = report.clone();
            change(&mut now);
            known.is_old(&now)
        };
        assert!(!now(|_| {}));
        assert!(!now(|now| now.free_bytes -= 1 << 30));
        assert!(now(|now| now.free_bytes -= 2 << 30));
        assert!(!now(|now| now.load = 1.2));
        assert!(now(|now| now.load = 1.3));
        assert!(now(|now| now.lent_bytes = 1));
        assert!(now(|now| now.trouble = Some("1 machine check".into())));
    }
}
