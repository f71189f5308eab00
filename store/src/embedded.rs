//! A store in a file of one daemon.
//!
//! Invariants, over the tables:
//! - `entries` is what `updates` says in the order of revisions;
//! - a key with a lease is in `leased` under it, and the lease is in `leases`;
//! - `updates` has all revisions above `compacted`, the last [`UPDATES_MAX`] or more.
//!
//! Leases count on this process's monotonic clock. When the file is opened all of them
//! start anew, as with a new leader of an etcd: a daemon that was down for an hour must not
//! take everybody's keys away before they could say that they live.

use crate::{
    Change, Committed, Condition, Entry, LeaseId, Revision, Snapshot, Store, StoreError, Update,
    check, check_lease,
};
use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
    WriteTransaction,
};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Changed keys that a watch can still ask for.
const UPDATES_MAX: u64 = 10_000;

/// Key -> (revision, lease or 0, value).
type Kept<'a> = (u64, i64, &'a [u8]);
const ENTRIES: TableDefinition<&str, Kept> = TableDefinition::new("entries");
/// (revision, number within it) -> (key, whether it is there, value).
type Logged<'a> = (&'a str, bool, &'a [u8]);
const UPDATES: TableDefinition<(u64, u32), Logged> = TableDefinition::new("updates");
/// Lease -> its time in milliseconds.
const LEASES: TableDefinition<i64, u64> = TableDefinition::new("leases");
const LEASED: TableDefinition<(i64, &str), ()> = TableDefinition::new("leased");
const NUMBERS: TableDefinition<&str, u64> = TableDefinition::new("numbers");

const REVISION: &str = "revision";
const COMPACTED: &str = "compacted";
const LAST_LEASE: &str = "last lease";
/// The layout of this file.
const FORMAT: &str = "format";
const FORMAT_NOW: u64 = 1;

/// A watch waits no longer than this.
const WATCH_MAX: Duration = Duration::from_secs(3600);

pub struct Embedded {
    file: PathBuf,
    database: Database,
    clock: Mutex<Clock>,
    changed: Condvar,
}

/// When leases run out, and what watches wait for. No file is touched under its lock.
struct Clock {
    ends: BTreeMap<LeaseId, (Instant, Duration)>,
    revision: Revision,
}

impl Embedded {
    /// Opens the file, or makes it. One process at a time can have it open.
    pub fn open(file: &Path) -> Result<Embedded, StoreError> {
        let wrong = |reason: String| StoreError::File {
            file: file.into(),
            reason,
        };
        // Nobody else may read it: the state of a cluster has keys in it.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        options
            .open(file)
            .map_err(|error| wrong(format!("cannot be opened: {error}")))?;
        let database = Database::create(file).map_err(|error| match error {
            redb::DatabaseError::DatabaseAlreadyOpen => {
                wrong("another process has it open: only one daemon can".into())
            }
            other => wrong(other.to_string()),
        })?;
        Embedded::with(file, database)
    }

    /// A store that is gone with this value: for simulations.
    pub fn in_memory() -> Result<Embedded, StoreError> {
        let file = Path::new("memory");
        let backend = redb::backends::InMemoryBackend::new();
        let database = Database::builder()
            .create_with_backend(backend)
            .map_err(|error| StoreError::File {
                file: file.into(),
                reason: error.to_string(),
            })?;
        Embedded::with(file, database)
    }

    fn with(file: &Path, database: Database) -> Result<Embedded, StoreError> {
        let mut store = Embedded {
            file: file.into(),
            database,
            clock: Mutex::new(Clock {
                ends: BTreeMap::new(),
                revision: 0,
            }),
            changed: Condvar::new(),
        };
        store.prepare()?;
        Ok(store)
    }

    /// Makes the tables of a new file, checks the format, and starts all leases anew.
    fn prepare(&mut self) -> Result<(), StoreError> {
        let (revision, leases) = self
            .write(|transaction| {
                let mut numbers = transaction.open_table(NUMBERS)?;
                let format = numbers.get(FORMAT)?.map(|format| format.value());
                match format {
                    None => {
                        numbers.insert(FORMAT, FORMAT_NOW)?;
                        numbers.insert(REVISION, 1)?;
                    }
                    Some(FORMAT_NOW) => {}
                    Some(other) => return Ok(Err(other)),
                }
                transaction.open_table(ENTRIES)?;
                transaction.open_table(UPDATES)?;
                transaction.open_table(LEASED)?;
                let leases = transaction.open_table(LEASES)?;
                let mut times = Vec::new();
                for lease in leases.iter()? {
                    let (id, time) = lease?;
                    times.push((LeaseId(id.value()), Duration::from_millis(time.value())));
                }
                let revision = numbers
                    .get(REVISION)?
                    .map_or(1, |revision| revision.value());
                Ok(Ok((revision, times)))
            })?
            .map_err(|format| {
                let reason = format!(
                    "has format {format}, this weft knows {FORMAT_NOW}: it was written by another \
                 version"
                );
                StoreError::File {
                    file: self.file.clone(),
                    reason,
                }
            })?;
        let now = Instant::now();
        let mut clock = self.clock();
        clock.revision = revision;
        clock.ends = leases
            .into_iter()
            .map(|(id, time)| (id, (now + time, time)))
            .collect();
        Ok(())
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.clock
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn wrong(&self, error: impl std::fmt::Display) -> StoreError {
        StoreError::File {
            file: self.file.clone(),
            reason: error.to_string(),
        }
    }

    fn write<T>(
        &self,
        work: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, StoreError> {
        let transaction = self
            .database
            .begin_write()
            .map_err(|error| self.wrong(error))?;
        let done = work(&transaction).map_err(|error| self.wrong(error))?;
        transaction.commit().map_err(|error| self.wrong(error))?;
        Ok(done)
    }

    /// Ends the leases whose time is over. One whose keys cannot be deleted is kept, so that it
    /// is tried again.
    fn expire(&self) -> Result<(), StoreError> {
        let now = Instant::now();
        let first_over = || {
            let mut clock = self.clock();
            let over = clock.ends.iter().find(|(_, (end, _))| *end <= now);
            let lease = *over?.0;
            clock.ends.remove_entry(&lease)
        };
        while let Some((lease, times)) = first_over() {
            self.end_lease(lease).inspect_err(|_| {
                self.clock().ends.insert(lease, times);
            })?;
        }
        Ok(())
    }

    /// Deletes a lease's keys and the lease.
    fn end_lease(&self, lease: LeaseId) -> Result<(), StoreError> {
        let revision = self.write(|transaction| {
            let keys = {
                let leased = transaction.open_table(LEASED)?;
                let from = (lease.0, "");
                let mut keys = Vec::new();
                for key in leased.range(from..)? {
                    let (key, _) = key?;
                    let (id, key) = key.value();
                    if id != lease.0 {
                        break;
                    }
                    keys.push(Change::delete(key));
                }
                keys
            };
            transaction.open_table(LEASES)?.remove(lease.0)?;
            apply(transaction, &keys)
        })?;
        self.note(revision);
        Ok(())
    }

    /// Wakes the watches.
    fn note(&self, revision: Revision) {
        let mut clock = self.clock();
        clock.revision = clock.revision.max(revision);
        self.changed.notify_all();
    }
}

/// Applies changes under the next revision, which is the answer; under the present one if
/// nothing changes.
fn apply(transaction: &WriteTransaction, changes: &[Change]) -> Result<Revision, redb::Error> {
    let mut numbers = transaction.open_table(NUMBERS)?;
    let before = numbers
        .get(REVISION)?
        .map_or(1, |revision| revision.value());
    let mut entries = transaction.open_table(ENTRIES)?;
    let mut leased = transaction.open_table(LEASED)?;
    let mut updates = transaction.open_table(UPDATES)?;
    let revision = before + 1;
    let mut number = 0;
    for change in changes {
        let key = change.key();
        let old = entries.remove(key)?.map(|old| old.value().1);
        if let Some(lease) = old
            && lease != 0
        {
            leased.remove((lease, key))?;
        }
        match change {
            Change::Put { value, lease, .. } => {
                let lease = lease.map_or(0, |lease| lease.0);
                entries.insert(key, (revision, lease, &value[..]))?;
                if lease != 0 {
                    leased.insert((lease, key), ())?;
                }
                updates.insert((revision, number), (key, true, &value[..]))?;
            }
            // A key that was not there did not change.
            Change::Delete { .. } if old.is_none() => continue,
            Change::Delete { .. } => {
                updates.insert((revision, number), (key, false, &[][..]))?;
            }
        }
        number += 1;
    }
    if number == 0 {
        return Ok(before);
    }
    numbers.insert(REVISION, revision)?;
    let mut compacted = None;
    while updates.len()? > UPDATES_MAX {
        let first = updates.pop_first()?.map(|(key, _)| key.value().0);
        compacted = first.or(compacted);
    }
    if let Some(compacted) = compacted {
        numbers.insert(COMPACTED, compacted)?;
    }
    Ok(revision)
}

impl Store for Embedded {
    fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        self.expire()?;
        let read = || -> Result<Snapshot, redb::Error> {
            let transaction = self.database.begin_read()?;
            let numbers = transaction.open_table(NUMBERS)?;
            let revision = numbers
                .get(REVISION)?
                .map_or(1, |revision| revision.value());
            let mut entries = Vec::new();
            for entry in transaction.open_table(ENTRIES)?.range(prefix..)? {
                let (key, kept) = entry?;
                if !key.value().starts_with(prefix) {
                    break;
                }
                entries.push(entry_of(key.value(), kept.value()));
            }
            Ok(Snapshot { revision, entries })
        };
        read().map_err(|error| self.wrong(error))
    }

    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.expire()?;
        let get = || -> Result<Option<Entry>, redb::Error> {
            let entries = self.database.begin_read()?.open_table(ENTRIES)?;
            Ok(entries.get(key)?.map(|kept| entry_of(key, kept.value())))
        };
        get().map_err(|error| self.wrong(error))
    }

    fn commit(
        &self,
        conditions: &[Condition],
        changes: &[Change],
    ) -> Result<Committed, StoreError> {
        check(conditions, changes)?;
        self.expire()?;
        // An inner error is the caller's: nothing was written then.
        let committed = self.write(|transaction| {
            for condition in conditions {
                let entries = transaction.open_table(ENTRIES)?;
                let revision = |key: &str| -> Result<Option<u64>, redb::Error> {
                    Ok(entries.get(key)?.map(|kept| kept.value().0))
                };
                let holds = match condition {
                    Condition::Absent(key) => revision(key)?.is_none(),
                    Condition::Unchanged(key, known) => revision(key)? == Some(*known),
                };
                if !holds {
                    return Ok(Ok(Committed::Refused));
                }
            }
            for change in changes {
                if let Change::Put {
                    lease: Some(lease), ..
                } = change
                    && transaction.open_table(LEASES)?.get(lease.0)?.is_none()
                {
                    return Ok(Err(StoreError::LeaseGone(*lease)));
                }
            }
            Ok(Ok(Committed::Done(apply(transaction, changes)?)))
        })??;
        if let Committed::Done(revision) = committed {
            self.note(revision);
        }
        Ok(committed)
    }

    fn grant(&self, time: Duration) -> Result<LeaseId, StoreError> {
        check_lease(time)?;
        let id = self.write(|transaction| {
            let mut numbers = transaction.open_table(NUMBERS)?;
            let id = numbers.get(LAST_LEASE)?.map_or(0, |id| id.value()) + 1;
            numbers.insert(LAST_LEASE, id)?;
            let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            transaction
                .open_table(LEASES)?
                .insert(id as i64, milliseconds)?;
            Ok(LeaseId(id as i64))
        })?;
        self.clock().ends.insert(id, (Instant::now() + time, time));
        Ok(id)
    }

    fn renew(&self, lease: LeaseId) -> Result<Duration, StoreError> {
        self.expire()?;
        let mut clock = self.clock();
        let (end, time) = clock
            .ends
            .get_mut(&lease)
            .ok_or(StoreError::LeaseGone(lease))?;
        *end = Instant::now() + *time;
        Ok(*time)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        let known = self.clock().ends.remove(&lease);
        if known.is_some() {
            self.end_lease(lease)
        } else {
            Ok(())
        }
    }

    fn watch(
        &self,
        prefix: &str,
        after: Revision,
        wait: Duration,
    ) -> Result<Vec<Update>, StoreError> {
        let deadline = Instant::now() + wait.min(WATCH_MAX);
        loop {
            self.expire()?;
            let seen = self.clock().revision;
            let updates = self.updates(prefix, after)?;
            if !updates.is_empty() {
                return Ok(updates);
            }
            let clock = self.clock();
            let now = Instant::now();
            if now >= deadline {
                return Ok(Vec::new());
            }
            // A lease that ends is a change, too.
            let first_end = clock.ends.values().map(|&(end, _)| end).min();
            let until = first_end.map_or(deadline, |end| end.min(deadline));
            let pause = until.saturating_duration_since(now);
            let waited = self
                .changed
                .wait_timeout_while(clock, pause, |clock| clock.revision == seen)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            drop(waited);
        }
    }
}

impl Embedded {
    fn updates(&self, prefix: &str, after: Revision) -> Result<Vec<Update>, StoreError> {
        let read = || -> Result<Result<Vec<Update>, StoreError>, redb::Error> {
            let transaction = self.database.begin_read()?;
            let compacted = transaction.open_table(NUMBERS)?.get(COMPACTED)?;
            if compacted.is_some_and(|compacted| compacted.value() > after) {
                return Ok(Err(StoreError::Compacted { after }));
            }
            let mut updates = Vec::new();
            for update in transaction.open_table(UPDATES)?.range((after + 1, 0)..)? {
                let (number, logged) = update?;
                let (key, there, value) = logged.value();
                if key.starts_with(prefix) {
                    updates.push(Update {
                        key: key.into(),
                        value: there.then(|| value.to_vec()),
                        revision: number.value().0,
                    });
                }
            }
            Ok(Ok(updates))
        };
        read().map_err(|error| self.wrong(error))?
    }
}

fn entry_of(key: &str, (revision, lease, value): Kept) -> Entry {
    Entry {
        key: key.into(),
        value: value.to_vec(),
        revision,
        lease: (lease != 0).then_some(LeaseId(lease)),
    }
}
