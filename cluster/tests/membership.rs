//! Membership over an embedded store. The store's own tests show that an etcd does the same.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use weft_cluster::{ALIVE_LEASE, Cluster, ClusterError, HostRecord, HostReport, Token};
use weft_store::{Change, Committed, Embedded, Store};

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn store() -> (Folder, Arc<dyn Store>) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("weft-cluster-{}-{number}", std::process::id());
    let folder = Folder(std::env::temp_dir().join(name));
    std::fs::create_dir_all(&folder.0).unwrap();
    let store = Embedded::open(&folder.0.join("state")).unwrap();
    (folder, Arc::new(store))
}

fn cluster() -> (Folder, Cluster) {
    let (folder, store) = store();
    (
        folder,
        Cluster::init(store, "fragments", &host("first")).unwrap(),
    )
}

fn host(name: &str) -> HostRecord {
    HostRecord {
        name: name.into(),
        key: format!("weft-key-{name}"),
        address: format!("{name}.example:7117"),
        cores: 4,
        memory_bytes: 8 << 30,
        features: vec!["avx2".into()],
        version: "1".into(),
        number: 0,
    }
}

const LIFE: Duration = Duration::from_secs(60);

#[test]
fn a_store_has_one_cluster() {
    let (_folder, store) = store();
    assert!(matches!(
        Cluster::open(store.clone()),
        Err(ClusterError::None)
    ));
    let made = Cluster::init(store.clone(), "fragments", &host("first")).unwrap();
    let again = Cluster::init(store.clone(), "other", &host("first"));
    assert!(matches!(again, Err(ClusterError::Exists(name)) if name == "fragments"));
    assert_eq!(
        Cluster::open(store.clone()).unwrap().identity(),
        made.identity()
    );
    let wrong = Cluster::init(store, "Not a name", &host("first"));
    assert!(matches!(wrong, Err(ClusterError::Name { .. })));
}

#[test]
fn a_token_lets_one_host_join_once() {
    let (_folder, cluster) = cluster();
    let token = cluster.invite(LIFE).unwrap();
    cluster.join(&token, &host("alpha")).unwrap();
    assert!(matches!(
        cluster.join(&token, &host("beta")),
        Err(ClusterError::NoSuchToken)
    ));
    let names: Vec<String> = cluster
        .members()
        .unwrap()
        .into_iter()
        .map(|member| member.record.name)
        .collect();
    assert_eq!(names, ["alpha", "first"]);
}

#[test]
fn of_many_that_use_a_token_at_once_one_joins() {
    let (_folder, cluster) = cluster();
    for round in 0..10 {
        let token = &cluster.invite(LIFE).unwrap();
        let cluster = &cluster;
        let joined = std::thread::scope(|scope| {
            let hosts = (0..4).map(|n| format!("h{round}-{n}"));
            let hosts: Vec<_> = hosts
                .map(|name| scope.spawn(move || cluster.join(token, &host(&name)).is_ok()))
                .collect();
            hosts
                .into_iter()
                .map(|it| u32::from(it.join().unwrap()))
                .sum::<u32>()
        });
        assert_eq!(joined, 1);
    }
    let members = cluster.members().unwrap();
    let numbers: std::collections::BTreeSet<u32> =
        members.iter().map(|member| member.record.number).collect();
    assert_eq!(numbers, (0..11).collect());
}

#[test]
fn what_cannot_join_is_told_why_and_spends_no_token() {
    let (_folder, cluster) = cluster();
    cluster
        .join(&cluster.invite(LIFE).unwrap(), &host("alpha"))
        .unwrap();
    let token = cluster.invite(LIFE).unwrap();
    let taken = cluster.join(
        &token,
        &HostRecord {
            key: "other".into(),
            ..host("alpha")
        },
    );
    assert!(matches!(taken, Err(ClusterError::NameTaken(name)) if name == "alpha"));
    let same_key = HostRecord {
        key: host("alpha").key,
        ..host("beta")
    };
    let taken = cluster.join(&token, &same_key);
    assert!(matches!(taken, Err(ClusterError::KeyTaken(name)) if name == "alpha"));
    let version = cluster.join(
        &token,
        &HostRecord {
            version: "2".into(),
            ..host("beta")
        },
    );
    assert!(matches!(version, Err(ClusterError::Version { .. })));
    let stranger: Token = format!("weft-join-{}", "0".repeat(64)).parse().unwrap();
    assert!(matches!(
        cluster.join(&stranger, &host("beta")),
        Err(ClusterError::NoSuchToken)
    ));
    cluster.join(&token, &host("beta")).unwrap();
}

#[test]
fn tokens_end_with_their_time() {
    let (_folder, cluster) = cluster();
    assert!(matches!(
        cluster.invite(Duration::from_secs(3601)),
        Err(ClusterError::TokenLife(_))
    ));
    let token = cluster.invite(Duration::from_secs(2)).unwrap();
    std::thread::sleep(Duration::from_millis(2200));
    assert!(matches!(
        cluster.join(&token, &host("alpha")),
        Err(ClusterError::NoSuchToken)
    ));
}

#[test]
fn hosts_live_while_they_say_so_and_leave() {
    let (_folder, cluster) = cluster();
    cluster
        .join(&cluster.invite(LIFE).unwrap(), &host("alpha"))
        .unwrap();
    assert_eq!(cluster.members().unwrap()[0].report, None);
    let lease = cluster.lease().unwrap();
    let report = HostReport {
        lends_bytes: 1 << 30,
        load: 0.5,
        ..HostReport::default()
    };
    cluster
        .report("alpha", "weft-key-alpha", &report, lease)
        .unwrap();
    assert_eq!(cluster.members().unwrap()[0].report, Some(report.clone()));
    cluster.end_lease(lease).unwrap();
    assert_eq!(cluster.members().unwrap()[0].report, None);
    let lease = cluster.lease().unwrap();
    cluster
        .report("alpha", "weft-key-alpha", &report, lease)
        .unwrap();
    cluster.leave("alpha", None).unwrap();
    assert_eq!(cluster.members().unwrap().len(), 1);
    assert!(matches!(
        cluster.leave("alpha", None),
        Err(ClusterError::NoSuchHost(_))
    ));
    let gone = cluster.report("alpha", "weft-key-alpha", &report, lease);
    assert!(matches!(gone, Err(ClusterError::NoSuchHost(_))));
    // Its name and key are free again.
    cluster
        .join(&cluster.invite(LIFE).unwrap(), &host("alpha"))
        .unwrap();
}

#[test]
fn one_host_decides_and_one_that_was_cut_off_changes_nothing() {
    let (_folder, cluster) = cluster();
    let (first, second) = (cluster.lease().unwrap(), cluster.lease().unwrap());
    let term = cluster.campaign("alpha", first).unwrap().unwrap();
    assert!(cluster.campaign("beta", second).unwrap().is_none());
    assert_eq!(cluster.leader().unwrap().unwrap().name, "alpha");
    let change = |value: &str| [Change::put("weft/decision", value)];
    assert!(matches!(
        term.commit(&[], &change("1")).unwrap(),
        Committed::Done(_)
    ));
    // Alpha is cut off: beta renews its lease, alpha does not.
    let begun = Instant::now();
    let next = loop {
        cluster.renew(second).unwrap();
        if let Some(next) = cluster.campaign("beta", second).unwrap() {
            break next;
        }
        assert!(begun.elapsed() < 3 * ALIVE_LEASE);
        std::thread::sleep(Duration::from_millis(200));
    };
    assert!(next.number() > term.number());
    assert!(matches!(
        term.commit(&[], &change("2")),
        Err(ClusterError::NotLeader(_))
    ));
    assert!(matches!(term.check(), Err(ClusterError::NotLeader(_))));
    assert!(matches!(
        next.commit(&[], &change("3")).unwrap(),
        Committed::Done(_)
    ));
    next.resign().unwrap();
    assert_eq!(cluster.leader().unwrap(), None);
}

#[test]
fn damaged_records_are_left_out_and_can_leave() {
    let (folder, store) = store();
    let cluster = Cluster::init(store.clone(), "fragments", &host("first")).unwrap();
    let record = |name: &str, number: u32| {
        let record = HostRecord {
            number,
            ..host(name)
        };
        Change::put(
            format!("weft/host/{name}"),
            serde_json::to_vec(&record).unwrap(),
        )
    };
    let other = serde_json::to_vec(&HostRecord {
        number: 7,
        ..host("other")
    })
    .unwrap();
    let changes = [
        Change::put("weft/host/garbage", "{"),
        Change::put("weft/alive/first", "{"),
        // The user id of the system's own, or of another member.
        record("root", 61_183),
        record("twin", 0),
        Change::put("weft/host/misnamed", other),
    ];
    store.commit(&[], &changes).unwrap();
    let members = cluster.members().unwrap();
    assert_eq!(members.len(), 1);
    assert_eq!(
        (&members[0].record.name[..], &members[0].report),
        ("first", &None)
    );
    let damaged = cluster.damaged().unwrap();
    let keys = ["garbage", "misnamed", "root", "twin"].map(|name| format!("weft/host/{name}"));
    assert_eq!(damaged, keys);
    for name in ["garbage", "misnamed", "root", "twin"] {
        cluster.leave(name, None).unwrap();
    }
    assert_eq!(cluster.damaged().unwrap(), [""; 0]);
    drop(folder);
}

#[test]
fn a_host_of_the_same_name_is_another_host() {
    let (_folder, cluster) = cluster();
    let lease = cluster.lease().unwrap();
    let report = HostReport::default();
    let other = cluster.report("first", "weft-key-other", &report, lease);
    assert!(matches!(other, Err(ClusterError::NoSuchHost(_))));
    let other = cluster.leave("first", Some("weft-key-other"));
    assert!(matches!(other, Err(ClusterError::NoSuchHost(_))));
    cluster.leave("first", Some("weft-key-first")).unwrap();
}

#[test]
fn numbers_are_not_reused_at_once_and_an_empty_cluster_can_be_made_again() {
    let (_folder, store) = store();
    let cluster = Cluster::init(store.clone(), "fragments", &host("first")).unwrap();
    let join = |name| {
        cluster
            .join(&cluster.invite(LIFE).unwrap(), &host(name))
            .unwrap()
            .number
    };
    assert_eq!((join("a"), join("b")), (1, 2));
    cluster.leave("a", None).unwrap();
    assert_eq!(join("c"), 3);
    for name in ["first", "b", "c"] {
        cluster.leave(name, None).unwrap();
    }
    let again = Cluster::init(store, "again", &host("first")).unwrap();
    assert_ne!(again.identity().id, cluster.identity().id);
    assert_eq!(again.members().unwrap().len(), 1);
}
