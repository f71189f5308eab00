//! Seeded histories of one machine over all hosts. A checker that knows nothing of the decisions
//! looks at where its parts are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weft_malleable::{
    Cluster, Forecast, Host, HostId, Machine, MachineId, OneMachine, Order, Rules, decide,
};
use weft_test_support::{Random, seed};

const MIB: u64 = 1 << 20;
/// Bytes a second between hosts.
const LINK: f64 = 100.0 * MIB as f64;
const TICK: Duration = Duration::from_millis(250);
const END: Duration = Duration::from_secs(3600);
const HISTORIES: u64 = 60;

/// The machine goes to other hosts.
struct Change {
    began: Duration,
    ends: Duration,
    to: Vec<HostId>,
    /// What leaves, if something does.
    leaving: Option<Machine>,
}

struct World {
    random: Random,
    now: Duration,
    cluster: Cluster,
    one: OneMachine,
    forecast: Forecast,
    rules: Rules,
    /// Where its parts are, its home's first.
    over: Vec<HostId>,
    change: Option<Change>,
    queue: Vec<Duration>,
    next_host: u32,
    changes: usize,
    home_moves: usize,
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Random::new(seed);
        let one = OneMachine {
            hosts_max: 2 + random.index(7),
            at_once_max: 10,
            memory: (128 + random.below(3000)) * MIB,
            overhead: 300 * MIB,
        };
        let mut world = World {
            now: Duration::ZERO,
            cluster: Cluster {
                wanted: 2 + random.index(6),
                one: Some(one),
                ..Cluster::default()
            },
            one,
            forecast: Forecast::new(LINK * (0.67 + 0.0083 * random.below(100) as f64)),
            rules: Rules {
                ask_ahead: Duration::from_secs(60),
                ..Rules::default()
            },
            over: Vec::new(),
            change: None,
            queue: Vec::new(),
            next_host: 0,
            changes: 0,
            home_moves: 0,
            random,
        };
        // This one stays for good, and has room for all.
        world.host(None, 8192 * MIB);
        world.host(Some(Duration::from_secs(900)), 8192 * MIB);
        world.over.push(HostId(1));
        world.note();
        world
    }

    fn host(&mut self, until: Option<Duration>, room: u64) {
        let id = HostId(self.next_host);
        self.next_host += 1;
        let host = Host {
            name: format!("h{}", id.0),
            until,
            room,
            leaves: false,
        };
        self.cluster.hosts.insert(id, host);
    }

    /// As a launcher tells it: while the machine goes elsewhere, it needs all of both.
    fn note(&mut self) {
        let mut hosts = self.over.clone();
        let to = self.change.iter().flat_map(|change| &change.to);
        for host in to {
            if !hosts.contains(host) {
                hosts.push(*host);
            }
        }
        let part = |at: &HostId| Machine {
            memory: self.one.part(hosts.len()),
            resident: self.one.memory / hosts.len() as u64,
            dirties: 0.0,
            at: *at,
            moves_to: self.change.as_ref().map(|_| *at),
            is_being_saved: false,
        };
        let parts = hosts.iter().map(part);
        self.cluster.machines = (0..).map(MachineId).zip(parts).collect();
    }

    fn step(&mut self) {
        self.now += TICK;
        let now = self.now;
        for comes in std::mem::take(&mut self.queue) {
            if comes > now {
                self.queue.push(comes);
            } else {
                self.cluster.asked -= 1;
                let until = now + Duration::from_secs(60 + self.random.below(1500));
                // Some are too small for any part.
                let room = (200 + self.random.below(4000)) * MIB;
                self.host(Some(until), room);
            }
        }
        self.arrive();
        self.surprise();
        self.obey();
        self.check();
    }

    fn arrive(&mut self) {
        let now = self.now;
        let Some(change) = self.change.take_if(|change| change.ends <= now) else {
            return;
        };
        if let Some(leaving) = change.leaving {
            self.forecast.learn(&leaving, now - change.began);
        }
        self.home_moves += usize::from(self.over[0] != change.to[0]);
        self.over = change.to;
        self.changes += 1;
        self.note();
    }

    fn surprise(&mut self) {
        let ids: Vec<HostId> = self.cluster.hosts.keys().copied().skip(1).collect();
        match self.random.below(4000) {
            0..4 if !ids.is_empty() => {
                let id = self.random.of(&ids);
                let host = self.cluster.hosts.get_mut(&id).unwrap();
                let sooner = self.now + Duration::from_secs(300);
                host.until = host.until.map(|until| until.min(sooner));
            }
            4..8 if !ids.is_empty() => {
                let id = self.random.of(&ids);
                self.cluster.hosts.get_mut(&id).unwrap().leaves = true;
            }
            // Its agent does not answer for a while, or does again.
            8..12 if !ids.is_empty() => {
                let id = self.random.of(&ids);
                let host = self.cluster.hosts.get_mut(&id).unwrap();
                host.room = if host.room == 0 { 4096 * MIB } else { 0 };
            }
            12..18 => self.cluster.wanted = 1 + self.random.index(8),
            _ => {}
        }
    }

    fn obey(&mut self) {
        for order in decide(&self.cluster, &self.forecast, &self.rules, self.now) {
            match order {
                Order::Ask => {
                    self.cluster.asked += 1;
                    let comes = self.now + Duration::from_secs(self.random.below(120));
                    self.queue.push(comes);
                }
                Order::Reshape { to, why } => {
                    assert!(why.ends_with('.') && why.len() > 5, "{why}");
                    self.begin(to);
                }
                Order::GiveBack(id) => {
                    assert!(!self.over.contains(&id), "{id:?} was given back in use");
                    let goes_to = self.change.as_ref().is_some_and(|it| it.to.contains(&id));
                    assert!(
                        !goes_to,
                        "{id:?} was given back, and the machine comes there"
                    );
                    self.cluster.hosts.remove(&id).unwrap();
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn begin(&mut self, to: Vec<HostId>) {
        assert!(self.change.is_none());
        let distinct: BTreeSet<_> = to.iter().collect();
        assert!(distinct.len() == to.len() && to.len() <= self.one.hosts_max);
        for id in &to {
            assert!(self.cluster.hosts.contains_key(id));
        }
        let both = self.over.iter().chain(&to).collect::<BTreeSet<_>>();
        assert!(both.len() <= self.one.at_once_max);
        let parts: Vec<&Machine> = (self.cluster.machines.values())
            .filter(|part| !to.contains(&part.at))
            .collect();
        let leaving = parts.first().map(|first| Machine {
            resident: parts.iter().map(|part| part.resident).sum(),
            ..(*first).clone()
        });
        let truth = Forecast::new(LINK);
        let takes = match &leaving {
            Some(leaving) => truth.expected(leaving).as_secs_f64(),
            None => 0.5,
        };
        let takes = takes * (0.7 + 0.007 * self.random.below(100) as f64);
        self.change = Some(Change {
            began: self.now,
            ends: self.now + Duration::from_secs_f64(takes),
            to,
            leaving,
        });
        self.note();
    }

    fn check(&self) {
        let ends: BTreeMap<HostId, Duration> = (self.cluster.hosts.iter())
            .filter_map(|(id, host)| Some((*id, host.until?)))
            .collect();
        for id in &self.over {
            let over = ends.get(id).is_some_and(|until| self.now >= *until);
            assert!(!over, "a part is on {id:?}, whose reservation has ended");
        }
    }

    /// Once nothing happens any more it is on all hosts that stay and have room.
    fn settle(&mut self) {
        for host in self.cluster.hosts.values_mut() {
            host.until = None;
            host.room = 8192 * MIB;
        }
        self.queue.clear();
        (self.cluster.asked, self.cluster.wanted) = (0, 0);
        for _ in 0..2400 {
            self.now += TICK;
            self.arrive();
            self.obey();
            self.check();
        }
        let staying = self.cluster.hosts.values().filter(|host| !host.leaves);
        assert_eq!(self.over.len(), staying.count().min(self.one.hosts_max));
    }
}

#[test]
fn no_part_is_where_its_host_has_ended() {
    let (seed, mut changes, mut home_moves) = (seed(), 0, 0);
    for number in 0..HISTORIES {
        let seed = seed.wrapping_add(number);
        let ran = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            while world.now < END {
                world.step();
            }
            world.settle();
            (world.changes, world.home_moves)
        });
        let (changed, moved) = ran.unwrap_or_else(|_| panic!("WEFT_SEED={seed}"));
        changes += changed;
        home_moves += moved;
    }
    let count = HISTORIES as usize;
    assert!(changes > 5 * count, "{changes} changes");
    assert!(home_moves >= count, "the home moved {home_moves} times");
}

/// All hosts end together, and one node writes the pages of all.
#[test]
fn a_machine_on_several_hosts_is_saved_in_time() {
    let end = Duration::from_secs(600);
    for hosts in 2..=6 {
        let mut world = World::new(u64::from(hosts));
        world.cluster.hosts.clear();
        world.next_host = 0;
        for _ in 0..hosts {
            world.host(Some(end), 8192 * MIB);
        }
        world.over = (0..hosts).map(HostId).collect();
        world.note();
        let rate = 50.0 * MIB as f64;
        world.rules.saves = Some(rate);
        let is_saved = |now: &Duration| {
            let orders = decide(&world.cluster, &world.forecast, &world.rules, *now);
            let is_save = |order: &Order| matches!(order, Order::Save { .. });
            orders.iter().any(is_save)
        };
        let mut seconds = (0..600).map(Duration::from_secs);
        let begins = seconds.find(is_saved).unwrap();
        let takes = Duration::from_secs_f64(world.one.memory as f64 / rate);
        assert!(begins + takes + world.rules.margin <= end, "{begins:?}");
        assert!(
            begins + 3 * takes + 2 * world.rules.margin > end,
            "{begins:?}"
        );
    }
}
