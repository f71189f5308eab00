//! What one user may have of a cluster at a time.
//!
//! | key | value | until |
//! | --- | --- | --- |
//! | `weft/quota/USER` | [`Quota`] | an operator ends it |
//!
//! A user is the name that the home's host has for it: the same name on two hosts is one user.
//! The quota of `*` is for each user that has none of its own.

use crate::host::is_shown;
use crate::work::{Asked, Work, WorkRequest};
use crate::{Cluster, ClusterError, json, parse};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use weft_place::AggregateId;
use weft_store::{Change, Entry};

const QUOTA: &str = "weft/quota/";
/// Each user without a quota of its own.
pub const ANY_USER: &str = "*";
const USER_MAX: usize = 256;

/// The most of everything that a user's aggregates may have together. `None`: no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    pub cores: Option<u32>,
    /// Of guests and programs, MiB.
    pub memory_mib: Option<u64>,
}

/// What a user's aggregates have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub cores: u64,
    pub memory_mib: u64,
}

impl Usage {
    fn add(&mut self, request: &WorkRequest) {
        self.cores += u64::from(request.cores);
        self.memory_mib = self.memory_mib.saturating_add(request.memory_mib);
    }
}

impl Quota {
    /// What a user that has `used` would have too much with one more: what is used of it, and
    /// the bound as a phrase.
    fn excess(self, used: Usage, request: &WorkRequest) -> Option<(u64, String)> {
        let mut then = used;
        then.add(request);
        let cores = self.cores.filter(|&cores| then.cores > u64::from(cores));
        let memory = self.memory_mib.filter(|&mib| then.memory_mib > mib);
        match (cores, memory) {
            (Some(cores), _) => Some((used.cores, format!("{cores} cores"))),
            (None, Some(mib)) => Some((used.memory_mib, format!("{mib} MiB"))),
            (None, None) => None,
        }
    }
}

/// All quotas, by user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas(pub BTreeMap<String, Quota>);

/// Why a request is not given to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// A sentence.
    pub(crate) why: String,
    /// It is larger than the whole quota.
    pub(crate) refused: bool,
}

impl Quotas {
    pub fn of(&self, user: &str) -> Option<Quota> {
        let quota = self.0.get(user).or_else(|| self.0.get(ANY_USER));
        quota.copied()
    }

    /// Requests that would give their users too much, of those that are asked for, in turn. What
    /// waits counts like what runs: it may start at any time. Of one user none overtakes another.
    pub(crate) fn held(&self, work: &Work, in_turn: &[&Asked]) -> BTreeMap<AggregateId, Held> {
        let mut held = BTreeMap::new();
        if self.0.is_empty() {
            return held;
        }
        let mut used = work.usage();
        let mut wait = BTreeSet::new();
        for asked in in_turn {
            let (request, user) = (&asked.request, &asked.request.user);
            let Some(quota) = self.of(user) else {
                continue;
            };
            let name = &request.name;
            if let Some((_, bound)) = quota.excess(Usage::default(), request) {
                let why = format!("{name} is refused: the quota of {user} is {bound}.");
                held.insert(asked.aggregate(), Held { why, refused: true });
                continue;
            }
            let used = used.entry(user.clone()).or_default();
            let why = match quota.excess(*used, request) {
                Some((used, bound)) => format!(
                    "{name} waits: {user} has or waits for {used} of the {bound} of its quota."
                ),
                None if wait.contains(user) => {
                    format!("{name} waits: another request of {user} waits for the quota.")
                }
                None => {
                    used.add(request);
                    continue;
                }
            };
            wait.insert(user);
            let refused = false;
            held.insert(asked.aggregate(), Held { why, refused });
        }
        held
    }
}

impl Work {
    /// What runs, by user.
    pub fn usage(&self) -> BTreeMap<String, Usage> {
        let mut used: BTreeMap<String, Usage> = BTreeMap::new();
        for placed in self.placed.values() {
            let user = placed.request.user.clone();
            used.entry(user).or_default().add(&placed.request);
        }
        used
    }
}

impl Cluster {
    /// Sets a user's quota, or that of [`ANY_USER`]. What runs already goes on.
    pub fn set_quota(&self, user: &str, quota: Quota) -> Result<(), ClusterError> {
        check_user(user)?;
        let change = Change::put(format!("{QUOTA}{user}"), json(&quota));
        self.store.commit(&[], &[change])?;
        Ok(())
    }

    pub fn end_quota(&self, user: &str) -> Result<(), ClusterError> {
        let key = format!("{QUOTA}{user}");
        if self.store.get(&key)?.is_none() {
            return Err(ClusterError::NoSuchQuota(user.into()));
        }
        self.store.commit(&[], &[Change::delete(key)])?;
        Ok(())
    }

    /// A record that cannot be read is no quota.
    pub fn quotas(&self) -> Result<Quotas, ClusterError> {
        let entries = self.store.read(QUOTA)?.entries;
        let read = |entry: &Entry| {
            let user = entry.key.strip_prefix(QUOTA)?;
            let quota = parse(&entry.key, &entry.value).ok()?;
            check_user(user).ok()?;
            Some((user.to_owned(), quota))
        };
        Ok(Quotas(entries.iter().filter_map(read).collect()))
    }
}

fn check_user(user: &str) -> Result<(), ClusterError> {
    let fine = !user.is_empty()
        && user.len() <= USER_MAX
        && !user.chars().any(|c| !is_shown(c) || c.is_whitespace());
    match fine {
        true => Ok(()),
        false => Err(ClusterError::User(user.into())),
    }
}
