//! The host that decides for the cluster: one daemon at a time, by a lease.
//!
//! One thread. It waits until no host decides, tries to become the one that does, and then
//! turns what the store has into plans ([`Planner`]), which it commits under the condition that
//! it still decides. What runs needs neither this thread nor the store.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use weft_cluster::{Cluster, ClusterError, LEADER_LEASE, LogKind, Member, Plan, Planner, Term};
use weft_store::{LeaseId, StoreError};

use super::shared::{Alive, Shared};
use crate::error::sentence;
use crate::member::{MemberError, Membership};
use crate::sys;

/// How long a turn lasts if nothing changes: the lease is renewed in each.
const TURN: Duration = LEADER_LEASE.checked_div(3).expect("not by zero");

pub(super) fn start(shared: &Arc<Shared>, membership: Membership) -> io::Result<()> {
    let mut thread = Candidate {
        shared: shared.clone(),
        membership,
        cluster: None,
        trouble: None,
    };
    std::thread::Builder::new()
        .name("weft-leader".into())
        .spawn(move || thread.run())?;
    Ok(())
}

/// How much of its history a store keeps, at least; at most twice as much.
const HISTORY: Duration = Duration::from_secs(300);

/// An etcd keeps all that ever changed, until its space is used up, unless it is told what
/// nothing needs any more (etcd's documentation, "Maintenance"). Kubernetes' API server does the
/// same with its etcd.
struct History {
    /// The newest revision, some time ago.
    revision: u64,
    noted: Instant,
}

impl Default for History {
    fn default() -> History {
        History {
            revision: 0,
            noted: Instant::now(),
        }
    }
}

impl History {
    /// Has the store forget what is old.
    fn forget(&mut self, cluster: &Cluster, newest: u64) -> Result<(), ClusterError> {
        if self.noted.elapsed() < HISTORY {
            return Ok(());
        }
        self.noted = Instant::now();
        let old = std::mem::replace(&mut self.revision, newest);
        match old {
            0 => Ok(()),
            old => cluster.forget_changes(old),
        }
    }
}

struct Candidate {
    shared: Arc<Shared>,
    membership: Membership,
    /// Once it was reached.
    cluster: Option<Cluster>,
    /// What was said last: the same is not said again and again.
    trouble: Option<String>,
}

impl Candidate {
    fn run(&mut self) {
        while !self.ends(Duration::ZERO) {
            match self.turn() {
                Ok(()) => self.trouble = None,
                // The thread that reports says so.
                Err(error) if error.is_silence() => {
                    self.ends(TURN);
                }
                Err(error) => {
                    let text = sentence(&error);
                    if self.trouble.as_ref() != Some(&text) {
                        self.shared.say(&format!("cluster: cannot decide: {text}"));
                        self.trouble = Some(text);
                    }
                    self.ends(TURN);
                }
            }
        }
    }

    /// Whether the daemon ends, now or while this waits.
    fn ends(&self, wait: Duration) -> bool {
        sys::wait_readable(&[self.shared.ending()], wait).map_or(true, |ready| ready[0])
    }

    /// Waits for a vacancy, or decides until another host does.
    fn turn(&mut self) -> Result<(), MemberError> {
        let cluster = match &self.cluster {
            Some(cluster) => cluster.clone(),
            None => {
                let cluster = self.membership.cluster()?;
                self.cluster = Some(cluster.clone());
                cluster
            }
        };
        if !cluster.wait_for_vacancy(TURN)? || self.ends(Duration::ZERO) {
            return Ok(());
        }
        self.check_member(&cluster.members()?)?;
        let lease = cluster.lease_to_lead()?;
        let Some(term) = cluster.campaign(&self.membership.host, lease)? else {
            cluster.end_lease(lease)?;
            return Ok(());
        };
        self.lead(&cluster, &term, lease)
    }

    /// A host that was removed decides nothing.
    fn check_member(&self, members: &[Member]) -> Result<(), MemberError> {
        let key = self.shared.keys.public().to_string();
        let host = &self.membership.host;
        let mut records = members.iter().map(|member| &member.record);
        match records.any(|record| record.name == *host && record.key == key) {
            true => Ok(()),
            false => Err(ClusterError::NoSuchHost(host.clone()).into()),
        }
    }

    fn lead(&self, cluster: &Cluster, term: &Term, lease: LeaseId) -> Result<(), MemberError> {
        *self.leading() = Some(Alive {
            cluster: cluster.clone(),
            lease,
        });
        self.shared
            .say("cluster: this host decides what runs where, from now on");
        let outcome = self.decide(cluster, term, lease);
        if self.leading().take().is_some() {
            // Else the daemon ends, and has given it back. It ends by itself, too.
            let _ = cluster.end_lease(lease);
        }
        match outcome {
            Err(MemberError::Cluster(ClusterError::NotLeader(_))) => {
                self.shared.say("cluster: another host decides now");
                Ok(())
            }
            outcome => outcome,
        }
    }

    fn leading(&self) -> std::sync::MutexGuard<'_, Option<Alive>> {
        let leading = self.shared.leading.lock();
        leading.unwrap_or_else(PoisonError::into_inner)
    }

    fn decide(&self, cluster: &Cluster, term: &Term, lease: LeaseId) -> Result<(), MemberError> {
        let mut planner = Planner::default();
        let begun = Instant::now();
        let mut history = History::default();
        while !self.ends(Duration::ZERO) {
            cluster.renew(lease)?;
            let state = cluster.state()?;
            self.check_member(&state.members)?;
            let mut renewed = Instant::now();
            for plan in planner.update(begun.elapsed(), &state) {
                if renewed.elapsed() > TURN / 2 {
                    cluster.renew(lease)?;
                    renewed = Instant::now();
                }
                match self.commit(term, plan) {
                    // Of this plan alone.
                    Err(MemberError::Cluster(ClusterError::Store(
                        error @ (StoreError::TooLarge { .. } | StoreError::LeaseGone(_)),
                    ))) => self.shared.say(&format!("cluster: {}", sentence(&error))),
                    outcome => outcome?,
                }
            }
            if let Err(error) = history.forget(cluster, state.work.revision) {
                let text = sentence(&error);
                self.shared
                    .say(&format!("cluster: the store's history grows: {text}"));
            }
            cluster.wait_for_work(state.work.revision, TURN)?;
        }
        Ok(())
    }

    fn commit(&self, term: &Term, plan: Plan) -> Result<(), MemberError> {
        let (done, why) = match plan {
            Plan::Place { asked, parts, why } => (term.place(&asked, parts, why.clone())?, why),
            Plan::Answer {
                asked,
                why,
                refused,
                is_first,
            } => (term.answer(&asked, why.clone(), refused, is_first)?, why),
            Plan::Move { placed, order } => {
                let why = order.why.clone();
                (term.order(&placed, order)?, why)
            }
            Plan::CancelMove { placed } => {
                let why = format!("{} cannot move: its agent is gone", placed.request.name);
                (term.cancel_order(&placed)?, why)
            }
            Plan::Failing { host, why } => {
                let done = term.failing(&host, &why)?;
                (done, format!("{host} is expected to fail: {why}"))
            }
            Plan::RefuseWish { placed, why } => (term.refuse_wish(&placed, &why)?, why),
            Plan::Stuck { why, .. } => (term.note(LogKind::Fail, why.clone())?, why),
            Plan::Learned { record } => {
                term.learned(&record)?;
                return Ok(());
            }
            Plan::Note { kind, what } => (term.note(kind, what.clone())?, what),
        };
        if done {
            self.shared.say(&format!("cluster: {why}"));
        }
        Ok(())
    }
}
