//! The policies and the scheduler: by example, and by random events with a checker that
//! keeps its own account.

mod figure_14;
mod policies;
mod random;
mod scheduler;

use crate::*;
use std::time::Duration;

const GIB: u64 = 1024;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn frag_bff(start: Start, goal: Goal) -> Box<dyn Policy> {
    Box::new(FragBff { start, goal })
}

/// A scheduler with hosts of these cores and 4 GiB for each, and no time to hold.
fn cluster(policy: Box<dyn Policy>, cores: &[u32]) -> Scheduler {
    let limits = Limits {
        hold: Duration::ZERO,
        ..Limits::default()
    };
    let mut scheduler = Scheduler::new(policy, Costs::default(), limits);
    for (number, &cores) in (0..).zip(cores) {
        step(&mut scheduler, 0, Event::HostJoined(host(number, cores)));
    }
    scheduler
}

fn request(id: u64, cores: u32) -> Request {
    let room = Room::new(cores, u64::from(cores) * 4 * GIB);
    Request::new(AggregateId(id), format!("vm{id}"), room)
}

/// The cores of an aggregate, by host.
fn cores_of(scheduler: &Scheduler, id: u64) -> Vec<(u32, u32)> {
    let aggregate = scheduler
        .cluster()
        .aggregate(AggregateId(id))
        .expect("it runs");
    let mut cores: Vec<(u32, u32)> = aggregate
        .placement
        .parts
        .iter()
        .map(|part| (part.host.0, part.room.cores))
        .collect();
    cores.sort_unstable();
    cores
}

fn home_of(scheduler: &Scheduler, id: u64) -> u32 {
    let aggregate = scheduler
        .cluster()
        .aggregate(AggregateId(id))
        .expect("it runs");
    aggregate.placement.parts[0].host.0
}

/// A host with 4 GiB for each core.
fn host(number: u32, cores: u32) -> Host {
    let room = Room::new(cores, u64::from(cores) * 4 * GIB);
    Host::new(HostId(number), format!("node{number}"), room)
}

fn disk() -> Vec<Device> {
    vec![Device {
        kind: "disk".into(),
        count: 1,
    }]
}

fn free(scheduler: &Scheduler, host: u32) -> u32 {
    scheduler.cluster().free(HostId(host)).cores
}

/// Ends the moves among `decisions`, and those that follow, as if they took no time.
fn settle(scheduler: &mut Scheduler, now: Duration, decisions: Vec<Decision>) -> Vec<Decision> {
    let mut all = decisions;
    let mut seen = 0;
    while seen < all.len() {
        if let Decision::Move {
            moving, expected, ..
        } = &all[seen]
        {
            let done = MoveResult::Done { took: *expected };
            let event = Event::MoveEnded(moving.aggregate, done);
            all.extend(scheduler.step(now, event).unwrap());
        }
        seen += 1;
    }
    all
}

fn step(scheduler: &mut Scheduler, now: u64, event: Event) -> Vec<Decision> {
    let decisions = scheduler.step(at(now), event).unwrap();
    settle(scheduler, at(now), decisions)
}
