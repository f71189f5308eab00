//! Keys for the cluster's API.
//!
//! A key is shown once, when it is made; the store has its digest below `weft/access/`, with a
//! role and the second after which it is of no use. That second is compared with the clock of
//! the host that serves.

use crate::host::check_name;
use crate::token::Secret;
use crate::{Cluster, ClusterError, json, parse};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use weft_store::{Change, Committed, Condition, Entry};

const ACCESS: &str = "weft/access/";

/// The longest life of a key.
pub const ACCESS_LIFE_MAX: Duration = Duration::from_secs(366 * 86400);

/// What a client may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Read everything.
    Look,
    /// Also have what runs move, and call moves off.
    Use,
    /// Also cordon and drain hosts, forget work, choose the policy, and keep the cluster from
    /// moving things.
    Run,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Role::Look => "look",
            Role::Use => "use",
            Role::Run => "run",
        }
    }
}

/// What the store has of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessKey {
    /// What operators call it.
    pub name: String,
    pub role: Role,
    /// Seconds since 1970.
    pub good_until: u64,
    digest: String,
}

/// All keys at one moment.
#[derive(Clone, Debug, Default)]
pub struct AccessKeys {
    by_digest: BTreeMap<String, AccessKey>,
}

impl AccessKeys {
    /// The key that this is the secret of, `now` seconds after 1970.
    pub fn find(&self, secret: &Secret, now: u64) -> Option<&AccessKey> {
        let key = self.by_digest.get(&secret.digest())?;
        (now < key.good_until).then_some(key)
    }

    /// In the order of their names.
    pub fn list(&self) -> Vec<&AccessKey> {
        let mut keys: Vec<&AccessKey> = self.by_digest.values().collect();
        keys.sort_by(|one, other| one.name.cmp(&other.name));
        keys
    }
}

/// Seconds since 1970.
pub fn seconds_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Cluster {
    /// Makes a key, under a name that no other has.
    pub fn make_access(
        &self,
        name: &str,
        role: Role,
        life: Duration,
    ) -> Result<Secret, ClusterError> {
        check_name(name)?;
        if life > ACCESS_LIFE_MAX {
            return Err(ClusterError::AccessLife(ACCESS_LIFE_MAX));
        }
        let secret = Secret::new();
        let access = AccessKey {
            name: name.into(),
            role,
            good_until: seconds_now() + life.as_secs(),
            digest: secret.digest(),
        };
        let key = format!("{ACCESS}{name}");
        let condition = Condition::Absent(key.clone());
        let change = Change::put(key, json(&access));
        match self.store.commit(&[condition], &[change])? {
            Committed::Done(_) => Ok(secret),
            Committed::Refused => Err(ClusterError::AccessTaken(name.into())),
        }
    }

    /// Ends a key.
    pub fn end_access(&self, name: &str) -> Result<(), ClusterError> {
        let key = format!("{ACCESS}{name}");
        if self.store.get(&key)?.is_none() {
            return Err(ClusterError::NoSuchAccess(name.into()));
        }
        self.store.commit(&[], &[Change::delete(key)])?;
        Ok(())
    }

    /// A record that cannot be read is no key.
    pub fn access(&self) -> Result<AccessKeys, ClusterError> {
        let entries = self.store.read(ACCESS)?.entries;
        let read = |entry: &Entry| {
            let access: AccessKey = parse(&entry.key, &entry.value).ok()?;
            let is_its = entry.key.strip_prefix(ACCESS) == Some(&access.name);
            (is_its && check_name(&access.name).is_ok()).then_some(access)
        };
        let keys = entries.iter().filter_map(read);
        Ok(AccessKeys {
            by_digest: keys.map(|key| (key.digest.clone(), key)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use weft_store::{Embedded, Store};

    #[test]
    fn keys_end_and_records_of_others_are_none() {
        let store = Arc::new(Embedded::in_memory().unwrap());
        let first = crate::HostRecord {
            name: "alpha".into(),
            key: "k".into(),
            address: "alpha:1".into(),
            cores: 1,
            memory_bytes: 0,
            features: Vec::new(),
            version: "1".into(),
            number: 0,
        };
        let cluster = Cluster::init(store.clone(), "c", &first).unwrap();
        let life = Duration::from_secs(100);
        let secret = cluster.make_access("eyes", Role::Look, life).unwrap();
        let again = cluster.make_access("eyes", Role::Run, life);
        assert!(matches!(again, Err(ClusterError::AccessTaken(_))));
        let keys = cluster.access().unwrap();
        let now = seconds_now();
        assert_eq!(keys.find(&secret, now).unwrap().name, "eyes");
        assert_eq!(keys.find(&secret, now + 101), None);
        assert_eq!(keys.find(&Secret::from_client("weft-key-"), now), None);
        // A record under another name, or with a name that a terminal would obey.
        let entry = store.get("weft/access/eyes").unwrap().unwrap();
        let text = String::from_utf8(entry.value).unwrap();
        for (key, text) in [
            ("other", text.clone()),
            ("\u{1b}[2J", text.replace("eyes", "\\u001b[2J")),
        ] {
            let change = Change::put(format!("{ACCESS}{key}"), text);
            store.commit(&[], &[change]).unwrap();
        }
        assert_eq!(cluster.access().unwrap().list().len(), 1);
        cluster.end_access("eyes").unwrap();
        assert!(cluster.access().unwrap().list().is_empty());
    }
}
