//! The command line of `weft mpi`.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use weft_mpi::control::MACHINES_MAX;
use weft_mpi::launcher::HOSTS_MAX;
use weft_node::size::parse_size;

use crate::values::parse_seconds;
use crate::vm::CpuArg;

/// `weft mpi …`.
#[derive(Debug, Subcommand)]
pub enum MpiCommand {
    /// Start a cluster of machines and run an MPI program on it
    Run(Box<MpiRunArgs>),
    /// Go on with a cluster whose launcher has ended: its machines run on meanwhile
    Attach {
        /// The cluster's name
        name: String,
    },
    /// Go on with a cluster whose machines were saved, since no host was left in time
    Resume(MpiResumeArgs),
    /// List the clusters of this user
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show hosts, machines and what happened
    Status {
        #[command(flatten)]
        cluster: NameArg,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a cluster on the terminal all the time, with keys for what it should do
    #[command(
        after_help = "The page shows hosts with the time that is left of their reservations, moves \
under way, what happened and the program's output. + and - change how many hosts are wanted, n asks \
for one more, s shrinks, r releases the host that was chosen with the arrows, d deploys a file, x \
ends the cluster after a question, o makes the output larger. q leaves the page, and the cluster \
runs on."
    )]
    Top {
        #[command(flatten)]
        cluster: NameArg,
    },
    /// Set how many hosts are wanted: more are asked for, fewer are left as reservations end
    Hosts {
        /// The number of hosts
        count: usize,
        #[command(flatten)]
        cluster: ClusterArg,
    },
    /// Ask for one more host
    Newnode {
        #[command(flatten)]
        cluster: ClusterArg,
    },
    /// Keep this many hosts, those whose reservations last longest, and leave the others now
    Shrink {
        /// The number of hosts
        count: usize,
        #[command(flatten)]
        cluster: ClusterArg,
    },
    /// Leave a host now and give it back
    Release {
        /// Its name, as `weft mpi status` shows it
        host: String,
        #[command(flatten)]
        cluster: ClusterArg,
    },
    /// Ask the batch system to let a host's reservation last longer: on Slurm most sites allow that
    /// to operators alone, and Grid Engine and a list of hosts cannot do it
    Extend {
        /// The host's name, as `weft mpi status` shows it
        host: String,
        /// By how much
        #[arg(value_parser = parse_minutes)]
        minutes: Duration,
        #[command(flatten)]
        cluster: ClusterArg,
    },
    /// Copy a file to the home of all machines
    Deploy {
        /// The file
        file: PathBuf,
        #[command(flatten)]
        cluster: ClusterArg,
    },
    /// Log in to a machine, or run a command there
    Ssh {
        /// The cluster's name
        name: String,
        /// The machine's number
        #[arg(default_value_t = 0)]
        machine: u32,
        /// The command, for the shell there
        #[arg(last = true)]
        command: Vec<String>,
    },
    /// End a cluster: its program, its machines and its reservations
    Exit {
        #[command(flatten)]
        cluster: NameArg,
    },
    /// Remove what is left of a cluster that has ended
    Forget {
        /// Its machines are saved: remove them, too
        #[arg(long)]
        saved: bool,
        /// The cluster's name
        name: String,
    },
    /// Serve in a reservation: what a job of the batch system runs
    #[command(hide = true)]
    Host {
        /// The job's token
        token: PathBuf,
    },
}

/// For commands without another argument: both forms mean the same.
#[derive(Debug, Args)]
pub struct NameArg {
    /// The cluster's name [default: the only one]
    pub name: Option<String>,
    /// The same
    #[arg(long, value_name = "NAME", conflicts_with = "name")]
    pub cluster: Option<String>,
}

impl NameArg {
    /// As it was given.
    pub fn either(self) -> Option<String> {
        self.name.or(self.cluster)
    }
}

/// For commands whose own argument is something else.
#[derive(Debug, Args)]
pub struct ClusterArg {
    /// The cluster's name [default: the only one]
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
}

/// `weft mpi resume`.
#[derive(Debug, Args)]
pub struct MpiResumeArgs {
    /// The cluster's name
    pub name: String,
    /// Hosts wanted from now on [default: as before]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=HOSTS_MAX as u64))]
    pub hosts: Option<u64>,
    /// How long each host is asked for [default: as before]
    #[arg(long, value_name = "MINUTES", value_parser = parse_minutes)]
    pub time: Option<Duration>,
    /// How long to wait for all hosts, before the cluster continues on the hosts that came
    /// [default: as before]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub wait: Option<Duration>,
    /// The address of this host where reserved hosts reach it [default: as before]
    #[arg(long, value_name = "ADDRESS")]
    pub address: Option<IpAddr>,
    /// Another list of hosts; `weft mpi run --help` has its form
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// An argument for `sbatch` or `qsub`, instead of all those before; may be repeated
    #[arg(long = "batch", value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub batch: Vec<OsString>,
}

/// `weft mpi run`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: the program's own; 121 no host was left in time, and all machines are \
saved; 122 a machine was lost; 125 the cluster did not start; 130 the user ended it before the program \
did; 2 an option is wrong."
)]
pub struct MpiRunArgs {
    /// The cluster's name [default: from the program's]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// What gives the hosts
    #[arg(long, value_enum, value_name = "SYSTEM", default_value_t = OnArg::Local)]
    pub on: OnArg,
    /// With `--on local`, the hosts: a line for each, its name and the command that leads to it,
    /// such as `alpha ssh alpha`; a name alone is this host. `max=SECONDS` at the end of a line
    /// limits each reservation of that host [default: this host, as often as hosts are wanted]
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// An argument for `sbatch` or `qsub`, such as --batch=--partition=long; may be repeated
    #[arg(long = "batch", value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub batch: Vec<OsString>,
    /// Hosts wanted
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=HOSTS_MAX as u64))]
    pub hosts: u64,
    /// Ask for HOSTS hosts, SECONDS after the start
    #[arg(long, value_name = "HOSTS@SECONDS", value_parser = parse_grow)]
    pub grow: Option<(usize, Duration)>,
    /// Machines, for the cluster's whole life [default: as many as hosts]
    #[arg(long, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MACHINES_MAX)))]
    pub vms: Option<u32>,
    /// Instead of machines that each have one host, one over all of them, whose vCPUs and memory
    /// move as hosts come and go: --cpus, --memory and --slots are its own
    #[arg(long, conflicts_with = "vms")]
    pub one_machine: bool,
    /// vCPUs of each machine
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: u32,
    /// The CPU that machines see, as a level of x86-64; a host that lacks it goes back
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "v2")]
    pub cpu: CpuArg,
    /// Memory of each machine
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub memory: u64,
    /// Processes that a machine takes [default: as many as vCPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub slots: Option<u32>,
    /// Processes of the program [default: all that the machines take]
    #[arg(short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub processes: Option<u32>,
    /// How long each host is asked for
    #[arg(long, value_name = "MINUTES", default_value = "60", value_parser = parse_minutes)]
    pub time: Duration,
    /// How long to wait for all hosts after the first one, before the cluster starts on the hosts
    /// that came
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub wait: Duration,
    /// How long before the end of its reservation a host is empty
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    pub margin: Duration,
    /// Neither ask for hosts later nor move machines: the cluster stays as it begins
    #[arg(long = "static")]
    pub is_static: bool,
    /// Where machines are saved if no host is left in time: a folder that all hosts can write to
    #[arg(long, value_name = "FOLDER")]
    pub save_to: Option<PathBuf>,
    /// The folder that `make guest-mpi` filled [default: `guest` beside the folder of this program]
    #[arg(long, value_name = "FOLDER")]
    pub image: Option<PathBuf>,
    /// A file for the home of each machine, or a folder whose `bin`, `lib` and `home` all machines
    /// get; may be repeated
    #[arg(long, value_name = "FILE|FOLDER")]
    pub with: Vec<PathBuf>,
    /// The program is in the image, or in a folder of --with: copy nothing
    #[arg(long)]
    pub no_copy: bool,
    /// An argument for mpirun, such as --mpirun=--map-by=node; may be repeated
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub mpirun: Vec<String>,
    /// The address of this host where reserved hosts reach it [default: every IPv4 address of this
    /// host; 127.0.0.1 if all hosts are this one]
    #[arg(long, value_name = "ADDRESS")]
    pub address: Option<IpAddr>,
    /// A tap device that each host has, on a bridge or VXLAN of the site: the network between
    /// machines of different hosts, instead of Weft's own encrypted links
    #[arg(long, value_name = "NAME")]
    pub tap: Option<String>,
    /// The program and its arguments; without it machines start and no mpirun
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub program: Vec<String>,
}

/// `--on`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnArg {
    /// Slurm, through sbatch, squeue and scancel
    Slurm,
    /// Grid Engine, through qsub, qstat and qdel
    Gridengine,
    /// A list of hosts
    Local,
}

fn parse_grow(text: &str) -> Result<(usize, Duration), String> {
    let parts = text.split_once('@');
    let parts = parts.and_then(|(hosts, after)| {
        let hosts: usize = hosts.parse().ok()?;
        Some((hosts, parse_seconds(after).ok()?))
    });
    match parts {
        Some((hosts, after)) if (1..=HOSTS_MAX).contains(&hosts) => Ok((hosts, after)),
        _ => Err(format!("write HOSTS@SECONDS, with 1 to {HOSTS_MAX} hosts")),
    }
}

fn parse_minutes(text: &str) -> Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|_| "not a number of minutes")?;
    match Duration::try_from_secs_f64(minutes * 60.0) {
        Ok(time) if time >= Duration::from_secs(10) => Ok(time),
        _ => Err("10 seconds (0.17) are the least".into()),
    }
}
