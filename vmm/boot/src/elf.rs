//! A kernel as an ELF file: what to load where, and the notes that say how to
//! start it. Everything is read by the file's own offsets, checked; what is loaded
//! is not read here.

use std::cell::Cell;
use std::ops::Range;

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadCacheOps};
use object::{Endianness, FileKind};

use super::error::Problem;
use super::{BootError, ImageError, ImageFile, PAGE, UPDATED_PAGES_MAX, UPDATED_RANGES_MAX};

/// Program headers that are looked at: Linux has five.
const SEGMENTS_MAX: usize = 128;
/// Notes that are looked at, of all segments.
const NOTES_MAX: usize = 1024;
/// A larger segment of notes is not looked at.
const NOTES_BYTES_MAX: u64 = 64 << 10;
/// Xen's public/elfnote.h.
const XEN_ELFNOTE_PHYS32_ENTRY: elf::NoteType = elf::NoteType(18);
/// A note of Weft's own owner: pairs of 64-bit guest-physical addresses, start and end,
/// of what one vCPU writes again and again and others read. See docs/vmm-boot.md.
const WEFT_ELFNOTE_UPDATE: elf::NoteType = elf::NoteType(1);
/// How every Linux names itself, init/version.c.
const BANNER: &[u8] = b"Linux version ";

/// What is loaded.
#[derive(Debug)]
pub struct Segment {
    /// Guest-physical.
    pub address: u64,
    /// The bytes in the file; they are there.
    pub bytes: Range<u64>,
    /// Length in memory: zeros after the bytes.
    pub size: u64,
}

impl Segment {
    /// Guest-physical addresses; the end was checked not to overflow.
    pub fn range(&self) -> Range<u64> {
        self.address..self.address + self.size
    }
}

/// An ELF file for x86.
#[derive(Debug)]
pub struct ElfKernel {
    /// ELF class and machine: 64-bit.
    pub is_64: bool,
    /// Guest-physical address of the first instruction.
    pub entry: u64,
    /// In the file's order; none is empty.
    pub segments: Vec<Segment>,
    /// What a PVH note says.
    pub pvh_entry: Option<u32>,
    /// Guest-physical addresses whose copies must be kept up to date where memory is
    /// shared; each lies in one segment.
    pub updated: Vec<Range<u64>>,
    /// It is a Linux kernel for x86-64: it has a note of the owner `Linux`
    /// (since 4.19). See [`ElfKernel::has_banner`].
    pub is_linux: bool,
}

impl ElfKernel {
    /// Whether it calls itself Linux in its data, as older kernels do, too.
    pub fn has_banner(&self, file: &ImageFile) -> Result<bool, BootError> {
        for segment in &self.segments {
            if file.contains(segment.bytes.clone(), BANNER)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A file as the parser reads it; what a read that failed said is kept.
struct Reading<'a> {
    file: &'a ImageFile,
    position: u64,
    failed: &'a Cell<Option<BootError>>,
}

impl ReadCacheOps for Reading<'_> {
    fn len(&mut self) -> Result<u64, ()> {
        Ok(self.file.size())
    }

    fn seek(&mut self, position: u64) -> Result<u64, ()> {
        self.position = position;
        Ok(position)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ()> {
        let left = self.file.size().saturating_sub(self.position);
        let count = left.min(buffer.len() as u64) as usize;
        self.read_exact(&mut buffer[..count]).map(|()| count)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), ()> {
        let end = self.position.checked_add(buffer.len() as u64).ok_or(())?;
        match self.file.read(self.position..end) {
            Ok(bytes) => buffer.copy_from_slice(&bytes),
            Err(error) => {
                self.failed.set(Some(error));
                return Err(());
            }
        }
        self.position = end;
        Ok(())
    }
}

type Data<'a, 'b> = &'b ReadCache<Reading<'a>>;

/// Reads the headers of an ELF file.
pub fn parse(file: &ImageFile) -> Result<ElfKernel, Problem> {
    let failed = Cell::new(None);
    let cache = ReadCache::new(Reading {
        file,
        position: 0,
        failed: &failed,
    });
    let parsed = match FileKind::parse(&cache) {
        Ok(FileKind::Elf32) => parse_class::<FileHeader32<Endianness>>(&cache, file.size()),
        Ok(FileKind::Elf64) => parse_class::<FileHeader64<Endianness>>(&cache, file.size()),
        _ => Err(ImageError::Truncated {
            what: "its ELF headers",
            needed: 64,
            has: file.size(),
        }),
    };
    match failed.take() {
        Some(error) => Err(error.into()),
        None => Ok(parsed?),
    }
}

fn parse_class<Elf: FileHeader<Endian = Endianness>>(
    data: Data<'_, '_>,
    file_size: u64,
) -> Result<ElfKernel, ImageError> {
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
    if table_end > file_size {
        return Err(ImageError::Truncated {
            what: "its program headers",
            needed: table_end,
            has: file_size,
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
        updated: Vec::new(),
        is_linux: false,
    };
    let entry = header.e_entry(endian).into();
    let mut physical_entry = None;
    let mut notes_left = NOTES_MAX;
    for program in headers {
        match program.p_type(endian) {
            elf::PT_LOAD => {
                let Some(segment) = segment::<Elf>(program, endian, file_size)? else {
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
        return Err(malformed("program headers", &"it has no loadable segments"));
    }
    if segments.iter().any(|s| s.range().contains(&entry)) {
        physical_entry = Some(entry);
    }
    let in_segment = |range: &Range<u64>| {
        let holds = |s: &Segment| s.address <= range.start && range.end <= s.range().end;
        range.start < range.end && segments.iter().any(holds)
    };
    kernel.updated.retain(in_segment);
    let mut pages = 0;
    kernel.updated.retain(|range| {
        let more = range.end.div_ceil(PAGE) - range.start / PAGE;
        let room = pages + more <= UPDATED_PAGES_MAX;
        pages += if room { more } else { 0 };
        room
    });
    kernel.entry = physical_entry
        .ok_or_else(|| malformed("entry", &format!("{entry:#x} is in no segment")))?;
    kernel.is_linux &= is_64;
    Ok(kernel)
}

/// What a program header loads; nothing when it has no length.
fn segment<Elf: FileHeader<Endian = Endianness>>(
    program: &Elf::ProgramHeader,
    endian: Endianness,
    file_size: u64,
) -> Result<Option<Segment>, ImageError> {
    let address: u64 = program.p_paddr(endian).into();
    let size: u64 = program.p_memsz(endian).into();
    let in_file: u64 = program.p_filesz(endian).into();
    let offset: u64 = program.p_offset(endian).into();
    let end = offset.saturating_add(in_file);
    if end > file_size {
        return Err(ImageError::Truncated {
            what: "its segments",
            needed: end,
            has: file_size,
        });
    }
    if in_file > size || address.checked_add(size).is_none() {
        return Err(ImageError::Malformed {
            place: "program headers",
            problem: format!("{in_file:#x} bytes of {size:#x} to {address:#x}"),
        });
    }
    Ok((size > 0).then_some(Segment {
        address,
        bytes: offset..end,
        size,
    }))
}

/// Looks for notes that tell how to boot; damaged notes end the search.
fn read_notes<Elf: FileHeader<Endian = Endianness>>(
    program: &Elf::ProgramHeader,
    endian: Endianness,
    data: Data<'_, '_>,
    left: &mut usize,
    kernel: &mut ElfKernel,
) {
    if program.p_filesz(endian).into() > NOTES_BYTES_MAX {
        return;
    }
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
        if note.name() == b"Weft" && note.n_type(endian) == WEFT_ELFNOTE_UPDATE {
            kernel.updated.extend(address_pairs(note.desc()));
            kernel.updated.truncate(UPDATED_RANGES_MAX);
        }
    }
}

/// Pairs of 64-bit addresses, as they are; none where bytes are left over.
fn address_pairs(bytes: &[u8]) -> impl Iterator<Item = Range<u64>> {
    let (words, rest) = bytes.as_chunks::<8>();
    let (pairs, odd) = words.as_chunks::<2>();
    let whole = rest.is_empty() && odd.is_empty();
    let pairs = if whole { pairs } else { &[] };
    let range = |[start, end]: &[[u8; 8]; 2]| u64::from_le_bytes(*start)..u64::from_le_bytes(*end);
    pairs.iter().take(UPDATED_RANGES_MAX).map(range)
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
