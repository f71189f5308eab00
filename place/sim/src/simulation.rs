//! The trace against the scheduler: discrete events, no clock but the simulated one. The
//! time that decisions take is measured beside it and changes nothing.

use crate::hosts::Hosts;
use crate::outcome::{Meter, Outcome};
use crate::trace::Job;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Write;
use std::time::{Duration, Instant};
use weft_place::{
    AggregateId, Costs, Decision, Event, Host, HostId, Limits, MoveResult, Policy, Request,
    Scheduler,
};

/// How often the state is noted for the picture.
const SAMPLES: u32 = 400;

pub fn simulate(
    hosts: Hosts,
    jobs: &[Job],
    policy: Box<dyn Policy>,
    costs: Costs,
    limits: Limits,
    hosts_max: u32,
) -> Outcome {
    let end = jobs.last().map_or(Duration::ZERO, |job| job.arrival);
    let name = match hosts.overcommit > 1.0 {
        true => "overcommit".into(),
        false => policy.name(),
    };
    let mut run = Run {
        scheduler: Scheduler::new(policy, costs, limits),
        jobs,
        happenings: BinaryHeap::new(),
        numbered: 0,
        woken: None,
        sentence: String::new(),
        decision_times: Vec::new(),
        meter: Meter::new(hosts, jobs.len()),
    };
    for number in 0..hosts.count {
        let mut host = Host::new(HostId(number), format!("host{number}"), hosts.promised());
        host.group = number / hosts.group.max(1);
        let joined = run.scheduler.step(Duration::ZERO, Event::HostJoined(host));
        joined.expect("each host joins once");
    }
    let mut next = 0;
    let sample = (end / SAMPLES).max(Duration::from_millis(1));
    let mut sampled = Duration::ZERO;
    loop {
        let arrival = jobs.get(next).map(|job| job.arrival);
        let happening = run.happenings.peek().map(|Reverse((at, ..))| *at);
        let now = match (arrival, happening) {
            (Some(arrival), Some(at)) => arrival.min(at),
            (Some(at), None) | (None, Some(at)) => at,
            (None, None) => break,
        };
        if now > end {
            break;
        }
        while sampled <= now {
            run.meter.sample(sampled, &run.scheduler);
            sampled += sample;
        }
        // What ends at this moment makes room for what arrives at it.
        if happening == Some(now) {
            let Some(Reverse((_, _, event))) = run.happenings.pop() else {
                break;
            };
            run.happened(now, event);
        } else {
            let id = AggregateId(next as u64);
            let mut request = Request::new(id, format!("vm{next}"), jobs[next].room);
            request.hosts_max = request.hosts_max.min(hosts_max);
            next += 1;
            run.meter.asked(id, now);
            run.step(now, Event::Requested(request));
        }
    }
    run.meter.finish(end, &run.scheduler);
    run.meter.outcome(name, run.decision_times)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    MoveEnds(AggregateId, Duration),
    Ends(AggregateId),
    Wakes,
}

struct Run<'a> {
    scheduler: Scheduler,
    jobs: &'a [Job],
    happenings: BinaryHeap<Reverse<(Duration, u64, Happening)>>,
    numbered: u64,
    /// For when a wake-up is on its way.
    woken: Option<Duration>,
    /// The last sentences that decisions were explained with: writing them down is part
    /// of the decision.
    sentence: String,
    decision_times: Vec<u32>,
    meter: Meter,
}

impl Run<'_> {
    fn at(&mut self, when: Duration, happening: Happening) {
        self.numbered += 1;
        self.happenings
            .push(Reverse((when, self.numbered, happening)));
    }

    fn happened(&mut self, now: Duration, happening: Happening) {
        match happening {
            Happening::Ends(id) => {
                self.meter.ended(id, now);
                self.step(now, Event::Ended(id));
            }
            Happening::MoveEnds(id, took) => {
                // It may have ended meanwhile.
                if self.scheduler.cluster().aggregate(id).is_some() {
                    self.step(now, Event::MoveEnded(id, MoveResult::Done { took }));
                    self.meter.moved(id, now, &self.scheduler);
                }
            }
            Happening::Wakes => {
                self.woken = None;
                self.step(now, Event::Passed);
            }
        }
    }

    fn step(&mut self, now: Duration, event: Event) {
        let begun = Instant::now();
        let decisions = self.scheduler.step(now, event).expect("hosts are known");
        self.sentence.clear();
        for decision in &decisions {
            let explained = decision.explain(self.scheduler.cluster());
            writeln!(self.sentence, "{explained}").expect("a string takes everything");
        }
        let took = begun.elapsed().as_nanos();
        self.decision_times
            .push(u32::try_from(took).unwrap_or(u32::MAX));
        for decision in decisions {
            self.meter.decided(&decision, now, &self.scheduler);
            match decision {
                Decision::Start { id, .. } => {
                    if let Some(lifetime) = self.jobs[id.0 as usize].lifetime {
                        self.at(now + lifetime, Happening::Ends(id));
                    }
                }
                Decision::Move {
                    moving, expected, ..
                } => {
                    self.at(
                        now + expected,
                        Happening::MoveEnds(moving.aggregate, expected),
                    );
                }
                _ => {}
            }
        }
        if let Some(wake) = self.scheduler.next_wake()
            && self.woken.is_none_or(|woken| wake < woken)
        {
            let wake = wake.max(now);
            self.woken = Some(wake);
            self.at(wake, Happening::Wakes);
        }
    }
}
