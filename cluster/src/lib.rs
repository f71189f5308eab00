//! Which hosts are members of a cluster, which of them live, and which one decides.
//!
//! All of it is in a [`Store`](weft_store::Store), below these keys:
//!
//! | key | has | until |
//! | --- | --- | --- |
//! | `weft/cluster` | [`Identity`] | for ever |
//! | `weft/token/DIGEST` | an invitation; the token itself is nowhere | it is used, or its lease ends |
//! | `weft/host/NAME` | [`HostRecord`] | the host leaves |
//! | `weft/key/KEY` | the name of the host with that public key | the host leaves |
//! | `weft/number/N` | the name of the host with that number | the host leaves |
//! | `weft/alive/NAME` | [`HostReport`] | the host's lease ends |
//! | `weft/leader` | [`Leader`] | the leader's lease ends |
//!
//! Invariants:
//! - a token lets one host join, however many try at the same time: the commit that makes the
//!   host deletes the token, under the condition that nobody has used it;
//! - two hosts never have the same name, the same public key or the same number;
//! - what a leader commits has the condition that it is still the leader, so one that was
//!   cut off changes nothing ([`Term::commit`]).
//!
//! No clock is read here: tokens, hosts and leaders end by the store's leases.

mod error;
mod host;
mod leader;
mod token;

pub use error::ClusterError;
pub use host::{HostRecord, HostReport, Member};
pub use leader::{Leader, Term};
pub use token::Token;

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use weft_store::{Change, Committed, Condition, LeaseId, Store};

const IDENTITY: &str = "weft/cluster";
const TOKENS: &str = "weft/token/";
const HOSTS: &str = "weft/host/";
const KEYS: &str = "weft/key/";
const NUMBERS: &str = "weft/number/";
const ALIVE: &str = "weft/alive/";
const LEADER: &str = "weft/leader";

/// The layout of the keys above.
const FORMAT: u32 = 1;

/// For so long an invitation is good, at most.
pub const TOKEN_LIFE_MAX: Duration = Duration::from_secs(3600);

/// Members at a time: each has a user of its own on all others, of some thousand.
pub const HOSTS_MAX: u32 = 500;

/// How often a host that joins tries to get a number while others join.
const JOIN_TRIES: usize = 32;

/// A host that does not renew its lease for so long counts as gone.
pub const ALIVE_LEASE: Duration = Duration::from_secs(10);

/// What a cluster is, decided when it is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Chosen at random: a host of another cluster is told apart by it.
    pub id: String,
    pub name: String,
    /// Weft's version. All members have the same.
    pub version: String,
    format: u32,
}

/// A cluster that exists.
#[derive(Clone)]
pub struct Cluster {
    store: Arc<dyn Store>,
    identity: Identity,
}

impl Cluster {
    /// Makes a cluster in an empty store.
    pub fn init(store: Arc<dyn Store>, name: &str, version: &str) -> Result<Cluster, ClusterError> {
        host::check_name(name)?;
        let identity = Identity {
            id: token::random_hex::<8>(),
            name: name.into(),
            version: version.into(),
            format: FORMAT,
        };
        let condition = [Condition::Absent(IDENTITY.into())];
        match store.commit(&condition, &[Change::put(IDENTITY, json(&identity))])? {
            Committed::Done(_) => Ok(Cluster { store, identity }),
            Committed::Refused => Err(ClusterError::Exists(Cluster::open(store)?.identity.name)),
        }
    }

    /// The cluster that is in this store.
    pub fn open(store: Arc<dyn Store>) -> Result<Cluster, ClusterError> {
        let entry = store.get(IDENTITY)?.ok_or(ClusterError::None)?;
        let identity: Identity = parse(IDENTITY, &entry.value)?;
        if identity.format != FORMAT {
            return Err(ClusterError::Format {
                found: identity.format,
                known: FORMAT,
            });
        }
        Ok(Cluster { store, identity })
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// An invitation for one host. It is shown once, and the store has only its digest.
    pub fn invite(&self, life: Duration) -> Result<Token, ClusterError> {
        if life > TOKEN_LIFE_MAX {
            return Err(ClusterError::TokenLife(TOKEN_LIFE_MAX));
        }
        let token = Token::new();
        let lease = self.store.grant(life)?;
        let key = format!("{TOKENS}{}", token.digest());
        self.store
            .commit(&[], &[Change::put_leased(key, "", lease)])?;
        Ok(token)
    }

    /// Makes a host a member, with the smallest number that is free. The token is used up by
    /// it.
    pub fn join(&self, token: &Token, record: &HostRecord) -> Result<HostRecord, ClusterError> {
        record.check(&self.identity.version)?;
        for _ in 0..JOIN_TRIES {
            let numbers: BTreeSet<u32> = self
                .members()?
                .iter()
                .map(|member| member.record.number)
                .collect();
            let free = (0..HOSTS_MAX).find(|number| !numbers.contains(number));
            let number = free.ok_or(ClusterError::Full)?;
            let record = HostRecord {
                number,
                ..record.clone()
            };
            if self.try_join(token, &record)? {
                return Ok(record);
            }
        }
        Err(ClusterError::Busy)
    }

    /// `false`: another host has got the number in the meantime.
    fn try_join(&self, token: &Token, record: &HostRecord) -> Result<bool, ClusterError> {
        let token_key = format!("{TOKENS}{}", token.digest());
        let entry = self
            .store
            .get(&token_key)?
            .ok_or(ClusterError::NoSuchToken)?;
        let [host, key, number] = record.keys();
        let conditions = [
            Condition::Unchanged(token_key.clone(), entry.revision),
            Condition::Absent(host.clone()),
            Condition::Absent(key.clone()),
            Condition::Absent(number.clone()),
        ];
        let changes = [
            Change::delete(&token_key),
            Change::put(&host, json(record)),
            Change::put(&key, record.name.as_bytes()),
            Change::put(&number, record.name.as_bytes()),
        ];
        if let Committed::Done(_) = self.store.commit(&conditions, &changes)? {
            return Ok(true);
        }
        if self.store.get(&host)?.is_some() {
            return Err(ClusterError::NameTaken(record.name.clone()));
        }
        if let Some(other) = self.store.get(&key)? {
            return Err(ClusterError::KeyTaken(lossy(&other.value)));
        }
        Ok(false)
    }

    /// Ends a host's membership. Its key opens nothing here from then on.
    pub fn leave(&self, name: &str) -> Result<(), ClusterError> {
        let host = format!("{HOSTS}{name}");
        let none = || ClusterError::NoSuchHost(name.into());
        let entry = self.store.get(&host)?.ok_or_else(none)?;
        let record: HostRecord = parse(&host, &entry.value)?;
        let mut changes: Vec<Change> = record.keys().into_iter().map(Change::delete).collect();
        changes.push(Change::delete(format!("{ALIVE}{name}")));
        match self
            .store
            .commit(&[Condition::Unchanged(host, entry.revision)], &changes)?
        {
            Committed::Done(_) => Ok(()),
            Committed::Refused => Err(none()),
        }
    }

    /// All members in the order of their names, with what the living ones say.
    pub fn members(&self) -> Result<Vec<Member>, ClusterError> {
        let reports = self.store.read(ALIVE)?;
        let hosts = self.store.read(HOSTS)?;
        let member = |entry: &weft_store::Entry| {
            let record: HostRecord = parse(&entry.key, &entry.value)?;
            let alive = format!("{ALIVE}{}", record.name);
            let report = reports.entries.iter().find(|report| report.key == alive);
            let report = report
                .map(|report| parse(&report.key, &report.value))
                .transpose()?;
            Ok(Member {
                record,
                report,
                revision: entry.revision,
            })
        };
        hosts.entries.iter().map(member).collect()
    }

    /// A lease under which a host says that it lives.
    pub fn lease(&self) -> Result<LeaseId, ClusterError> {
        Ok(self.store.grant(ALIVE_LEASE)?)
    }

    pub fn renew(&self, lease: LeaseId) -> Result<(), ClusterError> {
        self.store.renew(lease)?;
        Ok(())
    }

    /// Gives a lease back: what was said under it is gone at once.
    pub fn end_lease(&self, lease: LeaseId) -> Result<(), ClusterError> {
        Ok(self.store.revoke(lease)?)
    }

    /// Says that a member lives, and how it is. Refused where it is no member any more.
    pub fn report(
        &self,
        name: &str,
        report: &HostReport,
        lease: LeaseId,
    ) -> Result<(), ClusterError> {
        let host = format!("{HOSTS}{name}");
        let none = || ClusterError::NoSuchHost(name.into());
        let member = self.store.get(&host)?.ok_or_else(none)?;
        let change = Change::put_leased(format!("{ALIVE}{name}"), json(report), lease);
        match self
            .store
            .commit(&[Condition::Unchanged(host, member.revision)], &[change])?
        {
            Committed::Done(_) => Ok(()),
            Committed::Refused => Err(none()),
        }
    }

    /// Waits until a member comes, goes or changes after `after`, or `wait` is over. The
    /// revision to wait from next is the answer.
    pub fn wait_for_change(&self, after: u64, wait: Duration) -> Result<u64, ClusterError> {
        match self.store.watch(HOSTS, after, wait) {
            Ok(updates) => Ok(updates.last().map_or(after, |update| update.revision)),
            // Too much has changed: all must be read again.
            Err(weft_store::StoreError::Compacted { .. }) => Ok(self.store.read(HOSTS)?.revision),
            Err(error) => Err(error.into()),
        }
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records are plain data")
}

fn parse<'a, T: Deserialize<'a>>(key: &str, value: &'a [u8]) -> Result<T, ClusterError> {
    serde_json::from_slice(value).map_err(|error| ClusterError::Damaged {
        key: key.into(),
        reason: error.to_string(),
    })
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
