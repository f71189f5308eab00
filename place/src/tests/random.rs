//! Random events, and a checker that keeps its own account of all room.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Happening {
    Request {
        cores: u32,
        memory_gib: u64,
        hosts_max: u32,
        priority: u8,
        home: Option<u32>,
        home_stays: bool,
        fixed: bool,
    },
    End(usize),
    MoveDone(usize, bool),
    Cordon(u32, bool, bool),
    Deadline(u32, Option<u64>),
    Sick(u32, bool),
    Capacity(u32, u32),
    WantedBack(u32, u64),
    MoveAsked(usize, Option<u32>, u32),
    Leave(u32),
    Join(u32),
    Pass,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        6 => (
            (1..=8_u32, 1..=32_u64, 1..=6_u32, 0..3_u8),
            prop_oneof![Just(None), Just(None), (0..6_u32).prop_map(Some)],
            any::<bool>(),
            any::<bool>(),
        ).prop_map(
            |((cores, memory_gib, hosts_max, priority), home, home_stays, fixed)| {
                Happening::Request {
                    cores, memory_gib, hosts_max, priority, home, home_stays, fixed
                }
            }
        ),
        4 => any::<usize>().prop_map(Happening::End),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(n, done)| Happening::MoveDone(n, done)),
        1 => (0..6_u32, any::<bool>(), any::<bool>())
            .prop_map(|(host, cordoned, drain)| Happening::Cordon(host, cordoned, drain)),
        1 => (0..6_u32, prop::option::of(0..500_u64))
            .prop_map(|(host, at)| Happening::Deadline(host, at)),
        1 => (0..6_u32, any::<bool>()).prop_map(|(host, sick)| Happening::Sick(host, sick)),
        1 => (0..6_u32, 1..=12_u32)
            .prop_map(|(host, cores)| Happening::Capacity(host, cores)),
        1 => (0..6_u32, prop_oneof![Just(0), 1..=24_u64])
            .prop_map(|(host, gib)| Happening::WantedBack(host, gib)),
        2 => (any::<usize>(), prop::option::of(0..6_u32), 0..6_u32)
            .prop_map(|(n, from, to)| Happening::MoveAsked(n, from, to)),
        1 => (0..6_u32).prop_map(Happening::Leave),
        1 => (0..6_u32).prop_map(Happening::Join),
        2 => Just(Happening::Pass),
    ]
}

const CORES: [u32; 6] = [4, 8, 6, 2, 12, 3];

fn host(number: u32) -> Host {
    let cores = CORES[number as usize];
    let room = Room::new(cores, u64::from(cores) * 4 * GIB);
    let mut host = Host::new(HostId(number), format!("node{number}"), room);
    host.group = number / 3;
    host
}

/// What the decisions alone say about who has what.
#[derive(Default)]
struct Account {
    hosts: BTreeMap<u32, Room>,
    running: BTreeMap<u64, BTreeMap<u32, Room>>,
    moves: BTreeMap<u64, Move>,
    waiting: BTreeMap<u64, Request>,
}

impl Account {
    fn take(&mut self, decisions: &[Decision]) {
        for decision in decisions {
            match decision {
                Decision::Start { id, placement, .. } => {
                    let request = self.waiting.remove(&id.0).expect("it waited");
                    assert_eq!(placement.room(), request.room);
                    assert!(placement.parts.len() <= request.hosts_max as usize);
                    let parts: BTreeMap<u32, Room> = placement
                        .parts
                        .iter()
                        .map(|part| (part.host.0, part.room))
                        .collect();
                    assert_eq!(
                        parts.len(),
                        placement.parts.len(),
                        "each part on another host"
                    );
                    assert!(placement.parts[0].room.cores > 0, "the home has a core");
                    assert!(
                        self.running.insert(id.0, parts).is_none(),
                        "it started once"
                    );
                }
                Decision::Move { moving, .. } => {
                    let id = moving.aggregate.0;
                    assert!(!moving.transfers.is_empty());
                    assert!(
                        self.moves.insert(id, moving.clone()).is_none(),
                        "one move at a time"
                    );
                }
                Decision::Lost { id, .. } => {
                    self.running.remove(&id.0).expect("it ran");
                    self.moves.remove(&id.0);
                }
                Decision::Refuse { id, .. } => {
                    self.waiting.remove(&id.0);
                }
                _ => {}
            }
            self.check();
        }
    }

    /// Nothing is promised twice, both ends of moves counted.
    fn check(&self) {
        for (host, used) in self.used() {
            let capacity = self.hosts.get(&host).expect("a host of the cluster");
            assert!(
                capacity.holds(used),
                "host {host} has {capacity}, used {used}"
            );
        }
    }

    fn used(&self) -> BTreeMap<u32, Room> {
        let mut used: BTreeMap<u32, Room> = BTreeMap::new();
        for (host, room) in self.running.values().flatten() {
            *used.entry(*host).or_default() += *room;
        }
        for transfer in self.moves.values().flat_map(|moving| &moving.transfers) {
            *used.entry(transfer.to.0).or_default() += transfer.room;
        }
        used
    }

    fn end_move(&mut self, id: u64, done: bool) {
        let moving = self.moves.remove(&id).expect("it was on the move");
        if !done {
            return;
        }
        let parts = self.running.get_mut(&id).expect("it runs");
        for transfer in moving.transfers {
            *parts.entry(transfer.to.0).or_default() += transfer.room;
            *parts.get_mut(&transfer.from.0).unwrap() -= transfer.room;
        }
        parts.retain(|_, room| *room != Room::NONE);
    }

    fn agrees_with(&self, scheduler: &Scheduler) {
        let there: BTreeMap<u64, BTreeMap<u32, Room>> = scheduler
            .cluster()
            .aggregates()
            .map(|aggregate| {
                let parts = aggregate.placement.parts.iter();
                let parts = parts.map(|part| (part.host.0, part.room)).collect();
                (aggregate.request.id.0, parts)
            })
            .collect();
        assert_eq!(there, self.running);
        for aggregate in scheduler.cluster().aggregates() {
            let home = aggregate.placement.parts[0].host;
            let request = &aggregate.request;
            assert!(
                request.home.is_none_or(|wanted| wanted == home),
                "the home stays"
            );
            assert!(request.home.is_some() || !request.home_stays, "it stays");
            assert!(!request.fixed || aggregate.moving.is_none(), "it is fixed");
        }
        assert_eq!(scheduler.waiting().len(), self.waiting.len());
        assert_eq!(scheduler.moves_under_way(), self.moves.len());
    }
}

fn run(policy: Box<dyn Policy>, limits: Limits, happenings: Vec<Happening>) {
    let mut s = Scheduler::new(policy, Costs::default(), limits);
    let mut account = Account::default();
    let mut now = 0;
    let mut next = 0;
    for number in 0..4 {
        account.hosts.insert(number, host(number).capacity);
        account.take(&s.step(at(0), Event::HostJoined(host(number))).unwrap());
    }
    for happening in happenings {
        now += 7;
        let pick = |n: usize, of: &[u64]| (!of.is_empty()).then(|| of[n % of.len()]);
        let event = match happening {
            Happening::Request {
                cores,
                memory_gib,
                hosts_max,
                priority,
                home,
                home_stays,
                fixed,
            } => {
                next += 1;
                let mut wanted = request(next, cores);
                wanted.room.memory_mib = memory_gib * GIB;
                (wanted.hosts_max, wanted.priority) = (hosts_max, priority);
                (wanted.home, wanted.fixed) = (home.map(HostId), fixed);
                wanted.home_stays = home_stays;
                account.waiting.insert(next, wanted.clone());
                Event::Requested(wanted)
            }
            Happening::End(n) => {
                let known: Vec<u64> = account
                    .running
                    .keys()
                    .chain(account.waiting.keys())
                    .copied()
                    .collect();
                let Some(id) = pick(n, &known) else { continue };
                account.running.remove(&id);
                account.waiting.remove(&id);
                account.moves.remove(&id);
                Event::Ended(AggregateId(id))
            }
            Happening::MoveDone(n, done) => {
                let moving: Vec<u64> = account.moves.keys().copied().collect();
                let Some(id) = pick(n, &moving) else { continue };
                account.end_move(id, done);
                let took = at(3);
                let result = if done {
                    MoveResult::Done { took }
                } else {
                    MoveResult::Failed
                };
                Event::MoveEnded(AggregateId(id), result)
            }
            Happening::Leave(id) => {
                if !account.hosts.contains_key(&id) {
                    assert!(s.step(at(now), Event::HostLeft(HostId(id))).is_err());
                    continue;
                }
                // Moves to it have failed.
                account.moves.retain(|aggregate, moving| {
                    account.running[aggregate].contains_key(&id)
                        || moving.transfers.iter().all(|transfer| transfer.to.0 != id)
                });
                // What had a part there is lost: the decisions say so below.
                let decisions = s.step(at(now), Event::HostLeft(HostId(id))).unwrap();
                let lost = |d: &&Decision| matches!(d, Decision::Lost { .. });
                let named = decisions.iter().filter(lost).count();
                let had = account
                    .running
                    .values()
                    .filter(|p| p.contains_key(&id))
                    .count();
                assert_eq!(
                    named, had,
                    "all that had a part there are named, and no other"
                );
                account.take(&decisions);
                account.hosts.remove(&id);
                account.check();
                account.agrees_with(&s);
                continue;
            }
            Happening::Join(id) => {
                if account.hosts.contains_key(&id) {
                    assert!(s.step(at(now), Event::HostJoined(host(id))).is_err());
                    continue;
                }
                account.hosts.insert(id, host(id).capacity);
                Event::HostJoined(host(id))
            }
            Happening::Cordon(id, cordoned, drain) => Event::Cordoned {
                host: HostId(id),
                cordoned,
                drain,
            },
            Happening::Deadline(id, deadline) => Event::Deadline(HostId(id), deadline.map(at)),
            Happening::Capacity(id, cores) => {
                let wanted = Room::new(cores, u64::from(cores) * 4 * GIB);
                let used = account.used().get(&id).copied().unwrap_or_default();
                if let Some(capacity) = account.hosts.get_mut(&id) {
                    *capacity = Room::new(
                        wanted.cores.max(used.cores),
                        wanted.memory_mib.max(used.memory_mib),
                    );
                }
                Event::Capacity(HostId(id), wanted)
            }
            Happening::MoveAsked(n, from, to) => {
                let running: Vec<u64> = account.running.keys().copied().collect();
                let Some(id) = pick(n, &running) else {
                    continue;
                };
                let known = |host: u32| account.hosts.contains_key(&host);
                if !known(to) || !from.is_none_or(known) {
                    continue;
                }
                Event::MoveAsked {
                    id: AggregateId(id),
                    from: from.map(HostId),
                    to: HostId(to),
                }
            }
            Happening::WantedBack(id, gib) => Event::WantedBack(HostId(id), gib * GIB),
            Happening::Sick(id, true) => Event::HostHealth(HostId(id), Health::Sick("x".into())),
            Happening::Sick(id, false) => Event::HostHealth(HostId(id), Health::Well),
            Happening::Pass => Event::Passed,
        };
        let of_host = match &event {
            Event::Cordoned { host, .. } => Some(*host),
            Event::Deadline(host, _) | Event::HostHealth(host, _) => Some(*host),
            Event::Capacity(host, _) | Event::WantedBack(host, _) => Some(*host),
            _ => None,
        };
        let known = of_host.is_none_or(|host| account.hosts.contains_key(&host.0));
        match s.step(at(now), event) {
            Ok(decisions) => {
                assert!(known);
                for decision in &decisions {
                    let sentence = decision.explain(s.cluster());
                    assert!(sentence.ends_with('.'), "{sentence}");
                }
                account.take(&decisions);
            }
            Err(error) => assert!(!known, "{error}"),
        }
        account.agrees_with(&s);
    }
    finish(s, account, now);
}

/// Every move ends, every host is well: then nobody waits who finds room on an empty
/// cluster, once all that runs has ended.
fn finish(mut s: Scheduler, mut account: Account, mut now: u64) {
    for number in 0..6 {
        now += 1000;
        let joins = !account.hosts.contains_key(&number);
        if joins {
            account.hosts.insert(number, host(number).capacity);
            let decisions = s.step(at(now), Event::HostJoined(host(number)));
            account.take(&decisions.unwrap());
        }
        let id = HostId(number);
        for event in [
            Event::Cordoned {
                host: id,
                cordoned: false,
                drain: false,
            },
            Event::Deadline(id, None),
            Event::HostHealth(id, Health::Well),
            Event::WantedBack(id, 0),
        ] {
            account.take(&s.step(at(now), event).unwrap());
        }
    }
    while let Some(id) = account.moves.keys().next().copied() {
        now += 1;
        account.end_move(id, true);
        let done = MoveResult::Done { took: at(1) };
        account.take(
            &s.step(at(now), Event::MoveEnded(AggregateId(id), done))
                .unwrap(),
        );
    }
    end_all(&mut s, &mut account, &mut now);
    for number in 0..6 {
        now += 1;
        // What has just started may run there.
        end_all(&mut s, &mut account, &mut now);
        account.hosts.insert(number, host(number).capacity);
        let event = Event::Capacity(HostId(number), host(number).capacity);
        account.take(&s.step(at(now), event).unwrap());
    }
    end_all(&mut s, &mut account, &mut now);
    // A host may have lent more when they were asked for.
    let spreads = s.policy_name().starts_with("fragbff");
    account.waiting.retain(|_, request| {
        let hosts_max = if spreads { request.hosts_max } else { 1 };
        s.cluster().could_hold(request, hosts_max)
    });
    assert!(
        account.waiting.is_empty(),
        "{:?} wait for ever",
        account.waiting
    );
    assert_eq!(s.cluster().used(), Room::NONE);
}

fn end_all(s: &mut Scheduler, account: &mut Account, now: &mut u64) {
    while let Some(id) = account.running.keys().next().copied() {
        *now += 1;
        account.running.remove(&id);
        account.moves.remove(&id);
        account.take(&s.step(at(*now), Event::Ended(AggregateId(id))).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_room_is_promised_twice(
        which in 0..POLICY_NAMES.len(),
        backfill in 0..3_usize,
        hold in 0..30_u64,
        happenings in prop::collection::vec(happening(), 1..120),
    ) {
        let limits = Limits { backfill, hold: at(hold), notice: at(60), ..Limits::default() };
        run(policy_by_name(POLICY_NAMES[which]).unwrap(), limits, happenings);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    /// Each part has what its cores take of the memory, and the first one its least beside it.
    #[test]
    fn each_part_has_memory_for_its_cores(
        hosts in prop::collection::vec((1..=6_u32, 64..=500_u64), 2..=5),
        cores in 1..=8_u32,
        memory_mib in 64..=700_u64,
        most in any::<bool>(),
    ) {
        let start = if most { Start::MostHosts } else { Start::FewestHosts };
        let mut s = cluster(frag_bff(start, Goal::FewestHosts), &vec![1; hosts.len()]);
        for (number, (cores, memory_mib)) in (0..).zip(hosts) {
            let room = Room::new(cores, memory_mib);
            step(&mut s, 1, Event::Capacity(HostId(number), room));
        }
        let mut wanted = request(1, cores);
        wanted.core_memory_mib = 58;
        wanted.room.memory_mib = memory_mib + 58 * u64::from(cores);
        wanted.home = Some(HostId(0));
        wanted.hosts_max = 16;
        let room = wanted.room;
        step(&mut s, 2, Event::Requested(wanted));
        if let Some(aggregate) = s.cluster().aggregate(AggregateId(1)) {
            let parts = &aggregate.placement.parts;
            prop_assert_eq!(aggregate.placement.room(), room);
            for (number, part) in parts.iter().enumerate() {
                let least = 58 * u64::from(part.room.cores) + if number == 0 { 64 } else { 0 };
                prop_assert!(part.room.memory_mib >= least, "{:?}", parts);
            }
        }
    }
}
