use super::*;

fn start(scheduler: &mut Scheduler, id: u64, cores: u32) -> Vec<(u32, u32)> {
    step(scheduler, 1, Event::Requested(request(id, cores)));
    cores_of(scheduler, id)
}

#[test]
fn best_fit_leaves_the_least_over() {
    let mut s = cluster(Box::new(BestFit), &[16, 6, 8]);
    assert_eq!(start(&mut s, 1, 6), [(1, 6)]);
    assert_eq!(start(&mut s, 2, 6), [(2, 6)]);
    assert_eq!(start(&mut s, 3, 2), [(2, 2)]);
}

#[test]
fn best_fit_counts_memory_too() {
    let mut s = cluster(Box::new(BestFit), &[4, 8]);
    let mut large = request(1, 2);
    large.room.memory_mib = 20 * GIB;
    step(&mut s, 1, Event::Requested(large));
    assert_eq!(cores_of(&s, 1), [(1, 2)]);
}

#[test]
fn fewest_hosts_prefer_fragments_that_fit_exactly() {
    let policy = frag_bff(Start::FewestHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[5, 3, 2, 2, 1]);
    // 5+1 would need two as well, and so would 3+3 of 5; 5+1 leaves nothing.
    assert_eq!(start(&mut s, 1, 6), [(0, 5), (4, 1)]);
    // 3+2 of 3, 2, 2.
    assert_eq!(start(&mut s, 2, 5), [(1, 3), (3, 2)]);
}

#[test]
fn most_hosts_take_one_core_of_each() {
    let policy = frag_bff(Start::MostHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[3, 3, 2, 1]);
    assert_eq!(start(&mut s, 1, 4), [(0, 1), (1, 1), (2, 1), (3, 1)]);
}

#[test]
fn most_hosts_respect_the_limit() {
    let policy = frag_bff(Start::MostHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[3, 3, 2, 1]);
    let mut wanted = request(1, 5);
    wanted.hosts_max = 2;
    step(&mut s, 1, Event::Requested(wanted));
    assert_eq!(cores_of(&s, 1).len(), 2);
}

#[test]
fn memory_comes_from_hosts_without_free_cores() {
    let policy = frag_bff(Start::FewestHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[4, 2, 2]);
    let mut eater = request(1, 4);
    eater.room.memory_mib = GIB;
    step(&mut s, 1, Event::Requested(eater));
    let mut wanted = request(2, 4);
    wanted.room.memory_mib = 28 * GIB;
    step(&mut s, 2, Event::Requested(wanted));
    assert_eq!(cores_of(&s, 2), [(0, 0), (1, 2), (2, 2)]);
    let placement = &s.cluster().aggregate(AggregateId(2)).unwrap().placement;
    assert_eq!(placement.room(), Room::new(4, 28 * GIB));
    assert_eq!(placement.parts[0].room.cores, 2, "the home has cores");
}

#[test]
fn the_first_part_has_room_for_what_is_loaded_there() {
    let first_of = |memory_mib: u64, at_home: u32| {
        let policy = frag_bff(Start::FewestHosts, Goal::FewestHosts);
        let mut s = cluster(policy, &[2, 4, 4]);
        let mut eater = request(1, 2 - at_home);
        eater.home = Some(HostId(0));
        if at_home < 2 {
            step(&mut s, 1, Event::Requested(eater));
        }
        let mut wanted = request(2, 5);
        wanted.room.memory_mib = memory_mib;
        wanted.core_memory_mib = 58;
        wanted.home = Some(HostId(0));
        step(&mut s, 2, Event::Requested(wanted));
        let aggregate = s.cluster().aggregate(AggregateId(2));
        aggregate.map(|aggregate| aggregate.placement.parts[0].room)
    };
    // 260 MiB, and 58 for each core: a fifth is 110, less than 64 and 58.
    assert_eq!(first_of(550, 1), Some(Room::new(1, 122)));
    assert_eq!(first_of(550, 2), Some(Room::new(2, 220)));
    assert_eq!(first_of(350, 2), Some(Room::new(2, 180)));
    assert_eq!(first_of(110, 2), None, "it is whole, or does not run");
}

#[test]
fn no_host_gives_a_crumb_of_memory() {
    let parts_of = |at_home: u64, core_memory_mib: u64| {
        let mut s = cluster(frag_bff(Start::FewestHosts, Goal::FewestHosts), &[1, 4]);
        step(&mut s, 1, Event::Capacity(HostId(0), Room::new(1, at_home)));
        let mut wanted = request(1, 1);
        wanted.room.memory_mib = 196;
        wanted.hosts_max = 2;
        wanted.home = Some(HostId(0));
        wanted.core_memory_mib = core_memory_mib;
        step(&mut s, 2, Event::Requested(wanted));
        let aggregate = s.cluster().aggregate(AggregateId(1));
        let parts = aggregate.map(|aggregate| aggregate.placement.parts.clone());
        parts.map(|parts| {
            let memory = parts.iter().map(|part| part.room.memory_mib);
            memory.collect::<Vec<u64>>()
        })
    };
    assert_eq!(parts_of(196, 58), Some(vec![196]));
    assert_eq!(parts_of(195, 58), Some(vec![132, 64]));
    // The first part holds what is loaded there.
    assert_eq!(parts_of(120, 58), None);
    // A program's parts may be small.
    assert_eq!(parts_of(195, 0), Some(vec![132, 64]));
}

#[test]
fn a_home_that_may_be_anywhere_stays_where_it_starts() {
    for home_stays in [false, true] {
        let policy = frag_bff(Start::FewestHosts, Goal::FewestHosts);
        let mut s = cluster(policy, &[2, 4, 8]);
        let mut wanted = request(1, 3);
        wanted.home_stays = home_stays;
        step(&mut s, 1, Event::Requested(wanted));
        assert_eq!(cores_of(&s, 1), [(1, 3)], "the best fit");
        let mut spread = request(2, 10);
        spread.home_stays = home_stays;
        step(&mut s, 2, Event::Requested(spread));
        assert_eq!(cores_of(&s, 2), [(0, 2), (2, 8)]);
        assert_eq!(home_of(&s, 2), 2, "most of it is at home");
        step(&mut s, 3, Event::Ended(AggregateId(2)));
        let drain = Event::Cordoned {
            host: HostId(1),
            cordoned: true,
            drain: true,
        };
        let decisions = step(&mut s, 100, drain);
        let moves = decisions
            .iter()
            .any(|it| matches!(it, Decision::Move { .. }));
        assert_eq!(moves, !home_stays, "{decisions:?}");
    }
}

/// The host with the most free cores lacks the memory that a home needs.
#[test]
fn a_home_that_may_be_anywhere_is_one_that_can_be_it() {
    let mut s = cluster(frag_bff(Start::FewestHosts, Goal::FewestHosts), &[4, 3, 2]);
    step(&mut s, 1, Event::Capacity(HostId(0), Room::new(4, 300)));
    let mut wanted = request(1, 5);
    wanted.room.memory_mib = 2000;
    wanted.core_memory_mib = 300;
    wanted.home_stays = true;
    step(&mut s, 2, Event::Requested(wanted));
    assert_eq!(home_of(&s, 1), 1);
}

#[test]
fn near_hosts_are_preferred() {
    let policy = frag_bff(Start::FewestHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[]);
    for (number, (cores, group)) in (0..).zip([(3, 0), (1, 1), (2, 1), (1, 1)]) {
        let host = Host {
            group,
            ..host(number, cores)
        };
        step(&mut s, 0, Event::HostJoined(host));
    }
    assert_eq!(start(&mut s, 1, 4), [(1, 1), (2, 2), (3, 1)]);
}

#[test]
fn features_and_devices_restrict() {
    let policy = frag_bff(Start::FewestHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[]);
    for number in 0..3 {
        let features = Features(u64::from(number & 1));
        let devices = if number == 2 { disk() } else { Vec::new() };
        let host = Host {
            features,
            devices,
            ..host(number, 4)
        };
        step(&mut s, 0, Event::HostJoined(host));
    }
    let featured = Request {
        features: Features(1),
        ..request(1, 2)
    };
    step(&mut s, 1, Event::Requested(featured));
    assert_eq!(cores_of(&s, 1), [(1, 2)]);
    let with_disk = Request {
        devices: disk(),
        ..request(2, 6)
    };
    step(&mut s, 1, Event::Requested(with_disk.clone()));
    assert_eq!(cores_of(&s, 2), [(1, 2), (2, 4)]);
    assert_eq!(home_of(&s, 2), 2, "the home has the devices");
    // The disk is taken.
    let next = Request {
        devices: disk(),
        ..request(3, 1)
    };
    step(&mut s, 1, Event::Requested(next));
    assert!(s.cluster().aggregate(AggregateId(3)).is_none());
    step(&mut s, 2, Event::Ended(AggregateId(2)));
    assert_eq!(cores_of(&s, 3), [(2, 1)]);
    // Nobody has one of these.
    let tape = vec![Device {
        kind: "tape".into(),
        count: 1,
    }];
    let decisions = step(
        &mut s,
        3,
        Event::Requested(Request {
            devices: tape,
            ..request(4, 1)
        }),
    );
    let told = decisions[0].explain(s.cluster());
    assert_eq!(
        told,
        "vm4 is refused: no host of this cluster has the devices that it needs."
    );
}

#[test]
fn what_one_host_could_hold_is_not_refused() {
    let mut s = cluster(Box::new(BestFit), &[]);
    for (number, memory_gib) in [(0, 16), (1, 64)] {
        let capacity = Room::new(16 - 8 * number, memory_gib * GIB);
        let host = Host {
            capacity,
            ..host(number, 1)
        };
        step(&mut s, 0, Event::HostJoined(host));
    }
    let mut wanted = request(1, 8);
    wanted.hosts_max = 1;
    step(&mut s, 1, Event::Requested(wanted));
    assert_eq!(cores_of(&s, 1), [(1, 8)]);
}

#[test]
fn whole_machines_move_aside() {
    let mut s = cluster(Box::new(BestFitWithMigration), &[8, 8]);
    // 5 and 2 on one host, 5 on the other: 1 and 3 are free.
    for (id, cores) in [(1, 5), (2, 2), (3, 5)] {
        start(&mut s, id, cores);
    }
    let here = cores_of(&s, 1)[0].0;
    assert_eq!((free(&s, here), free(&s, 1 - here)), (1, 3));
    // 3 cores are free on one host; vm2 moves there, and 3 are free on the other.
    step(&mut s, 2, Event::Ended(AggregateId(99)));
    step(&mut s, 2, Event::Requested(request(4, 3)));
    assert_eq!(cores_of(&s, 4), [(1 - here, 3)]);
    step(&mut s, 3, Event::Ended(AggregateId(4)));
    let mut large = request(5, 3);
    large.hosts_max = 1;
    step(&mut s, 3, Event::Requested(large));
    step(&mut s, 4, Event::Ended(AggregateId(3)));
    let decisions = step(&mut s, 5, Event::Requested(request(6, 4)));
    assert!(decisions.iter().any(|d| matches!(
        d,
        Decision::Start {
            id: AggregateId(6),
            ..
        }
    )));
}

#[test]
fn the_least_loaded_host_is_taken() {
    let mut s = cluster(Box::new(LeastLoaded), &[4, 8, 6]);
    assert_eq!(start(&mut s, 1, 2), [(1, 2)]);
    assert_eq!(start(&mut s, 2, 1), [(2, 1)]);
    assert_eq!(start(&mut s, 3, 1), [(1, 1)]);
}

#[test]
fn policies_are_found_by_name() {
    for name in POLICY_NAMES {
        assert_eq!(policy_by_name(name).unwrap().name(), name);
    }
    let error = policy_by_name("worst-fit").err().unwrap().to_string();
    assert!(
        error.starts_with("there is no policy \"worst-fit\": choose one of bff, "),
        "{error}"
    );
}

#[test]
fn devices_move_with_the_home_and_only_if_forced() {
    let policy = frag_bff(Start::FewestHosts, Goal::FewestHosts);
    let mut s = cluster(policy, &[]);
    for number in 0..3 {
        let devices = if number == 2 { Vec::new() } else { disk() };
        let host = Host {
            devices,
            ..host(number, 4)
        };
        step(&mut s, 0, Event::HostJoined(host));
    }
    let with_disk = Request {
        devices: disk(),
        ..request(1, 6)
    };
    step(&mut s, 1, Event::Requested(with_disk));
    let home = HostId(home_of(&s, 1));
    let other = HostId(1 - home.0);
    // The other disk is reserved while the home is on its way, and free if that fails.
    let drain = Event::Cordoned {
        host: home,
        cordoned: true,
        drain: true,
    };
    let decisions = s.step(at(2), drain).unwrap();
    assert!(
        matches!(decisions[..], [Decision::Move { .. }]),
        "{decisions:?}"
    );
    assert!(!s.cluster().has_devices(other, &disk()));
    let failed = Event::MoveEnded(AggregateId(1), MoveResult::Failed);
    let decisions = s.step(at(3), failed).unwrap();
    settle(&mut s, at(4), decisions);
    assert_eq!(HostId(home_of(&s, 1)), other);
    step(&mut s, 5, Event::Ended(AggregateId(1)));
    for host in [home, other] {
        assert!(s.cluster().has_devices(host, &disk()));
    }
    let twice = Request {
        devices: [disk(), disk()].concat(),
        ..request(2, 1)
    };
    let decisions = step(&mut s, 6, Event::Requested(twice));
    assert!(matches!(decisions[..], [Decision::Refuse { .. }]));
}
