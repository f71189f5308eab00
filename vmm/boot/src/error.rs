//! Why a kernel does not boot: what was wrong, where, and what to do.

use std::path::PathBuf;

use thiserror::Error;

use super::format::{Protocol, Role};
use super::memory_map::{LOW_RAM_END, ONE_MIB};
use super::payload::PayloadError;

/// Why nothing was booted.
#[derive(Debug, Error)]
pub enum BootError {
    /// The file could not be read.
    #[error("cannot read the {role} {path}")]
    Read {
        /// The role of the file.
        role: Role,
        /// Which file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A directory, a device.
    #[error("the {role} {path} is not an ordinary file: give the image's own path")]
    NotAFile {
        /// The role of the file.
        role: Role,
        /// Which file.
        path: PathBuf,
    },
    /// Nothing in it, or absurdly much.
    #[error("the {role} {name} has {bytes} bytes: it must have 1 to {limit}")]
    FileSize {
        /// The role of the file.
        role: Role,
        /// Which file.
        name: String,
        bytes: u64,
        /// What it may have.
        limit: u64,
    },
    /// Somebody wrote to it since it was opened.
    #[error(
        "the {role} {name} was changed while the machine started: it had {before} bytes and \
        now has {now}: start again when it is complete"
    )]
    Changed {
        role: Role,
        /// Which file.
        name: String,
        /// Bytes when it was opened.
        before: u64,
        /// Bytes now.
        now: u64,
    },
    /// The kernel was read, but cannot boot here.
    #[error("cannot boot {name}")]
    Kernel {
        /// Which file.
        name: String,
        /// What is wrong with it.
        source: ImageError,
    },
    /// No room between the kernel and the end of low memory.
    #[error(
        "the initrd {name} has {bytes} bytes, but {room} are free above the kernel and below \
        {limit:#x}: give the guest more memory"
    )]
    InitrdTooLarge {
        /// Which file.
        name: String,
        bytes: u64,
        /// What there is room for.
        room: u64,
        /// Where that room ends.
        limit: u64,
    },
    /// No room between the kernel and the end of the first slice's memory.
    #[error(
        "the initrd {name} of {} does not fit into the first node's {}: {} MiB are free above \
         the kernel; give that node more with --memory",
        size(*bytes), size(*memory_bytes), room >> 20
    )]
    InitrdTooLargeForNode {
        /// Which file.
        name: String,
        bytes: u64,
        /// What there is room for.
        room: u64,
        /// The first slice's memory, in bytes.
        memory_bytes: u64,
    },
    /// The kernel would cut it off.
    #[error("the command line has {bytes} bytes, but the kernel accepts {limit}: shorten it")]
    CommandLineTooLong {
        /// Its length.
        bytes: usize,
        /// The most that fits.
        limit: usize,
    },
    /// The kernel would see only what is before it.
    #[error("the command line has a zero byte at {0}: remove it")]
    CommandLineZero(usize),
    /// The guest has no memory where boot information goes.
    #[error("guest memory at {address:#x} cannot be written")]
    Memory {
        /// Guest-physical.
        address: u64,
        /// The library's words.
        source: vm_memory::GuestMemoryError,
    },
}

/// What is wrong with a kernel image.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum ImageError {
    /// Not even the beginning looks like one.
    #[error(
        "it is not a kernel image but {0}: an ELF vmlinux, a bzImage, or a PVH or Multiboot \
        image is needed"
    )]
    NotAKernel(&'static str),
    /// A kernel, for another kind of computer.
    #[error("it is for {0}, but this machine is x86-64: use a kernel built for x86-64")]
    Architecture(String),
    /// It ends too early.
    #[error(
        "it is truncated: {what} extend to byte {needed}, but the file has {has}: copy it \
    again"
    )]
    Truncated {
        /// What is missing, in the plural.
        what: &'static str,
        /// Where that would end.
        needed: u64,
        /// Bytes in the file.
        has: u64,
    },
    /// It contradicts itself.
    #[error("its {place} is invalid ({problem}): the file is damaged")]
    Malformed {
        /// Which part.
        place: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// An x86 program without any of the headers that say how to start it.
    #[error(
        "it is an ELF file for {0}, but not a Linux kernel, and has neither a PVH note nor a \
        Multiboot header"
    )]
    NoProtocol(&'static str),
    /// Asked for a protocol that this image does not speak.
    #[error("it cannot be started by the {protocol} protocol: {reason}")]
    Forced {
        /// Asked for.
        protocol: Protocol,
        /// Why not.
        reason: &'static str,
    },
    /// A boot protocol older or stranger than what is understood.
    #[error("{0}: use a newer kernel")]
    Unsupported(String),
    /// A part of it would lie where no RAM is.
    #[error(
        "it needs guest memory from {start:#x} to {end:#x}, but RAM is from 0x100000 to \
        {ram_end:#x}: give the guest more memory"
    )]
    OutsideMemory {
        /// First byte.
        start: u64,
        /// One more than the last.
        end: u64,
        /// Where low RAM ends.
        ram_end: u64,
    },
    /// A part of it would lie in another slice's memory.
    #[error(
        "it needs guest memory from {start:#x} to {end:#x}, but the first node's {} end at \
        {memory_bytes:#x}: give that node more with --memory",
        size(*memory_bytes)
    )]
    OutsideFirstNode {
        /// First byte.
        start: u64,
        /// One more than the last.
        end: u64,
        /// The first slice's memory, in bytes.
        memory_bytes: u64,
    },
    /// A part of it would lie where the boot information goes.
    #[error("its load address is {0:#x}, but memory below 0x100000 is for boot information")]
    TooLow(u64),
    /// Where a PC has no RAM: some of it lies between the two parts.
    #[error(
        "its load address is {start:#x} to {end:#x}, but there is no RAM from {LOW_RAM_END:#x} \
         to {ONE_MIB:#x}: link it below or above"
    )]
    InFirmware {
        /// First byte.
        start: u64,
        /// One more than the last.
        end: u64,
    },
    /// It leaves no room for what it is told.
    #[error(
        "it leaves less than {bytes} contiguous bytes free below {LOW_RAM_END:#x}, which its \
        command line and boot information need: link it higher"
    )]
    NoRoomBelow {
        /// Wanted.
        bytes: u64,
    },
    /// The compressed kernel in a bzImage could not be unpacked.
    #[error("the compressed kernel in it cannot be unpacked")]
    Payload(#[source] PayloadError),
}

impl ImageError {
    /// The same of a machine whose first slice has `memory_bytes`.
    pub(super) fn of_first_node(self, memory_bytes: u64) -> Self {
        match self {
            Self::OutsideMemory { start, end, .. } => Self::OutsideFirstNode {
                start,
                end,
                memory_bytes,
            },
            other => other,
        }
    }
}

/// Bytes as the command line takes them, rounded up to whole MiB.
fn size(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Why an image is not understood: what is wrong with it, or with reading it.
#[derive(Debug)]
pub enum Problem {
    /// It is no image that boots.
    Image(ImageError),
    /// It cannot be read.
    File(BootError),
}

impl From<ImageError> for Problem {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}

impl From<BootError> for Problem {
    fn from(error: BootError) -> Self {
        Self::File(error)
    }
}

impl Problem {
    /// Of the kernel with this name.
    pub fn of(self, name: &str) -> BootError {
        match self {
            Self::Image(source) => BootError::Kernel {
                name: name.to_owned(),
                source,
            },
            Self::File(error) => error,
        }
    }
}
