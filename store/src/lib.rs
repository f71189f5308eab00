//! The state of a cluster: keys with values, changed all together or not at all, leases
//! that take their keys along when nobody renews them, and a watch on what changes.
//!
//! Two stores have this interface. [`Embedded`] is a file in one daemon (redb); [`Etcd`]
//! is an etcd of one or several members, through its JSON gateway, which needs no gRPC.
//! `tests/contract.rs` runs the same tests over both.
//!
//! Every call ends within [`CALL_MAX`], [`Store::watch`] within that and its own wait. A
//! change whose answer is lost may have happened: [`StoreError::Unknown`] says so, and the
//! caller reads again before it repeats the change. With a [`Condition`] on what it read, a
//! repeated change cannot happen twice.

mod embedded;
mod etcd;

pub use embedded::Embedded;
pub use etcd::{Etcd, EtcdOptions, NO_LEASE, TlsFiles, prefix_end};

use std::path::PathBuf;
use std::time::Duration;

/// A call takes no longer than this, however many members do not answer.
pub const CALL_MAX: Duration = Duration::from_secs(5);

/// The shortest lease. An etcd raises shorter ones to it (two election times-out).
pub const LEASE_MIN: Duration = Duration::from_secs(2);

/// The longest lease.
pub const LEASE_MAX: Duration = Duration::from_secs(86400);

/// The largest value, bytes. An etcd takes requests of 1.5 MiB.
pub const VALUE_MAX: usize = 512 * 1024;

/// Conditions and changes of one commit. An etcd takes 128 by default.
pub const COMMIT_MAX: usize = 128;

/// The longest key, bytes.
pub const KEY_MAX: usize = 512;

/// The number of a change to the store: each commit that changes something has a larger one
/// than all before.
pub type Revision = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

/// A key with what it is worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub value: Vec<u8>,
    /// The last commit that changed it.
    pub revision: Revision,
    pub lease: Option<LeaseId>,
}

/// All entries below a prefix at one moment, in the order of their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub revision: Revision,
    pub entries: Vec<Entry>,
}

/// What must hold so that a commit happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Absent(String),
    /// The key was last changed by that commit.
    Unchanged(String, Revision),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Put {
        key: String,
        value: Vec<u8>,
        lease: Option<LeaseId>,
    },
    Delete {
        key: String,
    },
}

impl Change {
    pub fn put(key: impl Into<String>, value: impl Into<Vec<u8>>) -> Change {
        Change::Put {
            key: key.into(),
            value: value.into(),
            lease: None,
        }
    }

    pub fn put_leased(key: impl Into<String>, value: impl Into<Vec<u8>>, lease: LeaseId) -> Change {
        Change::Put {
            key: key.into(),
            value: value.into(),
            lease: Some(lease),
        }
    }

    pub fn delete(key: impl Into<String>) -> Change {
        Change::Delete { key: key.into() }
    }

    fn key(&self) -> &str {
        match self {
            Change::Put { key, .. } | Change::Delete { key } => key,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    /// All changes are in the store, under this revision.
    Done(Revision),
    /// A condition did not hold; nothing changed.
    Refused,
}

/// One key that changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    pub key: String,
    /// `None`: it is gone.
    pub value: Option<Vec<u8>>,
    pub revision: Revision,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nothing was changed.
    #[error(
        "the store cannot be reached ({tried}): {reason}; see that it runs and that this host gets there"
    )]
    Unreachable { tried: String, reason: String },
    /// It may have happened, or not.
    #[error("the store {store} did not answer a change: {reason}; read again before repeating it")]
    Unknown { store: String, reason: String },
    #[error("the lease {} has run out: ask for a new one", .0.0)]
    LeaseGone(LeaseId),
    /// What happened after that revision is not kept any more.
    #[error("the store does not keep what changed after revision {after}: read all again")]
    Compacted { after: Revision },
    #[error("{what}: {bound} at most")]
    TooLarge { what: String, bound: usize },
    #[error("the store {store} refused: {reason}")]
    Refused { store: String, reason: String },
    #[error("the store's file {}: {reason}", .file.display())]
    File { file: PathBuf, reason: String },
    #[error("{what}: {reason}")]
    Options { what: String, reason: String },
}

/// What the control plane keeps its state in. All methods may be called from several
/// threads at once.
pub trait Store: Send + Sync {
    /// All entries whose keys begin with `prefix`, the newest ones: what was committed
    /// before this call began is there.
    fn read(&self, prefix: &str) -> Result<Snapshot, StoreError>;

    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError>;

    /// All changes if all conditions hold, else none. No key twice.
    fn commit(&self, conditions: &[Condition], changes: &[Change])
    -> Result<Committed, StoreError>;

    /// A lease that runs out unless it is renewed within `time`, from [`LEASE_MIN`] to
    /// [`LEASE_MAX`].
    fn grant(&self, time: Duration) -> Result<LeaseId, StoreError>;

    /// The lease counts from now on again. The time that it has is the answer.
    fn renew(&self, lease: LeaseId) -> Result<Duration, StoreError>;

    /// Ends a lease: its keys are gone. One that has run out already is no error.
    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// What changed below `prefix` after revision `after`, in the order of the changes.
    /// Waits up to `wait` for something; then the answer is empty.
    fn watch(
        &self,
        prefix: &str,
        after: Revision,
        wait: Duration,
    ) -> Result<Vec<Update>, StoreError>;

    /// What changed up to this revision need not be kept any more. An etcd keeps all of it until
    /// it is told so; other stores have a bound of their own, and do nothing.
    fn forget_changes(&self, _until: Revision) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Checks the bounds that both stores have.
fn check(conditions: &[Condition], changes: &[Change]) -> Result<(), StoreError> {
    let too_large = |what: &str, bound| {
        Err(StoreError::TooLarge {
            what: what.into(),
            bound,
        })
    };
    if conditions.len() > COMMIT_MAX || changes.len() > COMMIT_MAX {
        return too_large("a commit's conditions or changes are too many", COMMIT_MAX);
    }
    let mut keys = std::collections::BTreeSet::new();
    for change in changes {
        check_key(change.key())?;
        if !keys.insert(change.key()) {
            let (what, reason) = (change.key().into(), "a commit changes it twice".into());
            return Err(StoreError::Options { what, reason });
        }
        if let Change::Put { key, value, .. } = change
            && value.len() > VALUE_MAX
        {
            return too_large(&format!("the value of {key} is too long"), VALUE_MAX);
        }
    }
    for condition in conditions {
        let (Condition::Absent(key) | Condition::Unchanged(key, _)) = condition;
        check_key(key)?;
    }
    Ok(())
}

fn check_key(key: &str) -> Result<(), StoreError> {
    if key.is_empty() || key.len() > KEY_MAX {
        let what = format!("the key {key:?} is empty or too long");
        return Err(StoreError::TooLarge {
            what,
            bound: KEY_MAX,
        });
    }
    Ok(())
}

fn check_lease(time: Duration) -> Result<(), StoreError> {
    if !(LEASE_MIN..=LEASE_MAX).contains(&time) {
        let reason = format!(
            "it has {} to {} s",
            LEASE_MIN.as_secs(),
            LEASE_MAX.as_secs()
        );
        return Err(StoreError::Options {
            what: format!("a lease of {time:?}"),
            reason,
        });
    }
    Ok(())
}
