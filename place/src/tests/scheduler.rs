use super::*;

fn fewest() -> Box<dyn Policy> {
    frag_bff(Start::FewestHosts, Goal::LeastFragmentation)
}

fn fewest_hosts() -> Box<dyn Policy> {
    frag_bff(Start::FewestHosts, Goal::FewestHosts)
}

#[test]
fn what_no_cluster_holds_is_refused() {
    let mut s = cluster(fewest(), &[4, 4]);
    let decisions = step(&mut s, 1, Event::Requested(request(1, 9)));
    assert_eq!(
        decisions[0].explain(s.cluster()),
        "vm1 is refused: 9 of this cluster's hosts would not hold it if they were empty (the \
         cluster has 8 cores and 32768 MiB); ask for less."
    );
    let mut whole = request(2, 5);
    whole.hosts_max = 1;
    let decisions = step(&mut s, 1, Event::Requested(whole));
    assert!(matches!(decisions[..], [Decision::Refuse { .. }]));
    let decisions = step(&mut s, 1, Event::Requested(request(3, 0)));
    assert!(matches!(
        &decisions[..],
        [Decision::Refuse {
            why: Refused::Wrong(RequestError::NoCores(_)),
            ..
        }]
    ));
}

#[test]
fn the_queue_is_served_in_order() {
    let mut s = cluster(Box::new(BestFit), &[4]);
    step(&mut s, 1, Event::Requested(request(1, 4)));
    let decisions = step(&mut s, 2, Event::Requested(request(2, 3)));
    assert_eq!(
        decisions[0].explain(s.cluster()),
        "vm2 waits: 0 cores and 0 MiB are free on all hosts together."
    );
    // It would find room later, and does not overtake.
    step(&mut s, 3, Event::Requested(request(3, 1)));
    let mut urgent = request(4, 2);
    urgent.priority = 1;
    step(&mut s, 4, Event::Requested(urgent));
    let order: Vec<u64> = s.waiting().map(|request| request.id.0).collect();
    assert_eq!(order, [4, 2, 3]);
    step(&mut s, 5, Event::Ended(AggregateId(1)));
    assert_eq!(cores_of(&s, 4), [(0, 2)]);
    assert_eq!(s.waiting().len(), 2);
    // The first one is withdrawn: the next one starts.
    step(&mut s, 6, Event::Ended(AggregateId(2)));
    assert_eq!(cores_of(&s, 3), [(0, 1)]);
}

#[test]
fn backfill_lets_small_ones_pass() {
    let limits = Limits {
        backfill: 1,
        hold: Duration::ZERO,
        ..Limits::default()
    };
    let mut s = Scheduler::new(Box::new(BestFit), Costs::default(), limits);
    let host = Host::new(HostId(0), "node0", Room::new(4, 64 * GIB));
    step(&mut s, 0, Event::HostJoined(host));
    step(&mut s, 1, Event::Requested(request(1, 3)));
    step(&mut s, 2, Event::Requested(request(2, 4)));
    step(&mut s, 3, Event::Requested(request(3, 1)));
    assert_eq!(cores_of(&s, 3), [(0, 1)]);
}

#[test]
fn a_drained_host_is_left_and_taken_again() {
    let mut s = cluster(fewest(), &[4, 2, 2]);
    step(&mut s, 1, Event::Requested(request(1, 4)));
    let drain = Event::Cordoned {
        host: HostId(0),
        cordoned: true,
        drain: true,
    };
    let decisions = s.step(at(2), drain).unwrap();
    assert_eq!(
        decisions[0].explain(s.cluster()),
        "vm1 moves 2 cores and 8192 MiB from node0 to node1 and 2 cores and 8192 MiB from node0 \
         to node2 within 19.8 s: node0 is drained."
    );
    settle(&mut s, at(3), decisions);
    assert_eq!(cores_of(&s, 1), [(1, 2), (2, 2)]);
    step(&mut s, 4, Event::Requested(request(2, 1)));
    assert!(
        s.cluster().aggregate(AggregateId(2)).is_none(),
        "node0 is cordoned"
    );
    let back = Event::Cordoned {
        host: HostId(0),
        cordoned: false,
        drain: false,
    };
    step(&mut s, 5, back);
    assert_eq!(cores_of(&s, 2), [(0, 1)]);
}

#[test]
fn who_is_stuck_is_said_and_moves_later() {
    let mut s = cluster(fewest(), &[4, 4]);
    step(&mut s, 1, Event::Requested(request(1, 4)));
    step(&mut s, 1, Event::Requested(request(2, 4)));
    let sick = Event::HostHealth(HostId(0), Health::Sick("3 memory errors in an hour".into()));
    let decisions = step(&mut s, 2, sick);
    let stuck = cores_of(&s, 1)[0].0 == 0;
    let (stuck, other) = if stuck { (1, 2) } else { (2, 1) };
    assert_eq!(
        decisions[0].explain(s.cluster()),
        format!(
            "vm{stuck} has to leave node0, which is expected to fail (3 memory errors in an \
             hour), and no other host has room for its part."
        )
    );
    step(&mut s, 3, Event::Ended(AggregateId(other)));
    assert_eq!(cores_of(&s, stuck), [(1, 4)]);
}

#[test]
fn a_deadline_is_heeded_in_time() {
    let mut s = cluster(fewest(), &[4, 4]);
    step(&mut s, 1, Event::Requested(request(1, 4)));
    let host = cores_of(&s, 1)[0].0;
    assert_eq!(
        step(&mut s, 2, Event::Deadline(HostId(host), Some(at(1000)))),
        []
    );
    assert_eq!(s.next_wake(), Some(at(700)));
    step(&mut s, 700, Event::Passed);
    assert_eq!(cores_of(&s, 1), [(1 - host, 4)]);
    // And one that is too near is said at once.
    let mut s = cluster(fewest(), &[4, 4]);
    step(&mut s, 1, Event::Requested(request(1, 4)));
    let host = cores_of(&s, 1)[0].0;
    let decisions = s
        .step(at(2), Event::Deadline(HostId(host), Some(at(4))))
        .unwrap();
    assert!(
        decisions
            .iter()
            .any(|d| matches!(d, Decision::TooLate { .. })),
        "{decisions:?}"
    );
}

#[test]
fn a_part_moves_where_an_operator_wants_it() {
    let mut s = cluster(fewest_hosts(), &[4, 4, 4, 1]);
    for (id, cores) in [(1, 3), (2, 3), (3, 2)] {
        step(&mut s, 1, Event::Requested(request(id, cores)));
    }
    let mut wide = request(4, 4);
    wide.home = Some(HostId(0));
    step(&mut s, 2, Event::Requested(wide));
    assert_eq!(cores_of(&s, 4), [(0, 1), (2, 2), (3, 1)]);
    let ask = |id, from: Option<u32>, to| Event::MoveAsked {
        id: AggregateId(id),
        from: from.map(HostId),
        to: HostId(to),
    };
    let says = |s: &mut Scheduler, event| {
        let decisions = s.step(at(3), event).unwrap();
        decisions[0].explain(s.cluster())
    };
    let why = says(&mut s, ask(4, Some(0), 1));
    assert!(why.contains("no such part of it can move"), "{why}");
    let why = says(&mut s, ask(4, Some(2), 1));
    assert!(
        why.ends_with("1 core and 4096 MiB are free there, its part has 2 cores and 8192 MiB."),
        "{why}"
    );
    let decisions = s.step(at(4), ask(4, None, 1)).unwrap();
    assert_eq!(
        decisions[0].explain(s.cluster()),
        "vm4 moves 1 core and 4096 MiB from node3 to node1 within 5.0 s: an operator wants it."
    );
    let why = says(&mut s, ask(4, None, 1));
    assert!(why.contains("it moves already"), "{why}");
    settle(&mut s, at(5), decisions);
    assert_eq!(cores_of(&s, 4), [(0, 1), (1, 1), (2, 2)]);
    assert_eq!(s.step(at(6), ask(9, None, 3)).unwrap(), []);
}

#[test]
fn an_owner_gets_memory_back_and_no_more_than_that() {
    let limits = Limits {
        hold: Duration::from_secs(10),
        ..Limits::default()
    };
    let mut s = Scheduler::new(fewest(), Costs::default(), limits);
    for number in 0..2 {
        step(&mut s, 0, Event::HostJoined(host(number, 8)));
    }
    for (id, cores) in [(1, 1), (2, 2), (3, 4)] {
        step(&mut s, 20, Event::Requested(request(id, cores)));
        assert_eq!(cores_of(&s, id), [(0, cores)]);
    }
    // 8 GiB suffice: the smallest part that has as much.
    let wanted = Event::WantedBack(HostId(0), 6 * GIB);
    let decisions = s.step(at(40), wanted.clone()).unwrap();
    assert_eq!(
        decisions[0].explain(s.cluster()),
        "vm2 moves 2 cores and 8192 MiB from node0 to node1 within 10.0 s: node0 lends 6144 MiB \
         less than is used there."
    );
    // It is counted there until the host has said what it has now.
    assert_eq!(s.step(at(41), wanted.clone()).unwrap(), []);
    settle(&mut s, at(60), decisions);
    assert_eq!(s.step(at(61), wanted.clone()).unwrap(), []);
    step(&mut s, 62, Event::Requested(request(4, 1)));
    assert_eq!(cores_of(&s, 4), [(1, 1)], "nothing new comes to node0");
    // Still wanted: then more has to leave.
    let decisions = s.step(at(70), Event::Passed).unwrap();
    assert!(
        matches!(
            &decisions[..],
            [Decision::Stuck { .. } | Decision::Move { .. }, ..]
        ),
        "{decisions:?}"
    );
    settle(&mut s, at(90), decisions);
    step(&mut s, 91, Event::WantedBack(HostId(0), 0));
    step(&mut s, 92, Event::Requested(request(5, 2)));
    assert_eq!(cores_of(&s, 5), [(0, 2)], "node0 takes new work again");
}

#[test]
fn a_lost_host_is_named_by_all_it_had() {
    let mut s = cluster(fewest(), &[2, 2, 4]);
    step(&mut s, 1, Event::Requested(request(1, 4)));
    step(&mut s, 1, Event::Requested(request(2, 4)));
    let spread = if cores_of(&s, 1).len() > 1 { 1 } else { 2 };
    let decisions = step(&mut s, 2, Event::HostLeft(HostId(0)));
    assert_eq!(
        decisions[0].explain(s.cluster()),
        format!("vm{spread} has ended: a part of it was on node0, which is gone.")
    );
    assert_eq!(free(&s, 1), 2);
}

#[test]
fn a_failed_move_leaves_everything_and_is_tried_again() {
    let mut s = cluster(fewest_hosts(), &[4, 4]);
    step(&mut s, 1, Event::Requested(request(1, 2)));
    step(&mut s, 1, Event::Requested(request(2, 2)));
    step(&mut s, 1, Event::Requested(request(3, 3)));
    step(&mut s, 1, Event::Ended(AggregateId(2)));
    step(&mut s, 1, Event::Requested(request(4, 3)));
    assert_eq!(cores_of(&s, 4).len(), 2);
    let before = cores_of(&s, 4);
    let decisions = s.step(at(2), Event::Ended(AggregateId(1))).unwrap();
    let Decision::Move { moving, .. } = &decisions[0] else {
        panic!("{decisions:?}")
    };
    let failed = Event::MoveEnded(moving.aggregate, MoveResult::Failed);
    let decisions = s.step(at(3), failed).unwrap();
    assert_eq!(cores_of(&s, 4), before);
    assert!(matches!(decisions[..], [Decision::Move { .. }]));
    settle(&mut s, at(4), decisions);
    assert_eq!(cores_of(&s, 4).len(), 1);
}

#[test]
fn a_request_waits_for_the_move_that_makes_it_whole() {
    let mut s = cluster(fewest(), &[4, 4]);
    for (id, cores) in [(1, 3), (2, 2), (3, 3)] {
        step(&mut s, 1, Event::Requested(request(id, cores)));
    }
    assert_eq!(cores_of(&s, 3).len(), 2);
    assert_eq!(step(&mut s, 2, Event::Ended(AggregateId(2))), []);
    let decisions = s.step(at(2), Event::Ended(AggregateId(1))).unwrap();
    assert!(matches!(decisions[..], [Decision::Move { .. }]));
    let told = s.step(at(3), Event::Requested(request(4, 4))).unwrap();
    assert!(matches!(told[..], [Decision::Delay { .. }]), "{told:?}");
}

#[test]
fn moves_are_held_back() {
    let limits = Limits {
        hold: at(60),
        ..Limits::default()
    };
    let mut s = Scheduler::new(fewest_hosts(), Costs::default(), limits);
    for number in 0..2 {
        let host = Host::new(
            HostId(number),
            format!("node{number}"),
            Room::new(4, 16 * GIB),
        );
        step(&mut s, 0, Event::HostJoined(host));
    }
    for (id, cores) in [(1, 3), (2, 3), (3, 2)] {
        step(&mut s, 1, Event::Requested(request(id, cores)));
    }
    step(&mut s, 10, Event::Ended(AggregateId(1)));
    assert_eq!(cores_of(&s, 3).len(), 2);
    assert_eq!(s.next_wake(), Some(at(61)));
    step(&mut s, 61, Event::Passed);
    assert_eq!(cores_of(&s, 3).len(), 1);
}

#[test]
fn one_that_comes_among_the_next_is_tried() {
    let limits = Limits {
        backfill: 1,
        hold: Duration::ZERO,
        ..Limits::default()
    };
    let mut s = Scheduler::new(Box::new(BestFit), Costs::default(), limits);
    step(&mut s, 0, Event::HostJoined(host(0, 4)));
    for (id, cores) in [(1, 3), (2, 4), (3, 2), (4, 1)] {
        step(&mut s, id, Event::Requested(request(id, cores)));
    }
    assert!(
        s.cluster().aggregate(AggregateId(4)).is_none(),
        "two are before it"
    );
    step(&mut s, 5, Event::Ended(AggregateId(2)));
    assert_eq!(cores_of(&s, 4), [(0, 1)]);
}

#[test]
fn a_forced_move_that_failed_is_tried_again_later() {
    let policy = policy_by_name("fragbff-fewest-hosts").unwrap();
    let mut s = Scheduler::new(policy, Costs::default(), Limits::default());
    for number in 0..2 {
        step(&mut s, 0, Event::HostJoined(host(number, 4)));
    }
    step(&mut s, 0, Event::Requested(request(1, 2)));
    let home = home_of(&s, 1);
    let drain = Event::Cordoned {
        host: HostId(home),
        cordoned: true,
        drain: true,
    };
    let moves = |decisions: &[Decision]| {
        let of = |d: &&Decision| matches!(d, Decision::Move { .. });
        decisions.iter().filter(of).count()
    };
    assert_eq!(moves(&s.step(at(1), drain).unwrap()), 1);
    let failed = || Event::MoveEnded(AggregateId(1), MoveResult::Failed);
    assert_eq!(moves(&s.step(at(2), failed()).unwrap()), 0);
    assert_eq!(moves(&s.step(at(3), Event::Passed).unwrap()), 0);
    let wake = s.next_wake().expect("it tries again");
    assert_eq!(wake, at(2) + Limits::default().hold);
    assert_eq!(moves(&s.step(wake, Event::Passed).unwrap()), 1);
}

#[test]
fn a_new_scheduler_adopts_what_runs_and_what_moves() {
    let mut s = cluster(policy_by_name("fragbff-fewest-hosts").unwrap(), &[4, 4]);
    let adopted = |id, cores, from, to, moved| Adopted {
        placement: Placement::whole(HostId(0), request(id, cores).room),
        request: request(id, cores),
        transfers: vec![Transfer {
            from: HostId(from),
            to: HostId(to),
            room: request(id, moved).room,
        }],
    };
    for wrong in [
        adopted(1, 6, 1, 0, 1),
        adopted(1, 6, 0, 1, 7),
        adopted(1, 6, 0, 7, 1),
    ] {
        assert!(s.step(at(0), Event::Adopted(vec![wrong])).is_err());
    }
    let twin = || adopted(1, 1, 0, 1, 1);
    let twins = Event::Adopted(vec![twin(), twin()]);
    assert!(s.step(at(0), twins).is_err());
    assert_eq!(s.cluster().aggregates().count(), 0);
    let drain = Event::Cordoned {
        host: HostId(0),
        cordoned: true,
        drain: true,
    };
    step(&mut s, 0, drain);
    let both = || vec![adopted(1, 6, 0, 1, 6), adopted(2, 1, 0, 1, 1)];
    let decisions = s.step(at(1), Event::Adopted(both())).unwrap();
    assert_eq!(decisions, [], "both move already");
    assert!(s.step(at(1), Event::Adopted(both())).is_err());
    assert_eq!(
        s.cluster().host(HostId(1)).capacity.cores,
        7,
        "it moves there"
    );
    let done = MoveResult::Done { took: at(1) };
    step(&mut s, 2, Event::MoveEnded(AggregateId(1), done));
    assert_eq!((home_of(&s, 1), home_of(&s, 2), free(&s, 1)), (1, 0, 0));
}

/// The request for a full home waits, and the host is kept for it; what needs other hosts starts.
#[test]
fn a_full_home_holds_up_only_those_that_need_it() {
    let mut s = cluster(fewest(), &[4, 4, 4]);
    let at_home = |id, cores, home| {
        let mut wanted = request(id, cores);
        (wanted.home, wanted.hosts_max) = (Some(HostId(home)), 1);
        Event::Requested(wanted)
    };
    step(&mut s, 1, at_home(1, 3, 0));
    step(&mut s, 2, at_home(2, 2, 0));
    assert_eq!(s.waiting().len(), 1, "node0 has one core left");
    step(&mut s, 3, at_home(3, 4, 1));
    assert_eq!(cores_of(&s, 3), [(1, 4)]);
    // It would take the core that the second one waits for.
    step(&mut s, 4, at_home(4, 1, 0));
    assert_eq!(s.waiting().len(), 2);
    step(&mut s, 5, at_home(5, 2, 2));
    assert_eq!(cores_of(&s, 5), [(2, 2)]);
    // Two of three cores go to the first that waits, one to the next.
    step(&mut s, 6, Event::Ended(AggregateId(1)));
    assert_eq!(cores_of(&s, 2), [(0, 2)]);
    assert_eq!(cores_of(&s, 4), [(0, 1)]);
    assert_eq!(s.waiting().len(), 0);
}

#[test]
fn a_part_that_may_not_be_split_stays_until_one_host_holds_it() {
    let limits = Limits {
        split_parts: false,
        hold: Duration::ZERO,
        ..Limits::default()
    };
    let mut s = Scheduler::new(fewest(), Costs::default(), limits);
    for (id, cores) in [(0, 4), (1, 2), (2, 2)] {
        let host = Host::new(HostId(id), format!("node{id}"), Room::new(cores, 64 * GIB));
        step(&mut s, 0, Event::HostJoined(host));
    }
    step(&mut s, 1, Event::Requested(request(1, 4)));
    let drain = Event::Cordoned {
        host: HostId(0),
        cordoned: true,
        drain: true,
    };
    let decisions = s.step(at(2), drain).unwrap();
    assert!(matches!(
        &decisions[..],
        [Decision::Stuck { can_move: true, .. }]
    ));
    let larger = Host::new(HostId(3), "node3", Room::new(4, 64 * GIB));
    let decisions = s.step(at(3), Event::HostJoined(larger)).unwrap();
    settle(&mut s, at(4), decisions);
    assert_eq!(cores_of(&s, 1), [(3, 4)]);
}
