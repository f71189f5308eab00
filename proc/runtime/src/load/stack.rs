//! The main stack: mapped whole, filled as the ABI wants it
//! (`weft_proc::stack`).

use weft_proc::layout::{FLAG_NO_RESERVE, FLAG_STACK, PAGE, Region};
use weft_proc::stack::Start;

use super::{LoadError, Scripts};
use crate::initial_stack::{self, Initial};
use crate::own_calls::{call, random};
use crate::space;

/// Least and most bytes of stack, whatever the limit says: the region is mapped
/// at once, and counts against the budget.
const STACK_BYTES_MIN: u64 = 1 << 20;
const STACK_BYTES_MAX: u64 = 64 << 20;
/// Random part of the stack's top, bytes.
const SLACK_BYTES: u64 = 2 << 30;
/// Most entries of the auxiliary vector.
const AUXILIARY_MAX: usize = 48;

const AT_PHDR: usize = 3;
const AT_PHENT: usize = 4;
const AT_PHNUM: usize = 5;
const AT_BASE: usize = 7;
const AT_ENTRY: usize = 9;
const AT_PLATFORM: usize = 15;
const AT_BASE_PLATFORM: usize = 24;
const AT_RANDOM: usize = 25;
const AT_RSEQ_FEATURE_SIZE: usize = 27;
const AT_RSEQ_ALIGN: usize = 28;
const AT_EXECFN: usize = 31;
const AT_SYSINFO_EHDR: usize = 33;

/// What the auxiliary vector says about the program.
pub struct Program<'a> {
    /// As it was executed.
    pub path: &'a [u8],
    /// Address of its program headers.
    pub program_headers: u64,
    /// How many they are.
    pub program_header_count: u64,
    /// Its entry point.
    pub entry: u64,
    /// Base of the dynamic linker, or 0.
    pub linker_base: u64,
    /// The vdso's header, when there is one.
    pub vdso: Option<u64>,
    /// Whether the stack must be executable.
    pub executable_stack: bool,
}

/// Maps and fills the stack; returns the initial stack pointer.
pub fn build(
    program: &Program<'_>,
    scripts: &Scripts<'_>,
    initial: &Initial,
) -> Result<usize, LoadError> {
    let (low, top) = map(program.executable_stack)?;
    let given = if scripts.has_prefix() && !initial.arguments.is_empty() {
        &initial.arguments[1..]
    } else {
        initial.arguments
    };
    // SAFETY: strings of the initial stack.
    let text = |&text: &*const u8| unsafe { initial_stack::string(text) };
    let mut auxiliary = [(0u64, 0u64); AUXILIARY_MAX];
    let entries = fill_auxiliary(&mut auxiliary, program, initial);
    let start = Start {
        arguments: scripts.prefix().chain(given.iter().map(text)),
        environment: initial.environment.iter().map(text),
        auxiliary: &auxiliary[..entries],
        path: program.path,
        platform: b"x86_64",
        random: random_bytes(),
    };
    // SAFETY: just mapped, and the program does not run yet.
    let buffer = unsafe { core::slice::from_raw_parts_mut(low as *mut u8, top - low) };
    let stack = start
        .build(top as u64, (top - low) / 4, buffer)
        .map_err(LoadError::Arguments)?;
    Ok(stack.pointer as usize)
}

fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&random().to_ne_bytes());
    bytes[8..].copy_from_slice(&random().to_ne_bytes());
    bytes
}

/// Maps the whole stack: its size is the limit's, within bounds.
fn map(executable: bool) -> Result<(usize, usize), LoadError> {
    const RLIMIT_STACK: usize = 3;
    const MAP_PRIVATE_ANONYMOUS_FIXED_NORESERVE: usize = 0x10_4022;
    let mut limits = [0u64; 2];
    call!(prlimit64, 0, RLIMIT_STACK, 0, limits.as_mut_ptr())?;
    let bytes = limits[0].clamp(STACK_BYTES_MIN, STACK_BYTES_MAX) & !(PAGE - 1);
    let end = space::STACK_TOP - ((random() % SLACK_BYTES) & !(PAGE - 1));
    let start = end - bytes;
    let prot = if executable { 7 } else { 3 };
    let flags = MAP_PRIVATE_ANONYMOUS_FIXED_NORESERVE;
    call!(mmap, start, bytes, prot, flags, -1isize, 0)?;
    space::lock().enter(Region {
        flags: FLAG_STACK | FLAG_NO_RESERVE,
        ..Region::anonymous(start, end, prot)
    })?;
    Ok((start as usize, end as usize))
}

/// The kernel's own vector with the entries that describe the program replaced.
/// Those that point to strings are left out: the stack's builder has its own. So
/// are the areas for restartable sequences, because `rseq` is refused.
fn fill_auxiliary(
    entries: &mut [(u64, u64); AUXILIARY_MAX],
    program: &Program<'_>,
    initial: &Initial,
) -> usize {
    const PROGRAM_HEADER_BYTES: u64 = 56;
    let mut used = 0;
    for &[key, value] in initial.auxiliary {
        let value = match key {
            AT_RSEQ_FEATURE_SIZE | AT_RSEQ_ALIGN | AT_EXECFN | AT_PLATFORM | AT_BASE_PLATFORM
            | AT_RANDOM => continue,
            AT_SYSINFO_EHDR => match program.vdso {
                Some(header) => header,
                None => continue,
            },
            AT_PHDR => program.program_headers,
            AT_PHENT => PROGRAM_HEADER_BYTES,
            AT_PHNUM => program.program_header_count,
            AT_BASE => program.linker_base,
            AT_ENTRY => program.entry,
            _ => value as u64,
        };
        if used < AUXILIARY_MAX {
            entries[used] = (key as u64, value);
            used += 1;
        }
    }
    used
}
