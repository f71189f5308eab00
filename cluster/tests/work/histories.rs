//! Random histories: requests, ends, agents and hosts that die, and leaders that come and go
//! between any two of their steps. A checker looks at nothing but the store.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
enum Happening {
    Ask {
        home: usize,
        anywhere: bool,
        cores: u32,
        memory_gib: u64,
        hosts_max: u32,
    },
    /// It ends, or is not wanted any more.
    End(usize),
    /// Its agent dies; what is placed runs on.
    AgentDies(usize),
    HostDies(usize),
    HostLives(usize),
    /// It has lent so much, for others than the cluster's work or for what has ended.
    Lent(usize, u64),
    /// Its owner wants so much of that back.
    WantedBack(usize, u64),
    /// An operator keeps work away, and maybe has all leave.
    Cordon(usize, bool, bool),
    /// An agent carries an order out, or cannot.
    Carry(usize, bool),
    Turn,
    /// Another host leads between the plan of the leader and its commit.
    Deposed,
    /// A request is withdrawn, or something ends, between plan and commit.
    EndedMeanwhile(usize),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        6 => (0..4_usize, any::<bool>(), 1..=8_u32, 1..=8_u64, 1..=4_u32).prop_map(
            |(home, anywhere, cores, memory_gib, hosts_max)| Happening::Ask {
                home, anywhere, cores, memory_gib, hosts_max
            }
        ),
        3 => any::<usize>().prop_map(Happening::End),
        1 => any::<usize>().prop_map(Happening::AgentDies),
        1 => (0..4_usize).prop_map(Happening::HostDies),
        2 => (0..4_usize).prop_map(Happening::HostLives),
        2 => (0..4_usize, any::<bool>(), any::<bool>())
            .prop_map(|(n, cordoned, draining)| Happening::Cordon(n, cordoned, draining)),
        2 => (0..4_usize, 0..8000_u64).prop_map(|(n, mib)| Happening::Lent(n, mib)),
        1 => (0..4_usize, 1..8000_u64).prop_map(|(n, mib)| Happening::WantedBack(n, mib)),
        6 => (any::<usize>(), prop::bool::weighted(0.8))
            .prop_map(|(n, done)| Happening::Carry(n, done)),
        6 => Just(Happening::Turn),
        1 => Just(Happening::Deposed),
        2 => any::<usize>().prop_map(Happening::EndedMeanwhile),
    ]
}

/// The cluster as its users see it.
struct Site {
    cluster: Cluster,
    policy: &'static str,
    leader: Leader,
    alive: BTreeMap<usize, LeaseId>,
    /// Those that were asked for, with their numbers and agents, until they end.
    wanted: BTreeMap<String, (u64, LeaseId)>,
    asked: u32,
    /// The numbers of all that was seen to run, and their homes.
    begun: BTreeMap<u64, String>,
    now: u64,
}

impl Site {
    fn new(policy: &'static str) -> Site {
        let cluster = cluster();
        let alive = (0..3).map(|n| (n, live(&cluster, HOSTS[n]))).collect();
        let leader = Leader::new(&cluster, "alpha", policy).unwrap();
        Site {
            cluster,
            policy,
            leader,
            alive,
            wanted: BTreeMap::new(),
            asked: 0,
            begun: BTreeMap::new(),
            now: 0,
        }
    }

    fn pick(&self, n: usize) -> Option<String> {
        let count = self.wanted.len();
        (count > 0).then(|| self.wanted.keys().nth(n % count).unwrap().clone())
    }

    /// The agent says that it has ended, and goes.
    fn end(&mut self, n: usize) {
        if let Some(name) = self.pick(n) {
            let (id, lease) = self.wanted.remove(&name).unwrap();
            self.cluster.end_lease(lease).unwrap();
            self.cluster.work_ended(&name, id).unwrap();
        }
    }

    fn carry(&mut self, n: usize, done: bool) {
        let work = self.cluster.work().unwrap();
        let ordered: Vec<&Placed> = work
            .placed
            .values()
            .filter(|placed| placed.order.is_some() && work.agents.contains(&placed.request.name))
            .collect();
        if ordered.is_empty() {
            return;
        }
        let placed = ordered[n % ordered.len()];
        let outcome = if done { Ok(None) } else { Err("no".into()) };
        self.cluster.order_ended(placed, outcome.clone()).unwrap();
        // Said twice, or of an order of the past: nothing happens.
        self.cluster.order_ended(placed, outcome).unwrap();
    }

    fn happens(&mut self, happening: Happening) {
        self.now += 3;
        match happening {
            Happening::Ask {
                home,
                anywhere,
                cores,
                memory_gib,
                hosts_max,
            } => {
                self.asked += 1;
                let name = format!("w{}", self.asked);
                let home = HOSTS[home].0;
                let wanted = WorkRequest {
                    anywhere,
                    ..request(&name, home, cores, memory_gib * 1024, hosts_max)
                };
                let lease = self.cluster.lease().unwrap();
                let id = self.cluster.ask(&wanted, lease).unwrap();
                self.wanted.insert(name, (id, lease));
            }
            Happening::End(n) => self.end(n),
            Happening::AgentDies(n) => {
                if let Some(name) = self.pick(n) {
                    self.cluster.end_lease(self.wanted[&name].1).unwrap();
                    // Of what waits nothing is left.
                    if !self.cluster.work().unwrap().placed.contains_key(&name) {
                        self.wanted.remove(&name);
                    }
                }
            }
            Happening::HostDies(n) => {
                if let Some(lease) = self.alive.remove(&n) {
                    self.cluster.end_lease(lease).unwrap();
                }
            }
            Happening::HostLives(n) => {
                let cluster = &self.cluster;
                self.alive
                    .entry(n)
                    .or_insert_with(|| live(cluster, HOSTS[n]));
            }
            Happening::Lent(n, lent_mib) => {
                if let Some(lease) = self.alive.get(&n) {
                    report(&self.cluster, HOSTS[n], *lease, lent_mib, 0);
                }
            }
            Happening::WantedBack(n, mib) => {
                if let Some(lease) = self.alive.get(&n) {
                    report(&self.cluster, HOSTS[n], *lease, mib, mib);
                }
            }
            Happening::Cordon(n, cordoned, draining) => {
                let cordon = Cordon { cordoned, draining };
                self.cluster.cordon(HOSTS[n].0, cordon).unwrap();
            }
            Happening::Carry(n, done) => self.carry(n, done),
            Happening::Turn => self.turn(),
            Happening::Deposed => {
                let plans = self.leader.plan(&self.cluster, self.now);
                let before = self.cluster.work().unwrap();
                self.cluster.end_lease(self.leader.lease).unwrap();
                let next = Leader::new(&self.cluster, "beta", self.policy).unwrap();
                let old = std::mem::replace(&mut self.leader, next);
                let nothing = plans.is_empty();
                match old.commit(plans) {
                    Err(ClusterError::NotLeader(_)) => {}
                    outcome => assert!(nothing, "{outcome:?}"),
                }
                let after = self.cluster.work().unwrap();
                assert_eq!(
                    (before.placed, before.answers),
                    (after.placed, after.answers)
                );
            }
            Happening::EndedMeanwhile(n) => {
                let plans = self.leader.plan(&self.cluster, self.now);
                self.end(n);
                self.leader.commit(plans).unwrap();
            }
        }
        self.check();
    }

    fn turn(&mut self) {
        let plans = self.leader.plan(&self.cluster, self.now);
        self.leader.commit(plans).unwrap();
    }

    /// From the store alone: no host gives more than it has, and what is placed is what was
    /// asked for, once.
    fn check(&mut self) {
        let work = self.cluster.work().unwrap();
        assert_eq!(work.damaged, [""; 0]);
        let mut used: BTreeMap<String, (u32, u64)> = BTreeMap::new();
        let mut ids = BTreeSet::new();
        for placed in work.placed.values() {
            assert!(ids.insert(placed.id), "{} runs once", placed.id);
            let request = &placed.request;
            let home = self.begun.entry(placed.id);
            let home = home.or_insert_with(|| request.home.clone());
            assert_eq!(*home, request.home, "a home stays");
            assert_eq!(placed.parts[0].host, request.home);
            assert!(placed.parts.len() <= request.hosts_max as usize);
            let cores: u32 = placed.parts.iter().map(|part| part.cores).sum();
            let memory: u64 = placed.parts.iter().map(|part| part.memory_mib).sum();
            assert_eq!((cores, memory), (request.cores, request.memory_mib));
            // What is on the move has its room on both sides.
            let there = placed.order.iter().flat_map(|order| &order.parts);
            let arrives = there.map(|part| {
                let mut here = placed.parts.iter();
                let here = here.find(|now| now.host == part.host);
                let (cores, mib) = here.map_or((0, 0), |now| (now.cores, now.reserved_mib));
                WorkPart {
                    host: part.host.clone(),
                    cores: part.cores.saturating_sub(cores),
                    memory_mib: 0,
                    reserved_mib: part.reserved_mib.saturating_sub(mib),
                }
            });
            let arrives: Vec<WorkPart> = arrives.collect();
            for part in placed.parts.iter().chain(&arrives) {
                let host = used.entry(part.host.clone()).or_default();
                host.0 += part.cores;
                host.1 += part.reserved_mib;
            }
        }
        for (name, cores) in HOSTS {
            let (used_cores, used_mib) = used.get(name).copied().unwrap_or_default();
            assert!(used_cores <= cores, "{name} gives {used_cores} cores");
            let has = u64::from(cores) * (1024 + 58);
            assert!(used_mib <= has, "{name} gives {used_mib} MiB");
        }
        // The log has each start once, and no start that did not happen.
        let log = self.cluster.log().unwrap();
        let numbers: Vec<u64> = log.iter().map(|record| record.number).collect();
        let expected: Vec<u64> = (1..=log.len() as u64).collect();
        assert_eq!(numbers, expected);
        let starts = log.iter().filter(|record| record.kind == LogKind::Start);
        assert_eq!(starts.count(), self.begun.len());
    }

    /// Nothing is refused that its home alone could hold, whichever that may be.
    fn check_refused(&self, request: &WorkRequest) {
        let mut homes = HOSTS
            .iter()
            .filter(|(name, _)| request.anywhere || *name == request.home);
        let fits =
            |cores: u32| request.cores <= cores && request.memory_mib <= u64::from(cores) * 1024;
        assert!(
            !homes.any(|(_, cores)| fits(*cores)),
            "{request:?} was refused"
        );
    }

    /// All hosts live and what runs ends: then nothing waits.
    fn finish(&mut self) {
        for n in 0..HOSTS.len() {
            self.happens(Happening::HostLives(n));
            self.happens(Happening::Lent(n, 0));
            self.happens(Happening::Cordon(n, false, false));
        }
        for _ in 0..=self.wanted.len() {
            self.turn();
            self.check();
            let work = self.cluster.work().unwrap();
            let done: Vec<String> = self
                .wanted
                .iter()
                .filter(|(name, (id, _))| {
                    let answer = work.answer(name, *id);
                    work.placed.contains_key(*name) || answer.is_some_and(|answer| answer.refused)
                })
                .map(|(name, _)| name.clone())
                .collect();
            for name in done {
                if let Some(request) = work.asked.iter().find(|asked| asked.request.name == name) {
                    self.check_refused(&request.request);
                }
                let (id, lease) = self.wanted.remove(&name).unwrap();
                self.cluster.end_lease(lease).unwrap();
                self.cluster.work_ended(&name, id).unwrap();
            }
        }
        let work = self.cluster.work().unwrap();
        assert!(self.wanted.is_empty(), "{:?} of {work:?}", self.wanted);
        assert!(work.placed.is_empty() && work.asked.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn leaders_come_and_go_and_no_room_is_promised_twice(
        policy in prop_oneof![
            Just("bff"), Just("fragbff-fewest-fragmentation"), Just("fragbff-most-hosts"),
            Just("fragbff-fewest-hosts"), Just("bff-migration")
        ],
        happenings in prop::collection::vec(happening(), 1..40),
    ) {
        let mut site = Site::new(policy);
        for happening in happenings {
            site.happens(happening);
        }
        site.finish();
    }
}

/// A move has failed, and what waits starts in its room: the leader knows that it did.
#[test]
fn what_starts_as_a_move_fails_keeps_its_room() {
    let ask = |home, cores, memory_gib, hosts_max| Happening::Ask {
        home,
        anywhere: false,
        cores,
        memory_gib,
        hosts_max,
    };
    let mut site = Site::new("fragbff-fewest-fragmentation");
    for happening in [
        ask(0, 2, 5, 3),
        ask(2, 1, 1, 1),
        ask(1, 8, 1, 1),
        ask(0, 1, 1, 1),
        Happening::Turn,
        ask(0, 1, 2, 1),
        Happening::Cordon(2, false, true),
        Happening::Turn,
        Happening::Carry(0, false),
        Happening::EndedMeanwhile(1),
        ask(0, 1, 1, 1),
        ask(0, 1, 1, 1),
        ask(0, 1, 1, 1),
    ] {
        site.happens(happening);
    }
    site.finish();
}
