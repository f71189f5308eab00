//! What runs and what waits, and what a leader decides about it.

mod four_hosts;
mod histories;

use std::sync::Arc;
use std::time::Duration;
use weft_cluster::{
    Cluster, ClusterError, Cordon, HostRecord, HostState, LogKind, Mark, MoveWish, Placed, Plan,
    Quota, WorkKind, WorkPart, WorkRequest,
};
use weft_store::{Embedded, LeaseId};

use four_hosts::*;

#[test]
fn a_request_is_placed_and_its_name_is_taken_until_it_ends() {
    let cluster = cluster();
    for host in HOSTS {
        live(&cluster, host);
    }
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    assert!(Leader::new(&cluster, "beta", "bff").is_none());
    let lease = cluster.lease().unwrap();
    let web = request("web", "alpha", 6, 6 * 1024, 16);
    let id = cluster.ask(&web, lease).unwrap();
    let again = cluster.ask(&web, lease);
    assert!(matches!(again, Err(ClusterError::WorkNameTaken(name)) if name == "web"));
    let plans = leader.plan(&cluster, 1);
    leader.commit(plans).unwrap();
    let work = cluster.work().unwrap();
    let placed = &work.placed["web"];
    let parts: Vec<(&str, u32, u64)> = placed
        .parts
        .iter()
        .map(|part| (&part.host[..], part.cores, part.memory_mib))
        .collect();
    assert_eq!(parts, [("alpha", 4, 4096), ("gamma", 2, 2048)]);
    assert_eq!((placed.id, work.asked.len()), (id, 0));
    assert!(placed.why.contains("no host has room"), "{}", placed.why);
    assert!(matches!(
        cluster.ask(&web, lease),
        Err(ClusterError::WorkNameTaken(_))
    ));
    // Its agent is gone: it still runs. The number of another one ends nothing.
    cluster.end_lease(lease).unwrap();
    cluster.work_ended("web", id + 1).unwrap();
    let work = cluster.work().unwrap();
    assert!(work.placed.contains_key("web") && !work.agents.contains("web"));
    cluster.work_ended("web", id).unwrap();
    cluster.work_ended("web", id).unwrap();
    assert!(cluster.work().unwrap().placed.is_empty());
    assert!(matches!(
        cluster.forget_work("web"),
        Err(ClusterError::NoSuchWork(_))
    ));
}

/// The command is on alpha, the home wherever there is room.
#[test]
fn a_launcher_elsewhere_takes_over_or_the_room_is_free() {
    let cluster = cluster();
    for host in &HOSTS[..2] {
        live(&cluster, *host);
    }
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let (caller, launcher) = (cluster.lease().unwrap(), cluster.lease().unwrap());
    let mut place = |name: &str, home: &str, anywhere| {
        let wanted = WorkRequest {
            anywhere,
            caller: Some("alpha".into()),
            ..request(name, home, 4, 1024, 1)
        };
        let id = cluster.ask(&wanted, caller).unwrap();
        let plans = leader.plan(&cluster, 1);
        leader.commit(plans).unwrap();
        let placed = cluster.placed(name, id).unwrap();
        (id, placed.map(|placed| placed.request))
    };
    let (_, first) = place("first", "alpha", true);
    let first = first.unwrap();
    assert_eq!((&first.home[..], first.watched_by()), ("alpha", "alpha"));
    let (id, second) = place("second", "alpha", true);
    let second = second.unwrap();
    assert_eq!((&second.home[..], second.watched_by()), ("beta", "alpha"));
    let (third_id, third) = place("third", "beta", false);
    assert_eq!(third.unwrap().home, "beta");
    assert_eq!(place("fourth", "alpha", true).1, None, "nothing has room");

    let mark = Mark {
        nonce: "of beta".into(),
        ..second.mark.clone()
    };
    let take_over = |name, id, host| cluster.take_over((name, id), host, &mark, launcher);
    for (name, id, host) in [
        ("second", id, "alpha"),
        ("second", id + 1, "beta"),
        ("no", 1, "beta"),
    ] {
        let refused = take_over(name, id, host);
        assert!(
            matches!(refused, Err(ClusterError::NotElsewhere(_))),
            "{refused:?}"
        );
    }
    let placed = take_over("second", id, "beta").unwrap();
    assert_eq!(placed.request.watched_by(), "beta");
    assert_eq!(placed.request.mark, mark);
    // The same launcher again: an answer was lost.
    assert_eq!(take_over("second", id, "beta").unwrap(), placed);
    let other = cluster.take_over(("second", id), "beta", &second.mark, caller);
    assert!(
        matches!(other, Err(ClusterError::NotElsewhere(_))),
        "{other:?}"
    );

    // What was taken over runs on with its own agent; the rest is over.
    cluster.end_lease(caller).unwrap();
    cluster.caller_ended("second", id).unwrap();
    cluster.caller_ended("third", third_id).unwrap();
    let work = cluster.work().unwrap();
    assert!(work.placed.contains_key("second") && work.agents.contains("second"));
    assert!(!work.placed.contains_key("third") && work.asked.is_empty());
    assert!(take_over("third", third_id, "beta").is_err());
}

#[test]
fn what_waits_is_told_why_and_what_cannot_be_is_refused() {
    let cluster = cluster();
    for host in &HOSTS[..2] {
        live(&cluster, *host);
    }
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let lease = cluster.lease().unwrap();
    let ask = |name, home, cores, hosts_max| {
        let wanted = request(name, home, cores, 1024, hosts_max);
        cluster.ask(&wanted, lease).unwrap()
    };
    let first = ask("first", "alpha", 3, 16);
    let whole = ask("whole", "alpha", 3, 1);
    let behind = ask("behind", "alpha", 1, 16);
    ask("elsewhere", "beta", 1, 16);
    let large = ask("large", "alpha", 21, 16);
    let dead = ask("dead", "gamma", 1, 16);
    let plans = leader.plan(&cluster, 1);
    leader.commit(plans).unwrap();
    let work = cluster.work().unwrap();
    assert_eq!(
        work.placed.keys().collect::<Vec<_>>(),
        ["elsewhere", "first"]
    );
    let answer = |name, id| {
        let answer = work.answer(name, id).expect("an answer");
        (answer.refused, answer.why.clone())
    };
    let says = |name, id, refused, part: &str| {
        let (was_refused, why) = answer(name, id);
        assert_eq!(was_refused, refused, "{why}");
        assert!(why.contains(part), "{why}");
    };
    says(
        "whole",
        whole,
        false,
        "it starts on alpha, which has only 1 core",
    );
    says("behind", behind, false, "1 asked before it");
    says("large", large, true, "ask for less");
    says("dead", dead, false, "gamma, where it starts, lends nothing");
    assert_eq!(work.answer("first", first), None);
    // The agents withdraw what was refused; the first one ends.
    cluster.work_ended("first", first).unwrap();
    let plans = leader.plan(&cluster, 2);
    leader.commit(plans).unwrap();
    let placed = cluster.work().unwrap().placed;
    assert_eq!(
        placed.keys().collect::<Vec<_>>(),
        ["behind", "elsewhere", "whole"]
    );
}

#[test]
fn a_damaged_record_of_work_stops_nothing() {
    use weft_store::{Change, Store};
    let store = Arc::new(Embedded::in_memory().unwrap());
    let host = HostRecord {
        name: "alpha".into(),
        key: "weft-key-alpha".into(),
        address: "a:1".into(),
        cores: 4,
        memory_bytes: 1 << 30,
        features: Vec::new(),
        version: "1".into(),
        number: 0,
    };
    let cluster = Cluster::init(store.clone(), "fragments", &host).unwrap();
    let mut huge = request("huge", "alpha", u32::MAX, u64::MAX, 1);
    let put = |key: &str, value: Vec<u8>| {
        store.commit(&[], &[Change::put(key, value)]).unwrap();
    };
    put("weft/work/asked/huge", serde_json::to_vec(&huge).unwrap());
    huge.cores = 1;
    huge.memory_mib = 1;
    put("weft/work/asked/other", serde_json::to_vec(&huge).unwrap());
    put("weft/work/placed/x", b"{".to_vec());
    put("weft/work/what", Vec::new());
    let work = cluster.work().unwrap();
    assert_eq!(work.damaged.len(), 4, "{:?}", work.damaged);
    assert!(work.asked.is_empty() && work.placed.is_empty());
    cluster.forget_work("x").unwrap();
    assert_eq!(cluster.work().unwrap().damaged.len(), 3);
}

#[test]
fn a_machine_is_pulled_together_and_drained_by_orders() {
    let cluster = cluster();
    for host in HOSTS {
        live(&cluster, host);
    }
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let turn = |leader: &mut Leader, now| {
        let plans = leader.plan(&cluster, now);
        leader.commit(plans).unwrap();
        cluster.work().unwrap().placed
    };
    let hosts = |parts: &[WorkPart]| -> Vec<String> {
        parts.iter().map(|part| part.host.clone()).collect()
    };
    let lease = cluster.lease().unwrap();
    let ask = |name, home, cores| {
        let wanted = request(name, home, cores, u64::from(cores) * 1024, 16);
        cluster.ask(&wanted, lease).unwrap()
    };
    let first = ask("first", "alpha", 2);
    turn(&mut leader, 1);
    ask("web", "alpha", 4);
    assert_eq!(
        hosts(&turn(&mut leader, 2)["web"].parts),
        ["alpha", "gamma"]
    );
    // A drained host is left; the agent says how it went.
    let drain = |host, draining| {
        let cordoned = draining;
        cluster.cordon(host, Cordon { cordoned, draining }).unwrap();
    };
    drain("gamma", true);
    let web = turn(&mut leader, 3)["web"].clone();
    let order = web.order.clone().expect("an order");
    assert_eq!(hosts(&order.parts), ["alpha", "delta"]);
    assert!(order.why.contains("gamma is drained"), "{}", order.why);
    assert_eq!(turn(&mut leader, 4)["web"], web, "one order at a time");
    cluster.call_off("web").unwrap();
    let called_off = turn(&mut leader, 4)["web"].order.clone();
    assert!(called_off.expect("the agent's answer").called_off);
    cluster
        .order_ended(&web, Err("a cable was cut".into()))
        .unwrap();
    let web = turn(&mut leader, 5)["web"].clone();
    assert_eq!(web.failure.as_deref(), Some("a cable was cut"));
    let none = cluster.call_off("web");
    assert!(matches!(none, Err(ClusterError::NoMove(name)) if name == "web"));
    assert_eq!(web.order, None, "it is tried again later");
    let web = turn(&mut leader, 20)["web"].clone();
    assert_eq!((web.orders, web.order.is_some()), (2, true));
    // A new leader adopts the order.
    cluster.end_lease(leader.lease).unwrap();
    let mut leader = Leader::new(&cluster, "beta", "fragbff-fewest-hosts").unwrap();
    assert_eq!(turn(&mut leader, 1)["web"].order, web.order);
    cluster.order_ended(&web, Ok(None)).unwrap();
    let web = turn(&mut leader, 2)["web"].clone();
    assert_eq!((hosts(&web.parts), web.order), (hosts(&order.parts), None));
    drain("gamma", false);
    // Room at home: it is pulled together, unless hands are off.
    cluster.work_ended("first", first).unwrap();
    cluster.set_hands_off(true).unwrap();
    turn(&mut leader, 200);
    assert_eq!(turn(&mut leader, 300)["web"].order, None, "hands are off");
    cluster.set_hands_off(false).unwrap();
    let web = turn(&mut leader, 301)["web"].clone();
    let order = web.order.clone().expect("an order");
    assert_eq!(hosts(&order.parts), ["alpha"]);
    // Without an agent nothing carries it out.
    cluster.end_lease(lease).unwrap();
    turn(&mut leader, 302);
    let web = turn(&mut leader, 303)["web"].clone();
    assert_eq!((&web.order, hosts(&web.parts).len()), (&None, 2));
    assert_eq!(web.failure.as_deref(), Some("its agent is gone"));
    // It was only silent, and had carried the order out: that counts.
    let mut late = web;
    late.order = Some(order);
    cluster.order_ended(&late, Ok(None)).unwrap();
    let web = turn(&mut leader, 304)["web"].clone();
    assert_eq!(
        (hosts(&web.parts), web.failure),
        (vec!["alpha".to_owned()], None)
    );
    let free = |host: u32| {
        leader
            .planner
            .inventory()
            .free(weft_place::HostId(host))
            .cores
    };
    assert_eq!((free(0), free(3)), (0, 6));
}

#[test]
fn the_first_of_the_queue_is_decided_first_also_by_a_new_leader() {
    let cluster = cluster();
    live(&cluster, HOSTS[0]);
    let lease = cluster.lease().unwrap();
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let ask = |name: &str, cores, priority| {
        let mut wanted = request(name, "alpha", cores, 1024, 1);
        wanted.priority = priority;
        cluster.ask(&wanted, lease).unwrap()
    };
    let first = ask("first", 4, 0);
    let plans = leader.plan(&cluster, 1);
    leader.commit(plans).unwrap();
    ask("small", 2, 0);
    ask("large", 4, 9);
    let plans = leader.plan(&cluster, 2);
    leader.commit(plans).unwrap();
    cluster.work_ended("first", first).unwrap();
    // Any reader of the store sees what the leader will decide.
    let overview = cluster.overview().unwrap();
    let large = overview.waits.iter().find(|wait| wait.name == "large");
    assert!(large.unwrap().why.contains("large starts on alpha"));
    cluster.end_lease(leader.lease).unwrap();
    let mut next = Leader::new(&cluster, "beta", "fragbff-fewest-hosts").unwrap();
    let plans = next.plan(&cluster, 3);
    next.commit(plans).unwrap();
    let work = cluster.work().unwrap();
    assert_eq!(work.placed.keys().collect::<Vec<_>>(), ["large"]);
}

#[test]
fn the_log_is_a_ring_that_a_new_leader_continues() {
    use weft_cluster::LOG_MAX;
    use weft_store::{Change, Store};
    let (store, cluster) = store_and_cluster();
    let leader = Leader::new(&cluster, "alpha", "bff").unwrap();
    assert_eq!(cluster.log().unwrap(), []);
    let numbers = |log: Vec<weft_cluster::LogRecord>| -> Vec<u64> {
        log.iter().map(|record| record.number).collect()
    };
    let note = |leader: &Leader, n: u64| {
        assert!(leader.term.note(LogKind::Host, format!("{n}")).unwrap());
    };
    (1..=LOG_MAX + 500).for_each(|n| note(&leader, n));
    let kept: Vec<u64> = (501..=LOG_MAX + 500).collect();
    assert_eq!(numbers(cluster.log().unwrap()), kept);
    assert_eq!(numbers(cluster.log_after(0).unwrap()), kept);
    assert_eq!(numbers(cluster.log_after(400).unwrap()), kept);
    assert_eq!(numbers(cluster.log_after(1490).unwrap()), kept[990..]);
    assert_eq!(numbers(cluster.log_after(1500).unwrap()), [0; 0]);
    // A record that cannot be read, and one that says that it is the last of all.
    let put = |key: &str, value: &[u8]| {
        store.commit(&[], &[Change::put(key, value)]).unwrap();
    };
    put("weft/log/501", b"{");
    let forged = br#"{"number":18446744073709551615,"at":0,"leader":"x","kind":"end","what":""}"#;
    put("weft/log/615", forged);
    cluster.end_lease(leader.lease).unwrap();
    let next = Leader::new(&cluster, "beta", "bff").unwrap();
    note(&next, 1501);
    note(&next, 1502);
    assert_eq!(numbers(cluster.log_after(1500).unwrap()), [1501, 1502]);
    put("weft/log/503", b"{");
    note(&next, 1503);
    note(&next, 1504);
    put("weft/log/503", b"{");
    // What is behind a damaged record is found.
    assert_eq!(numbers(cluster.log_after(1502).unwrap()), [1504]);
}

#[test]
fn what_leaves_a_host_and_what_stays_is_known_before() {
    use weft_cluster::Leaving;
    let cluster = cluster();
    for host in &HOSTS[..2] {
        live(&cluster, *host);
    }
    let lease = cluster.lease().unwrap();
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    // Over both hosts: its part on beta can leave, its home cannot.
    cluster
        .ask(&request("wide", "alpha", 6, 6 * 1024, 16), lease)
        .unwrap();
    let mut program = request("program", "beta", 1, 512, 16);
    program.kind = WorkKind::Program;
    cluster.ask(&program, lease).unwrap();
    let plans = leader.plan(&cluster, 1);
    leader.commit(plans).unwrap();
    let work = cluster.work().unwrap();
    assert_eq!(work.placed["wide"].parts.len(), 2);
    let of_alpha = Leaving::of(&work, None, "alpha");
    assert_eq!(
        (&of_alpha.moves[..], &of_alpha.stays[..]),
        (&[][..], &["wide".to_owned()][..])
    );
    assert_eq!(of_alpha.takes, Duration::ZERO);
    let of_beta = Leaving::of(&work, None, "beta");
    assert_eq!(
        (&of_beta.moves[..], &of_beta.stays[..]),
        (&["wide".to_owned()][..], &["program".to_owned()][..])
    );
    // 830 MiB a second.
    let mib = work.placed["wide"].parts[1].memory_mib as f64;
    let expected = 0.1 + mib / 830.0;
    assert!(
        (of_beta.takes.as_secs_f64() - expected).abs() < 0.01,
        "{of_beta:?}"
    );
    assert_eq!(Leaving::of(&work, None, "gamma"), Leaving::default());
}

/// Three hosts that live, and `wide` on two of them.
fn spread(leader: &mut Leader, cluster: &Cluster) -> (Vec<LeaseId>, Placed) {
    let alive = HOSTS[..3].iter().map(|host| live(cluster, *host)).collect();
    let lease = cluster.lease().unwrap();
    let wanted = request("wide", "alpha", 5, 5 * 1024, 16);
    cluster.ask(&wanted, lease).unwrap();
    let plans = leader.plan(cluster, 1);
    leader.commit(plans).unwrap();
    (alive, cluster.work().unwrap().placed["wide"].clone())
}

fn moves(plans: &[Plan]) -> Vec<&str> {
    let orders = plans.iter().filter_map(|plan| match plan {
        Plan::Move { order, .. } => Some(&order.why[..]),
        _ => None,
    });
    orders.collect()
}

fn notes(plans: &[Plan]) -> Vec<&str> {
    let notes = plans.iter().filter_map(|plan| match plan {
        Plan::Note { what, .. } => Some(&what[..]),
        _ => None,
    });
    notes.collect()
}

fn answers(plans: &[Plan]) -> Vec<&str> {
    let answers = plans.iter().filter_map(|plan| match plan {
        Plan::Answer { why, .. } => Some(&why[..]),
        _ => None,
    });
    answers.collect()
}

/// A program's slice has given its memory back: the room is free, and the record as small.
#[test]
fn a_program_that_has_left_a_host_frees_its_room() {
    let cluster = cluster();
    for host in &HOSTS[..2] {
        live(&cluster, *host);
    }
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let lease = cluster.lease().unwrap();
    let program = |name: &str| WorkRequest {
        kind: WorkKind::Program,
        ..request(name, "alpha", 1, 6 * 1024, 16)
    };
    let id = cluster.ask(&program("sort"), lease).unwrap();
    let plans = leader.plan(&cluster, 1);
    leader.commit(plans).unwrap();
    let placed = cluster.work().unwrap().placed["sort"].clone();
    let [home, other] = &placed.parts[..] else {
        panic!("{placed:?}")
    };
    let left = |hosts: &[&str]| {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        cluster.parts_left("sort", id, &hosts).unwrap()
    };
    // The home stays, and a host without a part changes nothing.
    assert!(left(&["alpha", "gamma"]));
    assert_eq!(cluster.work().unwrap().placed["sort"], placed);
    assert!(left(&[&other.host]));
    let placed = cluster.work().unwrap().placed["sort"].clone();
    assert_eq!(placed.parts, std::slice::from_ref(home));
    let plans = leader.plan(&cluster, 2);
    assert_eq!(notes(&plans), ["sort is on alpha now."]);
    leader.commit(plans).unwrap();
    assert_eq!(leader.plan(&cluster, 3), []);
    // Of another number it says nothing.
    cluster.work_ended("sort", id).unwrap();
    let again = cluster.ask(&program("sort"), lease).unwrap();
    assert_ne!(again, id);
    let plans = leader.plan(&cluster, 4);
    leader.commit(plans).unwrap();
    assert!(left(&[&other.host]));
    assert_eq!(cluster.work().unwrap().placed["sort"].parts.len(), 2);
}

#[test]
fn a_part_moves_where_an_operator_wants_it() {
    let cluster = cluster();
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let (_alive, placed) = spread(&mut leader, &cluster);
    let here = placed.parts[1].host.clone();
    let free = |name: &&str| placed.parts.iter().all(|part| part.host != *name);
    let mut hosts = HOSTS[..3].iter().map(|(name, _)| *name);
    let there = hosts.rfind(free).unwrap();
    let wish = |from: Option<&str>, to: &str| {
        let (from, to) = (from.map(str::to_owned), to.to_owned());
        cluster.wish("wide", &MoveWish { from, to })
    };
    let placed = || cluster.work().unwrap().placed["wide"].clone();
    assert!(matches!(
        wish(None, "nowhere"),
        Err(ClusterError::NoSuchHost(_))
    ));
    // The home stays.
    wish(Some("alpha"), there).unwrap();
    let plans = leader.plan(&cluster, 2);
    leader.commit(plans).unwrap();
    let refused = placed();
    assert_eq!(refused.wish, None);
    assert!(refused.failure.unwrap().contains("no such part"));
    wish(Some(&here), there).unwrap();
    let plans = leader.plan(&cluster, 3);
    assert!(
        moves(&plans)[0].ends_with("an operator wants it."),
        "{plans:?}"
    );
    // The order was not committed: it is given again.
    let plans = leader.plan(&cluster, 4);
    assert_eq!(moves(&plans).len(), 1);
    leader.commit(plans).unwrap();
    let ordered = placed();
    assert_eq!((&ordered.wish, &ordered.failure), (&None, &None));
    cluster.order_ended(&ordered, Ok(None)).unwrap();
    assert_eq!(placed().parts[1].host, there);
    // A host that leaves meanwhile is no destination.
    wish(None, &here).unwrap();
    cluster.leave(&here, None).unwrap();
    let plans = leader.plan(&cluster, 5);
    leader.commit(plans).unwrap();
    assert!(placed().failure.unwrap().contains("has left"));
}

#[test]
fn a_user_has_no_more_than_its_quota() {
    let cluster = cluster();
    for host in HOSTS {
        live(&cluster, host);
    }
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let lease = cluster.lease().unwrap();
    let ask = |name: &str, user: &str, cores: u32, priority: u8| {
        let mut wanted = request(name, "beta", cores, 1024, 16);
        (wanted.user, wanted.priority) = (user.into(), priority);
        cluster.ask(&wanted, lease).unwrap()
    };
    let cores = |cores: u32| Quota {
        cores: Some(cores),
        memory_mib: None,
    };
    cluster.set_quota("ann", cores(4)).unwrap();
    cluster.set_quota("*", cores(2)).unwrap();
    assert!(cluster.set_quota("a n", cores(4)).is_err());
    ask("large", "ann", 5, 0);
    let first = ask("first", "ann", 2, 0);
    ask("second", "ann", 2, 0);
    ask("third", "ann", 1, 0);
    ask("other", "bob", 2, 0);
    ask("urgent", "ann", 1, 9);
    let plans = leader.plan(&cluster, 1);
    assert_eq!(
        answers(&plans),
        [
            "large is refused: the quota of ann is 4 cores.",
            "second waits: ann has or waits for 3 of the 4 cores of its quota.",
            "third waits: another request of ann waits for the quota.",
        ]
    );
    leader.commit(plans).unwrap();
    let placed = cluster.work().unwrap().placed;
    assert_eq!(
        placed.keys().collect::<Vec<_>>(),
        ["first", "other", "urgent"]
    );
    assert_eq!(cluster.work().unwrap().usage()["ann"].cores, 3);
    assert_eq!(leader.plan(&cluster, 2), [], "all was said");
    cluster.work_ended("first", first).unwrap();
    let plans = leader.plan(&cluster, 3);
    leader.commit(plans).unwrap();
    let placed = cluster.work().unwrap().placed;
    assert!(placed.contains_key("second") && placed.contains_key("third"));
    // What waits for room when the quota comes, waits for the quota from then on.
    ask("wide", "carl", 2, 0);
    cluster.end_quota("*").unwrap();
    ask("wider", "carl", 12, 0);
    let plans = leader.plan(&cluster, 4);
    assert_eq!(answers(&plans).len(), 1);
    leader.commit(plans).unwrap();
    cluster.set_quota("carl", cores(13)).unwrap();
    let plans = leader.plan(&cluster, 5);
    let held = "wider waits: carl has or waits for 2 of the 13 cores of its quota.";
    assert_eq!(answers(&plans), [held]);
    leader.commit(plans).unwrap();
    let overview = cluster.overview().unwrap();
    let wait = overview.waits.iter().find(|wait| wait.name == "wider");
    assert_eq!(wait.unwrap().why, held);
    assert!(cluster.end_quota("*").is_err());
}

#[test]
fn a_host_that_is_expected_to_fail_is_left() {
    let cluster = cluster();
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let (_alive, placed) = spread(&mut leader, &cluster);
    let host = placed.parts[1].host.clone();
    assert!(cluster.evacuate(&host, "two\nlines").is_err());
    cluster.evacuate(&host, "its fan stands still.").unwrap();
    let overview = cluster.overview().unwrap();
    let view = overview.hosts.iter().find(|view| view.name == host);
    let view = view.unwrap();
    assert_eq!(view.state, HostState::Failing);
    assert_eq!(view.trouble.as_deref(), Some("its fan stands still"));
    // Nothing leaves by itself while the cluster keeps its hands off.
    cluster.set_hands_off(true).unwrap();
    let plans = leader.plan(&cluster, 20);
    let note = format!("{host} is expected to fail: its fan stands still.");
    assert_eq!((moves(&plans), notes(&plans)), (vec![], vec![&note[..]]));
    cluster.set_hands_off(false).unwrap();
    let plans = leader.plan(&cluster, 21);
    let why = moves(&plans)[0];
    let reason = format!("{host} is expected to fail (its fan stands still).");
    assert!(why.ends_with(&reason), "{why}");
    // It is repaired before the order was committed.
    cluster.cordon(&host, Cordon::default()).unwrap();
    let plans = leader.plan(&cluster, 22);
    assert_eq!(notes(&plans), [format!("{host} takes work.")]);
    let overview = cluster.overview().unwrap();
    assert!(overview.hosts.iter().all(|view| view.trouble.is_none()));
}

#[test]
fn a_host_that_falls_silent_again_and_again_is_left() {
    let cluster = cluster();
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    let (mut alive, placed) = spread(&mut leader, &cluster);
    let host = &placed.parts[1].host;
    let at = HOSTS.iter().position(|(name, _)| name == host).unwrap();
    let mut now = 20;
    let mut silent_for = |leader: &mut Leader, seconds: u64| {
        cluster.end_lease(alive[at]).unwrap();
        let plans = leader.plan(&cluster, now);
        assert!(notes(&plans).contains(&&format!("{host} is silent.")[..]));
        leader.commit(plans).unwrap();
        now += seconds;
        let plans = leader.plan(&cluster, now);
        leader.commit(plans).unwrap();
        alive[at] = live(&cluster, HOSTS[at]);
        now += 60;
        let plans = leader.plan(&cluster, now);
        let leaves = moves(&plans).concat();
        leader.commit(plans).unwrap();
        leaves
    };
    let trouble = || {
        let members = cluster.members().unwrap();
        let member = members.iter().find(|member| member.record.name == *host);
        member.unwrap().trouble().map(str::to_owned)
    };
    // A daemon that is started again does not count.
    for seconds in [1, 5, 9, 10, 60] {
        assert_eq!(silent_for(&mut leader, seconds), "");
    }
    assert_eq!(trouble(), None);
    let why = "it was silent 3 times within 10 minutes";
    let leaves = silent_for(&mut leader, 20);
    assert!(leaves.ends_with(&format!("({why}).")), "{leaves}");
    assert_eq!(trouble().as_deref(), Some(why));
    // An operator ends it, and one more silence is one.
    cluster.cordon(host, Cordon::default()).unwrap();
    cluster
        .order_ended(&cluster.work().unwrap().placed["wide"], Err("no".into()))
        .unwrap();
    silent_for(&mut leader, 20);
    assert_eq!(trouble(), None);
}

#[test]
fn a_forced_move_is_among_the_next_moves() {
    let cluster = cluster();
    for host in &HOSTS[..3] {
        live(&cluster, *host);
    }
    let lease = cluster.lease().unwrap();
    let mut leader = Leader::new(&cluster, "alpha", "fragbff-fewest-hosts").unwrap();
    cluster
        .ask(&request("wide", "alpha", 5, 5 * 1024, 16), lease)
        .unwrap();
    let plans = leader.plan(&cluster, 1);
    leader.commit(plans).unwrap();
    let placed = cluster.work().unwrap().placed["wide"].clone();
    assert_eq!(cluster.overview().unwrap().next_moves, []);
    let drain = Cordon {
        cordoned: true,
        draining: true,
    };
    cluster.cordon(&placed.parts[1].host, drain).unwrap();
    let next = cluster.overview().unwrap().next_moves;
    assert_eq!(next.len(), 1);
    assert!(next[0].why.contains("is drained"), "{next:?}");
}
