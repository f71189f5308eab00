//! Why a file is no program that can run here.

use ::elf::abi;

/// An ELF machine number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine(pub u16);

impl core::fmt::Display for Machine {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let name = match self.0 {
            abi::EM_AARCH64 => "64-bit ARM (aarch64)",
            abi::EM_ARM => "32-bit ARM",
            abi::EM_RISCV => "RISC-V",
            abi::EM_PPC => "PowerPC",
            abi::EM_PPC64 => "64-bit PowerPC",
            abi::EM_S390 => "IBM S/390",
            abi::EM_MIPS => "MIPS",
            abi::EM_SPARC => "SPARC",
            abi::EM_SPARCV9 => "64-bit SPARC",
            abi::EM_LOONGARCH => "LoongArch",
            abi::EM_IA_64 => "Itanium",
            abi::EM_BPF => "BPF",
            abi::EM_386 => "32-bit x86",
            abi::EM_X86_64 => "x86-64",
            number => return write!(f, "machine number {number}"),
        };
        f.write_str(name)
    }
}

/// Why a file is no program that can run here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ElfError {
    /// The magic number is missing.
    #[error("not an ELF file")]
    NotElf,
    /// The head that was read does not hold the headers.
    #[error("only {length} bytes of the file were read, its headers need {needed}")]
    Short {
        /// What was given.
        length: usize,
        needed: usize,
    },
    /// A 32-bit program, x32 included.
    #[error("a 32-bit program; only 64-bit programs can run here")]
    ThirtyTwoBit,
    /// For another processor.
    #[error("a program for {machine}; this is an x86-64 machine")]
    ForeignMachine { machine: Machine },
    /// Big-endian.
    #[error("a big-endian ELF file; x86-64 is little-endian")]
    WrongByteOrder,
    /// An object file, a core dump or something else.
    #[error("an ELF file of type {file_type}, which is not executable")]
    NotExecutable {
        /// `e_type`.
        file_type: u16,
    },
    /// The table of program headers has a size that Linux refuses too.
    #[error("{count} program headers of {size} bytes; they must be of 56 bytes and fit a page")]
    ProgramHeaders {
        /// How many.
        count: u16,
        /// Size of each, bytes.
        size: u16,
    },
    /// Nothing to load.
    #[error("an ELF file without loadable segments")]
    NoSegments,
    /// More loadable segments than are supported.
    #[error("more than {max} loadable segments")]
    TooManySegments {
        /// The most.
        max: usize,
    },
    /// Segments overlap or are not in ascending order.
    #[error(
        "the segment at {address:#x} overlaps or comes after the one at {before:#x} it follows"
    )]
    Overlap {
        /// The later one in the table.
        address: u64,
        /// The one before it.
        before: u64,
    },
    /// The file is cut off.
    #[error("{what} ends at byte {end}, but the file has only {file_length}")]
    BeyondFile {
        /// What is cut off.
        what: &'static str,
        /// Where it would end.
        end: u64,
        /// Length of the file.
        file_length: u64,
    },
    /// More bytes in the file than in memory.
    #[error("the segment at {address:#x} has more bytes in the file than in memory")]
    FileLongerThanMemory { address: u64 },
    /// Address and file offset differ within the page.
    #[error("the segment at {address:#x} has different page offsets in the file and in memory")]
    Misaligned { address: u64 },
    /// An alignment that no base can satisfy.
    #[error("a segment asks for an alignment of {alignment:#x} bytes")]
    Alignment {
        /// `p_align`.
        alignment: u64,
    },
    /// Not within the addresses of elastic processes.
    #[error(
        "{address:#x} is outside the addresses that an elastic process can use (64 KiB to 8 TiB)"
    )]
    OutsideManaged {
        /// The offending address.
        address: u64,
    },
    /// An address or offset overflows.
    #[error("{what} wraps around the end of the address space")]
    WrapAround { what: &'static str },
    /// Empty, too long or not terminated.
    #[error("the path of the program's interpreter is malformed")]
    Interpreter,
}
