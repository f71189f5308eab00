//! FragVisor's Figure 14: the five decisions about a machine of 4 vCPUs on a cluster of
//! hosts with 12 CPUs, and the machine of 12 that waits.

use super::*;

/// Two of the four hosts are full throughout; the figure is about the other two. What
/// ends there frees what the figure's lower graph shows.
fn before() -> Scheduler {
    let policy = frag_bff(Start::FewestHosts, Goal::LeastFragmentation);
    let mut scheduler = cluster(policy, &[12, 12, 12, 12]);
    // Each host takes whole what fits exactly: 12 on two, then fillers of the other two.
    let sizes = [12, 12, 8, 1, 1, 2, 4, 4, 2, 1, 1];
    for (id, cores) in sizes.into_iter().enumerate() {
        step(
            &mut scheduler,
            0,
            Event::Requested(request(100 + id as u64, cores)),
        );
    }
    scheduler
}

/// The fillers by host, as best fit has placed them.
fn on(scheduler: &Scheduler, host: u32, cores: u32) -> AggregateId {
    let here = scheduler.cluster().on(HostId(host)).iter();
    let filler = here
        .filter_map(|&id| scheduler.cluster().aggregate(id))
        .find(|aggregate| aggregate.request.room.cores == cores && aggregate.request.id.0 >= 100);
    filler.expect("a filler of that size").request.id
}

#[test]
fn the_five_decisions() {
    let mut s = before();
    // The host with 8+1+1+2 is node0 of the figure, the one with 4+4+2+1+1 its node1.
    let (node0, node1) = (home_of(&s, 102), home_of(&s, 106));
    assert_ne!(node0, node1);
    assert_eq!((free(&s, node0), free(&s, node1)), (0, 0));

    // 155: two CPUs are free on each; a machine of four starts on both.
    let ended = on(&s, node0, 2);
    step(&mut s, 150, Event::Ended(ended));
    step(&mut s, 150, Event::Requested(request(1, 4)));
    assert!(s.cluster().aggregate(AggregateId(1)).is_none());
    let ended = on(&s, node1, 2);
    let decisions = step(&mut s, 155, Event::Ended(ended));
    assert!(matches!(
        &decisions[..],
        [Decision::Start {
            id: AggregateId(1),
            why: Started::Spread { .. },
            ..
        }]
    ));
    let mut parts: Vec<u32> = cores_of(&s, 1).iter().map(|&(_, cores)| cores).collect();
    parts.sort_unstable();
    assert_eq!(parts, [2, 2]);
    assert_eq!((free(&s, node0), free(&s, node1)), (0, 0));
    // A machine of 12 waits.
    step(&mut s, 160, Event::Requested(request(3, 12)));

    // 222: four CPUs become free on node1. Nothing moves: the block would be broken.
    let ended = on(&s, node1, 4);
    assert_eq!(step(&mut s, 222, Event::Ended(ended)), []);
    assert_eq!(free(&s, node1), 4);

    // 360: like 222.
    for _ in 0..2 {
        let ended = on(&s, node1, 1);
        assert_eq!(step(&mut s, 360, Event::Ended(ended)), []);
    }
    assert_eq!(free(&s, node1), 6);

    // 470: one CPU becomes free on node0: one vCPU goes there, 3+1.
    let ended = on(&s, node0, 1);
    step(&mut s, 470, Event::Ended(ended));
    assert_eq!(
        cores_of(&s, 1)
            .iter()
            .find(|&&(host, _)| host == node0)
            .unwrap()
            .1,
        3
    );
    assert_eq!((free(&s, node0), free(&s, node1)), (0, 7));

    // Node1's last filler ends: still nothing moves.
    let ended = on(&s, node1, 4);
    assert_eq!(step(&mut s, 500, Event::Ended(ended)), []);
    assert_eq!(free(&s, node1), 11);

    // 623: one more on node0: the machine is whole, and the waiting one starts whole.
    let ended = on(&s, node0, 1);
    let decisions = step(&mut s, 623, Event::Ended(ended));
    assert_eq!(cores_of(&s, 1), [(node0, 4)]);
    assert_eq!(cores_of(&s, 3), [(node1, 12)]);
    let told: Vec<String> = decisions.iter().map(|d| d.explain(s.cluster())).collect();
    assert_eq!(
        told,
        [
            format!(
                "vm1 moves 1 core and 8192 MiB from node{node1} to node{node0} within 10.0 s: \
                 node{node1} then has a block of 12 free cores, and the aggregate is on one host."
            ),
            format!("vm1 is on node{node0} as a whole: it is placed by best fit from now on."),
            format!("vm3 starts on node{node1}: it fills the free cores there exactly."),
        ]
    );
}

/// A machine that starts on one of several hosts for good: cores go there alone, each with what it
/// takes of the memory, and none goes to another part.
#[test]
fn single_cores_go_home() {
    let policy = frag_bff(Start::FewestHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[4, 4, 4]);
    for number in 0..3 {
        let mut filler = request(100 + u64::from(number), 2);
        filler.home = Some(HostId(number));
        step(&mut s, 0, Event::Requested(filler));
    }
    let mut spread = request(1, 6);
    spread.home = Some(HostId(0));
    spread.core_memory_mib = 58;
    step(&mut s, 0, Event::Requested(spread));
    assert_eq!(cores_of(&s, 1), [(0, 2), (1, 2), (2, 2)]);
    let lends = |host, cores| Event::Capacity(HostId(host), Room::new(cores, 64 * GIB));
    // A core of one would leave two free there.
    step(&mut s, 1, lends(1, 5));
    step(&mut s, 1, lends(2, 5));
    assert_eq!(cores_of(&s, 1), [(0, 2), (1, 2), (2, 2)]);
    step(&mut s, 2, lends(0, 5));
    // The two that are left there then fit beside the other part.
    let cores: Vec<u32> = cores_of(&s, 1).iter().map(|&(_, cores)| cores).collect();
    assert_eq!(cores, [3, 3]);
    let there = s.cluster().aggregate(AggregateId(1)).unwrap();
    let memory = there.placement.on(HostId(0)).memory_mib;
    assert_eq!(memory, 8 * GIB + 58, "the part's memory stays");
}

#[test]
fn another_policy_looks_at_all_hosts() {
    let policy = frag_bff(Start::FewestHosts, Goal::LeastFragmentation);
    let mut s = cluster(policy, &[2, 2]);
    step(&mut s, 0, Event::Requested(request(1, 4)));
    step(
        &mut s,
        1,
        Event::Capacity(HostId(1), Room::new(4, 16 * GIB)),
    );
    assert_eq!(cores_of(&s, 1), [(0, 2), (1, 2)], "a block stays free");
    s.set_policy(frag_bff(Start::FewestHosts, Goal::FewestHosts));
    step(&mut s, 2, Event::Passed);
    assert_eq!(cores_of(&s, 1), [(1, 4)]);
}

/// With the goal of fewest hosts the machine would be whole at 222 already, and the one of
/// 12 would wait longer: the two goals differ where the paper says so.
#[test]
fn fewest_hosts_consolidates_at_once() {
    let mut s = before();
    s = {
        let policy = frag_bff(Start::FewestHosts, Goal::FewestHosts);
        let mut other = cluster(policy, &[12, 12, 12, 12]);
        for id in 100..111 {
            let request = s
                .cluster()
                .aggregate(AggregateId(id))
                .unwrap()
                .request
                .clone();
            step(&mut other, 0, Event::Requested(request));
        }
        other
    };
    let (node0, node1) = (home_of(&s, 102), home_of(&s, 106));
    for (host, cores) in [(node0, 2), (node1, 2)] {
        let ended = on(&s, host, cores);
        step(&mut s, 150, Event::Ended(ended));
    }
    step(&mut s, 155, Event::Requested(request(1, 4)));
    let ended = on(&s, node1, 4);
    step(&mut s, 222, Event::Ended(ended));
    assert_eq!(cores_of(&s, 1), [(node1, 4)]);
}
