//! The same tests over all stores: a file, a file that is served, an etcd of one member without TLS on loopback,
//! and an etcd of three members with mutual TLS. Needs `etcd` and `openssl`; without them
//! the tests of an etcd are skipped, and say so.

mod etcd;

use etcd::Cluster;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use weft_store::{
    Change, Committed, Condition, Embedded, Etcd, EtcdOptions, LEASE_MIN, LeaseId, Revision, Store,
    StoreError, VALUE_MAX,
};
use weft_web::Gateway;

/// A folder of this test's own, gone at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-store-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        Folder(folder)
    }

    fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn embedded(test: fn(&dyn Store)) {
    let folder = Folder::new();
    test(&Embedded::open(&folder.path().join("state")).unwrap());
}

/// A file that is served to others, without TLS on the loopback.
fn served(test: fn(&dyn Store)) {
    let folder = Folder::new();
    let store = Arc::new(Embedded::open(&folder.path().join("state")).unwrap());
    let address = "127.0.0.1:0".parse().unwrap();
    let gateway = Gateway::bind(store, address, None).unwrap();
    let url = format!("etcd://{}", gateway.address().unwrap());
    serving(gateway, || {
        let options = EtcdOptions::parse(&url, None).unwrap();
        test(&Etcd::new(&options).unwrap());
    });
}

/// Has a gateway serve while `work` runs.
fn serving(gateway: Gateway, work: impl FnOnce()) {
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            gateway
                .run(async {
                    let _ = ended.await;
                })
                .unwrap();
        });
        work();
        drop(end);
        thread.join().unwrap();
    });
}

fn of_members(members: usize, test: fn(&dyn Store)) {
    if let Some(cluster) = Cluster::start(members) {
        test(&cluster.store());
    }
}

fn old_changes_may_be_forgotten(store: &dyn Store) {
    let first = put(store, "f/a", "1");
    put(store, "f/a", "2");
    let last = put(store, "f/b", "3");
    store.forget_changes(last).unwrap();
    // Again, and less: nothing happens.
    store.forget_changes(last).unwrap();
    store.forget_changes(first).unwrap();
    assert_eq!(keys(store, "f/"), ["f/a", "f/b"]);
    match store.watch("f/", first, Duration::ZERO) {
        Ok(updates) => assert_eq!(updates.len(), 2),
        Err(error) => assert!(matches!(error, StoreError::Compacted { after } if after == first)),
    }
    // What comes later is seen.
    let next = put(store, "f/c", "4");
    let updates = store.watch("f/", last, Duration::from_secs(5)).unwrap();
    assert_eq!((&updates[0].key[..], updates[0].revision), ("f/c", next));
}

/// Each test over each store.
macro_rules! contract {
    ($($name:ident),* $(,)?) => {
        mod in_a_file {
            $(#[test] fn $name() { super::embedded(super::$name) })*
        }
        mod in_a_file_that_is_served {
            $(#[test] fn $name() { super::served(super::$name) })*
        }
        mod in_an_etcd_of_one {
            $(#[test] fn $name() { super::of_members(1, super::$name) })*
        }
        mod in_an_etcd_of_three {
            $(#[test] fn $name() { super::of_members(3, super::$name) })*
        }
    };
}

contract!(
    what_is_put_is_read,
    conditions_hold_or_nothing_changes,
    leases_take_their_keys_along,
    watches_see_every_change,
    one_of_many_gets_the_key,
    many_keys_are_of_one_moment,
    bounds_are_said,
    old_changes_may_be_forgotten,
);

fn done(committed: Result<Committed, StoreError>) -> Revision {
    match committed.unwrap() {
        Committed::Done(revision) => revision,
        Committed::Refused => panic!("refused"),
    }
}

fn put(store: &dyn Store, key: &str, value: &str) -> Revision {
    done(store.commit(&[], &[Change::put(key, value)]))
}

fn keys(store: &dyn Store, prefix: &str) -> Vec<String> {
    store
        .read(prefix)
        .unwrap()
        .entries
        .into_iter()
        .map(|entry| entry.key)
        .collect()
}

fn what_is_put_is_read(store: &dyn Store) {
    assert_eq!(store.get("a/1").unwrap(), None);
    let first = put(store, "a/1", "one");
    let second = put(store, "a/2", "two");
    put(store, "b/1", "");
    assert!(second > first);
    let entry = store.get("a/1").unwrap().unwrap();
    assert_eq!(
        (&entry.value[..], entry.revision, entry.lease),
        (&b"one"[..], first, None)
    );
    let snapshot = store.read("a/").unwrap();
    assert!(snapshot.revision > second);
    assert_eq!(keys(store, "a/"), ["a/1", "a/2"]);
    assert_eq!(keys(store, ""), ["a/1", "a/2", "b/1"]);
    assert_eq!(store.get("b/1").unwrap().unwrap().value, b"");
    let bytes: Vec<u8> = (0..=255).collect();
    done(store.commit(
        &[],
        &[Change::put("a/1", bytes.clone()), Change::delete("a/2")],
    ));
    assert_eq!(store.get("a/1").unwrap().unwrap().value, bytes);
    assert_eq!(keys(store, "a/"), ["a/1"]);
}

fn conditions_hold_or_nothing_changes(store: &dyn Store) {
    let absent = |key: &str| Condition::Absent(key.into());
    let unchanged = |key: &str, revision| Condition::Unchanged(key.into(), revision);
    let first = done(store.commit(&[absent("k")], &[Change::put("k", "1")]));
    assert_eq!(
        store
            .commit(&[absent("k")], &[Change::put("k", "2")])
            .unwrap(),
        Committed::Refused
    );
    let both = [Change::put("k", "2"), Change::put("other", "x")];
    let second = done(store.commit(&[unchanged("k", first)], &both));
    assert_eq!(
        store.commit(&[unchanged("k", first)], &both).unwrap(),
        Committed::Refused
    );
    assert_eq!(store.get("other").unwrap().unwrap().revision, second);
    // One of two does not hold.
    let mixed = [unchanged("k", second), absent("other")];
    assert_eq!(
        store.commit(&mixed, &[Change::delete("k")]).unwrap(),
        Committed::Refused
    );
    assert_eq!(store.get("k").unwrap().unwrap().value, b"2");
    assert_eq!(
        store.commit(&[unchanged("none", 1)], &[]).unwrap(),
        Committed::Refused
    );
    done(store.commit(&[unchanged("k", second)], &[Change::delete("k")]));
    done(store.commit(&[absent("k")], &[]));
}

fn leases_take_their_keys_along(store: &dyn Store) {
    let lease = store.grant(LEASE_MIN).unwrap();
    let kept = store.grant(LEASE_MIN).unwrap();
    let leased = |key: &str, lease| Change::put_leased(key, "x", lease);
    done(store.commit(
        &[],
        &[
            leased("l/1", lease),
            leased("l/2", lease),
            leased("l/3", kept),
        ],
    ));
    assert_eq!(store.get("l/1").unwrap().unwrap().lease, Some(lease));
    // A key that is put again without its lease does not go with it.
    put(store, "l/2", "y");
    let begun = Instant::now();
    while store.get("l/1").unwrap().is_some() {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "the lease does not run out"
        );
        assert!(store.renew(kept).unwrap() >= LEASE_MIN);
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(begun.elapsed() >= LEASE_MIN - Duration::from_millis(500));
    assert_eq!(keys(store, "l/"), ["l/2", "l/3"]);
    assert!(matches!(store.renew(lease), Err(StoreError::LeaseGone(gone)) if gone == lease));
    let gone = store.commit(&[], &[leased("l/4", lease)]);
    assert!(matches!(gone, Err(StoreError::LeaseGone(_))), "{gone:?}");
    store.revoke(kept).unwrap();
    store.revoke(kept).unwrap();
    assert_eq!(keys(store, "l/"), ["l/2"]);
    let unknown = store.renew(LeaseId(12345));
    assert!(
        matches!(unknown, Err(StoreError::LeaseGone(_))),
        "{unknown:?}"
    );
}

fn watches_see_every_change(store: &dyn Store) {
    let begun = Instant::now();
    let first = put(store, "w/a", "1");
    put(store, "x/a", "unseen");
    let second = done(store.commit(&[], &[Change::put("w/b", "2"), Change::delete("w/a")]));
    let seen = |after| -> Vec<(String, Option<Vec<u8>>, Revision)> {
        let updates = store.watch("w/", after, Duration::from_secs(5)).unwrap();
        updates
            .into_iter()
            .map(|update| (update.key, update.value, update.revision))
            .collect()
    };
    // All of it may come at once, or in several answers.
    let mut all = seen(first - 1);
    while all.len() < 3 {
        all.extend(seen(all.last().unwrap().2));
    }
    assert_eq!(all[0], ("w/a".into(), Some(b"1".to_vec()), first));
    let together: BTreeSet<_> = all[1..].iter().cloned().collect();
    let b = ("w/b".to_string(), Some(b"2".to_vec()), second);
    assert_eq!(
        together,
        BTreeSet::from([b, ("w/a".to_string(), None, second)])
    );
    // Nothing more.
    let quiet = Instant::now();
    assert_eq!(
        store
            .watch("w/", second, Duration::from_millis(300))
            .unwrap(),
        []
    );
    assert!(quiet.elapsed() >= Duration::from_millis(300));
    // What comes while it waits, and what a lease takes along.
    let lease = store.grant(LEASE_MIN).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            done(store.commit(&[], &[Change::put_leased("w/c", "3", lease)]));
        });
        let updates = store.watch("w/", second, Duration::from_secs(10)).unwrap();
        assert_eq!(updates[0].value.as_deref(), Some(&b"3"[..]));
        let ended = store
            .watch("w/", updates[0].revision, Duration::from_secs(20))
            .unwrap();
        assert_eq!((&ended[0].key[..], ended[0].value.is_none()), ("w/c", true));
    });
    assert!(begun.elapsed() < Duration::from_secs(40));
}

fn one_of_many_gets_the_key(store: &dyn Store) {
    for round in 0..5 {
        let key = format!("leader/{round}");
        let won: usize = std::thread::scope(|scope| {
            let contenders: Vec<_> = (0..4)
                .map(|number| {
                    let key = key.clone();
                    scope.spawn(move || {
                        let condition = [Condition::Absent(key.clone())];
                        let change = [Change::put(key, format!("{number}"))];
                        store.commit(&condition, &change).unwrap() != Committed::Refused
                    })
                })
                .collect();
            contenders
                .into_iter()
                .map(|it| usize::from(it.join().unwrap()))
                .sum()
        });
        assert_eq!(won, 1);
    }
}

fn many_keys_are_of_one_moment(store: &dyn Store) {
    for hundred in 0..25 {
        let keys = (0..100).map(|number| format!("many/{hundred:02}{number:02}"));
        let changes: Vec<Change> = keys.map(|key| Change::put(key, "x")).collect();
        done(store.commit(&[], &changes));
    }
    let entries = store.read("many/").unwrap().entries;
    assert_eq!(entries.len(), 2500);
    assert!(entries.is_sorted_by(|one, other| one.key < other.key));
}

fn bounds_are_said(store: &dyn Store) {
    let large = store.commit(&[], &[Change::put("k", vec![0; VALUE_MAX + 1])]);
    assert!(matches!(large, Err(StoreError::TooLarge { .. })));
    put(store, "k", &"x".repeat(VALUE_MAX));
    assert_eq!(store.get("k").unwrap().unwrap().value.len(), VALUE_MAX);
    let many: Vec<Change> = (0..129).map(|n| Change::delete(format!("{n}"))).collect();
    assert!(matches!(
        store.commit(&[], &many),
        Err(StoreError::TooLarge { .. })
    ));
    assert!(matches!(
        store.commit(&[], &[Change::put("", "")]),
        Err(StoreError::TooLarge { .. })
    ));
    let twice = [Change::put("k", ""), Change::delete("k")];
    assert!(matches!(
        store.commit(&[], &twice),
        Err(StoreError::Options { .. })
    ));
    assert!(matches!(
        store.grant(Duration::from_secs(1)),
        Err(StoreError::Options { .. })
    ));
}

#[test]
fn a_file_keeps_all_and_has_one_user() {
    let folder = Folder::new();
    let file = folder.path().join("state");
    let lease;
    {
        let store = Embedded::open(&file).unwrap();
        put(&store, "k", "v");
        lease = store.grant(LEASE_MIN).unwrap();
        done(store.commit(&[], &[Change::put_leased("l", "v", lease)]));
        let error = Embedded::open(&file).err().unwrap().to_string();
        assert!(error.contains("another process has it open"), "{error}");
    }
    std::thread::sleep(LEASE_MIN);
    let store = Embedded::open(&file).unwrap();
    assert_eq!(keys(&store, ""), ["k", "l"], "leases start anew");
    store.renew(lease).unwrap();
    let mode = std::os::unix::fs::MetadataExt::mode(&file.metadata().unwrap());
    assert_eq!(mode & 0o777, 0o600);
    std::fs::write(folder.path().join("no store"), "text").unwrap();
    let error = Embedded::open(&folder.path().join("no store"))
        .err()
        .unwrap();
    assert!(matches!(error, StoreError::File { .. }));
}

#[test]
fn a_file_forgets_old_changes_and_says_so() {
    let folder = Folder::new();
    let store = Embedded::open(&folder.path().join("state")).unwrap();
    let first = put(&store, "k", "0");
    for _ in 0..110 {
        let changes: Vec<Change> = (0..100)
            .map(|n| Change::put(format!("m/{n}"), "x"))
            .collect();
        done(store.commit(&[], &changes));
    }
    let gone = store.watch("", first, Duration::ZERO);
    assert!(matches!(gone, Err(StoreError::Compacted { after }) if after == first));
    let now = store.read("").unwrap().revision;
    assert_eq!(store.watch("", now - 1, Duration::ZERO).unwrap().len(), 100);
}

#[test]
fn an_etcd_that_is_not_there_is_named_in_time() {
    let options = EtcdOptions::parse("etcd://127.0.0.1:1,127.0.0.1:2", None).unwrap();
    let store = Etcd::new(&options).unwrap();
    let begun = Instant::now();
    let error = store.read("").unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }));
    assert!(error.to_string().contains("http://127.0.0.1:2"), "{error}");
    // Nothing was sent: it is known that nothing has happened.
    let error = store.commit(&[], &[Change::put("k", "v")]).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    assert!(begun.elapsed() < 2 * weft_store::CALL_MAX);
}

/// Members are killed and come back while four threads count in one key: what was said to
/// have happened has happened, once.
#[test]
fn counting_survives_the_loss_of_members() {
    let Some(mut cluster) = Cluster::start(3) else {
        return;
    };
    let store = cluster.store();
    let store = &store;
    let stop = &std::sync::atomic::AtomicBool::new(false);
    let counted: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let counters: Vec<_> = (0..4)
            .map(|_| scope.spawn(move || count(store, stop)))
            .collect();
        for victim in [0, 1, 2, 0] {
            std::thread::sleep(Duration::from_millis(1500));
            cluster.kill(victim);
            std::thread::sleep(Duration::from_millis(2500));
            cluster.restart(victim);
        }
        std::thread::sleep(Duration::from_millis(1000));
        stop.store(true, Ordering::Relaxed);
        counters
            .into_iter()
            .map(|counter| counter.join().unwrap())
            .collect()
    });
    let begun = Instant::now();
    let value = loop {
        match store.get("count") {
            Ok(entry) => break String::from_utf8(entry.unwrap().value).unwrap(),
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(20), "{error}"),
        }
    };
    let value: u64 = value.parse().unwrap();
    let (done, unknown) = counted.iter().fold((0, 0), |(d, u), (n, m)| (d + n, u + m));
    println!("{done} done, {unknown} unknown, the key says {value}");
    assert!(done > 100, "{done}");
    assert!(
        (done..=done + unknown).contains(&value),
        "{done} {unknown} {value}"
    );
}

/// The host of a served file goes down and comes back while four threads count.
#[test]
fn a_served_file_loses_nothing_when_its_server_ends() {
    let folder = Folder::new();
    let file = folder.path().join("state");
    let mut address = "127.0.0.1:0".parse().unwrap();
    let stop = AtomicBool::new(false);
    let counted: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let mut counters = Vec::new();
        for _ in 0..4 {
            let gateway = serve_again(&file, address);
            address = gateway.address().unwrap();
            if counters.is_empty() {
                let url = format!("etcd://{address}");
                counters.extend((0..4).map(|_| {
                    let options = EtcdOptions::parse(&url, None).unwrap();
                    let store = Etcd::new(&options).unwrap();
                    let stop = &stop;
                    scope.spawn(move || count(&store, stop))
                }));
            }
            serving(gateway, || std::thread::sleep(Duration::from_secs(1)));
        }
        stop.store(true, Ordering::Relaxed);
        let counted = counters.into_iter().map(|counter| counter.join().unwrap());
        counted.collect()
    });
    let (done, unknown) = counted.iter().fold((0, 0), |(d, u), (n, m)| (d + n, u + m));
    let mut value = 0;
    serving(serve_again(&file, address), || {
        let options = EtcdOptions::parse(&format!("etcd://{address}"), None).unwrap();
        let entry = Etcd::new(&options).unwrap().get("count").unwrap().unwrap();
        value = String::from_utf8(entry.value).unwrap().parse().unwrap();
    });
    println!("{done} done, {unknown} unknown, the key says {value}");
    assert!(done > 100, "{done}");
    let expected = done..=done + unknown;
    assert!(expected.contains(&value), "{done} {unknown} {value}");
}

/// Once the server before has let go of the file and the port.
fn serve_again(file: &std::path::Path, address: std::net::SocketAddr) -> Gateway {
    let begun = Instant::now();
    loop {
        let outcome = Embedded::open(file)
            .map_err(|error| error.to_string())
            .and_then(|store| {
                let gateway = Gateway::bind(Arc::new(store), address, None);
                gateway.map_err(|error| format!("{error:?}"))
            });
        match outcome {
            Ok(gateway) => return gateway,
            Err(why) => assert!(begun.elapsed() < Duration::from_secs(20), "{why}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_served_file_takes_clients_with_a_certificate_only() {
    if etcd::lacks("openssl") {
        return;
    }
    let (folder, stranger) = (Folder::new(), Folder::new());
    for folder in [&folder, &stranger] {
        etcd::make_certificates(folder.path());
    }
    let store = Arc::new(Embedded::in_memory().unwrap());
    let own = etcd::files(folder.path(), "member");
    let gateway = Gateway::bind(store, "127.0.0.1:0".parse().unwrap(), Some(&own)).unwrap();
    let url = format!("etcd://{}", gateway.address().unwrap());
    serving(gateway, || {
        let with = |files| Etcd::new(&EtcdOptions::parse(&url, files).unwrap()).unwrap();
        let member = with(Some(etcd::files(folder.path(), "node")));
        done(member.commit(&[], &[Change::put("a", "1")]));
        assert_eq!(member.get("a").unwrap().unwrap().value, b"1");
        // Another authority, and none at all. One knows the server, and is not known.
        let mut unknown = etcd::files(stranger.path(), "node");
        unknown.authority = own.authority.clone();
        for other in [
            Some(etcd::files(stranger.path(), "node")),
            Some(unknown),
            None,
        ] {
            assert!(with(other).get("a").is_err());
        }
    });
}

/// Adds one again and again. How often it was done, and how often nobody knows.
fn count(store: &dyn Store, stop: &std::sync::atomic::AtomicBool) -> (u64, u64) {
    let (mut done, mut unknown) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        let Ok(entry) = store.get("count") else {
            continue;
        };
        let (condition, value) = match &entry {
            None => (Condition::Absent("count".into()), 0),
            Some(entry) => {
                let value = std::str::from_utf8(&entry.value)
                    .unwrap()
                    .parse::<u64>()
                    .unwrap();
                (Condition::Unchanged("count".into(), entry.revision), value)
            }
        };
        match store.commit(
            &[condition],
            &[Change::put("count", (value + 1).to_string())],
        ) {
            Ok(Committed::Done(_)) => done += 1,
            Ok(Committed::Refused) => {}
            Err(StoreError::Unknown { .. }) => unknown += 1,
            Err(StoreError::Unreachable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    (done, unknown)
}
