//! The kinds of files that boot, and the protocols that start them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Kernel,
    /// The first file system, or a module.
    Initrd,
}

impl Role {
    /// Larger files are refused before they are read: no kernel is, and an
    /// initrd must fit below 4 GiB.
    pub(crate) fn bytes_max(self) -> u64 {
        match self {
            Self::Kernel => 1 << 30,
            Self::Initrd => 3 << 30,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::Initrd => "initrd",
        })
    }
}

/// How a kernel is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// Linux, 64-bit, at the entry of its vmlinux.
    Linux,
    /// Linux, 64-bit, at the entry of the unpacker in its bzImage.
    LinuxOwnEntry,
    Pvh,
    /// Multiboot 1.
    Multiboot,
}

impl Protocol {
    /// All, with the name that chooses each.
    pub const NAMES: [(&'static str, Protocol); 4] = [
        ("linux", Protocol::Linux),
        ("linux-own-entry", Protocol::LinuxOwnEntry),
        ("pvh", Protocol::Pvh),
        ("multiboot", Protocol::Multiboot),
    ];
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, protocol)| protocol == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

/// No protocol has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no boot protocol {0}: choose linux, linux-own-entry, pvh or multiboot")]
pub struct UnknownProtocol(String);

impl FromStr for Protocol {
    type Err = UnknownProtocol;

    fn from_str(text: &str) -> Result<Self, UnknownProtocol> {
        Self::NAMES
            .iter()
            .find(|(name, _)| *name == text)
            .map(|(_, protocol)| *protocol)
            .ok_or_else(|| UnknownProtocol(text.into()))
    }
}

/// What kind of file a kernel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// An ELF file.
    Elf,
    /// Linux with its unpacker.
    BzImage,
    /// A file that a Multiboot header loads by addresses.
    Flat,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Elf => "ELF image",
            Self::BzImage => "bzImage",
            Self::Flat => "flat Multiboot image",
        })
    }
}
