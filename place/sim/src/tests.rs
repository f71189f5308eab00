//! Small runs, judged by what must hold for any policy.

use crate::hosts::Hosts;
use crate::outcome::Outcome;
use crate::simulation::simulate;
use crate::trace::{Job, Made, make};
use crate::{picture, table};
use std::time::Duration;
use weft_place::{Costs, Limits, POLICY_NAMES, Room, policy_by_name};

const HOSTS: Hosts = Hosts {
    count: 4,
    room: Room::new(12, 48 * 1024),
    group: 100,
    overcommit: 1.0,
};

fn jobs(seed: u64) -> Vec<Job> {
    let made = Made {
        bursts: 4,
        burst: 100,
        between: Duration::from_secs(800),
        faster: 100.0,
        largest: HOSTS.room,
    };
    make(made, seed)
}

fn run(policy: &str, hosts: Hosts, jobs: &[Job]) -> Outcome {
    let policy = policy_by_name(policy).unwrap();
    simulate(hosts, jobs, policy, Costs::default(), Limits::default(), 8)
}

#[test]
fn runs_repeat() {
    let jobs = jobs(3);
    for name in POLICY_NAMES {
        let same = |outcome: Outcome| {
            (
                outcome.delayed,
                outcome.moves,
                outcome.lost_core_hours,
                outcome.waited_core_hours,
            )
        };
        assert_eq!(
            same(run(name, HOSTS, &jobs)),
            same(run(name, HOSTS, &jobs)),
            "{name}"
        );
    }
}

#[test]
fn enough_room_delays_nobody() {
    let hosts = Hosts {
        count: 1000,
        ..HOSTS
    };
    for name in POLICY_NAMES {
        let outcome = run(name, hosts, &jobs(3));
        assert_eq!(
            (outcome.delayed, outcome.spread_aggregates),
            (0, 0),
            "{name}"
        );
        assert_eq!(outcome.at_once_percent, 100.0);
        assert_eq!(outcome.lost_core_hours, 0.0);
    }
}

#[test]
fn fragments_are_used_before_anybody_waits() {
    for seed in 0..5 {
        let jobs = jobs(seed);
        let whole = run("bff", HOSTS, &jobs);
        let spread = run("fragbff-fewest-fragmentation", HOSTS, &jobs);
        assert!(
            spread.packing_at_first_delay_percent >= whole.packing_at_first_delay_percent,
            "seed {seed}"
        );
        assert!(spread.spread_aggregates > 0);
    }
}

/// One host, two machines that fill it twice over: half of the work is lost while both run.
#[test]
fn overcommitting_loses_what_is_promised_twice() {
    let job = |arrival: u64, lifetime: Option<u64>| Job {
        arrival: Duration::from_secs(arrival),
        room: Room::new(12, 1024),
        lifetime: lifetime.map(Duration::from_secs),
    };
    let jobs = [job(0, Some(100)), job(0, Some(50)), job(200, None)];
    let hosts = Hosts {
        count: 1,
        overcommit: 2.0,
        ..HOSTS
    };
    let outcome = run("least-loaded", hosts, &jobs);
    assert_eq!(outcome.lost_core_hours, 12.0 * 50.0 / 3600.0);
    assert_eq!(outcome.done_core_hours, 12.0 * 100.0 / 3600.0);
}

#[test]
fn tables_and_pictures_name_every_policy() {
    let jobs = jobs(1);
    let outcomes: Vec<Outcome> = POLICY_NAMES
        .iter()
        .map(|name| run(name, HOSTS, &jobs))
        .collect();
    let (table, picture) = (
        table::render(&outcomes),
        picture::render("a title", &outcomes),
    );
    for name in POLICY_NAMES {
        assert!(table.contains(name) && picture.contains(name));
    }
    assert_eq!(
        table.lines().map(|line| line.matches('|').count()).max(),
        Some(9)
    );
    assert!(!picture.contains("NaN") && picture.ends_with("</svg>\n"));
}
