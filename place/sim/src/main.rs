//! `weft-place-sim`: a trace of virtual machines through the scheduler, each policy beside
//! the others.

mod hosts;
mod outcome;
mod picture;
mod random;
mod simulation;
mod table;
#[cfg(test)]
mod tests;
mod trace;

use anyhow::{Context, bail};
use clap::Parser;
use hosts::Hosts;
use outcome::Outcome;
use simulation::simulate;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use trace::{Job, Made};
use weft_place::{Costs, LeastLoaded, Limits, POLICY_NAMES, Policy, Room, policy_by_name};

/// Runs a trace of virtual machines through Weft's scheduler, and shows what each policy
/// makes of it
///
/// Without --trace the requests are made: --bursts of --burst arrivals, with the sizes and
/// lifetimes of Azure's public dataset of 2017. The defaults are FragVisor's experiment
/// (section 7.3): four hosts of 12 CPUs, bursts of 100, lifetimes divided by 100.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// A trace to run, CSV or CSV in gzip: arrival_s, batch, cores, memory_gb,
    /// lifetime_min_s, lifetime_max_s, ended
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How many hosts the cluster has
    #[arg(long, default_value_t = 4)]
    hosts: u32,
    /// Cores of each host
    #[arg(long, default_value_t = 12)]
    cores: u32,
    /// Memory of each host, GiB; 4 for each core if not said
    #[arg(long, value_name = "GIB")]
    memory: Option<u64>,
    /// Hosts of a rack, which are near one another
    #[arg(long, default_value_t = 1_000_000)]
    rack: u32,
    /// Which policy; "overcommit" and all others beside each other if not said
    #[arg(long = "policy", value_name = "NAME")]
    policies: Vec<String>,
    /// Cores that overcommitting promises for each that there is
    #[arg(long, default_value_t = 1.5)]
    overcommit: f64,
    /// The most hosts that an aggregate is spread over
    #[arg(long, default_value_t = 8)]
    hosts_max: u32,
    /// How many requests behind the first that waits may start before it
    #[arg(long, default_value_t = 0)]
    backfill: usize,
    /// For so long an aggregate is not moved again, seconds
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    hold: u64,
    /// How much slower an aggregate is whose cores are all on different hosts of a rack: 0.78
    /// is FragVisor's web server, 0 a program that shares nothing
    #[arg(long, default_value_t = 0.78)]
    slow_down: f64,
    /// What a move copies in a second, MiB
    #[arg(long, default_value_t = 830.0, value_name = "MIB")]
    rate: f64,
    /// Bursts of made requests
    #[arg(long, default_value_t = 12)]
    bursts: u32,
    /// Requests of a burst
    #[arg(long, default_value_t = 100)]
    burst: u32,
    /// Seconds between bursts
    #[arg(long, default_value_t = 1000, value_name = "SECONDS")]
    between: u64,
    /// What lifetimes of made requests are divided by
    #[arg(long, default_value_t = 100.0)]
    faster: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Writes a picture of the runs over time there
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
    /// Prints the figures as JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// No time of a simulation is longer, seconds.
const YEAR_S: u64 = 366 * 86400;

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let hosts = options.hosts()?;
    let jobs = options.jobs(hosts)?;
    let mut outcomes = Vec::new();
    for name in options.names() {
        let begun = Instant::now();
        eprint!("{name}: ");
        let outcome = options.run(&name, hosts, &jobs)?;
        eprintln!(
            "{} requests in {:.1} s",
            outcome.requests,
            begun.elapsed().as_secs_f64()
        );
        outcomes.push(outcome);
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&outcomes)?);
    } else {
        print!("{}", table::render(&outcomes));
    }
    if let Some(path) = &options.picture {
        let title = format!(
            "{} requests, {} hosts of {} cores",
            jobs.len(),
            hosts.count,
            hosts.room.cores
        );
        std::fs::write(path, picture::render(&title, &outcomes))
            .with_context(|| format!("cannot write the picture {}", path.display()))?;
    }
    Ok(())
}

impl Options {
    fn hosts(&self) -> anyhow::Result<Hosts> {
        if self.hosts == 0 || self.hosts > 1_000_000 {
            bail!(
                "--hosts {}: give a number between 1 and 1000000",
                self.hosts
            );
        }
        if self.cores == 0 || self.cores > 1024 {
            bail!("--cores {}: give a number between 1 and 1024", self.cores);
        }
        if !(1.0..=16.0).contains(&self.overcommit) {
            bail!(
                "--overcommit {}: give a number between 1 and 16",
                self.overcommit
            );
        }
        if self.hold > YEAR_S {
            bail!("--hold {}: give a year or less, in seconds", self.hold);
        }
        if self.hosts_max == 0 {
            bail!("--hosts-max 0: give 1 or more");
        }
        if !(0.001..=1e9).contains(&self.rate) {
            bail!("--rate {}: give a number between 0.001 and 1e9", self.rate);
        }
        if !(0.0..=1000.0).contains(&self.slow_down) {
            bail!(
                "--slow-down {}: give a number between 0 and 1000",
                self.slow_down
            );
        }
        let memory_gib = self.memory.unwrap_or(u64::from(self.cores) * 4);
        if memory_gib == 0 || memory_gib > 1 << 20 {
            bail!("--memory {memory_gib}: give a number between 1 and 1048576 (GiB)");
        }
        let room = Room::new(self.cores, memory_gib * 1024);
        Ok(Hosts {
            count: self.hosts,
            room,
            group: self.rack,
            overcommit: 1.0,
        })
    }

    fn jobs(&self, hosts: Hosts) -> anyhow::Result<Vec<Job>> {
        if let Some(path) = &self.trace {
            return Ok(trace::read(path, self.seed)?);
        }
        let requests = u64::from(self.bursts) * u64::from(self.burst);
        if requests == 0 || requests > 100_000_000 {
            bail!("--bursts and --burst make {requests} requests: 1 to 100000000 can be run");
        }
        if !(1e-3..=1e9).contains(&self.faster) {
            bail!(
                "--faster {}: give a number between 0.001 and 1e9",
                self.faster
            );
        }
        if self.between > YEAR_S {
            bail!(
                "--between {}: give a year or less, in seconds",
                self.between
            );
        }
        if !trace::some_size_fits(hosts.room) {
            bail!("no host holds the smallest machine, 1 core and 1.75 GiB: raise --memory");
        }
        let made = Made {
            bursts: self.bursts,
            burst: self.burst,
            between: Duration::from_secs(self.between),
            faster: self.faster,
            largest: hosts.room,
        };
        Ok(trace::make(made, self.seed))
    }

    fn names(&self) -> Vec<String> {
        if !self.policies.is_empty() {
            return self.policies.clone();
        }
        let others = POLICY_NAMES.iter().filter(|&&name| name != "least-loaded");
        let mut names: Vec<String> = others.map(|&name| name.into()).collect();
        names.insert(2, "overcommit".into());
        names
    }

    fn run(&self, name: &str, mut hosts: Hosts, jobs: &[Job]) -> anyhow::Result<Outcome> {
        let policy: Box<dyn Policy> = if name == "overcommit" {
            hosts.overcommit = self.overcommit;
            Box::new(LeastLoaded)
        } else {
            policy_by_name(name).context("\"overcommit\" is one, too")?
        };
        let mut costs = Costs::default();
        costs.spread.near = self.slow_down;
        costs.spread.far = 2.0 * self.slow_down;
        costs.moves.mib_per_s = self.rate;
        let limits = Limits {
            hold: Duration::from_secs(self.hold),
            backfill: self.backfill,
            ..Limits::default()
        };
        Ok(simulate(hosts, jobs, policy, costs, limits, self.hosts_max))
    }
}
