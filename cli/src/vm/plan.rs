//! The options of `weft vm run`, judged: everything that can be known to be
//! wrong before anything is opened.

use std::path::PathBuf;

use weft_node::host;
use weft_vmm::confine::Mode;
use weft_vmm::confine::privilege::{self, Identity};
use weft_vmm::machine::{CPUS_MAX, Configuration, Disk, Forward, Invalid, Network};

use super::args::VmRunArgs;
use super::error::VmError;
use super::suboptions::{ConsoleArg, NetArg};

/// Longest name of a machine: it becomes a part of a socket's path.
const NAME_MAX: usize = 40;
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
    /// Where the console is.
    pub console: ConsoleArg,
    /// Where the API is, if not in the run directory.
    pub api: Option<PathBuf>,
    /// A reset starts the guest again.
    pub reboot: bool,
    /// Marks the end of boot on the console.
    pub ready: Option<String>,
    /// Whom to become.
    pub identity: Option<Identity>,
    /// What happens to calls that nobody has business with.
    pub confine: Mode,
}

impl Plan {
    /// Judges the options.
    pub fn check(args: &VmRunArgs) -> Result<Plan, VmError> {
        let configuration = configuration(args)?;
        configuration
            .validate()
            .map_err(|invalid| explain(&invalid))?;
        check_memory(configuration.memory_bytes)?;
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
            console: args.console.clone(),
            api: args.api.clone(),
            reboot: !args.no_reboot,
            ready: args.ready.clone(),
            identity: privilege::choose(args.user.as_deref(), sudo_uid.as_deref())?,
            confine: args.confine.into(),
        })
    }
}

fn configuration(args: &VmRunArgs) -> Result<Configuration, VmError> {
    let mut configuration = Configuration::new(args.kernel.clone(), args.memory);
    configuration.cpus = args.cpus;
    configuration.back_end = args.backend.into();
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
    configuration.debug_exit = args.debug_exit;
    let disks = args.disk.iter().map(|disk| Disk {
        path: disk.path.clone(),
        read_only: disk.read_only,
        direct: disk.direct,
    });
    configuration.disks = disks.collect();
    configuration.networks = args.net.iter().map(network).collect::<Result<_, _>>()?;
    Ok(configuration)
}

fn network(argument: &NetArg) -> Result<Network, VmError> {
    Ok(match argument {
        NetArg::Tap(name) if name.len() > TAP_NAME_MAX || name.contains(['/', ' ']) => {
            return Err(VmError::Option(format!(
                "--net tap={name}: no network device can be called so \
                 (at most {TAP_NAME_MAX} bytes, no `/`, no space)"
            )));
        }
        NetArg::Tap(name) => Network::Tap { name: name.clone() },
        NetArg::User { forwards, loopback } => Network::User {
            reaches_host: *loopback,
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
            format!("--net user,forward={port}:…: the host's port {port} is forwarded twice")
        }
    })
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
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let why = if name.is_empty() || name.len() > NAME_MAX {
        format!("a name has 1 to {NAME_MAX} bytes")
    } else if !name.chars().all(is_plain) || name.starts_with(['.', '-']) {
        "a name has letters, digits, `-`, `_` and `.`, and starts with neither `-` nor `.`".into()
    } else if name.chars().all(|c| c.is_ascii_digit()) {
        "a name of digits only would be taken for a pid".into()
    } else {
        return Ok(name.to_owned());
    };
    Err(VmError::Option(format!("--name {name}: {why}")))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use weft_vmm::boot::Protocol;

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
    fn nonsense_is_refused_in_the_options_words() {
        let error = |line: &str| check(&format!("--kernel k {line}")).unwrap_err();
        assert!(error("--cpus 0").contains("--cpus 0: a machine has 1 to 255"));
        assert!(error("--cpus 256").contains("--cpus 256"));
        assert!(error("--memory 1M").contains("at least 4M"));
        assert!(error("--memory 5000001").contains("multiple of 4K"));
        assert!(error("--memory 4096T").contains("more than this host has"));
        assert!(error("--deterministic --backend kvm").contains("--backend soft"));
        let twice = "--net user,forward=1:2,forward=1:3";
        assert!(error(twice).contains("port 1 is forwarded twice"));
        assert!(error("--net tap=sixteen-letters-").contains("at most 15"));
        for name in ["a/b", ".x", "-", "17"] {
            assert!(
                error(&format!("--name={name}")).contains("--name"),
                "{name}"
            );
        }
    }
}
