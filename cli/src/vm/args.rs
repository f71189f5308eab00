//! The command line of `weft vm`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ArgPredicate;
use clap::{Args, Subcommand, ValueEnum};
use weft_machine::migration::{Choose, Destination, Migration, Mode};
use weft_machine::{BackEndChoice, Follow};
use weft_node::size::parse_size;

use super::choices::{
    BalloonArg, ConfineArg, CpuArg, ExchangeArg, GrowableArg, LateArg, LinkArg, ProtocolArg,
};
use super::suboptions::{
    ConsoleArg, DiskArg, ListArg, NetArg, parse_cpus, parse_destination, parse_follow,
    parse_lender, parse_memory,
};
use crate::values::{StatsArg, parse_seconds};
use crate::work::PlaceArgs;

/// Longest delay of a frame that tests may ask for, in microseconds: well below the
/// shortest lease.
const LINK_DELAY_US_MAX: i64 = 100_000;

/// Stands for a path that is as it was when the machine was saved.
const AS_SAVED: &str = "saved";
/// Options whose values `--restore` takes from the checkpoint.
const AS_SAVED_OPTIONS: [&str; 14] = [
    "kernel",
    "initrd",
    "boot_protocol",
    "cmdline",
    "disk",
    "net",
    "backend",
    "cpu",
    "deterministic",
    "late_cpus",
    "balloon",
    "update",
    "debug_exit",
    "ready",
];

/// `weft vm …`.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Boot a kernel in a virtual machine and run until it ends
    Run(Box<VmRunArgs>),
    /// Start a machine that outlives this command and its terminal
    Start(Box<VmStartArgs>),
    /// Take a machine from another host: a daemon starts this command
    #[command(hide = true)]
    TakeHome,
    /// List the running machines
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Attach to a machine's console
    Console {
        /// Its name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
    },
    /// Pause a machine
    Pause {
        /// Its name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
    },
    /// Resume a paused machine
    Resume {
        /// Its name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
    },
    /// Move a vCPU of a running machine, its timekeeper or its platform to another of its nodes
    Move {
        /// Its name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// The vCPU's number
        #[arg(long, value_name = "N", required_unless_present_any = ["time", "platform"])]
        vcpu: Option<u32>,
        /// Instead of a vCPU the timekeeper, whose host's clock guest time follows
        #[arg(long, conflicts_with = "vcpu")]
        time: bool,
        /// Instead of a vCPU the platform: the I/O APIC, the serial port and the other small
        /// devices, but not those on the PCI bus
        #[arg(long, conflicts_with_all = ["vcpu", "time"])]
        platform: bool,
        /// The node's number, as `weft vm top` shows it
        #[arg(long, value_name = "NODE")]
        to: usize,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Ask a guest to give memory back to the hosts, or to take it again
    Balloon {
        /// Its name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// Memory that the guest should give back, such as 512M; 0: all of it is the
        /// guest's again
        #[arg(value_name = "SIZE", value_parser = parse_size)]
        size: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Add a node to a running machine
    ///
    /// The machine must have several nodes, or be one that can grow (`weft vm run --growable`).
    /// The new node has neither vCPUs nor memory of its own at first: `weft vm move` brings
    /// vCPUs, and their pages follow. Another host must lend to the host that started the
    /// machine (`weft node list` there). Ctrl-C cancels.
    Grow {
        /// The machine's name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// The host of the node, and the most guest memory that it may fill there [default: the
        /// host of the machine]
        #[arg(long, value_name = "HOST[=SIZE]", value_parser = parse_lender)]
        on: Option<(String, Option<u64>)>,
        /// The most guest memory that the node may fill [default: 1G]
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        memory: Option<u64>,
        /// Change a machine that a cluster placed, too: the cluster goes on counting its parts
        /// where it put them
        #[arg(long)]
        by_hand: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Give back a node of a running machine
    ///
    /// Its vCPUs and pages go to the other nodes while the guest runs, and what it serves of
    /// disks and networks of others goes to the nodes that have them. Node 0 cannot leave, nor
    /// can a node that has a disk or network. Ctrl-C cancels.
    Release {
        /// The machine's name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// The node's number, as `weft vm top` shows it
        #[arg(value_name = "NODE")]
        node: usize,
        /// Change a machine that a cluster placed, too: the cluster goes on counting its parts
        /// where it put them
        #[arg(long)]
        by_hand: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Move a running machine to other hosts, as a whole
    ///
    /// A node joins on each host, pages are sent there while the guest runs, and then the
    /// machine stands once, for some milliseconds, while the platform, the timekeeper, the vCPUs
    /// and the pages change their node. Nodes that the machine leaves are given back. Node 0, and nodes
    /// with disks or networks, stay for their devices, without vCPUs and memory. Ctrl-C puts
    /// everything back, until all pages have moved.
    Migrate {
        /// The machine's name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// Where to, separated by commas: a host, with the most guest memory that the machine may
        /// fill there [default: its part of all], or the number of a node that the machine has,
        /// with the most that it may have then [default: all]
        #[arg(value_name = "HOST[=SIZE]|NODE[=SIZE]", required = true, value_delimiter = ',', value_parser = parse_destination)]
        to: Vec<Destination>,
        /// Divide the vCPUs evenly among all of them, instead of moving them to the first
        #[arg(long)]
        spread: bool,
        /// Which pages go to the first of several
        #[arg(long, value_enum, default_value_t)]
        choose: ChooseArg,
        /// Copy the disks of node 0 to the same paths of the host that the machine goes to for
        /// good, while the guest runs
        #[arg(long)]
        with_disks: bool,
        /// Leave node 0 where it is, with the console, the PCI bus and the API, also if it could go
        #[arg(long, conflicts_with = "with_disks")]
        keep_home: bool,
        #[command(flatten)]
        how: MigrationArgs,
    },
    /// Bring all vCPUs and pages of a machine to one of its nodes, or to another host, and give
    /// the others back
    ///
    /// Nodes with disks or networks, and node 0, stay for their devices. Ctrl-C puts everything
    /// back, until all pages have moved.
    Consolidate {
        /// The machine's name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// The node's number, as `weft vm top` shows it, or a host, where a node joins for it
        #[arg(value_name = "NODE|HOST", default_value = "0", value_parser = parse_destination)]
        to: Destination,
        /// Wait until node 0's host, or HOST, has room for all of the machine, for SECONDS at
        /// most, 0.1 to 3600
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        when_room: Option<Duration>,
        #[command(flatten)]
        how: MigrationArgs,
    },
    /// Save a machine to files, from which `weft vm run --restore` continues it
    Save(SaveArgs),
    /// Ask a guest to power itself off, then end its machine
    Stop {
        /// Its name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// How long to wait for the guest, 0 to 600; 0: end the machine at once
        #[arg(long, value_name = "SECONDS", default_value_t = weft_api::STOP_SECONDS)]
        timeout: f64,
    },
    /// Show the activity of vCPUs and nodes every second
    Top(TopArgs),
    /// Count remote faults by vCPU and by page, with kernel symbols
    Trace(TraceArgs),
    /// Print a machine's counters
    Counters {
        /// Its name or pid, as `weft vm list` shows them
        #[arg(value_name = "NAME|PID")]
        machine: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// `weft vm save`.
#[derive(Debug, Args)]
pub struct SaveArgs {
    /// Its name or pid, as `weft vm list` shows them
    #[arg(value_name = "NAME|PID")]
    pub machine: String,
    /// The directory for the files: it must not exist yet, or be empty
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
    /// End the machine when it is saved, instead of letting it continue
    #[arg(long)]
    pub stop: bool,
    /// Let the machine continue while its memory is written: it stands only for the moment that
    /// is saved. Software vCPUs, and a machine that can grow or has several nodes
    #[arg(long, conflicts_with = "stop")]
    pub live: bool,
    /// Nodes on other hosts write to a directory of their own hosts, at this absolute path
    /// [default: that of DIRECTORY], which can be on a disk of the host or on one that all share.
    /// The `disks` of each host's node.toml must allow it for writing
    #[arg(long, value_name = "DIRECTORY", num_args = 0..=1, require_equals = true)]
    pub each_host: Option<Option<PathBuf>>,
    /// Write only what changed since this checkpoint of the machine, without which the new one
    /// cannot be restored
    #[arg(long, value_name = "DIRECTORY")]
    pub since: Option<PathBuf>,
    /// Print a report as JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft vm top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Its name or pid, as `weft vm list` shows them [default: the only one that runs]
    #[arg(value_name = "NAME|PID")]
    pub machine: Option<String>,
    /// Print one sample of a second and exit
    #[arg(long)]
    pub once: bool,
    /// Print JSON, a line for each sample
    #[arg(long)]
    pub json: bool,
}

/// `weft vm trace`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Its name or pid, as `weft vm list` shows them [default: the only one that runs]
    #[arg(value_name = "NAME|PID", conflicts_with = "file")]
    pub machine: Option<String>,
    /// A file that `weft vm run --trace` wrote, instead of a running machine
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The kernel's symbols: System.map, or a vmlinux with symbols [default: the
    /// System.map beside the kernel, otherwise the kernel]
    #[arg(long, value_name = "FILE")]
    pub system_map: Option<PathBuf>,
    /// Number of pages to show, 1 to 2048
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub top: usize,
    /// How long to watch a machine, 0.1 to 3600
    #[arg(long = "for", value_name = "SECONDS", default_value = "5", value_parser = parse_seconds, conflicts_with = "file")]
    pub seconds: Duration,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `weft vm start`.
#[derive(Debug, Args)]
pub struct VmStartArgs {
    #[command(flatten)]
    pub run: VmRunArgs,
    /// Print the machine's description as JSON, when it runs
    #[arg(long)]
    pub json: bool,
}

/// `weft vm run`.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Exit codes: 0 the guest powered off; with --debug-exit the guest's own, an odd \
number; 116 it reset itself, with --no-reboot or after a request to end it; 118 it ended in triple \
faults; 120 it was stopped from outside; 124 the machine failed; 125 it did not start; 159 its \
process made a system call that its seccomp filter forbids; 128+N a signal ended it."
)]
pub struct VmRunArgs {
    /// Kernel image: vmlinux, bzImage, or an ELF image for PVH or Multiboot 1
    #[arg(
        long,
        value_name = "FILE",
        default_value_if("restore", ArgPredicate::IsPresent, AS_SAVED)
    )]
    pub kernel: PathBuf,
    /// Continue a machine that `weft vm save` wrote to this directory, on as many nodes as
    /// the options say. Its vCPUs, memory and devices are as saved
    #[arg(long, value_name = "DIRECTORY", conflicts_with_all = AS_SAVED_OPTIONS)]
    pub restore: Option<PathBuf>,
    /// With `--restore`: read and check all of guest memory before the machine starts, not only
    /// when a page is needed
    #[arg(long, requires = "restore")]
    pub verify: bool,
    /// With `--restore`: use disks whose length or time of modification is not as it was when
    /// the machine was saved, for example copies with the same contents
    #[arg(long, requires = "restore")]
    pub changed_disks: bool,
    /// Initial RAM file system
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// How the kernel is started: Linux's own protocol for Linux, otherwise PVH,
    /// otherwise Multiboot
    #[arg(long, value_enum, default_value_t = ProtocolArg::Auto)]
    pub boot_protocol: ProtocolArg,
    /// The kernel's command line [default: `console=ttyS0`]
    #[arg(long, value_name = "TEXT")]
    pub cmdline: Option<String>,
    /// Nodes of the machine, all on this host, 2 to 16 [default: 1, or the number of
    /// values of `--cpus` or `--memory`]
    #[arg(long, value_name = "N", conflicts_with_all = ["on", "cluster"])]
    pub nodes: Option<usize>,
    /// Whether nodes can join a machine that starts on one node (`weft vm grow`, `weft vm
    /// migrate`); with the software back end only. Nodes can always join a machine that starts
    /// on several
    #[arg(long, value_enum, default_value_t = GrowableArg::Auto)]
    pub growable: GrowableArg,
    /// Further hosts of the machine, one node on each
    #[arg(
        long,
        value_name = "HOST[:PORT]",
        value_delimiter = ',',
        conflicts_with = "cluster"
    )]
    pub on: Vec<String>,
    #[command(flatten)]
    pub place: PlaceArgs,
    /// vCPUs, 1 to 255: the total, distributed in turn, or a number for each node
    #[arg(long, value_name = "N[,N…]", default_value = "1",
        default_value_if("restore", ArgPredicate::IsPresent, "0"), value_parser = parse_cpus)]
    pub cpus: ListArg<u32>,
    /// Guest memory: the total, distributed, or a size for each node
    #[arg(long, value_name = "SIZE[,SIZE…]", default_value = "256M",
        default_value_if("restore", ArgPredicate::IsPresent, "0"), value_parser = parse_memory)]
    pub memory: ListArg<u64>,
    /// Memory that each of several nodes may use beyond its own, for pages of other
    /// nodes; pages beyond that go back to their nodes [default: a quarter of its own,
    /// at least 64M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub spare: Option<u64>,
    /// Whether vCPUs of several nodes move by themselves to where their remote faults go:
    /// never, where it seems to pay (`auto`), or after this many remote faults since the last
    /// move, 1 to 4194304 (back end `soft`). For programs that read far memory in sequence, again
    /// and again: those that use memory of several nodes alike can need up to a third more time
    #[arg(long, value_name = "auto|never|COUNT", default_value = "never",
        value_parser = parse_follow)]
    pub follow: Follow,
    /// Pages that vCPUs fetch from nodes without vCPUs: `auto` moves them in blocks, for blocks
    /// that no vCPU has used lately, while a node without vCPUs has some (back end `soft`). With
    /// `--follow auto` only where it does not pay that the vCPU moves instead; with a COUNT never
    #[arg(long, value_enum, default_value_t = ExchangeArg::Auto)]
    pub exchange: ExchangeArg,
    /// How nodes on this host are connected
    #[arg(long, value_enum, default_value_t = LinkArg::Tcp, conflicts_with = "on")]
    pub transport: LinkArg,
    /// Silence after which a node counts as lost
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    pub lease: Duration,
    /// For tests: every frame between nodes waits for a random time below this
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0, hide = true,
        value_parser = clap::value_parser!(u32).range(..=LINK_DELAY_US_MAX))]
    pub link_delay: u32,
    /// A disk: a raw image or a block device. `ro`: read-only; `direct`: without the
    /// host's page cache; `node`: the node that has it, counted from 0; `path`: how
    /// its data reach other nodes' vCPUs, by messages (`bypass`, the default) or
    /// through shared memory (`dsm`)
    #[arg(long, value_name = "FILE[,ro][,direct][,node=N][,path=bypass|dsm]")]
    pub disk: Vec<DiskArg>,
    /// A network card: on a tap device; at a `weft switch`, with the address `mac`: at the
    /// one that each host has by this name, or at a path with a slash; or a network in user space that needs no privilege, with TCP
    /// ports of this host's loopback address forwarded to the guest; `loopback`:
    /// 10.0.2.2 in the guest is this host's loopback address; `node`: the node that has it, counted from 0; `path`: as for a disk
    #[arg(
        long,
        value_name = "tap=NAME|switch=NAME|PATH[,mac=ADDRESS]|user[,forward=HOSTPORT:GUESTPORT][,loopback][,node=N][,path=bypass|dsm]"
    )]
    pub net: Vec<NetArg>,
    /// Back end of the vCPUs: `auto` is hardware KVM if available, otherwise software
    #[arg(long, value_enum, default_value_t = BackEndArg::Auto)]
    pub backend: BackEndArg,
    /// The CPU that the guest sees, as a level of x86-64; all hosts must support it
    /// [default: v2; with KVM, all features that KVM offers]
    #[arg(long, value_enum)]
    pub cpu: Option<CpuArg>,
    /// Guest time is the number of executed instructions: a run repeats exactly
    /// (back end `soft`)
    #[arg(long)]
    pub deterministic: bool,
    /// The console: standard input and output, or a socket (by default in the run directory)
    #[arg(long, value_name = "stdio|socket[=PATH]", default_value = "stdio")]
    pub console: ConsoleArg,
    /// Socket of the HTTP API [default: in the run directory]
    #[arg(long, value_name = "PATH")]
    pub api: Option<PathBuf>,
    /// Bring the vCPUs of other nodes online only after the boot, by the guest's init
    /// (kernel parameter `weft.online=all`), so that the boot shares no pages between
    /// nodes. `auto`: if the initrd declares that its init supports this
    #[arg(long, value_enum, default_value_t = LateArg::Auto)]
    pub late_cpus: LateArg,
    /// A virtio balloon: the guest reports memory that it frees, which goes back to the
    /// hosts, and gives memory back on request (`weft vm balloon`). `auto`: unless
    /// `--deterministic`
    #[arg(long, value_enum, default_value_t = BalloonArg::Auto)]
    pub balloon: BalloonArg,
    /// Variables that one vCPU of the guest writes repeatedly and others read: kernel
    /// symbols, or guest-physical addresses (0xSTART-0xEND). Nodes that read these
    /// pages keep their copies up to date. Added to those that the kernel's own ELF
    /// notes list
    #[arg(long, value_name = "SYMBOL|0xSTART-0xEND[,...]", value_delimiter = ',')]
    pub update: Vec<String>,
    /// The kernel's symbols for --update: System.map, or a vmlinux with symbols
    /// [default: the System.map beside the kernel, otherwise the kernel]
    #[arg(long, value_name = "FILE", requires = "update")]
    pub system_map: Option<PathBuf>,
    /// Give the guest a port (0xf4) that ends the machine with an exit code
    #[arg(long)]
    pub debug_exit: bool,
    /// End when the guest resets itself, instead of restarting it
    #[arg(long)]
    pub no_reboot: bool,
    /// Name of the machine [default: its pid]
    #[arg(long)]
    pub name: Option<String>,
    /// Report as boot time the time until this text first appears on the console
    #[arg(long, value_name = "TEXT")]
    pub ready: Option<String>,
    /// Print a summary at the end: `text` or `json` on standard error, or `json=FILE`
    #[arg(long, value_name = "text|json[=FILE]")]
    pub stats: Option<StatsArg>,
    /// Record remote faults, write them to this file at the end, and print the pages
    /// with most of them (as `weft vm trace --file` does)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// If started by root, run as this user [default: the user who called sudo,
    /// otherwise nobody]; `root` stays root
    #[arg(long, value_name = "NAME|UID")]
    pub user: Option<String>,
    /// What happens when the process makes a system call that it does not need
    #[arg(long, value_enum, default_value_t = ConfineArg::Enforce)]
    pub confine: ConfineArg,
}

/// `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackEndArg {
    /// Hardware KVM, else soft
    Auto,
    /// KVM, with or without hardware virtualisation
    Kvm,
    /// The software vCPU
    Soft,
}

impl From<BackEndArg> for BackEndChoice {
    fn from(argument: BackEndArg) -> BackEndChoice {
        match argument {
            BackEndArg::Auto => BackEndChoice::Auto,
            BackEndArg::Kvm => BackEndChoice::Kvm,
            BackEndArg::Soft => BackEndChoice::Soft,
        }
    }
}

/// How a machine migrates.
#[derive(Debug, Args)]
pub struct MigrationArgs {
    /// When the bytes of pages go
    #[arg(long, value_enum, default_value_t)]
    pub mode: MigrationMode,
    /// Longest that the machine may stand, in milliseconds, 1 to 10000 [default: 20, and 100
    /// with --mode pre-copy]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub downtime: Option<u64>,
    /// Most bytes of pages that each node sends in a second
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub bandwidth: Option<u64>,
    /// Put everything back if the pages have not moved by then, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,
    /// Change a machine that a cluster placed, too: the cluster goes on counting its parts
    /// where it put them
    #[arg(long)]
    pub by_hand: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl MigrationArgs {
    /// A migration to these nodes.
    pub fn to(&self, to: Vec<Destination>, spread: bool, choose: Choose) -> Migration {
        Migration {
            to,
            spread,
            mode: self.mode.into(),
            choose,
            downtime_ms: self.downtime,
            bytes_per_s: self.bandwidth,
            with_disks: false,
            keep_home: false,
        }
    }
}

/// `--mode` of `weft vm migrate`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum MigrationMode {
    /// Ahead of the vCPUs, and after them what was written since
    #[default]
    Hybrid,
    /// All of them ahead of the vCPUs
    PreCopy,
    /// After the vCPUs
    PostCopy,
}

impl From<MigrationMode> for Mode {
    fn from(argument: MigrationMode) -> Mode {
        match argument {
            MigrationMode::Hybrid => Mode::Hybrid,
            MigrationMode::PreCopy => Mode::PreCopy,
            MigrationMode::PostCopy => Mode::PostCopy,
        }
    }
}

/// `--choose` of `weft vm migrate`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ChooseArg {
    /// Those that the guest used most and last
    #[default]
    History,
    /// Those with the lowest numbers
    Order,
}

impl From<ChooseArg> for Choose {
    fn from(argument: ChooseArg) -> Choose {
        match argument {
            ChooseArg::History => Choose::History,
            ChooseArg::Order => Choose::Order,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn parse(line: &str) -> Result<VmCommand, String> {
        let words = ["weft", "vm"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words) {
            Ok(Cli {
                command: Command::Vm { command },
            }) => Ok(command),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_machine_is_described() {
        let line = "run --kernel k --initrd i --disk a.img,ro --disk b.img --net user,forward=1:2 \
                    --cpus 2 --memory 1G --backend soft --console socket=/s --stats json --no-reboot";
        let Ok(VmCommand::Run(args)) = parse(line) else {
            panic!("it does not parse");
        };
        assert_eq!(args.cpus.values, [2]);
        assert_eq!(args.memory.values, [1 << 30]);
        assert_eq!(args.disk.len(), 2);
        let network = NetArg::User {
            forwards: vec![(1, 2)],
            loopback: false,
            place: Default::default(),
        };
        assert_eq!(args.net, [network]);
        assert_eq!(args.console, ConsoleArg::Socket(Some("/s".into())));
        assert!(args.no_reboot && !args.debug_exit);
    }

    #[test]
    fn nodes_are_described() {
        let line = "run --kernel k --nodes 2 --cpus 1,2 --memory 64M,1G --transport tcp-sealed \
                    --lease 0.5 --disk d,node=1";
        let Ok(VmCommand::Run(args)) = parse(line) else {
            panic!("it does not parse");
        };
        assert_eq!((args.nodes, args.disk[0].node), (Some(2), 1));
        assert_eq!(args.cpus.values, [1, 2]);
        assert_eq!(args.memory.values, [64 << 20, 1 << 30]);
        assert_eq!(args.transport, LinkArg::TcpSealed);
        assert_eq!(args.lease, Duration::from_millis(500));
        let Ok(VmCommand::Run(args)) = parse("run --kernel k --on a,b:9") else {
            panic!("it does not parse");
        };
        assert_eq!(args.on, ["a", "b:9"]);
        let error = |line: &str| parse(&format!("run --kernel k {line}")).unwrap_err();
        assert!(error("--nodes 2 --on a").contains("cannot be used with"));
        assert!(error("--transport unix --on a").contains("cannot be used with"));
        assert!(error("--transport ring").contains("tcp-sealed"));
        assert!(error("--cpus 1,x").contains("`x` is not a number of vCPUs"));
        assert!(error("--cpus 1 --cpus 2").contains("multiple times"));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |line: &str| parse(line).unwrap_err();
        assert!(error("run --cpus 2").contains("--kernel"));
        assert!(error("run --kernel k --memory 1Q").contains("is not a unit of size"));
        assert!(error("run --kernel k --disk a,r0").contains("did you mean `ro`?"));
        assert!(error("run --kernel k --backend sfot").contains("soft"));
        assert!(error("run --kernel k --kernl k").contains("--kernel"));
        assert!(error("run --kernel k --boot-protocol pvhh").contains("'pvh'"));
        assert!(error("pause").contains("<NAME|PID>"));
    }
}
