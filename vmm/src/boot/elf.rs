//! A kernel as an ELF file: what to load where, and the notes that say how to
//! start it. Everything is read by the file's own offsets, checked.

use std::ops::Range;

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind};

use super::ImageError;

/// Program headers that are looked at: Linux has five.
const SEGMENTS_MAX: usize = 128;
/// Notes that are looked at, of all segments.
const NOTES_MAX: usize = 1024;
/// Xen's public/elfnote.h.
const XEN_ELFNOTE_PHYS32_ENTRY: elf::NoteType = elf::NoteType(18);
/// How every Linux names itself, init/version.c.
const BANNER: &[u8] = b"Linux version ";

/// What is loaded.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Guest-physical.
    pub address: u64,
    /// Bytes from the file.
    pub data: &'a [u8],
    /// Length in memory: zeros after the bytes.
    pub size: u64,
}

impl Segment<'_> {
    /// Guest-physical addresses; the end was checked not to overflow.
    pub fn range(&self) -> Range<u64> {
        self.address..self.address + self.size
    }
}

/// An ELF file for x86.
#[derive(Debug)]
pub struct ElfKernel<'a> {
    /// ELF class and machine: 64-bit.
    pub is_64: bool,
    /// Guest-physical address of the first instruction.
    pub entry: u64,
    /// In the file's order; none is empty.
    pub segments: Vec<Segment<'a>>,
    /// What a PVH note says.
    pub pvh_entry: Option<u32>,
    /// It is a Linux kernel for x86-64: it has a note of the owner `Linux`
    /// (since 4.19), or calls itself so in its data.
    pub is_linux: bool,
}

/// Reads the headers of an ELF file.
pub fn parse(data: &[u8]) -> Result<ElfKernel<'_>, ImageError> {
    match FileKind::parse(data) {
        Ok(FileKind::Elf32) => parse_class::<FileHeader32<Endianness>>(data),
        Ok(FileKind::Elf64) => parse_class::<FileHeader64<Endianness>>(data),
        _ => Err(ImageError::Truncated {
            what: "its ELF headers",
            needed: 64,
            has: data.len() as u64,
        }),
    }
}

fn parse_class<Elf: FileHeader<Endian = Endianness>>(
    data: &[u8],
) -> Result<ElfKernel<'_>, ImageError> {
    let malformed = |place, problem: &dyn ToString| ImageError::Malformed {
        place,
        problem: problem.to_string(),
    };
    let header = Elf::parse(data).map_err(|e| malformed("ELF header", &e))?;
    let endian = header.endian().map_err(|e| malformed("byte order", &e))?;
    let is_64 = header.is_type_64();
    match header.e_machine(endian) {
        elf::EM_X86_64 if is_64 => {}
        elf::EM_386 if !is_64 => {}
        machine => return Err(ImageError::Architecture(machine_name(machine))),
    }
    if endian != Endianness::Little {
        return Err(malformed("byte order", &"big endian for x86"));
    }
    let table_end = header
        .e_phoff(endian)
        .into()
        .saturating_add(u64::from(header.e_phnum(endian)) * u64::from(header.e_phentsize(endian)));
    if table_end > data.len() as u64 {
        return Err(ImageError::Truncated {
            what: "its program headers",
            needed: table_end,
            has: data.len() as u64,
        });
    }
    let headers = header
        .program_headers(endian, data)
        .map_err(|e| malformed("program headers", &e))?;
    if headers.len() > SEGMENTS_MAX {
        return Err(malformed("number of program headers", &headers.len()));
    }

    let mut kernel = ElfKernel {
        is_64,
        entry: 0,
        segments: Vec::new(),
        pvh_entry: None,
        is_linux: false,
    };
    let entry = header.e_entry(endian).into();
    let mut physical_entry = None;
    let mut notes_left = NOTES_MAX;
    for program in headers {
        match program.p_type(endian) {
            elf::PT_LOAD => {
                let Some(segment) = segment::<Elf>(program, endian, data)? else {
                    continue;
                };
                // The entry is an address like those of symbols, or physical.
                let offset = entry.wrapping_sub(program.p_vaddr(endian).into());
                if offset < segment.size && physical_entry.is_none() {
                    physical_entry = Some(segment.address + offset);
                }
                kernel.segments.push(segment);
            }
            elf::PT_NOTE => {
                read_notes::<Elf>(program, endian, data, &mut notes_left, &mut kernel);
            }
            _ => {}
        }
    }
    let segments = &kernel.segments;
    if segments.is_empty() {
        return Err(malformed("program headers", &"nothing is to be loaded"));
    }
    if segments.iter().any(|s| s.range().contains(&entry)) {
        physical_entry = Some(entry);
    }
    kernel.entry = physical_entry
        .ok_or_else(|| malformed("entry", &format!("{entry:#x} lies in no segment")))?;
    let banner = |segment: &Segment| memchr::memmem::find(segment.data, BANNER).is_some();
    kernel.is_linux = is_64 && (kernel.is_linux || segments.iter().any(banner));
    Ok(kernel)
}

/// What a program header loads; nothing when it has no length.
fn segment<'a, Elf: FileHeader<Endian = Endianness>>(
    program: &Elf::ProgramHeader,
    endian: Endianness,
    data: &'a [u8],
) -> Result<Option<Segment<'a>>, ImageError> {
    let address: u64 = program.p_paddr(endian).into();
    let size: u64 = program.p_memsz(endian).into();
    let in_file: u64 = program.p_filesz(endian).into();
    let needed = program.p_offset(endian).into().saturating_add(in_file);
    let bytes = program
        .data(endian, data)
        .map_err(|()| ImageError::Truncated {
            what: "its segments",
            needed,
            has: data.len() as u64,
        })?;
    if in_file > size || address.checked_add(size).is_none() {
        return Err(ImageError::Malformed {
            place: "program headers",
            problem: format!("{in_file:#x} bytes of {size:#x} to {address:#x}"),
        });
    }
    Ok((size > 0).then_some(Segment {
        address,
        data: bytes,
        size,
    }))
}

/// Looks for notes that tell how to boot; damaged notes end the search.
fn read_notes<'a, Elf: FileHeader<Endian = Endianness>>(
    program: &Elf::ProgramHeader,
    endian: Endianness,
    data: &'a [u8],
    left: &mut usize,
    kernel: &mut ElfKernel<'a>,
) {
    let Ok(Some(mut notes)) = program.notes(endian, data) else {
        return;
    };
    while let Ok(Some(note)) = notes.next() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        if note.name() == b"Linux" {
            kernel.is_linux = true;
        }
        if note.name() == b"Xen" && note.n_type(endian) == XEN_ELFNOTE_PHYS32_ENTRY {
            let entry = match note.desc() {
                [a, b, c, d] | [a, b, c, d, 0, 0, 0, 0] => u32::from_le_bytes([*a, *b, *c, *d]),
                _ => continue,
            };
            kernel.pvh_entry = Some(entry);
        }
    }
}

fn machine_name(machine: elf::Machine) -> String {
    let name = match machine {
        elf::EM_AARCH64 => "arm64",
        elf::EM_ARM => "32-bit ARM",
        elf::EM_RISCV => "RISC-V",
        elf::EM_PPC64 => "64-bit POWER",
        elf::EM_PPC => "32-bit POWER",
        elf::EM_S390 => "s390x",
        elf::EM_LOONGARCH => "LoongArch",
        elf::EM_MIPS => "MIPS",
        elf::EM_SPARCV9 => "64-bit SPARC",
        elf::EM_386 | elf::EM_X86_64 => "x86 with the other word size (x32?)",
        other => return format!("ELF machine {}", other.0),
    };
    name.into()
}
