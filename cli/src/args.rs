//! The command line, as `clap` derives it. Completions and man pages are made
//! from the same definitions.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use weft_node::config::May;
use weft_node::options::{Jump, Placement, RunOptions, Transport};
use weft_node::size::parse_size;

use crate::mpi::MpiCommand;
use crate::values::{StatsArg, parse_seconds};
use crate::vm::VmCommand;
use crate::work::PlaceArgs;

/// Run one program on the memory and CPUs of several machines
#[derive(Debug, Parser)]
#[command(name = "weft", version, max_term_width = 100)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program over several nodes
    Run(Box<RunArgs>),
    /// Show what runs in this host's cluster, what waits and why, and what is free
    Plan {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show this host's cluster on a terminal, renewed every second, and cordon or drain hosts
    Top,
    /// Lend this host, or list hosts that lend
    Node {
        /// What to do
        #[command(subcommand)]
        command: NodeCommand,
    },
    /// Join hosts to a cluster, whose members trust one another
    Cluster {
        /// What to do
        #[command(subcommand)]
        command: ClusterCommand,
    },
    /// Run virtual machines
    Vm {
        /// What to do
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Run an MPI program on machines that move between the hosts of a batch system
    Mpi {
        /// What to do
        #[command(subcommand)]
        command: MpiCommand,
    },
    /// Pass frames between the machines of this host and other hosts, as a process of a
    /// malleable cluster
    #[command(hide = true)]
    Switch(SwitchArgs),
    /// List the running aggregates
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Stretch an aggregate over its nodes now, before its budget is full
    Stretch {
        /// The aggregate, as `weft list` shows it
        pid: u32,
    },
    /// Give a node of an aggregate back
    Shrink {
        /// The aggregate, as `weft list` shows it
        pid: u32,
        /// The node's number
        node: u32,
    },
    /// Check what this host supports, and how to fix what it lacks
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the man page, or write one for each command into a directory
    Man {
        /// The directory
        directory: Option<PathBuf>,
    },
}

/// `weft switch`.
#[derive(Debug, Args)]
#[command(
    after_help = "Orders are lines on standard input: {\"peer\":{\"key\":KEY,\"address\":\"HOST:PORT\"}}, \
{\"leave\":KEY}, {\"counters\":true}. Reports are lines of JSON on standard output. The switch ends \
when its standard input does."
)]
pub struct SwitchArgs {
    /// Where other switches connect: an address of this host, and a port
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// The socket for this host's machines, which is made: a name, with which machines find it in
    /// the run directory of each host (`--net switch=NAME`), or a path with a slash
    #[arg(long, value_name = "NAME|PATH")]
    pub machines: PathBuf,
    /// The file with this switch's private key: `node.key` of `weft node init`, or one like it
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// A tap device of this host on a bridge, by which machines of other hosts are reached, too.
    /// Switches with tap devices on one bridge must not be linked to each other
    #[arg(long, value_name = "NAME")]
    pub tap: Option<String>,
}

/// `weft run`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: the program's own; by its signal if one ended it; 122 a node was lost; \
123 every budget is full; 124 internal error; 125 the aggregate did not start; 126 the program \
cannot be executed; 127 it was not found."
)]
pub struct RunArgs {
    /// Nodes on this host, home included
    #[arg(long, value_name = "N", default_value_t = 2, conflicts_with_all = ["on", "cluster"])]
    pub nodes: usize,
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Hosts that lend memory and CPU; this host is home
    #[arg(
        long,
        value_name = "HOST[:PORT]",
        value_delimiter = ',',
        conflicts_with = "cluster"
    )]
    pub on: Vec<String>,
    /// Each node's budget for the program's pages: one for all nodes, or one for each,
    /// home first [default: half of each host's free memory]; with `--cluster`, all that the
    /// program needs
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = parse_size)]
    pub memory: Vec<u64>,
    /// Memory of this host that stays free for its owner: while less is free, home's pages
    /// leave for other hosts; 0: none [default: `keep_free` in node.toml, if nodes are on
    /// other hosts]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub keep_free: Option<u64>,
    /// When the execution moves to its pages: `auto` (learned), `never`, or after this
    /// many remote faults
    #[arg(long, value_name = "auto|never|COUNT", default_value = "auto")]
    pub jump: Jump,
    /// How nodes on this host are connected; links between hosts are encrypted TCP
    #[arg(long, value_enum, default_value_t = TransportArg::Ring, conflicts_with = "on")]
    pub transport: TransportArg,
    /// Maximum number of pages read ahead of a sequential fault; 0 turns it off
    #[arg(long, value_name = "PAGES", default_value_t = 128)]
    pub read_ahead: u32,
    /// Longest busy wait for a reply before the thread sleeps
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    pub spin: u64,
    /// Silence after which a node counts as lost
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    pub lease: Duration,
    /// When to stretch over the nodes: at once, or when home's budget is full
    #[arg(long, value_enum, default_value_t = StretchArg::Auto)]
    pub stretch: StretchArg,
    /// Print a summary at the end: `text` or `json` on standard error, or `json=FILE`
    #[arg(long, value_name = "text|json[=FILE]")]
    pub stats: Option<StatsArg>,
    /// Show nodes, pages, jumps and traffic while the program runs
    #[arg(long)]
    pub watch: bool,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub program: Vec<OsString>,
}

/// `--transport`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// Rings in shared memory
    Ring,
    /// A UNIX socket
    Unix,
    /// TCP over loopback, unencrypted
    Tcp,
    /// TCP over loopback, encrypted as between hosts
    TcpSealed,
}

/// `--stretch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StretchArg {
    /// At start
    Now,
    /// When home's budget is full
    Auto,
}

/// `weft node …`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Create this host's key and configuration
    Init,
    /// Let another node lend to this host, borrow from it, or both
    Trust {
        /// The other node's public key, as its `weft node init` printed it
        key: String,
        /// A name for the node, preferably its host name
        name: Option<String>,
        /// Where it listens, if the name is not its address
        #[arg(long, value_name = "HOST[:PORT]")]
        address: Option<String>,
        /// The node's rights: to run programs and machines of this host (lend), to run
        /// its own on this host (borrow), or both
        #[arg(long, value_enum, default_value_t = MayArg::Lend)]
        may: MayArg,
    },
    /// Lend this host's memory and CPU until stopped
    Start {
        /// Address to listen on [default: from the configuration, otherwise 0.0.0.0:7117]
        #[arg(long, value_name = "ADDR[:PORT]")]
        listen: Option<String>,
        /// Maximum memory of all slices together; each slice counts with its budget, a
        /// quarter of that, and 64M
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        memory: Option<u64>,
        /// Cores that the cluster counts on; it may be more than there are, which are shared then
        #[arg(long, value_name = "N",
            value_parser = clap::value_parser!(u32).range(..=i64::from(weft_cluster::CORES_MAX)))]
        cores: Option<u32>,
        /// Maximum number of slices at a time
        #[arg(long, value_name = "N")]
        slices: Option<u32>,
    },
    /// Change what this host lends while its daemon runs, or show it
    ///
    /// What is lent beyond that has to leave: slices of programs are asked to, the cluster moves
    /// parts of its machines to other hosts, and the command waits. Nothing is ended. It holds
    /// until the daemon ends; `memory` and `keep_free` in node.toml hold from its next start on.
    Lend {
        /// Maximum memory of all slices together
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        memory: Option<u64>,
        /// Memory of this host that stays free for its owner: while less is free, this host
        /// lends less; 0: none
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        keep_free: Option<u64>,
        /// How long to wait until what is too much has left; then the exit code is 1 [default:
        /// until it has]
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        wait: Option<Duration>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Keep new work of the cluster away from a host
    Cordon {
        /// Its name in the cluster [default: this host]
        host: Option<String>,
    },
    /// Have all work of the cluster leave a host, and wait until it has
    ///
    /// Machines move their part to other hosts, while their guests run. Programs bring their pages
    /// to their other hosts, if these have room. What has its first part there, with its
    /// launcher, cannot leave: the command names it, and waits until it ends.
    Drain {
        /// Its name in the cluster [default: this host]
        host: Option<String>,
        /// How long to wait; then the exit code is 1, and the host is still drained [default:
        /// until nothing is there]
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        wait: Option<Duration>,
        /// Print how far it has come on standard output: a line of JSON at first, and whenever
        /// something has left
        #[arg(long)]
        json: bool,
    },
    /// Have all work of the cluster leave a host that is expected to fail, and wait until it has
    ///
    /// As `drain`, for people and scripts that know why. A host whose kernel counts memory
    /// errors, machine checks or file system errors, or that is silent three times within ten
    /// minutes, is left without this command. `weft node uncordon` ends it.
    Evacuate {
        /// Its name in the cluster [default: this host]
        host: Option<String>,
        /// Why it is expected to fail: a phrase, such as "its fan stands still"
        #[arg(long, value_name = "TEXT")]
        why: String,
        /// How long to wait; then the exit code is 1, and the host is still left [default:
        /// until nothing is there]
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        wait: Option<Duration>,
        /// Print how far it has come on standard output: a line of JSON at first, and whenever
        /// something has left
        #[arg(long)]
        json: bool,
    },
    /// Let new work of the cluster come to a host again
    Uncordon {
        /// Its name in the cluster [default: this host]
        host: Option<String>,
    },
    /// Show what nodes have and lend
    List {
        /// Hosts to ask [default: every trusted node]
        hosts: Vec<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// `weft cluster …`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Make a cluster with this host as its first member
    Init {
        /// A name for the cluster: small letters, digits and -
        #[arg(value_name = "NAME")]
        cluster: String,
        #[command(flatten)]
        store: StoreArgs,
        #[command(flatten)]
        host: HostArgs,
    },
    /// Print a token with which one other host can join
    Invite {
        /// How long the token is good, 60 at most
        #[arg(long, value_name = "MINUTES", default_value_t = 60,
              value_parser = clap::value_parser!(u64).range(1..=60))]
        minutes: u64,
    },
    /// Make this host a member
    Join {
        /// The token that `weft cluster invite` printed; from standard input if not given,
        /// so that it is in no list of processes
        token: Option<String>,
        #[command(flatten)]
        store: StoreArgs,
        #[command(flatten)]
        host: HostArgs,
    },
    /// End a host's membership
    Leave {
        /// Its name [default: this host]
        host: Option<String>,
    },
    /// Have a part of a machine that the cluster placed move to another host, and wait until it
    /// has
    Move {
        /// The machine's name, as `weft plan` shows it
        name: String,
        /// The host that gets the part
        #[arg(required_unless_present = "cancel")]
        host: Option<String>,
        /// Call the move off that is under way: everything goes back, if it still can
        #[arg(long, conflicts_with_all = ["host", "from"])]
        cancel: bool,
        /// The host whose part moves [default: that of the smallest part that can move]
        #[arg(long, value_name = "HOST")]
        from: Option<String>,
    },
    /// Free the name and the room of what runs or waits in the cluster, although nothing has
    /// said that it ended. Only if nothing of it runs: it could be started twice
    Forget {
        /// The name, as `weft plan` shows it
        name: String,
    },
    /// Show by which policy hosts are chosen, or choose another one
    ///
    /// bff: on the host that is left with the least free cores, or not at all. fragbff-START-GOAL
    /// spreads over several hosts what fits on none: over the fewest, or the most; and pulls it
    /// together for large blocks of free cores (fragmentation), or for few hosts of each machine
    /// (hosts). bff-migration: bff, and machines move so that one fits. least-loaded: where the
    /// most is free.
    Policy {
        /// The policy [default: show the present one]
        #[arg(value_parser = weft_place::POLICY_NAMES)]
        policy: Option<String>,
    },
    /// Keep the cluster from moving machines by itself, or let it
    HandsOff {
        /// `on`: it moves nothing by itself; `off`: it pulls machines together where there is room
        #[arg(value_name = "on|off", action = clap::ArgAction::Set,
            value_parser = clap::builder::BoolishValueParser::new())]
        hands_off: bool,
    },
    /// Show what the cluster did and saw: starts, waits, moves, ends, hosts that come and go
    Log {
        /// Print new records as they come, until this command is ended
        #[arg(long, short)]
        follow: bool,
        /// Print JSON, a record a line
        #[arg(long)]
        json: bool,
    },
    /// Serve the cluster's page, API, events and metrics over HTTP
    Serve(ServeArgs),
    /// Serve a file as the store of a cluster, where there is no etcd
    ///
    /// It is one process on one host: while it is down nothing starts or moves in the cluster,
    /// and what runs goes on. Hosts use it by `--store etcd://HOST:PORT`.
    Store(StoreServeArgs),
    /// Make, list and end the keys for what `serve` serves
    Access {
        /// What to do
        #[command(subcommand)]
        command: AccessCommand,
    },
    /// Bound what one user may have of the cluster at a time
    Quota {
        /// What to do
        #[command(subcommand)]
        command: QuotaCommand,
    },
    /// Ask for room beside a launcher, which starts this command
    #[command(hide = true)]
    Agent,
    /// Show the members, what they lend, and which of them live
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// `weft cluster serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where to listen; without a certificate only on the loopback
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7180")]
    pub listen: std::net::SocketAddr,
    /// Serve HTTPS with this certificate chain, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// The certificate's key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// A UNIX socket that serves this user without a key [default: web.sock in the directory of
    /// running aggregates]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// `weft cluster store`.
#[derive(Debug, Args)]
pub struct StoreServeArgs {
    /// The file, which is made if it does not exist; one process can serve it
    pub file: PathBuf,
    /// Where to listen; without certificates only on the loopback
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:2379")]
    pub listen: std::net::SocketAddr,
    /// The authority that signs the certificates of the hosts (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["store_certificate", "store_key"])]
    pub store_authority: Option<PathBuf>,
    /// This store's certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "store_authority")]
    pub store_certificate: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "store_authority")]
    pub store_key: Option<PathBuf>,
}

/// What a key lets a client do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    /// Read everything
    Look,
    /// Also have what runs move, and call moves off
    Use,
    /// Also cordon and drain hosts, forget work, choose the policy, and switch moves off
    Run,
}

#[derive(Debug, Subcommand)]
pub enum QuotaCommand {
    /// Set the quota of a user, in place of an earlier one
    ///
    /// It bounds the sum of what the user's programs and machines asked for. A request that goes
    /// beyond it waits, and is refused if it is larger than the whole quota. What runs goes on.
    Set {
        /// The user's name, or * for each user without a quota of its own
        user: String,
        #[command(flatten)]
        bounds: QuotaArgs,
    },
    /// List quotas, and what users have
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// End the quota of a user
    End {
        /// The user's name, or *
        user: String,
    },
}

/// One of them at least.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct QuotaArgs {
    /// Maximum number of cores
    #[arg(long, value_name = "N")]
    pub cores: Option<u32>,
    /// Maximum memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
}

/// `weft cluster access …`.
#[derive(Debug, Subcommand)]
pub enum AccessCommand {
    /// Make a key and print it, once
    Make {
        /// A name for it
        name: String,
        /// What it lets a client do
        #[arg(long, value_enum, default_value_t = RoleArg::Look)]
        role: RoleArg,
        /// How long it is good, 366 at most
        #[arg(long, value_name = "DAYS", default_value_t = 30,
              value_parser = clap::value_parser!(u64).range(1..=366))]
        days: u64,
    },
    /// List the keys, without their secrets
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// End a key: clients with it are refused within seconds
    End {
        /// Its name
        name: String,
    },
}

/// Where a cluster's state is.
#[derive(Debug, Args)]
pub struct StoreArgs {
    /// An etcd with its members, or `weft cluster store`; without certificates only on this
    /// host's loopback
    #[arg(long, value_name = "etcd://HOST:PORT[,…]")]
    pub store: String,
    /// The authority that signed the certificates of the etcd's members (PEM)
    #[arg(long, value_name = "FILE")]
    pub store_authority: Option<PathBuf>,
    /// This host's certificate for the etcd (PEM)
    #[arg(long, value_name = "FILE")]
    pub store_certificate: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE")]
    pub store_key: Option<PathBuf>,
}

/// How this host is known in a cluster.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// Its name in the cluster [default: its host name]
    #[arg(long)]
    pub name: Option<String>,
    /// Where its daemon is reached by the other members [default: its host name, port 7117]
    #[arg(long, value_name = "HOST[:PORT]")]
    pub address: Option<String>,
}

/// `--may`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MayArg {
    /// The node may borrow from this host
    Borrow,
    /// The node may lend to this host
    Lend,
    /// Both
    Both,
}

impl From<MayArg> for May {
    fn from(may: MayArg) -> May {
        match may {
            MayArg::Borrow => May::Borrow,
            MayArg::Lend => May::Lend,
            MayArg::Both => May::Both,
        }
    }
}

impl RunArgs {
    /// The run that the arguments ask for.
    pub fn to_options(&self) -> RunOptions {
        let (program, arguments) = self.program.split_first().expect("clap demands a program");
        RunOptions {
            program: program.clone(),
            arguments: arguments.to_vec(),
            placement: if self.on.is_empty() {
                Placement::Embedded(self.nodes)
            } else {
                Placement::Remote(self.on.clone())
            },
            memory_bytes: self.memory.clone(),
            keep_free_bytes: self.keep_free,
            jump: self.jump,
            transport: match self.transport {
                TransportArg::Ring => Transport::Ring,
                TransportArg::Unix => Transport::Unix,
                TransportArg::Tcp => Transport::Tcp,
                TransportArg::TcpSealed => Transport::TcpSealed,
            },
            read_ahead_pages: self.read_ahead,
            spin: Duration::from_micros(self.spin),
            lease: self.lease,
            stretch_now: self.stretch == StretchArg::Now,
            configuration: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> RunArgs {
        let words = ["weft", "run"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Run(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn everything_after_the_program_is_the_programs() {
        let args = run("--memory 64M,1.5G sort --nodes 7 -k1");
        assert_eq!(args.nodes, 2);
        assert_eq!(args.memory, [64 << 20, 3 << 29]);
        assert_eq!(args.program, ["sort", "--nodes", "7", "-k1"]);
        assert_eq!(run("-- sort --help").program, ["sort", "--help"]);
    }

    #[test]
    fn options_reach_the_launcher() {
        let args = run("--on a,b:9 --jump 32 --lease 0.5 --stretch now --stats json=x -- true");
        let options = args.to_options();
        assert_eq!(
            options.placement,
            Placement::Remote(vec!["a".into(), "b:9".into()])
        );
        assert_eq!(options.jump, Jump::After(32));
        assert_eq!(options.lease, Duration::from_millis(500));
        assert!(options.stretch_now);
        assert_eq!(args.stats, Some(StatsArg::JsonFile("x".into())));
        let both = ["weft", "run", "--on", "a", "--nodes", "2", "true"];
        assert!(Cli::try_parse_from(both).is_err());
    }
}
