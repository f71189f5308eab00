//! A cluster of many hosts and aggregates in memory, with its page: to look at, and to measure
//! what a server costs. `cargo run --release -p weft-web --example crowd -- 100 500`
//!
//! Hosts report, aggregates start and end, and a leader decides, all in this process. The thread
//! `weft-feed` and the server's own are what `weft cluster serve` has; their processor time is
//! printed at the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_cluster::{
    Cluster, Flow, HostRecord, HostReport, Live, LiveHost, Mark, Plan, Planner, Term, WorkKind,
    WorkRequest,
};
use weft_store::{Embedded, LeaseId};
use weft_web::{Listen, Server};

fn main() {
    let mut words = std::env::args().skip(1);
    let mut number = |default: usize| {
        let word = words.next();
        word.map_or(default, |word| word.parse().expect("a number"))
    };
    let (hosts, aggregates, seconds) = (number(100), number(500), number(3600));
    let store = Arc::new(Embedded::in_memory().expect("a store"));
    let mut crowd = Crowd::new(store, hosts);
    for n in 0..aggregates {
        crowd.ask(n);
        crowd.decide();
    }
    let work = crowd.cluster.work().expect("work");
    eprintln!(
        "{hosts} hosts, {aggregates} aggregates: {} run, {} wait",
        work.placed.len(),
        work.asked.len()
    );
    let socket = std::env::temp_dir().join(format!("weft-crowd-{}.sock", std::process::id()));
    let address = "127.0.0.1:0".parse().expect("an address");
    let listen = Listen { address, tls: None };
    let server = Server::bind(crowd.cluster.clone(), &socket, &listen).expect("a server");
    println!("{}", server.link().expect("it listens"));
    let until = Instant::now() + Duration::from_secs(seconds as u64);
    std::thread::spawn(move || crowd.live(aggregates));
    let end = async move {
        tokio::time::sleep_until(until.into()).await;
    };
    let begun = Instant::now();
    server.run(end).expect("it serves");
    for name in ["crowd", "weft-feed"] {
        let busy = busy_seconds(name);
        let share = 100.0 * busy / begun.elapsed().as_secs_f64();
        eprintln!("thread {name}: {busy:.2} s of a processor, {share:.1} %");
    }
}

/// The processor time of this process's thread.
fn busy_seconds(name: &str) -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let read = |task: std::io::Result<std::fs::DirEntry>| {
        let path = task.ok()?.path();
        let comm = std::fs::read_to_string(path.join("comm")).ok()?;
        let stat = std::fs::read_to_string(path.join("stat")).ok()?;
        // After the name in brackets: user and system time are the 12th and 13th words.
        let words: Vec<&str> = stat.rsplit(") ").next()?.split(' ').collect();
        let ticks: u64 = words[11].parse::<u64>().ok()? + words[12].parse::<u64>().ok()?;
        (comm.trim() == name).then_some(ticks as f64 / 100.0)
    };
    tasks.filter_map(read).sum()
}

struct Crowd {
    cluster: Cluster,
    leases: Vec<LeaseId>,
    leads: LeaseId,
    term: Term,
    planner: Planner,
    begun: Instant,
}

fn name(n: usize) -> String {
    format!("host-{n:03}")
}

impl Crowd {
    fn new(store: Arc<Embedded>, hosts: usize) -> Crowd {
        let record = |n: usize| HostRecord {
            name: name(n),
            key: format!("weft-key-{n}"),
            address: format!("10.0.{}.{}:7117", n / 256, n % 256),
            cores: [8, 16, 32, 12][n % 4],
            memory_bytes: 64 << 30,
            features: Vec::new(),
            version: "1".into(),
            number: 0,
        };
        let cluster = Cluster::init(store, "crowd", &record(0)).expect("a cluster");
        for n in 1..hosts {
            let token = cluster.invite(Duration::from_secs(60)).expect("a token");
            cluster.join(&token, &record(n)).expect("it joins");
        }
        let leases = (0..hosts).map(|_| cluster.lease().expect("a lease"));
        let leases: Vec<LeaseId> = leases.collect();
        let leads = cluster.lease_to_lead().expect("a lease");
        let term = cluster.campaign(&name(0), leads).expect("a store");
        let crowd = Crowd {
            leases,
            leads,
            term: term.expect("it leads"),
            planner: Planner::default(),
            begun: Instant::now(),
            cluster,
        };
        (0..hosts).for_each(|n| crowd.report(n));
        crowd
    }

    fn report(&self, n: usize) {
        let turn = self.begun.elapsed().as_secs();
        let report = HostReport {
            lends_bytes: 60 << 30,
            free_bytes: 30 << 30,
            load: (n as u64 * 7 + turn) as f64 % 8.0,
            ..HostReport::default()
        };
        let _ = self.cluster.renew(self.leases[n]);
        let key = format!("weft-key-{n}");
        let _ = self.cluster.report(&name(n), &key, &report, self.leases[n]);
    }

    fn ask(&self, n: usize) {
        let request = WorkRequest {
            name: format!("vm-{n:04}"),
            kind: if n.is_multiple_of(5) {
                WorkKind::Program
            } else {
                WorkKind::Machine
            },
            home: name(n * 37 % self.leases.len()),
            anywhere: false,
            caller: None,
            user: ["ann", "bob", "eve"][n % 3].into(),
            cores: [1, 2, 4, 2, 6][n % 5],
            memory_mib: [1024, 2048, 6144, 3072, 8192][n % 5],
            hosts_max: 4,
            priority: 0,
            mark: Mark {
                boot: String::new(),
                namespace: String::new(),
                nonce: String::new(),
            },
        };
        let lease = self.leases[n % self.leases.len()];
        let _ = self.cluster.ask(&request, lease);
    }

    /// A turn of the leader, which also carries out what it orders.
    fn decide(&mut self) {
        let Ok(state) = self.cluster.state() else {
            return;
        };
        let now = self.begun.elapsed();
        for plan in self.planner.update(now, &state) {
            let _ = match plan {
                Plan::Place { asked, parts, why } => self.term.place(&asked, parts, why),
                Plan::Answer {
                    asked,
                    why,
                    refused,
                    is_first,
                } => self.term.answer(&asked, why, refused, is_first),
                Plan::Move { placed, order } => self.term.order(&placed, order),
                Plan::CancelMove { placed } => self.term.cancel_order(&placed),
                Plan::Failing { host, why } => self.term.failing(&host, &why),
                Plan::RefuseWish { placed, why } => self.term.refuse_wish(&placed, &why),
                Plan::Stuck { .. } => Ok(true),
                Plan::Learned { record } => self.term.learned(&record),
                Plan::Note { kind, what } => self.term.note(kind, what),
            };
        }
        for placed in state
            .work
            .placed
            .values()
            .filter(|placed| placed.order.is_some())
        {
            let _ = self.cluster.order_ended(placed, Ok(None));
        }
    }

    /// Half of the agents say what their aggregates do, as each does every two seconds while
    /// somebody looks.
    fn tell(&self, turn: u64) {
        let (Ok(true), Ok(work)) = (self.cluster.is_watched(), self.cluster.work()) else {
            return;
        };
        for placed in work
            .placed
            .values()
            .filter(|placed| placed.id % 2 == turn % 2)
        {
            let rate = |n: u64| ((placed.id * 7919 + turn * 31 + n) % 4096 * 1000) as f64;
            let home = &placed.parts[0].host;
            let hosts = placed.parts.iter().map(|part| LiveHost {
                host: part.host.clone(),
                memory_bytes: part.memory_mib << 20,
                vcpus: Some(part.cores),
                executes: true,
            });
            let others = placed.parts[1..].iter().zip(0_u64..);
            let flows = others.flat_map(|(part, n)| {
                let flow = |from: &String, to: &String, n| Flow {
                    from: from.clone(),
                    to: to.clone(),
                    bytes_per_s: rate(n),
                };
                [
                    flow(home, &part.host, 2 * n),
                    flow(&part.host, home, 2 * n + 1),
                ]
            });
            let live = Live {
                id: placed.id,
                hosts: hosts.collect(),
                flows: flows.collect(),
                moved: None,
            };
            let lease = self.leases[0];
            let _ = self.cluster.tell_live(&placed.request.name, &live, lease);
        }
    }

    /// Each second one aggregate ends and another one comes.
    fn live(mut self, aggregates: usize) {
        let mut next = aggregates;
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let _ = self.cluster.renew(self.leads);
            let hosts = self.leases.len();
            (0..hosts)
                .filter(|n| (n + next).is_multiple_of(3))
                .for_each(|n| self.report(n));
            if let Ok(work) = self.cluster.work()
                && let Some(placed) = work
                    .placed
                    .values()
                    .nth(next * 31 % work.placed.len().max(1))
            {
                let _ = self.cluster.work_ended(&placed.request.name, placed.id);
            }
            self.ask(next);
            next += 1;
            self.decide();
            self.tell(next as u64);
        }
    }
}
