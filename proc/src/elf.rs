//! Programs: an x86-64 Linux executable, from its first bytes to the mappings
//! that make it run.
//!
//! [`Image::parse`] reads the file's head (the ELF header and the program
//! headers; [`bytes_needed`] says how much that is) and validates it as
//! `load_elf_binary` in the kernel does, with a named error where the kernel
//! says ENOEXEC or kills the process. [`Image::plan`] then says what to map.
//!
//! Invariants of an [`Image`]:
//!
//! - 1 to [`SEGMENTS_MAX`] segments, in ascending order, none overlapping the
//!   next: `segments[i].address + memory_length <= segments[i + 1].address`;
//! - every segment has `file_length <= memory_length`, lies inside the file, and
//!   its file offset and address are congruent modulo the page size;
//! - with the image's base added, every address is between
//!   [`layout::LOWEST`] and [`layout::LIMIT`].

mod error;
mod plan;
#[cfg(test)]
mod tests;

pub use error::{ElfError, Machine};
pub use plan::{Mapping, Mappings};

use crate::layout::{self, PAGE};
use ::elf::abi;
use ::elf::endian::LittleEndian;
use ::elf::file::{Class, FileHeader, parse_ident};
use ::elf::parse::ParsingTable;
use ::elf::segment::ProgramHeader;
use core::ops::Range;

/// Most `PT_LOAD` segments.
pub const SEGMENTS_MAX: usize = 32;
/// Size of an ELF header, bytes: what must be read first.
pub const HEADER: usize = 64;
/// Size of a program header, bytes.
pub const PROGRAM_HEADER: usize = 56;
/// Most bytes of program headers; the kernel takes as many as fit a page.
pub const PROGRAM_HEADERS_MAX: usize = 4096;
/// Longest path of an interpreter, bytes, NUL included.
pub const INTERPRETER_MAX: u64 = 4096;

/// Whether a program has its addresses already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageKind {
    /// `ET_EXEC`: linked at its addresses, base 0.
    Fixed,
    /// `ET_DYN`: a base is added (a position-independent program, or ld.so).
    Relocatable,
}

/// A `PT_LOAD` segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Segment {
    /// First address, before the base is added.
    pub address: u64,
    /// Bytes in memory.
    pub memory_length: u64,
    /// Where its bytes are in the file.
    pub file_offset: u64,
    /// Bytes from the file; the rest is zero.
    pub file_length: u64,
    /// `PROT_*` of [`crate::layout`].
    pub prot: u32,
}

/// A program, parsed and valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Image {
    /// Fixed or relocatable.
    pub kind: ImageKind,
    /// Where execution starts, before the base is added.
    pub entry: u64,
    /// Where in the file the interpreter's path is, its NUL included; `None` for
    /// a static program.
    pub interpreter: Option<Range64>,
    /// Address of the program headers in memory (AT_PHDR), before the base is
    /// added; 0 when no segment holds them.
    pub program_headers: u64,
    /// How many there are (AT_PHNUM).
    pub program_header_count: u16,
    /// Whether the stack must be executable. Without a `PT_GNU_STACK` it need
    /// not be on x86-64.
    pub executable_stack: bool,
    /// What the base must be a multiple of: the largest `p_align`, at least a
    /// page.
    pub alignment: u64,
    segments: [Segment; SEGMENTS_MAX],
    count: usize,
}

/// A range of bytes in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range64 {
    /// First byte.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

/// How many of the file's first bytes [`Image::parse`] needs, given at least its
/// first [`HEADER`] bytes (fewer is an error that says so).
pub fn bytes_needed(head: &[u8]) -> Result<usize, ElfError> {
    let header = header(head)?;
    let table = usize::from(header.e_phnum) * PROGRAM_HEADER;
    if header.e_phnum == 0 {
        return Err(ElfError::NoSegments);
    }
    if usize::from(header.e_phentsize) != PROGRAM_HEADER || table > PROGRAM_HEADERS_MAX {
        return Err(ElfError::ProgramHeaders {
            count: header.e_phnum,
            size: header.e_phentsize,
        });
    }
    usize::try_from(header.e_phoff)
        .ok()
        .and_then(|offset| offset.checked_add(table))
        .ok_or(ElfError::WrapAround {
            what: "the program headers",
        })
}

/// Checks what kind of file this is, and decodes its header.
fn header(head: &[u8]) -> Result<FileHeader<LittleEndian>, ElfError> {
    if !head.starts_with(&abi::ELFMAGIC) {
        return Err(ElfError::NotElf);
    }
    let Some(head) = head.get(..HEADER) else {
        return Err(ElfError::Short {
            length: head.len(),
            needed: HEADER,
        });
    };
    // The machine is read before the identification is judged: an error that
    // names it says more than one about byte order.
    let big = head[abi::EI_DATA] == abi::ELFDATA2MSB;
    let machine = [head[18], head[19]];
    let machine = Machine(if big {
        u16::from_be_bytes(machine)
    } else {
        u16::from_le_bytes(machine)
    });
    if machine.0 != abi::EM_X86_64 && machine.0 != abi::EM_386 {
        return Err(ElfError::ForeignMachine { machine });
    }
    if head[abi::EI_CLASS] != abi::ELFCLASS64 || machine.0 == abi::EM_386 {
        return Err(ElfError::ThirtyTwoBit);
    }
    if big {
        return Err(ElfError::WrongByteOrder);
    }
    let identification = parse_ident::<LittleEndian>(head).map_err(|_| ElfError::NotElf)?;
    let tail = head.get(abi::EI_NIDENT..).unwrap_or(&[]);
    let header = FileHeader::parse_tail(identification, tail).map_err(|_| ElfError::NotElf)?;
    if header.e_type != abi::ET_EXEC && header.e_type != abi::ET_DYN {
        return Err(ElfError::NotExecutable {
            file_type: header.e_type,
        });
    }
    Ok(header)
}

impl Image {
    /// Parses and validates a program. `head` is the beginning of the file, at
    /// least [`bytes_needed`]; `file_length` the length of all of it, bytes.
    pub fn parse(head: &[u8], file_length: u64) -> Result<Image, ElfError> {
        let needed = bytes_needed(head)?;
        let header = header(head)?;
        if needed as u64 > file_length {
            return Err(ElfError::BeyondFile {
                what: "the program headers",
                end: needed as u64,
                file_length,
            });
        }
        let table = needed - usize::from(header.e_phnum) * PROGRAM_HEADER;
        let table = head.get(table..needed).ok_or(ElfError::Short {
            length: head.len(),
            needed,
        })?;
        let mut image = Image {
            kind: if header.e_type == abi::ET_EXEC {
                ImageKind::Fixed
            } else {
                ImageKind::Relocatable
            },
            entry: header.e_entry,
            interpreter: None,
            program_headers: 0,
            program_header_count: header.e_phnum,
            executable_stack: false,
            alignment: PAGE,
            segments: [Segment::default(); SEGMENTS_MAX],
            count: 0,
        };
        let table: ParsingTable<'_, LittleEndian, ProgramHeader> =
            ParsingTable::new(LittleEndian, Class::ELF64, table);
        let mut stated = None;
        for program_header in table.iter() {
            match program_header.p_type {
                abi::PT_LOAD => image.add_segment(&program_header, file_length)?,
                abi::PT_INTERP if image.interpreter.is_none() => {
                    image.interpreter = Some(interpreter(&program_header, file_length)?);
                }
                abi::PT_PHDR => stated = Some(program_header.p_vaddr),
                abi::PT_GNU_STACK => {
                    image.executable_stack = program_header.p_flags & abi::PF_X != 0;
                }
                // PT_TLS and the rest are the business of the program's own C
                // library.
                _ => {}
            }
        }
        image.finish(header.e_phoff, stated)
    }

    /// The segments, in ascending order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments[..self.count]
    }
    /// The whole pages from the first segment's start to the last one's end,
    /// before the base is added.
    pub fn extent(&self) -> Range<u64> {
        let first = self.segments().first().map_or(0, |s| s.address);
        let last = self.segments().last();
        let end = last.map_or(0, |s| s.address + s.memory_length);
        (first & !(PAGE - 1))..end.next_multiple_of(PAGE)
    }
    /// The end of the program's memory with `base` added, which is where its
    /// heap (`brk`) begins: the first whole page after the last segment.
    pub fn heap_start(&self, base: u64) -> u64 {
        base.wrapping_add(self.extent().end)
    }
    /// Checks that `base` is one that the image can have: 0 for a fixed one, a
    /// multiple of the alignment within the managed addresses for the others.
    pub fn check_base(&self, base: u64) -> Result<(), ElfError> {
        let extent = self.extent();
        let aligned = match self.kind {
            ImageKind::Fixed => base == 0,
            ImageKind::Relocatable => base.is_multiple_of(self.alignment),
        };
        let start = base.checked_add(extent.start);
        let end = base.checked_add(extent.end);
        match (start, end) {
            (Some(start), Some(end))
                if aligned && start >= layout::LOWEST && end <= layout::LIMIT =>
            {
                Ok(())
            }
            _ => Err(ElfError::OutsideManaged {
                address: start.unwrap_or(u64::MAX),
            }),
        }
    }

    fn add_segment(&mut self, header: &ProgramHeader, file_length: u64) -> Result<(), ElfError> {
        let segment = segment(header, file_length)?;
        if header.p_align > PAGE && header.p_align.is_power_of_two() {
            self.alignment = self.alignment.max(header.p_align);
        }
        if segment.memory_length == 0 {
            // The kernel maps nothing for it.
            return Ok(());
        }
        if let Some(before) = self.segments().last()
            && before.address + before.memory_length > segment.address
        {
            return Err(ElfError::Overlap {
                address: segment.address,
                before: before.address,
            });
        }
        let index = self.count;
        *self
            .segments
            .get_mut(index)
            .ok_or(ElfError::TooManySegments { max: SEGMENTS_MAX })? = segment;
        self.count += 1;
        Ok(())
    }
    /// What can be said only when every header was seen.
    fn finish(mut self, table_offset: u64, stated: Option<u64>) -> Result<Image, ElfError> {
        if self.count == 0 {
            return Err(ElfError::NoSegments);
        }
        let holder = self.segments().iter().find(|s| {
            s.file_offset <= table_offset && table_offset - s.file_offset < s.file_length
        });
        self.program_headers = holder
            .map(|s| s.address + (table_offset - s.file_offset))
            .or(stated)
            .unwrap_or(0);
        let extent = self.extent();
        if self.entry > layout::LIMIT || extent.end > layout::LIMIT {
            return Err(ElfError::OutsideManaged {
                address: self.entry.max(extent.end),
            });
        }
        if self.kind == ImageKind::Fixed {
            self.check_base(0)?;
        }
        if self.alignment > layout::LIMIT {
            return Err(ElfError::Alignment {
                alignment: self.alignment,
            });
        }
        Ok(self)
    }
}

/// A loadable segment, checked by itself.
fn segment(header: &ProgramHeader, file_length: u64) -> Result<Segment, ElfError> {
    let wraps = ElfError::WrapAround {
        what: "a loadable segment",
    };
    let file_end = header.p_offset.checked_add(header.p_filesz).ok_or(wraps)?;
    let memory_end = header.p_vaddr.checked_add(header.p_memsz).ok_or(wraps)?;
    if header.p_filesz > header.p_memsz {
        return Err(ElfError::FileLongerThanMemory {
            address: header.p_vaddr,
        });
    }
    if file_end > file_length {
        return Err(ElfError::BeyondFile {
            what: "a loadable segment",
            end: file_end,
            file_length,
        });
    }
    if memory_end > layout::LIMIT {
        return Err(ElfError::OutsideManaged {
            address: memory_end,
        });
    }
    if header.p_filesz > 0 && header.p_offset % PAGE != header.p_vaddr % PAGE {
        return Err(ElfError::Misaligned {
            address: header.p_vaddr,
        });
    }
    let bits = [
        (abi::PF_R, layout::PROT_READ),
        (abi::PF_W, layout::PROT_WRITE),
        (abi::PF_X, layout::PROT_EXEC),
    ];
    let prot = bits
        .into_iter()
        .filter(|(flag, _)| header.p_flags & flag != 0)
        .fold(0, |prot, (_, bit)| prot | bit);
    Ok(Segment {
        address: header.p_vaddr,
        memory_length: header.p_memsz,
        file_offset: header.p_offset,
        file_length: header.p_filesz,
        prot,
    })
}

/// Where the interpreter's path is.
fn interpreter(header: &ProgramHeader, file_length: u64) -> Result<Range64, ElfError> {
    let end = header.p_offset.checked_add(header.p_filesz);
    let end = end.ok_or(ElfError::WrapAround {
        what: "the interpreter's path",
    })?;
    if !(2..=INTERPRETER_MAX).contains(&header.p_filesz) {
        return Err(ElfError::Interpreter);
    }
    if end > file_length {
        return Err(ElfError::BeyondFile {
            what: "the interpreter's path",
            end,
            file_length,
        });
    }
    Ok(Range64 {
        offset: header.p_offset,
        length: header.p_filesz,
    })
}

/// The path in the bytes of [`Image::interpreter`], without its NUL.
pub fn interpreter_path(bytes: &[u8]) -> Result<&[u8], ElfError> {
    match bytes.split_last() {
        Some((0, _)) => {
            let path = bytes.split(|&byte| byte == 0).next().unwrap_or(&[]);
            if path.is_empty() {
                Err(ElfError::Interpreter)
            } else {
                Ok(path)
            }
        }
        _ => Err(ElfError::Interpreter),
    }
}
