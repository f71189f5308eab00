//! What an aggregate does on its hosts just now, told while somebody looks.
//!
//! | key | has | until |
//! | --- | --- | --- |
//! | `weft/look/LEASE` | nothing: somebody looks | its lease ends (10 s) |
//! | `weft/live/NAME` | [`Live`] | its agent's lease ends |
//!
//! An etcd keeps every version of a record until it is compacted. So agents write only while a
//! page or a client of the API looks.

use crate::host::check_name;
use crate::{Cluster, ClusterError, json};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use weft_store::{Change, Entry, LeaseId, StoreError};

const LOOK: &str = "weft/look/";
const LIVE: &str = "weft/live/";
const LOOK_LEASE: Duration = Duration::from_secs(10);

/// Rates are of the last seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Live {
    /// The request's number.
    pub id: u64,
    pub hosts: Vec<LiveHost>,
    pub flows: Vec<Flow>,
    /// The part of the open move's bytes that has been sent, 0 to 1.
    #[serde(default)]
    pub moved: Option<f64>,
}

/// An aggregate on one host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveHost {
    pub host: String,
    /// Guest memory, or a program's pages, that the host has now.
    pub memory_bytes: u64,
    /// vCPUs that run there. `None`: a program; its execution is on one host.
    pub vcpus: Option<u32>,
    /// Whether a program executes there.
    pub executes: bool,
}

/// What one host sends another one for an aggregate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flow {
    pub from: String,
    pub to: String,
    pub bytes_per_s: f64,
}

impl Live {
    fn is_sound(&self) -> bool {
        let flow = |flow: &Flow| {
            let named = check_name(&flow.from).is_ok() && check_name(&flow.to).is_ok();
            named && flow.bytes_per_s.is_finite() && flow.bytes_per_s >= 0.0
        };
        self.hosts.iter().all(|here| check_name(&here.host).is_ok())
            && self.flows.iter().all(flow)
            && self.moved.is_none_or(|part| (0.0..=1.0).contains(&part))
    }
}

/// Somebody who looks. Agents tell what their aggregates do until it has not looked for ten
/// seconds.
#[derive(Debug, Default)]
pub struct Onlooker {
    lease: Option<(LeaseId, Instant)>,
}

impl Onlooker {
    /// Looks. Asks the store now and then only.
    pub fn look(&mut self, cluster: &Cluster) -> Result<(), ClusterError> {
        if let Some((lease, renewed)) = self.lease {
            if renewed.elapsed() < LOOK_LEASE / 4 {
                return Ok(());
            }
            match cluster.renew(lease) {
                Err(ClusterError::Store(StoreError::LeaseGone(_))) => self.lease = None,
                outcome => {
                    self.lease = Some((lease, Instant::now()));
                    return outcome;
                }
            }
        }
        let lease = cluster.store.grant(LOOK_LEASE)?;
        let change = Change::put_leased(format!("{LOOK}{}", lease.0), "", lease);
        cluster.store.commit(&[], &[change])?;
        self.lease = Some((lease, Instant::now()));
        Ok(())
    }
}

impl Cluster {
    /// Whether somebody looks.
    pub fn is_watched(&self) -> Result<bool, ClusterError> {
        Ok(!self.store.read(LOOK)?.entries.is_empty())
    }

    /// Says what an aggregate does, under the lease of its agent.
    pub fn tell_live(&self, name: &str, live: &Live, lease: LeaseId) -> Result<(), ClusterError> {
        let change = Change::put_leased(format!("{LIVE}{name}"), json(live), lease);
        self.store.commit(&[], &[change])?;
        Ok(())
    }

    /// By the names of the aggregates. What cannot be read is left out.
    pub fn live(&self) -> Result<BTreeMap<String, Live>, ClusterError> {
        let read = |entry: &Entry| {
            let name = entry.key.strip_prefix(LIVE)?.to_owned();
            let live: Live = serde_json::from_slice(&entry.value).ok()?;
            live.is_sound().then_some((name, live))
        };
        let entries = self.store.read(LIVE)?.entries;
        Ok(entries.iter().filter_map(read).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostRecord;
    use std::sync::Arc;
    use weft_store::Embedded;

    #[test]
    fn agents_tell_while_somebody_looks() {
        let store = Arc::new(Embedded::in_memory().unwrap());
        let first = HostRecord {
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
        let mut onlooker = Onlooker::default();
        assert!(!cluster.is_watched().unwrap());
        onlooker.look(&cluster).unwrap();
        onlooker.look(&cluster).unwrap();
        assert!(cluster.is_watched().unwrap());
        let (lease, _) = onlooker.lease.unwrap();
        cluster.end_lease(lease).unwrap();
        assert!(!cluster.is_watched().unwrap());
        // It looks still: with a lease of its own again.
        onlooker.lease = Some((lease, Instant::now() - LOOK_LEASE));
        onlooker.look(&cluster).unwrap();
        assert!(cluster.is_watched().unwrap());

        let agent = cluster.lease().unwrap();
        let flow = |bytes_per_s| Flow {
            from: "alpha".into(),
            to: "beta".into(),
            bytes_per_s,
        };
        let live = |flows| Live {
            id: 7,
            flows,
            ..Live::default()
        };
        let told = live(vec![flow(1.5)]);
        cluster.tell_live("web", &told, agent).unwrap();
        cluster
            .tell_live("odd", &live(vec![flow(-1.0)]), agent)
            .unwrap();
        assert_eq!(cluster.live().unwrap(), [("web".to_owned(), told)].into());
        cluster.end_lease(agent).unwrap();
        assert!(cluster.live().unwrap().is_empty());
    }
}
