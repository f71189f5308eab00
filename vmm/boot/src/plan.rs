//! The boot plan of an image: its protocol, what is loaded where, and its entry.

use std::ops::Range;

use linux_loader::bootparam::setup_header;

use super::bzimage::{self, BzImage};
use super::elf::{self, ElfKernel, Segment};
use super::error::{ImageError, Problem};
use super::file::ImageFile;
use super::format::{Format, Protocol, Role};
use super::memory_map::{LOW_RAM_END, ONE_MIB};
use super::multiboot;
use super::payload::{self, Compression, PayloadError};

/// A recognised image, unpacked if its compression is supported.
#[derive(Debug)]
pub struct Opened<'a> {
    file: &'a ImageFile,
    /// The first bytes of the file.
    head: Vec<u8>,
    /// The format of the file.
    pub format: Format,
    /// Set for a bzImage.
    pub bzimage: Option<BzImage>,
    /// How the kernel in it is compressed.
    pub compression: Option<Compression>,
    /// The kernel in the bzImage, or why it was not unpacked.
    unpacked: Option<Result<ImageFile, PayloadError>>,
}

/// What is loaded where, and how the kernel starts.
#[derive(Debug)]
pub struct BootPlan<'a> {
    /// The protocol that starts the kernel.
    pub protocol: Protocol,
    /// The file of the segments.
    pub file: &'a ImageFile,
    /// The segments in order of addresses; they do not overlap.
    pub segments: Vec<Segment>,
    /// Guest-physical addresses that the kernel needs.
    pub extent: Range<u64>,
    /// First instruction, guest-physical.
    pub entry: u64,
    /// Whether the kernel is Linux, by any protocol.
    pub is_linux: bool,
    /// The pages to which its notes ask to subscribe.
    pub updated: Vec<Range<u64>>,
}

impl<'a> Opened<'a> {
    /// Recognises a file. A compressed kernel is unpacked to at most `limit` bytes.
    pub fn new(file: &'a ImageFile, forced: Option<Protocol>, limit: u64) -> Result<Self, Problem> {
        let head_bytes = bzimage::HEAD.max(multiboot::SEARCHED as u64);
        let mut opened = Self {
            file,
            head: file.read(0..file.size().min(head_bytes))?,
            format: Format::Elf,
            bzimage: None,
            compression: None,
            unpacked: None,
        };
        let head = &opened.head;
        if head.starts_with(b"\x7fELF") {
            return Ok(opened);
        }
        if !bzimage::recognise(head) {
            opened.format = Format::Flat;
            let addresses = multiboot::find(head).and_then(|header| header.flat(file.size()));
            return match addresses {
                Some(_) => Ok(opened),
                None => Err(what_else(head).into()),
            };
        }
        let image = bzimage::parse(head, file.size())?;
        opened.format = Format::BzImage;
        if forced == Some(Protocol::LinuxOwnEntry) {
            let magic = image.payload.start..image.payload.end.min(image.payload.start + 8);
            opened.compression = payload::recognise(&file.read(magic)?);
        } else {
            let packed = file.read(image.payload.clone())?;
            opened.compression = payload::recognise(&packed);
            opened.unpacked = Some(match payload::unpack(&packed, limit) {
                Ok(bytes) => Ok(ImageFile::from_bytes(Role::Kernel, file.name(), bytes)),
                Err(error) if error.is_ours() => Err(error),
                Err(error) => return Err(ImageError::Payload(error).into()),
            });
        }
        opened.bzimage = Some(image);
        Ok(opened)
    }

    /// Why the kernel must unpack itself, if it was not asked to.
    pub fn not_unpacked(&self) -> Option<PayloadError> {
        self.unpacked.as_ref()?.as_ref().err().cloned()
    }

    /// The header for Linux's zero page.
    pub fn setup_header(&self) -> Option<&setup_header> {
        self.bzimage.as_ref().map(|image| &image.header)
    }

    /// Chooses the protocol: Linux's own for Linux, else PVH, else Multiboot.
    pub fn plan(&self, forced: Option<Protocol>) -> Result<BootPlan<'_>, Problem> {
        let mut plan = match (&self.bzimage, &self.unpacked) {
            (Some(_), Some(Ok(vmlinux))) => {
                let mut kernel = elf::parse(vmlinux)?;
                kernel.is_linux = true;
                self.plan_elf(vmlinux, kernel, None, forced)?
            }
            (Some(image), _) => self.own_entry(image, forced)?,
            (None, _) => {
                let header = multiboot::find(&self.head);
                match self.format {
                    Format::Elf => {
                        let mut kernel = elf::parse(self.file)?;
                        if kernel.is_64 && !kernel.is_linux {
                            kernel.is_linux = kernel.has_banner(self.file)?;
                        }
                        self.plan_elf(self.file, kernel, header, forced)?
                    }
                    _ => self.plan_flat(header, forced)?,
                }
            }
        };
        plan.sort_segments()?;
        let extent = plan.extent.clone();
        plan.updated
            .retain(|range| extent.start <= range.start && range.end <= extent.end);
        Ok(plan)
    }

    fn plan_elf<'b>(
        &self,
        file: &'b ImageFile,
        kernel: ElfKernel,
        header: Option<multiboot::Header>,
        forced: Option<Protocol>,
    ) -> Result<BootPlan<'b>, ImageError> {
        let protocol = match forced {
            Some(protocol) => protocol,
            None if kernel.is_linux => Protocol::Linux,
            None if kernel.pvh_entry.is_some() => Protocol::Pvh,
            None if header.is_some() => Protocol::Multiboot,
            None => {
                let machine = if kernel.is_64 { "x86-64" } else { "32-bit x86" };
                return Err(ImageError::NoProtocol(machine));
            }
        };
        let impossible = |reason| ImageError::Forced { protocol, reason };
        let mut plan = BootPlan {
            protocol,
            file,
            segments: kernel.segments,
            extent: 0..0,
            entry: kernel.entry,
            is_linux: kernel.is_linux,
            updated: kernel.updated,
        };
        match protocol {
            Protocol::Linux if !kernel.is_64 => {
                return Err(impossible("it is a 32-bit kernel"));
            }
            Protocol::Linux => {}
            Protocol::LinuxOwnEntry => return Err(impossible("only a bzImage has that entry")),
            Protocol::Pvh => {
                let entry = kernel.pvh_entry;
                let entry = entry.ok_or_else(|| impossible("it has no PVH note"))?;
                plan.entry = u64::from(entry);
            }
            Protocol::Multiboot => {
                let header = header.ok_or_else(|| impossible("it has no Multiboot header"))?;
                header.check()?;
                if let Some(flat) = header.flat(self.file.size()) {
                    let (segment, entry) = flat?;
                    plan.segments = vec![segment];
                    plan.entry = entry;
                }
            }
        }
        if !plan
            .segments
            .iter()
            .any(|s| s.range().contains(&plan.entry))
        {
            return Err(ImageError::Malformed {
                place: "entry",
                problem: format!("{:#x} is in no segment", plan.entry),
            });
        }
        Ok(plan)
    }

    fn plan_flat(
        &self,
        header: Option<multiboot::Header>,
        forced: Option<Protocol>,
    ) -> Result<BootPlan<'_>, ImageError> {
        if let Some(protocol) = forced.filter(|protocol| *protocol != Protocol::Multiboot) {
            let reason = "it has a Multiboot header only";
            return Err(ImageError::Forced { protocol, reason });
        }
        let flat = header.and_then(|header| {
            let flat = header.flat(self.file.size())?;
            Some(header.check().and(flat))
        });
        let (segment, entry) = flat.unwrap_or_else(|| Err(what_else(&self.head)))?;
        Ok(BootPlan {
            protocol: Protocol::Multiboot,
            file: self.file,
            segments: vec![segment],
            extent: 0..0,
            entry,
            is_linux: false,
            updated: Vec::new(),
        })
    }

    fn own_entry(
        &self,
        image: &BzImage,
        forced: Option<Protocol>,
    ) -> Result<BootPlan<'_>, ImageError> {
        if let Some(protocol) = forced.filter(|protocol| *protocol != Protocol::LinuxOwnEntry) {
            let reason = "the kernel in it could not be unpacked";
            return Err(ImageError::Forced { protocol, reason });
        }
        let (extent, entry) = image.own_entry()?;
        Ok(BootPlan {
            protocol: Protocol::LinuxOwnEntry,
            file: self.file,
            segments: vec![Segment {
                address: extent.start,
                bytes: image.body.clone(),
                size: image.body.end - image.body.start,
            }],
            extent,
            entry,
            is_linux: true,
            updated: Vec::new(),
        })
    }
}

impl BootPlan<'_> {
    /// Sorts, refuses what overlaps or lies too low, and finds the extent.
    fn sort_segments(&mut self) -> Result<(), ImageError> {
        self.segments.sort_by_key(|segment| segment.address);
        for pair in self.segments.windows(2) {
            if pair[0].range().end > pair[1].address {
                return Err(ImageError::Malformed {
                    place: "program headers",
                    problem: format!("two of them load to {:#x}", pair[1].address),
                });
            }
        }
        let (Some(first), Some(last)) = (self.segments.first(), self.segments.last()) else {
            return Ok(());
        };
        if first.address < ONE_MIB && self.protocol != Protocol::Multiboot {
            return Err(ImageError::TooLow(first.address));
        }
        let no_ram = |range: &Range<u64>| range.start < ONE_MIB && range.end > LOW_RAM_END;
        if let Some(range) = self.segments.iter().map(Segment::range).find(no_ram) {
            let Range { start, end } = range;
            return Err(ImageError::InFirmware { start, end });
        }
        self.extent = first.address..last.range().end.max(self.extent.end);
        Ok(())
    }

    /// Refuses what does not fit below `ram_end`, the end of low RAM: a kernel
    /// there is reached by 32-bit addresses.
    pub fn check_fits(&self, ram_end: u64) -> Result<(), ImageError> {
        if self.extent.end > ram_end {
            return Err(ImageError::OutsideMemory {
                start: self.extent.start,
                end: self.extent.end,
                ram_end,
            });
        }
        Ok(())
    }
}

/// Names what is no kernel for x86, for the error.
fn what_else(bytes: &[u8]) -> ImageError {
    let at = |offset: usize, magic: &[u8]| {
        bytes
            .get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    // Linux: Documentation/arch/arm64/booting.rst, arch/riscv/boot-image-header.rst.
    if at(0x38, b"ARMd") {
        return ImageError::Architecture("arm64".into());
    }
    if at(0x38, b"RSC\x05") {
        return ImageError::Architecture("RISC-V".into());
    }
    let found = if at(0, b"070701") || at(0, b"070702") {
        "a cpio archive (an initrd?)"
    } else if payload::recognise(bytes).is_some() {
        "compressed data (unpack it first; or is it an initrd?)"
    } else if at(0, b"MZ") {
        "a program for Windows or EFI"
    } else if at(0, b"#!") {
        "a script"
    } else if at(0x1fe, &[0x55, 0xaa]) {
        "a disk with a boot sector"
    } else {
        "something else"
    };
    ImageError::NotAKernel(found)
}
