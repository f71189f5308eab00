//! Options of `weft vm run` whose values are one of a few words.

use clap::ValueEnum;
use weft_boot::Protocol;
use weft_machine::Follow;
use weft_monitor::settings::Confine;
use weft_node::options::Transport;
use weft_vcpu::CpuModel;

/// `--cpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CpuArg {
    /// SSE2, as the first processors
    V1,
    /// SSE4.2 and POPCNT, as of 2009; with AES
    V2,
    /// AVX2, BMI2 and FMA, as of 2013
    V3,
}

impl From<CpuArg> for CpuModel {
    fn from(argument: CpuArg) -> CpuModel {
        match argument {
            CpuArg::V1 => CpuModel::V1,
            CpuArg::V2 => CpuModel::V2,
            CpuArg::V3 => CpuModel::V3,
        }
    }
}

/// `--transport`: as of `weft run`, without the rings, which are the engine's of an
/// elastic process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LinkArg {
    /// A UNIX socket
    Unix,
    /// TCP over loopback, unencrypted
    Tcp,
    /// TCP over loopback, encrypted as between hosts
    TcpSealed,
}

impl From<LinkArg> for Transport {
    fn from(argument: LinkArg) -> Transport {
        match argument {
            LinkArg::Unix => Transport::Unix,
            LinkArg::Tcp => Transport::Tcp,
            LinkArg::TcpSealed => Transport::TcpSealed,
        }
    }
}

/// `--growable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GrowableArg {
    /// `yes` with software vCPUs, unless the machine is deterministic
    Auto,
    /// Nodes can join it. Its start takes some milliseconds more
    Yes,
    /// It stays on its node
    No,
}

/// `--exchange`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExchangeArg {
    /// While a node without vCPUs has pages that vCPUs use
    Auto,
    /// Pages stay with their nodes
    Never,
}

impl ExchangeArg {
    /// Whether pages come to vCPUs that follow theirs like this. A vCPU that goes after a number
    /// of faults never learns that its pages had better come.
    pub fn allows(self, follow: Follow) -> bool {
        self == ExchangeArg::Auto && !matches!(follow, Follow::Faults(_))
    }
}

/// `--late-cpus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LateArg {
    /// If the initrd says that its init can
    Auto,
    /// After the boot
    Yes,
    /// With the boot
    No,
}

/// `--balloon`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BalloonArg {
    /// Unless the machine is deterministic
    Auto,
    /// No balloon
    Off,
}

/// `--boot-protocol`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProtocolArg {
    /// What fits best
    Auto,
    /// Linux, 64-bit, at the entry of its vmlinux
    Linux,
    /// Linux, 64-bit: a bzImage that unpacks itself
    LinuxOwnEntry,
    /// PVH
    Pvh,
    /// Multiboot 1
    Multiboot,
}

impl From<ProtocolArg> for Option<Protocol> {
    fn from(argument: ProtocolArg) -> Option<Protocol> {
        match argument {
            ProtocolArg::Auto => None,
            ProtocolArg::Linux => Some(Protocol::Linux),
            ProtocolArg::LinuxOwnEntry => Some(Protocol::LinuxOwnEntry),
            ProtocolArg::Pvh => Some(Protocol::Pvh),
            ProtocolArg::Multiboot => Some(Protocol::Multiboot),
        }
    }
}

/// `--confine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ConfineArg {
    /// The process ends
    Enforce,
    /// The kernel's log names the call
    Log,
    /// Nothing
    Off,
}

impl From<ConfineArg> for Confine {
    fn from(argument: ConfineArg) -> Confine {
        match argument {
            ConfineArg::Enforce => Confine::Enforce,
            ConfineArg::Log => Confine::Log,
            ConfineArg::Off => Confine::Off,
        }
    }
}
