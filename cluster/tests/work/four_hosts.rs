//! A cluster of four hosts in memory, and a leader whose every step a test takes itself.

use std::sync::Arc;
use std::time::Duration;

use weft_cluster::{
    Cluster, ClusterError, HostRecord, HostReport, LogKind, Mark, Plan, Planner, Term, WorkKind,
    WorkRequest,
};
use weft_store::{Embedded, LeaseId};

pub const HOSTS: [(&str, u32); 4] = [("alpha", 4), ("beta", 8), ("gamma", 2), ("delta", 6)];
/// What a host lends so that it offers 1 GiB for each core, and what is counted for a vCPU.
pub fn lends_mib(cores: u32) -> u64 {
    (u64::from(cores) * (1024 + 58) * 25).div_ceil(16) + 2 * 144
}

pub fn cluster() -> Cluster {
    store_and_cluster().1
}

pub fn store_and_cluster() -> (Arc<Embedded>, Cluster) {
    let store = Arc::new(Embedded::in_memory().unwrap());
    let record = |name: &str, cores| HostRecord {
        name: name.into(),
        key: format!("weft-key-{name}"),
        address: format!("{name}:7117"),
        cores,
        memory_bytes: 64 << 30,
        features: Vec::new(),
        version: "1".into(),
        number: 0,
    };
    let (first, cores) = HOSTS[0];
    let cluster = Cluster::init(store.clone(), "fragments", &record(first, cores)).unwrap();
    for (name, cores) in &HOSTS[1..] {
        let token = cluster.invite(Duration::from_secs(60)).unwrap();
        cluster.join(&token, &record(name, *cores)).unwrap();
    }
    (store, cluster)
}

pub fn live(cluster: &Cluster, host: (&str, u32)) -> LeaseId {
    let lease = cluster.lease().unwrap();
    report(cluster, host, lease, 0, 0);
    lease
}

pub fn report(
    cluster: &Cluster,
    (name, cores): (&str, u32),
    lease: LeaseId,
    lent_mib: u64,
    wanted_back_mib: u64,
) {
    let report = HostReport {
        lends_bytes: lends_mib(cores) << 20,
        lent_bytes: lent_mib << 20,
        wanted_back_bytes: wanted_back_mib << 20,
        ..HostReport::default()
    };
    let key = format!("weft-key-{name}");
    cluster.report(name, &key, &report, lease).unwrap();
}

pub fn request(name: &str, home: &str, cores: u32, memory_mib: u64, hosts_max: u32) -> WorkRequest {
    WorkRequest {
        name: name.into(),
        kind: WorkKind::Machine,
        home: home.into(),
        anywhere: false,
        caller: None,
        user: "nobody".into(),
        cores,
        memory_mib,
        hosts_max,
        priority: 0,
        mark: Mark {
            boot: "b".into(),
            namespace: "n".into(),
            nonce: name.into(),
        },
    }
}

pub struct Leader {
    pub lease: LeaseId,
    pub term: Term,
    pub planner: Planner,
}

impl Leader {
    pub fn new(cluster: &Cluster, name: &str, policy: &str) -> Option<Leader> {
        let lease = cluster.lease().unwrap();
        let term = cluster.campaign(name, lease).unwrap()?;
        cluster.set_policy(policy).unwrap();
        Some(Leader {
            lease,
            term,
            planner: Planner::default(),
        })
    }

    pub fn plan(&mut self, cluster: &Cluster, now: u64) -> Vec<Plan> {
        let state = cluster.state().unwrap();
        self.planner.update(Duration::from_secs(now), &state)
    }

    pub fn commit(&self, plans: Vec<Plan>) -> Result<(), ClusterError> {
        for plan in plans {
            match plan {
                Plan::Place { asked, parts, why } => self.term.place(&asked, parts, why)?,
                Plan::Answer {
                    asked,
                    why,
                    refused,
                    is_first,
                } => self.term.answer(&asked, why, refused, is_first)?,
                Plan::Move { placed, order } => self.term.order(&placed, order)?,
                Plan::CancelMove { placed } => self.term.cancel_order(&placed)?,
                Plan::Failing { host, why } => self.term.failing(&host, &why)?,
                Plan::RefuseWish { placed, why } => self.term.refuse_wish(&placed, &why)?,
                Plan::Stuck { why, .. } => self.term.note(LogKind::Fail, why)?,
                Plan::Learned { record } => self.term.learned(&record)?,
                Plan::Note { kind, what } => self.term.note(kind, what)?,
            };
        }
        Ok(())
    }
}
