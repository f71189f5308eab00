//! One host decides: the one that made a key with its lease. The key is free again when that
//! host has not renewed the lease for [`crate::LEADER_LEASE`].
//!
//! A leader that was cut off may believe that it still leads. So every change of a leader
//! has the condition that the key is the one that it made: its revision is the number of
//! the term, and no two terms have the same.

use crate::log::{LogKind, LogRecord};
use crate::{Cluster, ClusterError, HOSTS, LEADER, TROUBLE, json, parse, stir};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::time::Duration;
use weft_store::{Change, Committed, Condition, LeaseId, StoreError};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leader {
    pub name: String,
}

/// The right to decide, as long as the store agrees.
pub struct Term {
    cluster: Cluster,
    leader: Leader,
    revision: u64,
    /// The number of the next record of the log, once the log was read.
    next_record: Cell<Option<u64>>,
}

impl Cluster {
    /// The host that decides, if one does.
    pub fn leader(&self) -> Result<Option<Leader>, ClusterError> {
        let entry = self.store.get(LEADER)?;
        entry.map(|entry| parse(LEADER, &entry.value)).transpose()
    }

    /// Waits until no host decides, for `wait` at most. `true`: none does.
    pub fn wait_for_vacancy(&self, wait: Duration) -> Result<bool, ClusterError> {
        let snapshot = self.store.read(LEADER)?;
        if snapshot.entries.is_empty() {
            return Ok(true);
        }
        match self.store.watch(LEADER, snapshot.revision, wait) {
            Ok(_) | Err(StoreError::Compacted { .. }) => Ok(self.store.get(LEADER)?.is_none()),
            Err(error) => Err(error.into()),
        }
    }

    /// Tries to become the leader. `None`: another host is.
    pub fn campaign(&self, name: &str, lease: LeaseId) -> Result<Option<Term>, ClusterError> {
        let leader = Leader { name: name.into() };
        let condition = [Condition::Absent(LEADER.into())];
        let change = Change::put_leased(LEADER, json(&leader), lease);
        let revision = match self.store.commit(&condition, &[change]) {
            Ok(Committed::Done(revision)) => Some(revision),
            Ok(Committed::Refused) => None,
            // It may have come about: the key says, by the lease that only this host has.
            Err(StoreError::Unknown { .. }) => {
                let entry = self
                    .store
                    .get(LEADER)?
                    .filter(|entry| entry.lease == Some(lease));
                entry.map(|entry| entry.revision)
            }
            Err(error) => return Err(error.into()),
        };
        let Some(revision) = revision else {
            return Ok(None);
        };
        Ok(Some(Term {
            cluster: self.clone(),
            leader,
            revision,
            next_record: Cell::new(None),
        }))
    }
}

impl Term {
    /// The number of the term: larger than that of all before.
    pub fn number(&self) -> u64 {
        self.revision
    }

    /// Changes something as the leader: all of it if this host still is, else nothing.
    pub fn commit(
        &self,
        conditions: &[Condition],
        changes: &[Change],
    ) -> Result<Committed, ClusterError> {
        let leads = Condition::Unchanged(LEADER.into(), self.revision);
        let conditions: Vec<Condition> = std::iter::once(leads)
            .chain(conditions.iter().cloned())
            .collect();
        let committed = self.cluster.store.commit(&conditions, changes)?;
        if committed == Committed::Refused {
            self.check()?;
        }
        Ok(committed)
    }

    /// The same, with a record of the log if it happens. A log that cannot be read keeps nothing
    /// from happening: it gets no record then.
    pub(crate) fn commit_logged(
        &self,
        conditions: &[Condition],
        mut changes: Vec<Change>,
        record: Option<(LogKind, String)>,
    ) -> Result<bool, ClusterError> {
        let record = record.and_then(|(kind, what)| {
            let number = self
                .next_record
                .take()
                .or_else(|| self.read_next_record())?;
            Some(LogRecord::new(number, &self.leader.name, kind, what))
        });
        changes.extend(record.as_ref().map(LogRecord::put));
        if changes.is_empty() {
            return Ok(true);
        }
        // After an error nobody knows whether the record is there: the log is read again.
        let done = self.commit(conditions, &changes)? != Committed::Refused;
        if let Some(record) = record {
            let next = record.number + u64::from(done);
            self.next_record.set(Some(next));
        }
        Ok(done)
    }

    fn read_next_record(&self) -> Option<u64> {
        let log = self.cluster.log().ok()?;
        Some(log.last().map_or(0, |record| record.number) + 1)
    }

    /// Writes into the log what needs no other change.
    pub fn note(&self, kind: LogKind, what: String) -> Result<bool, ClusterError> {
        self.commit_logged(&[], Vec::new(), Some((kind, what)))
    }

    /// Says that a member is expected to fail, unless that is known. What it says of the host is
    /// noted when it is seen. `false`: it is known, or the host has left.
    pub fn failing(&self, host: &str, why: &str) -> Result<bool, ClusterError> {
        let key = format!("{HOSTS}{host}");
        let Some(entry) = self.cluster.store.get(&key)? else {
            return Ok(false);
        };
        let trouble = format!("{TROUBLE}{host}");
        let conditions = [
            Condition::Unchanged(key, entry.revision),
            Condition::Absent(trouble.clone()),
        ];
        let changes = vec![Change::put(trouble, why), stir()];
        self.commit_logged(&conditions, changes, None)
    }

    /// Whether this host still decides.
    pub fn check(&self) -> Result<(), ClusterError> {
        let entry = self.cluster.store.get(LEADER)?;
        match entry {
            Some(entry) if entry.revision == self.revision => Ok(()),
            _ => Err(ClusterError::NotLeader(self.leader.name.clone())),
        }
    }

    /// Lets another host decide.
    pub fn resign(self) -> Result<(), ClusterError> {
        let leads = Condition::Unchanged(LEADER.into(), self.revision);
        self.cluster
            .store
            .commit(&[leads], &[Change::delete(LEADER)])?;
        Ok(())
    }
}
