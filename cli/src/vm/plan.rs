//! The options of `weft vm run`, judged: everything that can be known to be
//! wrong before anything is opened.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;

use weft_confine::privilege;
use weft_confine::privilege::Identity;
use weft_machine::{
    BackEndChoice, CPUS_MAX, Configuration, Disk, Forward, Invalid, Network, SwitchSocket,
    check_host,
};
use weft_monitor::settings::Confine;
use weft_node::consent::Lender;
use weft_node::host;
use weft_node::rundir::{self, SWITCH_SOCKET_MAX};

use super::args::VmRunArgs;
use super::choices::{BalloonArg, LateArg};
use super::error::VmError;
use super::nodes::Nodes;
use super::restore::Restored;
use super::suboptions::{ConsoleArg, NetArg};
use super::updated;

/// Longest name of a machine: it becomes a part of a socket's path.
pub const NAME_MAX: usize = 40;
/// Longest name of a network device (`IFNAMSIZ`, without its zero).
const TAP_NAME_MAX: usize = 15;
/// What a kernel is told unless the user tells it something.
const COMMAND_LINE: &str = "console=ttyS0";

/// A run that makes sense.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What `weft vm list` shows.
    pub name: String,
    /// The machine.
    pub configuration: Configuration,
    /// The nodes that it lies on.
    pub nodes: Nodes,
    /// Where the console is.
    pub console: ConsoleArg,
    /// Where the API is, if not in the run directory.
    pub api: Option<PathBuf>,
    /// A reset starts the guest again.
    pub reboot: bool,
    /// It does so on the hosts that it had at its end, not on those of its start.
    pub stays_on_hosts: bool,
    /// Marks the end of boot on the console.
    pub ready: Option<String>,
    /// Whom to become.
    pub identity: Option<Identity>,
    /// What happens to calls that nobody has business with.
    pub confine: Confine,
    /// The checkpoint that the first life continues from.
    pub restore: Option<PathBuf>,
    /// What it may open here, if it came from another host.
    pub lender: Option<Lender>,
}

impl Plan {
    /// Judges the options.
    pub fn check(args: &VmRunArgs) -> Result<Plan, VmError> {
        let restored = args.restore.as_deref();
        let restored = restored
            .map(|set| Restored::open(set, args.verify))
            .transpose()?;
        let completed = restored.as_ref().map(|restored| restored.complete(args));
        let args = completed.as_ref().unwrap_or(args);
        let nodes = Nodes::check(args)?;
        // Until the cluster has found hosts their number is not known.
        if !args.place.cluster {
            check_one_node(args, &nodes)?;
        }
        let configuration = match &restored {
            Some(restored) => restored.configuration(args, &nodes)?,
            None => configuration(args, &nodes)?,
        };
        configuration
            .validate()
            .map_err(|invalid| explain(&invalid))?;
        if let Some(restored) = restored.as_ref().filter(|_| !args.changed_disks) {
            restored.check_disks()?;
        }
        if !nodes.shares.is_empty() && configuration.back_end != BackEndChoice::Kvm {
            let model = configuration.cpu_model.unwrap_or_default();
            check_host(model).map_err(|error| VmError::Option(error.to_string()))?;
        }
        check_devices(&configuration, &nodes)?;
        if !args.place.cluster {
            check_memory(bytes_here(&configuration, &nodes))?;
        }
        let name = match &args.name {
            Some(name) => check_name(name)?,
            None => std::process::id().to_string(),
        };
        if args.ready.as_deref() == Some("") {
            return Err(VmError::Option("--ready lacks the text to look for".into()));
        }
        let sudo_uid = std::env::var_os("SUDO_UID");
        Ok(Plan {
            name,
            configuration,
            nodes,
            console: args.console.clone(),
            api: args.api.clone(),
            reboot: !args.no_reboot,
            stays_on_hosts: false,
            ready: args.ready.clone(),
            identity: privilege::choose(args.user.as_deref(), sudo_uid.as_deref())?,
            confine: args.confine.into(),
            restore: restored.map(|restored| restored.directory().to_owned()),
            lender: None,
        })
    }
}

fn configuration(args: &VmRunArgs, nodes: &Nodes) -> Result<Configuration, VmError> {
    let mut configuration = Configuration::new(args.kernel.clone(), nodes.memory_bytes);
    configuration.cpus = nodes.cpus;
    configuration.slices = nodes.shares.clone();
    configuration.spare_bytes = args.spare;
    configuration.back_end = back_end(args, nodes)?;
    configuration.cpu_model = args.cpu.map(Into::into);
    configuration.deterministic = args.deterministic;
    configuration.initrd = args.initrd.clone();
    configuration.boot_protocol = args.boot_protocol.into();
    configuration.command_line = match &args.cmdline {
        Some(line) => line.clone(),
        None => COMMAND_LINE.to_owned(),
    };
    // The port costs a guest without its driver nothing, but one with it some
    // milliseconds of its boot.
    configuration.virtio_console = configuration
        .command_line
        .split_whitespace()
        .any(|word| word.starts_with("console=hvc"));
    // It answers at moments that are not repeated.
    configuration.balloon = args.balloon == BalloonArg::Auto && !args.deterministic;
    configuration.debug_exit = args.debug_exit;
    configuration.trace = args.trace.is_some();
    configuration.follow = nodes.follow(args.follow, configuration.back_end)?;
    configuration.exchanges = args.exchange.allows(configuration.follow);
    configuration.updated = updated::ranges(args, !nodes.shares.is_empty())?;
    configuration.late_cpus = match args.late_cpus {
        LateArg::Auto => None,
        LateArg::Yes => Some(true),
        LateArg::No => Some(false),
    };
    let disks = args.disk.iter().map(|disk| Disk {
        path: match disk.node as usize {
            node if node > 0 && !args.on.is_empty() => disk.path.clone(),
            // The machine may be saved, and continued, in another directory.
            _ => std::path::absolute(&disk.path).unwrap_or_else(|_| disk.path.clone()),
        },
        read_only: disk.read_only,
        direct: disk.direct,
        slice: disk.node,
        data_path: disk.data_path,
    });
    configuration.disks = disks.collect();
    configuration.networks = args.net.iter().map(network).collect::<Result<_, _>>()?;
    Ok(configuration)
}

/// Refuses options that say nothing of a machine on one node.
fn check_one_node(args: &VmRunArgs, nodes: &Nodes) -> Result<(), VmError> {
    let why = match nodes.count {
        1 if args.trace.is_some() => {
            "--trace: a machine on one node has no remote faults: add --nodes"
        }
        1 if args.spare.is_some() => {
            "--spare: a machine on one node keeps all of its memory: add --nodes or --on"
        }
        _ => return Ok(()),
    };
    Err(VmError::Option(why.into()))
}

/// What runs vCPUs, where the nodes leave a choice.
fn back_end(args: &VmRunArgs, nodes: &Nodes) -> Result<BackEndChoice, VmError> {
    let choice = args.backend.into();
    if nodes.shares.is_empty() {
        return Ok(choice);
    }
    if args.deterministic {
        return Err(VmError::Option(
            "--deterministic: a machine over several nodes has no single order of \
            instructions: use one node"
                .into(),
        ));
    }
    // Whether KVM can do it, its opening says.
    Ok(match choice {
        BackEndChoice::Kvm if !nodes.hosts.is_empty() => {
            return Err(VmError::Option(
                "--backend kvm: a machine over several hosts needs --backend soft: KVM cannot \
                follow another host's clock yet"
                    .into(),
            ));
        }
        // The machine says why it takes the software back end.
        BackEndChoice::Auto if nodes.count == 1 => BackEndChoice::Auto,
        BackEndChoice::Kvm => BackEndChoice::Kvm,
        BackEndChoice::Auto | BackEndChoice::Soft => BackEndChoice::Soft,
    })
}

fn network(argument: &NetArg) -> Result<Network, VmError> {
    Ok(match argument {
        NetArg::Tap { name, .. } if name.len() > TAP_NAME_MAX || name.contains(['/', ' ']) => {
            return Err(VmError::Option(format!(
                "--net tap={name}: this is not a valid network device name (at most \
                {TAP_NAME_MAX} bytes, no `/`, no space)"
            )));
        }
        NetArg::Tap { name, place } => Network::Tap {
            name: name.clone(),
            slice: place.node,
            data_path: place.data_path,
        },
        NetArg::Switch { socket, mac, place } => Network::Switch {
            socket: switch_socket(socket, place.node)?,
            mac: mac.unwrap_or_else(any_mac),
            slice: place.node,
            data_path: place.data_path,
        },
        NetArg::User {
            forwards,
            loopback,
            place,
        } => Network::User {
            reaches_host: *loopback,
            slice: place.node,
            data_path: place.data_path,
            forwards: forwards
                .iter()
                .map(|(host_port, guest_port)| Forward {
                    host_port: *host_port,
                    guest_port: *guest_port,
                })
                .collect(),
        },
    })
}

/// The same for processes with other working directories, and on other hosts. A name stays one:
/// each host has a path for it.
fn switch_socket(socket: &SwitchSocket, node: u32) -> Result<SwitchSocket, VmError> {
    let path = match socket {
        SwitchSocket::Named(name) => {
            let refused = |error| VmError::Option(format!("--net switch={name}: {error}"));
            // Another host's run directory is not known here.
            let directory = match node {
                0 => rundir::switches(),
                _ => PathBuf::new(),
            };
            rundir::switch_socket(&directory, name).map_err(refused)?;
            return Ok(socket.clone());
        }
        SwitchSocket::At(path) => path,
    };
    let path = std::path::absolute(path)
        .map_err(|error| VmError::Option(format!("--net switch={}: {error}", path.display())))?;
    match path.as_os_str().len() {
        0..=SWITCH_SOCKET_MAX => Ok(SwitchSocket::At(path)),
        bytes => Err(VmError::Option(format!(
            "--net switch={}: the path has {bytes} bytes: at most {SWITCH_SOCKET_MAX} are allowed",
            path.display()
        ))),
    }
}

/// An address of a card that no other has, by chance: 02, then random bytes.
fn any_mac() -> [u8; 6] {
    let [_, _, _, a, b, c, d, e] = RandomState::new().build_hasher().finish().to_be_bytes();
    [2, a, b, c, d, e]
}

/// The configuration's complaint in the words of the command line.
fn explain(invalid: &Invalid) -> VmError {
    VmError::Option(match invalid {
        Invalid::Cpus(cpus) => format!("--cpus {cpus}: a machine has 1 to {CPUS_MAX} vCPUs"),
        Invalid::Memory(bytes) => {
            format!("--memory {bytes}: a machine has at least 4M, and a multiple of 4K")
        }
        Invalid::Deterministic => {
            "--deterministic needs --backend soft: KVM does not count instructions".into()
        }
        Invalid::Forward(port) => {
            format!("--net user,forward={port}:…: port {port} of the host is forwarded twice")
        }
        Invalid::Slice {
            device,
            slice,
            slices,
            ..
        } => {
            let option = match *device {
                "disk" => "--disk",
                _ => "--net",
            };
            let last = slices - 1;
            format!("{option} …,node={slice}: the last of this machine's nodes is {last}")
        }
        Invalid::Spare { bytes, least } => format!(
            "--spare {bytes}: too little for the vCPUs of a node, which can need {least} bytes \
            of other nodes' pages at once"
        ),
        Invalid::Updated(_) | Invalid::UpdatedRange(_) => format!("--update: {invalid}"),
        // Said before, in the options' words.
        Invalid::Placement(_) | Invalid::Shares { .. } => invalid.to_string(),
    })
}

/// A file of another host is opened there, where this process's folder means nothing.
fn check_devices(configuration: &Configuration, nodes: &Nodes) -> Result<(), VmError> {
    if nodes.hosts.is_empty() {
        return Ok(());
    }
    let elsewhere = |disk: &&Disk| disk.slice != 0 && !disk.path.is_absolute();
    match configuration.disks.iter().find(elsewhere) {
        None => Ok(()),
        Some(disk) => {
            let (path, node) = (disk.path.display(), disk.slice);
            let host = nodes.hosts.get(node as usize - 1);
            let host = host.map_or("another host", String::as_str);
            Err(VmError::Option(format!(
                "--disk {path},node={node}: it is opened on {host}: give an absolute path"
            )))
        }
    }
}

/// Guest memory that this host may come to hold.
fn bytes_here(configuration: &Configuration, nodes: &Nodes) -> u64 {
    let placement = configuration.placement();
    match nodes.hosts.is_empty() {
        true => configuration.memory_bytes,
        false => placement.budget_bytes(0, configuration.spare_bytes),
    }
}

fn check_memory(asked_bytes: u64) -> Result<(), VmError> {
    let host_bytes = host::total_memory_bytes();
    if asked_bytes > host_bytes {
        return Err(VmError::MemoryTooLarge {
            asked_bytes,
            host_bytes,
        });
    }
    Ok(())
}

fn check_name(name: &str) -> Result<String, VmError> {
    if !name.is_empty() && name.chars().all(|c| c.is_ascii_digit()) {
        return Err(bad_name(
            name,
            "a name of digits only would be mistaken for a pid",
        ));
    }
    check_plain(name)
}

/// A name that can be a part of a path. A machine without a name of its own has its pid for one.
pub fn check_plain(name: &str) -> Result<String, VmError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(bad_name(name, &format!("a name has 1 to {NAME_MAX} bytes")));
    }
    if !name.chars().all(is_plain) || name.starts_with(['.', '-']) {
        return Err(bad_name(
            name,
            "a name has letters, digits, `-`, `_` and `.`, and starts with neither `-` nor `.`",
        ));
    }
    Ok(name.to_owned())
}

fn bad_name(name: &str, why: &str) -> VmError {
    VmError::Option(format!("--name {name}: {why}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use clap::Parser;

    use weft_boot::Protocol;
    use weft_checkpoint::{NewSet, PAGE_BYTES, PagesWriter};
    use weft_machine::{MachineState, SavedMachine, Share};
    use weft_node::options::Transport;
    use weft_platform::part::Version;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::vm::args::VmCommand;

    fn check(line: &str) -> Result<Plan, String> {
        let words = ["weft", "vm", "run"].into_iter().chain(line.split(' '));
        match Cli::try_parse_from(words).unwrap().command {
            Command::Vm {
                command: VmCommand::Run(args),
            } => Plan::check(&args).map_err(|error| error.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_plan_has_everything() {
        let plan = check("--kernel k --disk d,ro --net user,forward=1:2 --name web.1 --no-reboot");
        let plan = plan.unwrap();
        assert_eq!(plan.name, "web.1");
        assert!(!plan.reboot);
        assert!(plan.configuration.disks[0].read_only);
        assert_eq!(plan.configuration.command_line, COMMAND_LINE);
        assert!(!plan.configuration.virtio_console);
        assert_eq!(plan.configuration.boot_protocol, None);
        let plan = check("--kernel k --boot-protocol linux-own-entry").unwrap();
        let forced = plan.configuration.boot_protocol;
        assert_eq!(forced, Some(Protocol::LinuxOwnEntry));
        let plan = check("--kernel k --cmdline console=hvc0").unwrap();
        assert!(plan.configuration.virtio_console);
        assert_eq!(plan.name, std::process::id().to_string());
    }

    #[test]
    fn nodes_share_the_machine() {
        let shares = |line: &str| {
            let plan = check(&format!("--kernel k {line}")).unwrap();
            let configuration = plan.configuration;
            assert_eq!(plan.nodes.count, configuration.slices.len().max(1));
            let placement = configuration.placement();
            assert_eq!(placement.cpus(), configuration.cpus);
            assert_eq!(placement.memory_bytes(), configuration.memory_bytes);
            let mib = |share: &Share| (share.cpus, share.memory_bytes >> 20);
            configuration.slices.iter().map(mib).collect::<Vec<_>>()
        };
        assert_eq!(shares("--cpus 2 --growable no"), []);
        assert_eq!(shares("--nodes 2 --cpus 3"), [(2, 128), (1, 128)]);
        assert_eq!(shares("--nodes 3"), [(1, 86), (0, 86), (0, 84)]);
        assert_eq!(
            shares("--cpus 1,1,2 --memory 96M"),
            [(1, 64), (1, 16), (2, 16)]
        );
        assert_eq!(shares("--cpus 2 --memory 256M,64M"), [(1, 256), (1, 64)]);
        assert_eq!(
            shares("--nodes 2 --cpus 1,1 --memory 64M,0"),
            [(1, 64), (1, 0)]
        );
        let plan = check("--kernel k --nodes 2 --disk d,node=1 --net user,node=1").unwrap();
        let machine = plan.configuration;
        assert_eq!(
            (machine.disks[0].slice, machine.networks[0].slice()),
            (1, 1)
        );
        assert_eq!(machine.back_end, BackEndChoice::Soft);
        assert_eq!(plan.nodes.transport, Transport::Tcp);
        assert!(plan.nodes.hosts.is_empty());
        let plan = check("--kernel k --on beta,gamma:7118 --cpus 3").unwrap();
        assert_eq!(plan.nodes.hosts, ["beta", "gamma:7118"]);
        assert_eq!((plan.nodes.count, plan.configuration.slices.len()), (3, 3));
        let one = check("--kernel k --growable no").unwrap().configuration;
        assert_eq!(one.back_end, BackEndChoice::Auto);
    }

    #[test]
    fn one_node_can_grow_where_it_is_asked_to() {
        let plan = check("--kernel k --growable yes --cpus 3 --memory 6M --follow auto").unwrap();
        let share = Share {
            cpus: 3,
            memory_bytes: 6 << 20,
        };
        assert_eq!((plan.nodes.count, &plan.nodes.shares), (1, &vec![share]));
        assert_eq!(plan.configuration.slices, [share]);
        assert_eq!(plan.configuration.back_end, BackEndChoice::Auto);
        // Several nodes have their own shares.
        let two = check("--kernel k --growable yes --nodes 2").unwrap();
        assert_eq!(two.configuration.slices.len(), 2);
        for (line, slices) in [
            ("--backend soft", 1),
            ("--backend kvm", 0),
            ("--deterministic", 0),
            ("--backend soft --growable no", 0),
        ] {
            let plan = check(&format!("--kernel k {line}")).unwrap();
            assert_eq!(plan.configuration.slices.len(), slices, "{line}");
        }
        for (line, sentence) in [
            ("--deterministic", "a single order of instructions"),
            ("--backend kvm", "use --backend soft or --nodes 2"),
            ("--cpus 0", "--cpus 0: a machine has 1 to 255"),
            ("--memory 5000001", "multiple of 4K"),
        ] {
            let error = check(&format!("--kernel k --growable yes {line}")).unwrap_err();
            assert!(error.contains(sentence), "{line}: {error}");
        }
    }

    #[test]
    fn nodes_that_do_not_fit_are_refused_in_the_options_words() {
        for (line, sentence) in [
            (
                "--nodes 3 --cpus 1,1",
                "--cpus 1,1 names 2 nodes, --nodes says 3",
            ),
            (
                "--cpus 1,1 --memory 64M,64M,64M",
                "--memory 64M,64M,64M names 3 nodes, --cpus 1,1 names 2",
            ),
            (
                "--on a,b --cpus 1,1",
                "--cpus 1,1 names 2 nodes, --on a,b with this host makes 3",
            ),
            (
                "--on a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p",
                "with this host makes 17: a machine over several nodes has 2 to 16",
            ),
            ("--on a --backend kvm", "needs --backend soft: KVM"),
            (
                "--on a --disk d,node=1",
                "--disk d,node=1: it is opened on a: give an absolute path",
            ),
            (
                "--nodes 1",
                "--nodes says 1: a machine over several nodes has 2 to 16",
            ),
            (
                "--nodes 17",
                "--nodes says 17: a machine over several nodes has 2 to 16",
            ),
            (
                "--nodes 2 --cpus 256",
                "--cpus 256: a machine has 1 to 255 vCPUs",
            ),
            ("--cpus 0,1", "--cpus 0,1: the machine starts on node 0"),
            (
                "--memory 32M,64M",
                "--memory 32M,64M: the kernel is loaded into the first node's",
            ),
            ("--nodes 2 --memory 48M", "which must be at least 64M"),
            ("--memory 64M,2M", "--memory 64M,2M: too little for node 1"),
            (
                "--memory 64M,65M",
                "the memory of each node must be a multiple of 2M",
            ),
            (
                "--nodes 2 --memory 129M",
                "the memory of each node must be a multiple of 2M",
            ),
            ("--cpus 1,0 --memory 64M,0", "node 1 has neither"),
            ("--memory 9000000T,9000000T", "more than a machine can have"),
            ("--memory 4000T,4000T", "more than this host has for it"),
            (
                "--nodes 2 --deterministic",
                "no single order of instructions",
            ),
            (
                "--nodes 2 --disk d,node=2",
                "--disk …,node=2: the last of this machine's nodes is 1",
            ),
            (
                "--net user,node=1",
                "--net …,node=1: the last of this machine's nodes is 0",
            ),
            (
                "--nodes 2 --lease 0.1",
                "--lease 0.1 s is not within 0.5 to 600 s",
            ),
        ] {
            let error = check(&format!("--kernel k {line}")).unwrap_err();
            assert!(error.contains(sentence), "{line}: {error}");
        }
    }

    /// A complete set of a machine of one vCPU and 128 MiB of zeros.
    fn saved(directory: &Path) {
        let set = NewSet::create(directory, 1, None).unwrap();
        let file = set.pages()[0].try_clone().unwrap();
        let writer = PagesWriter::new(file, set.identity(), 0).unwrap();
        let written = writer.finish().unwrap();
        let configuration = Configuration::new("k".into(), 128 << 20);
        let machine = weft_checkpoint::Machine {
            name: "one".into(),
            cpus: 1,
            memory_bytes: 128 << 20,
            pages_end: (128 << 20) / PAGE_BYTES as u64,
            back_end: "soft".into(),
            features: vec![],
            disks: vec![],
        };
        let state = SavedMachine {
            configuration,
            updated: vec![],
            state: MachineState {
                version: Version,
                vcpus: vec![],
                parts: BTreeMap::new(),
            },
        };
        let state = serde_json::to_vec(&state).unwrap();
        set.commit(machine, &state, vec![written.into()], "test", 0)
            .unwrap();
    }

    #[test]
    fn what_one_node_has_no_use_for_is_refused_of_a_saved_machine_too() {
        let name = format!("weft-plan-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        saved(&directory);
        let restore = format!("--restore {}", directory.display());
        assert!(check(&restore).unwrap().restore.is_some());
        let grown = check(&format!("{restore} --growable yes")).unwrap();
        assert_eq!(grown.configuration.slices.len(), 1);
        for machine in ["--kernel k", &restore] {
            for (option, sentence) in [
                ("--trace t", "--trace: a machine on one node has no remote"),
                ("--spare 8M", "--spare: a machine on one node keeps all"),
            ] {
                let error = check(&format!("{machine} {option}")).unwrap_err();
                assert!(error.contains(sentence), "{machine}: {error}");
                check(&format!("{machine} {option} --nodes 2 --memory 64M,64M")).unwrap();
            }
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn nonsense_is_refused_in_the_options_words() {
        let error = |line: &str| check(&format!("--kernel k {line}")).unwrap_err();
        assert!(error("--cpus 0").contains("--cpus 0: a machine has 1 to 255"));
        assert!(error("--cpus 256").contains("--cpus 256"));
        assert!(error("--memory 1M").contains("at least 4M"));
        assert!(error("--memory 5000001").contains("multiple of 4K"));
        assert!(error("--memory 4096T").contains("more than this host has for it"));
        assert!(error("--deterministic --backend kvm").contains("--backend soft"));
        let twice = "--net user,forward=1:2,forward=1:3";
        assert!(error(twice).contains("port 1 of the host is forwarded twice"));
        assert!(error("--net tap=sixteen-letters-").contains("at most 15"));
        for name in ["a/b", ".x", "-", "17"] {
            assert!(
                error(&format!("--name={name}")).contains("--name"),
                "{name}"
            );
        }
    }
}
