//! Which hosts are members of a cluster, which of them live, which one decides, and what it
//! decides.
//!
//! All of it is in a [`Store`], below these keys:
//!
//! | key | has | until |
//! | --- | --- | --- |
//! | `weft/cluster` | [`Identity`] | for ever |
//! | `weft/token/DIGEST` | an invitation; the token itself is nowhere | it is used, or its lease ends |
//! | `weft/host/NAME` | [`HostRecord`] | the host leaves |
//! | `weft/key/KEY` | the name of the host with that public key | the host leaves |
//! | `weft/number/N` | the name of the host with that number | the host leaves |
//! | `weft/alive/NAME` | [`HostReport`] | the host's lease ends |
//! | `weft/last-number` | the number that the newest host got | for ever |
//! | `weft/live/NAME` | [`Live`] | its agent's lease ends |
//! | `weft/look/LEASE` | nothing: somebody looks, see [`Onlooker`] | its lease ends |
//! | `weft/console/…` | consoles that somebody has open: see `console.rs` | |
//! | `weft/quota/USER` | [`Quota`] | an operator ends it |
//! | `weft/trouble/NAME` | why an operator expects the host to fail | an operator ends it, or the host leaves |
//! | `weft/cordon/NAME` | [`Cordon`] | an operator ends it, or the host leaves |
//! | `weft/hands-off` | nothing: the cluster moves nothing by itself | an operator ends it |
//! | `weft/policy` | the name of the policy by which hosts are chosen | an operator chooses another |
//! | `weft/access/NAME` | [`AccessKey`]: the digest of a key for the API, with its role | an operator ends it |
//! | `weft/leader` | [`Leader`] | the leader's lease ends |
//! | `weft/log/N` | [`LogRecord`] | [`LOG_MAX`] more are written |
//! | `weft/move-costs` | what moves cost here, as leaders have learned | for ever |
//! | `weft/work/stirred` | nothing: members, or what operators want of them, have changed | for ever |
//! | `weft/work/…` | what runs and what waits: see `work.rs` | |
//!
//! Invariants:
//! - a token lets one host join, however many try at the same time: the commit that makes the
//!   host deletes the token, under the condition that nobody has used it;
//! - two hosts never have the same name, the same public key or the same number;
//! - what a leader commits has the condition that it is still the leader, so one that was
//!   cut off changes nothing ([`Term::commit`]).
//!
//! No clock counts for tokens, hosts and leaders: they end by the store's leases. Keys for the
//! API end by the clock of the host that serves it.

mod access;
mod bounds;
mod console;
mod costs;
mod error;
mod host;
mod leader;
mod leaving;
mod live;
mod log;
mod offer;
mod overview;
mod planner;
mod quota;
mod token;
mod work;

pub use access::{ACCESS_LIFE_MAX, AccessKey, AccessKeys, Role, seconds_now};
pub use bounds::{CORES_MAX, PRIORITY_MAX, WORK_HOSTS_MAX};
pub use console::{CONSOLE_TAIL_MAX, ConsoleCalls, ConsoleNews, ConsoleView, Shown};
pub use costs::MoveRecord;
pub use error::ClusterError;
pub use host::{Cordon, HostRecord, HostReport, HostState, Member, is_shown};
pub use leader::{Leader, Term};
pub use leaving::{Departure, Leaving};
pub use live::{Flow, Live, LiveHost, Onlooker};
pub use log::{LOG_MAX, LogKind, LogRecord};
pub use offer::lent_mib;
pub use overview::{HostView, NextMove, Overview, RunView, WaitView};
pub use planner::{POLICY_DEFAULT, Plan, Planner};
pub use quota::{ANY_USER, Quota, Quotas, Usage};
pub use token::{Secret, Token};
pub use work::{
    Answer, Asked, Mark, MoveOrder, MoveWish, Placed, Work, WorkKind, WorkPart, WorkRequest,
};

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use weft_store::{Change, Committed, Condition, LeaseId, Revision, Store, StoreError};

const IDENTITY: &str = "weft/cluster";
const TOKENS: &str = "weft/token/";
const HOSTS: &str = "weft/host/";
const KEYS: &str = "weft/key/";
const NUMBERS: &str = "weft/number/";
const ALIVE: &str = "weft/alive/";
const LAST_NUMBER: &str = "weft/last-number";
const LEADER: &str = "weft/leader";
const CORDONS: &str = "weft/cordon/";
const TROUBLE: &str = "weft/trouble/";
const HANDS_OFF: &str = "weft/hands-off";
const POLICY: &str = "weft/policy";
/// Written with each change that those who wait for changes of work have to know, and that is
/// elsewhere. A store watches one prefix at a time.
const STIRRED: &str = "weft/work/stirred";

/// All that a leader decides by, as it is in the store.
#[derive(Clone, Debug, Default)]
pub struct ClusterState {
    pub members: Vec<Member>,
    pub work: Work,
    pub quotas: Quotas,
    /// The cluster moves nothing by itself.
    pub hands_off: bool,
    /// How hosts are chosen, if an operator said so.
    pub policy: Option<String>,
    /// What moves cost, once some were seen.
    pub costs: Option<MoveRecord>,
}

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

/// A host that does not renew this lease for so long decides no more: another takes over within
/// ten seconds.
pub const LEADER_LEASE: Duration = Duration::from_secs(6);

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
    /// Makes a cluster with its first host, in a store that has none, or one without hosts.
    pub fn init(
        store: Arc<dyn Store>,
        name: &str,
        first: &HostRecord,
    ) -> Result<Cluster, ClusterError> {
        host::check_name(name)?;
        first.check(&first.version)?;
        let identity = Identity {
            id: token::random_hex::<8>(),
            name: name.into(),
            version: first.version.clone(),
            format: FORMAT,
        };
        let known = store.get(IDENTITY)?;
        if known.is_some() && !store.read(HOSTS)?.entries.is_empty() {
            return Err(ClusterError::Exists(Cluster::open(store)?.identity.name));
        }
        let record = HostRecord {
            number: 0,
            ..first.clone()
        };
        let mut conditions = vec![match &known {
            None => Condition::Absent(IDENTITY.into()),
            Some(entry) => Condition::Unchanged(IDENTITY.into(), entry.revision),
        }];
        conditions.extend(record.keys().map(Condition::Absent));
        let mut changes = vec![Change::put(IDENTITY, json(&identity))];
        changes.extend(record.entries());
        match store.commit(&conditions, &changes)? {
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

    /// Makes a host a member, with a number that no other has. The token is used up by it.
    pub fn join(&self, token: &Token, record: &HostRecord) -> Result<HostRecord, ClusterError> {
        record.check(&self.identity.version)?;
        for _ in 0..JOIN_TRIES {
            let number = self.free_number()?;
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

    /// The next free number after the one that was given out last. What ran for a host that has
    /// left may still have the user id that was derived from its number.
    fn free_number(&self) -> Result<u32, ClusterError> {
        let taken: BTreeSet<String> = self
            .store
            .read(NUMBERS)?
            .entries
            .into_iter()
            .map(|entry| entry.key)
            .collect();
        let last = self.store.get(LAST_NUMBER)?;
        let last = last.and_then(|entry| lossy(&entry.value).parse::<u32>().ok());
        let from = last.unwrap_or(0) + 1;
        let mut numbers = (0..HOSTS_MAX).map(|step| (from + step) % HOSTS_MAX);
        let free = numbers.find(|number| !taken.contains(&format!("{NUMBERS}{number}")));
        free.ok_or(ClusterError::Full)
    }

    /// `false`: another host has got the number in the meantime.
    fn try_join(&self, token: &Token, record: &HostRecord) -> Result<bool, ClusterError> {
        let token_key = format!("{TOKENS}{}", token.digest());
        let entry = self
            .store
            .get(&token_key)?
            .ok_or(ClusterError::NoSuchToken)?;
        let [host, key, _] = record.keys();
        let mut conditions = vec![Condition::Unchanged(token_key.clone(), entry.revision)];
        conditions.extend(record.keys().map(Condition::Absent));
        let last = Change::put(LAST_NUMBER, record.number.to_string());
        let mut changes = vec![Change::delete(&token_key), last, stir()];
        changes.extend(record.entries());
        match self.store.commit(&conditions, &changes) {
            Ok(Committed::Done(_)) => return Ok(true),
            Ok(Committed::Refused) => {}
            // It may have come about: then the host's key has this record.
            Err(StoreError::Unknown { store, reason }) => {
                let entry = self.store.get(&host)?;
                return match entry.is_some_and(|entry| entry.value == json(record)) {
                    true => Ok(true),
                    false => Err(StoreError::Unknown { store, reason }.into()),
                };
            }
            Err(error) => return Err(error.into()),
        }
        if self.store.get(&host)?.is_some() {
            return Err(ClusterError::NameTaken(record.name.clone()));
        }
        if let Some(other) = self.store.get(&key)? {
            return Err(ClusterError::KeyTaken(lossy(&other.value)));
        }
        Ok(false)
    }

    /// Ends a host's membership, also if its record cannot be read. With `key`, only if the
    /// host has that public key.
    pub fn leave(&self, name: &str, key: Option<&str>) -> Result<(), ClusterError> {
        let mut changes = [HOSTS, ALIVE, CORDONS, TROUBLE]
            .map(|prefix| Change::delete(format!("{prefix}{name}")))
            .to_vec();
        for prefix in [KEYS, NUMBERS] {
            let entries = self.store.read(prefix)?.entries.into_iter();
            let of_host = entries.filter(|entry| entry.value == name.as_bytes());
            changes.extend(of_host.map(|entry| Change::delete(entry.key)));
        }
        changes.push(stir());
        self.change_member(name, key, &changes)
    }

    /// All members in the order of their names, with what the living ones say. A record that
    /// cannot be read, or has a name, key or number that an earlier one has, is no member's:
    /// see [`Cluster::damaged`].
    pub fn members(&self) -> Result<Vec<Member>, ClusterError> {
        Ok(self.read_members()?.0)
    }

    /// The keys of hosts' records that were left out.
    pub fn damaged(&self) -> Result<Vec<String>, ClusterError> {
        Ok(self.read_members()?.1)
    }

    fn read_members(&self) -> Result<(Vec<Member>, Vec<String>), ClusterError> {
        let reports = self.store.read(ALIVE)?;
        let cordons = self.store.read(CORDONS)?;
        let troubles = self.store.read(TROUBLE)?;
        let hosts = self.store.read(HOSTS)?;
        let (mut members, mut damaged): (Vec<Member>, Vec<String>) = (Vec::new(), Vec::new());
        for entry in &hosts.entries {
            let same = |record: &HostRecord| {
                members.iter().any(|known| {
                    known.record.key == record.key || known.record.number == record.number
                })
            };
            let Some(record) = host::read(entry).filter(|record| !same(record)) else {
                damaged.push(entry.key.clone());
                continue;
            };
            let alive = format!("{ALIVE}{}", record.name);
            let report = reports.entries.iter().find(|report| report.key == alive);
            let report = report.and_then(|report| serde_json::from_slice(&report.value).ok());
            let report = report.map(HostReport::shown);
            let cordon = format!("{CORDONS}{}", record.name);
            let cordon = cordons.entries.iter().find(|entry| entry.key == cordon);
            let cordon = cordon.and_then(|entry| serde_json::from_slice(&entry.value).ok());
            let trouble = format!("{TROUBLE}{}", record.name);
            let trouble = troubles.entries.iter().find(|entry| entry.key == trouble);
            members.push(Member {
                record,
                report,
                cordon: cordon.unwrap_or_default(),
                said_to_fail: trouble.map(|entry| host::shown_trouble(&lossy(&entry.value))),
                revision: entry.revision,
            });
        }
        Ok((members, damaged))
    }

    /// Keeps new work away from a member, has everything leave it, or ends both, and what was
    /// said of its failure ([`Cluster::evacuate`]).
    pub fn cordon(&self, name: &str, cordon: Cordon) -> Result<(), ClusterError> {
        let key = format!("{CORDONS}{name}");
        let changes = match cordon == Cordon::default() {
            true => vec![
                Change::delete(key),
                Change::delete(format!("{TROUBLE}{name}")),
                stir(),
            ],
            false => vec![Change::put(key, json(&cordon)), stir()],
        };
        self.change_member(name, None, &changes)
    }

    /// Has everything leave a member that is expected to fail. `why`: a phrase such as "its fan
    /// stands still".
    pub fn evacuate(&self, name: &str, why: &str) -> Result<(), ClusterError> {
        let why = host::check_trouble(why)?;
        let change = Change::put(format!("{TROUBLE}{name}"), why.as_bytes());
        self.change_member(name, None, &[change, stir()])
    }

    /// Changes something that belongs to a member. With `key`, only if the member has that
    /// public key.
    fn change_member(
        &self,
        name: &str,
        key: Option<&str>,
        changes: &[Change],
    ) -> Result<(), ClusterError> {
        let host = format!("{HOSTS}{name}");
        let none = || ClusterError::NoSuchHost(name.into());
        let entry = self.store.get(&host)?.ok_or_else(none)?;
        if key.is_some_and(|key| host::read(&entry).is_none_or(|record| record.key != key)) {
            return Err(none());
        }
        let condition = Condition::Unchanged(host, entry.revision);
        match self.store.commit(&[condition], changes)? {
            Committed::Done(_) => Ok(()),
            Committed::Refused => Err(none()),
        }
    }

    /// Lets the store forget what changed up to this revision: nothing needs it any more.
    pub fn forget_changes(&self, until: Revision) -> Result<(), ClusterError> {
        Ok(self.store.forget_changes(until)?)
    }

    /// All that a leader decides by.
    pub fn state(&self) -> Result<ClusterState, ClusterError> {
        Ok(ClusterState {
            members: self.members()?,
            work: self.work()?,
            quotas: self.quotas()?,
            hands_off: self.hands_off()?,
            policy: self.policy()?,
            costs: self.move_costs()?,
        })
    }

    /// Whether the cluster moves nothing by itself. What an operator drains still leaves.
    pub fn hands_off(&self) -> Result<bool, ClusterError> {
        Ok(self.store.get(HANDS_OFF)?.is_some())
    }

    pub fn set_hands_off(&self, hands_off: bool) -> Result<(), ClusterError> {
        let change = match hands_off {
            true => Change::put(HANDS_OFF, ""),
            false => Change::delete(HANDS_OFF),
        };
        self.store.commit(&[], &[change, stir()])?;
        Ok(())
    }

    /// How hosts are chosen, if an operator said so ([`POLICY_DEFAULT`] else). A name that this
    /// version does not know counts as none.
    pub fn policy(&self) -> Result<Option<String>, ClusterError> {
        let name = self.store.get(POLICY)?.map(|entry| lossy(&entry.value));
        Ok(name.filter(|name| weft_place::policy_by_name(name).is_ok()))
    }

    /// Has hosts be chosen by this policy from now on.
    pub fn set_policy(&self, name: &str) -> Result<(), ClusterError> {
        weft_place::policy_by_name(name)?;
        let changes = [Change::put(POLICY, name), stir()];
        self.store.commit(&[], &changes)?;
        Ok(())
    }

    /// A lease under which a host says that it lives.
    pub fn lease(&self) -> Result<LeaseId, ClusterError> {
        Ok(self.store.grant(ALIVE_LEASE)?)
    }

    /// A lease under which a host decides.
    pub fn lease_to_lead(&self) -> Result<LeaseId, ClusterError> {
        Ok(self.store.grant(LEADER_LEASE)?)
    }

    pub fn renew(&self, lease: LeaseId) -> Result<(), ClusterError> {
        self.store.renew(lease)?;
        Ok(())
    }

    /// Gives a lease back: what was said under it is gone at once.
    pub fn end_lease(&self, lease: LeaseId) -> Result<(), ClusterError> {
        Ok(self.store.revoke(lease)?)
    }

    /// Says that a member lives, and how it is. Refused where no member has this name and
    /// this public key any more.
    pub fn report(
        &self,
        name: &str,
        key: &str,
        report: &HostReport,
        lease: LeaseId,
    ) -> Result<(), ClusterError> {
        let change = Change::put_leased(format!("{ALIVE}{name}"), json(report), lease);
        self.change_member(name, Some(key), &[change])
    }

    /// Waits until a member comes or goes, or an operator wants something else of one, after
    /// `after`, or `wait` is over. The revision to wait from next is the answer.
    pub fn wait_for_change(&self, after: u64, wait: Duration) -> Result<u64, ClusterError> {
        self.wait_below(STIRRED, after, wait)
    }

    /// The same of any keys.
    fn wait_below(&self, prefix: &str, after: u64, wait: Duration) -> Result<u64, ClusterError> {
        match self.store.watch(prefix, after, wait) {
            Ok(updates) => Ok(updates.last().map_or(after, |update| update.revision)),
            // Too much has changed: all must be read again.
            Err(StoreError::Compacted { .. }) => Ok(self.store.read(prefix)?.revision),
            Err(error) => Err(error.into()),
        }
    }
}

fn stir() -> Change {
    Change::put(STIRRED, "")
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
