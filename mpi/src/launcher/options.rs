//! What a cluster is asked to be.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use weft_malleable::OneMachine;
use weft_node::size::format_bytes;

/// Hosts of a cluster: each has a switch, which has at most 64 peers.
pub const HOSTS_MAX: usize = 60;

/// What a reservation has beside its margin, at least.
const LEAST_TIME: Duration = Duration::from_secs(30);
/// With less the image does not boot.
const LEAST_MEMORY: u64 = 64 << 20;
/// Hosts of one machine (`--one-machine`).
const ONE_HOSTS_MAX: usize = 12;
/// Hosts of one machine before and after a change, together. A machine has 16 nodes at most, and
/// node 0 and the process that takes its home need one each.
const ONE_AT_ONCE_MAX: usize = 14;
/// What a host reserves for each vCPU that may run there.
const CPU_BYTES: u64 = 72 << 20;

/// As a user gave them; kept with the cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// One machine over all hosts, instead of many that each have one.
    pub one_machine: bool,
    /// Machines, for the cluster's whole life.
    pub machines: u32,
    /// vCPUs of each.
    pub cpus: u32,
    /// Of each, bytes.
    pub memory: u64,
    /// The CPU that their guests see, as `weft vm start --cpu` takes it.
    pub cpu: String,
    /// What that needs of a host, by the names in `/proc/cpuinfo`.
    pub cpu_features: Vec<String>,
    /// Ranks of each.
    pub slots: u32,
    /// Ranks of the program; `None`: all slots.
    pub processes: Option<u32>,
    /// Hosts wanted at first.
    pub hosts: usize,
    /// Later this many hosts are wanted, after this time.
    pub grow: Option<(usize, Duration)>,
    pub site: SiteOptions,
    /// How long each host is asked for.
    pub time: Duration,
    /// How long to wait for all hosts before the start with those that came.
    pub wait: Duration,
    /// A host is empty this much before its end.
    pub margin: Duration,
    /// Hosts are asked for, and machines move, by themselves.
    pub adaptive: bool,
    /// Where machines are saved if no host is left in time.
    pub save_to: Option<PathBuf>,
    /// What `guest/build small mpi` made.
    pub image: PathBuf,
    /// Files and folders for the machines.
    pub with: Vec<PathBuf>,
    /// The program and its arguments; without it no `mpirun` is started.
    pub program: Vec<String>,
    /// Arguments for `mpirun`.
    pub mpirun: Vec<String>,
    /// Where hosts reach the launcher; `None`: see [`Options::listens_at`].
    pub address: Option<IpAddr>,
    /// A tap device of each host, on a bridge of the site: the machines' network between hosts.
    #[serde(default)]
    pub tap: Option<String>,
}

/// What gives the hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SiteOptions {
    Slurm {
        /// For `sbatch`.
        options: Vec<OsString>,
    },
    GridEngine {
        /// For `qsub`.
        options: Vec<OsString>,
    },
    Local(Vec<ListedHost>),
}

/// A host of a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListedHost {
    pub name: String,
    /// Leads to it; empty: this host.
    pub through: Vec<OsString>,
    /// The longest time for which it may be had.
    pub time_max: Option<Duration>,
}

impl Options {
    /// # Errors
    /// Two options contradict each other, one machine has fewer vCPUs than hosts, reservations are
    /// too short, or machines too small.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let most = self
            .grow
            .map_or(self.hosts, |(count, _)| count.max(self.hosts));
        self.check_hosts(most)?;
        ensure!(
            self.adaptive || (self.save_to.is_none() && self.grow.is_none()),
            "--static has machines stay on the hosts that they begin on: without --grow and --save-to"
        );
        ensure!(
            self.time >= self.margin + LEAST_TIME,
            "--time {} ({} s) is too short: machines need {} s to boot, and a host is left \
             --margin {} s before its end, so {} s are the least",
            self.time.as_secs_f64() / 60.0,
            self.time.as_secs(),
            LEAST_TIME.as_secs(),
            self.margin.as_secs(),
            (self.margin + LEAST_TIME).as_secs()
        );
        ensure!(
            self.memory >= LEAST_MEMORY,
            "--memory {} is too little for the image: 128M is enough for small programs",
            format_bytes(self.memory)
        );
        Ok(())
    }

    /// # Errors
    /// One machine has too few vCPUs for `count` hosts.
    pub(super) fn check_hosts(&self, count: usize) -> anyhow::Result<()> {
        let one_most = self.one().hosts_max;
        ensure!(
            !self.one_machine || count <= one_most,
            "--one-machine with --cpus {} is on {one_most} hosts at most, since each has a vCPU: \
             ask for fewer hosts, or start with more --cpus, up to {ONE_HOSTS_MAX}",
            self.cpus,
        );
        Ok(())
    }

    /// Where the launcher listens, if not at every address of this host. All hosts may be this
    /// one.
    pub fn listens_at(&self) -> Option<IpAddr> {
        let is_here = match &self.site {
            SiteOptions::Local(hosts) => hosts.iter().all(|host| host.through.is_empty()),
            SiteOptions::Slurm { .. } | SiteOptions::GridEngine { .. } => false,
        };
        self.address
            .or(is_here.then_some(Ipv4Addr::LOCALHOST.into()))
    }

    /// What a machine takes of a host's memory, at most: its monitor lends with these bounds, too
    /// (`docs/lending.md`, Memory and Processors).
    pub fn needs(&self) -> u64 {
        self.memory + self.memory / 4 + self.overhead()
    }

    /// The one machine, as what decides sees it.
    pub fn one(&self) -> OneMachine {
        OneMachine {
            hosts_max: ONE_HOSTS_MAX.min(self.cpus as usize),
            at_once_max: ONE_AT_ONCE_MAX,
            memory: self.memory,
            overhead: self.overhead(),
        }
    }

    /// What a machine, or a part of one, takes of a host's memory beside the guest's.
    pub fn overhead(&self) -> u64 {
        (64 << 20) + u64::from(self.cpus) * CPU_BYTES
    }
}
