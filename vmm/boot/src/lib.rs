//! Loads a kernel into guest memory, and makes the state in which the first vCPU starts.
//!
//! | file | holds |
//! | --- | --- |
//! | [`mod@file`] | an open image file |
//! | `bzimage`, `elf`, `multiboot` | parsers of formats, which check every field |
//! | [`payload`] | the compressed kernel of a bzImage |
//! | [`plan`] | the protocol, and what is loaded where |
//! | [`mod@format`] | kinds of files, and protocols |
//! | [`layout`] | the addresses of everything beside the kernel |
//! | [`memory_map`] | the memory map that the kernel is given |
//! | `linux`, `pvh`, `multiboot` | the structures that each protocol gives to the kernel |
//! | `processor` | registers, descriptor table, page tables |
//!
//! Nothing is written to guest memory before the image was checked. All that is
//! loaded is written, zeros too, because memory may have been used before. Files are read
//! where they are needed, straight into guest memory; one that changes while it is
//! read is refused.

mod bzimage;
mod elf;
mod error;
pub mod file;
pub mod format;
pub mod layout;
mod linux;
pub mod memory_map;
mod multiboot;
pub mod payload;
pub mod plan;
mod processor;
mod pvh;
#[cfg(any(test, feature = "test-images"))]
pub mod test_images;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use weft_guest_memory::Ram;
use weft_platform::acpi;
use weft_vcpu::CpuState;

pub use error::{BootError, ImageError};
pub use file::ImageFile;
pub use format::{Format, Protocol, Role};
pub use payload::{Compression, PayloadError};

use error::Problem;
use layout::{COMMAND_LINE_ROOM, Places, clear, write};
use memory_map::{ONE_MIB, low_end};
use plan::{BootPlan, Opened};

const PAGE: u64 = 4096;
/// Most ranges of addresses to subscribe to, of a user and of a kernel each: each fault
/// searches all of both.
pub const UPDATED_RANGES_MAX: usize = 64;
/// Most pages of a kernel's ranges: hot words are on few pages.
const UPDATED_PAGES_MAX: u64 = 1024;

/// What to boot.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub kernel: &'a ImageFile,
    /// The first file system; for Multiboot, a module.
    pub initrd: Option<&'a ImageFile>,
    /// The command line, without `linux_parameters`.
    pub command_line: &'a str,
    /// Parameters that are appended to the command line if the kernel is Linux.
    pub linux_parameters: &'a [&'a str],
    /// Forces a protocol; `None`: the best one is chosen.
    pub protocol: Option<Protocol>,
    /// Tables that are in guest memory already.
    pub acpi: Option<&'a acpi::Placed>,
    /// Randomness for Linux, by any of its 64-bit entries.
    pub seed: Option<&'a [u8; 32]>,
    /// Everything is loaded below this guest-physical address, which is where the
    /// primary's part of RAM ends; `None`: anywhere in RAM.
    pub limit: Option<u64>,
}

impl Request<'_> {
    /// Where what is loaded ends at the latest: in RAM below the hole for devices.
    fn end(&self, ram: &Ram) -> u64 {
        low_end(ram).min(self.limit.unwrap_or(u64::MAX))
    }

    /// The limit, where it is what leaves no room.
    fn narrow(&self, ram: &Ram) -> Option<u64> {
        self.limit.filter(|limit| *limit < low_end(ram))
    }
}

/// The recognised image, and where it was loaded.
#[derive(Clone, Debug)]
pub struct Recognised {
    /// Kind of file.
    pub format: Format,
    /// How it starts.
    pub protocol: Protocol,
    /// Whether the kernel is Linux, by any protocol.
    pub is_linux: bool,
    /// How the kernel in a bzImage is compressed.
    pub compression: Option<Compression>,
    /// Why the kernel has to unpack itself.
    pub not_unpacked: Option<PayloadError>,
    /// The version string of a bzImage.
    pub version: Option<String>,
    /// Guest-physical addresses of the kernel.
    pub kernel: Range<u64>,
    /// First instruction.
    pub entry: u64,
    /// Guest-physical addresses of the initrd.
    pub initrd: Option<Range<u64>>,
    /// Guest-physical addresses, within the kernel's, that one vCPU writes again and
    /// again and others read, as the kernel's notes say.
    pub updated: Vec<Range<u64>>,
}

impl fmt::Display for Recognised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.format)?;
        if let Some(compression) = self.compression {
            write!(f, " ({compression})")?;
        }
        if let Some(version) = &self.version {
            write!(f, " {version}")?;
        }
        write!(f, ", protocol {}, entry {:#x}", self.protocol, self.entry)?;
        if let Some(reason) = &self.not_unpacked {
            write!(f, "; not unpacked here: {reason}")?;
        }
        Ok(())
    }
}

/// A machine ready to start.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The first CPU.
    pub state: CpuState,
    /// For the log.
    pub recognised: Recognised,
}

/// Where what all protocols speak of lies.
struct Placed<'a> {
    initrd: Option<Range<u64>>,
    acpi: Option<&'a acpi::Placed>,
}

impl Placed<'_> {
    /// Zero when there are no tables, as all protocols say.
    fn rsdp(&self) -> u64 {
        self.acpi.map_or(0, |acpi| acpi.rsdp)
    }

    fn acpi_tables(&self) -> Option<&Range<u64>> {
        self.acpi.map(|acpi| &acpi.range)
    }
}

/// Loads the kernel, the initrd, the command line and what goes with them.
pub fn load(ram: &Ram, request: &Request) -> Result<Loaded, BootError> {
    let kernel = request.kernel;
    let refused = |source| Problem::Image(source).of(kernel.name());
    let of_kernel = |problem: Problem| problem.of(kernel.name());
    for file in [Some(kernel), request.initrd].into_iter().flatten() {
        file.check_size()?;
    }
    let forced = request.protocol;
    let opened = Opened::new(kernel, forced, ram.size()).map_err(of_kernel)?;
    let plan = opened.plan(forced).map_err(of_kernel)?;
    plan.check_fits(request.end(ram)).map_err(|error| {
        refused(match request.narrow(ram) {
            Some(limit) => error.of_first_node(limit),
            None => error,
        })
    })?;
    let entry_32 = u32::try_from(plan.entry).map_err(|_| {
        refused(ImageError::Malformed {
            place: "entry",
            problem: format!("{:#x} is above 4 GiB", plan.entry),
        })
    })?;
    let command_line = command_line(request, &opened, &plan)?;
    let places = match plan.protocol {
        Protocol::Multiboot => {
            let taken = plan
                .segments
                .iter()
                .map(|segment| segment.range())
                .collect();
            Places::beside(taken, command_line.len() as u64).map_err(refused)?
        }
        _ => Places::USUAL,
    };
    let initrd = request
        .initrd
        .map(|initrd| initrd_range(ram, request, initrd, &opened, &plan))
        .transpose()?;

    for segment in &plan.segments {
        plan.file
            .place(ram, segment.bytes.clone(), segment.address)?;
        let loaded = segment.bytes.end - segment.bytes.start;
        clear(ram, segment.address + loaded..segment.range().end)?;
    }
    write(ram, places.command_line, &command_line)?;
    if let (Some(file), Some(range)) = (request.initrd, &initrd) {
        file.place(ram, 0..file.size(), range.start)?;
    }
    let placed = Placed {
        initrd,
        acpi: request.acpi,
    };
    let state = match plan.protocol {
        Protocol::Linux | Protocol::LinuxOwnEntry => {
            let header = opened.setup_header();
            linux::start(ram, plan.entry, header, request.seed, &placed)?
        }
        Protocol::Pvh => pvh::start(ram, entry_32, &placed)?,
        Protocol::Multiboot => multiboot::start(ram, entry_32, &placed, &places)?,
    };
    let recognised = Recognised {
        format: opened.format,
        protocol: plan.protocol,
        is_linux: plan.is_linux,
        compression: opened.compression,
        not_unpacked: opened.not_unpacked(),
        version: opened.bzimage.as_ref().and_then(|b| b.version.clone()),
        kernel: plan.extent,
        entry: plan.entry,
        initrd: placed.initrd,
        updated: plan.updated,
    };
    Ok(Loaded { state, recognised })
}

/// With its zero, if the kernel takes so much.
fn command_line(request: &Request, opened: &Opened, plan: &BootPlan) -> Result<Vec<u8>, BootError> {
    let mut parameters = vec![request.command_line];
    if plan.is_linux {
        parameters.extend(request.linux_parameters);
    }
    parameters.retain(|parameter| !parameter.is_empty());
    let text = parameters.join(" ");
    let limit = match opened.setup_header().map(|header| header.cmdline_size) {
        Some(limit) if limit > 0 => limit as usize,
        _ if plan.is_linux => linux::COMMAND_LINE_MAX,
        _ => usize::MAX,
    };
    let limit = limit.min(COMMAND_LINE_ROOM - 1);
    if text.len() > limit {
        let bytes = text.len();
        return Err(BootError::CommandLineTooLong { bytes, limit });
    }
    if let Some(at) = text.find('\0') {
        return Err(BootError::CommandLineZero(at));
    }
    Ok([text.as_bytes(), &[0]].concat())
}

/// The highest pages that the protocol lets an initrd have.
fn initrd_range(
    ram: &Ram,
    request: &Request,
    initrd: &ImageFile,
    opened: &Opened,
    plan: &BootPlan,
) -> Result<Range<u64>, BootError> {
    let highest = match (plan.protocol, opened.setup_header()) {
        (Protocol::Linux | Protocol::LinuxOwnEntry, Some(header)) => {
            u64::from(header.initrd_addr_max)
        }
        (Protocol::Linux | Protocol::LinuxOwnEntry, None) => linux::INITRD_ADDRESS_MAX,
        _ => u64::from(u32::MAX),
    };
    let limit = request.end(ram).min(highest + 1) & !(PAGE - 1);
    let bytes = initrd.size();
    let kernel_end = plan.extent.end.next_multiple_of(PAGE).max(ONE_MIB);
    let room = limit.saturating_sub(kernel_end);
    let padded = bytes.next_multiple_of(PAGE);
    if padded > room {
        if let Some(memory_bytes) = request.narrow(ram).filter(|end| *end == limit) {
            return Err(BootError::InitrdTooLargeForNode {
                name: initrd.name().to_owned(),
                bytes,
                room,
                memory_bytes,
            });
        }
        return Err(BootError::InitrdTooLarge {
            name: initrd.name().to_owned(),
            bytes,
            room,
            limit,
        });
    }
    let start = limit - padded;
    Ok(start..start + bytes)
}
