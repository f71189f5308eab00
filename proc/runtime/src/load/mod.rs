//! Brings a program into the address space: script interpreters, ELF image,
//! dynamic linker, heap, stack.
//!
//! Nothing here can be undone, so everything that can be refused is refused
//! first, with the text and exit code that a shell's user expects.

pub mod file;
mod image;
mod stack;

use weft_proc::boot::{EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND};
use weft_proc::layout::{Kind, PAGE, Region};
use weft_proc::stack::StackError;

use crate::initial_stack::Initial;
use crate::log;
use crate::own_calls::{Errno, call, random};
use crate::{engine, program, space, vdso};
pub use file::{Executable, FileError, Scripts};

/// Most bytes between an image and its heap.
const HEAP_SLACK_BYTES: u64 = 32 << 20;

/// Where the program begins.
pub struct Entry {
    /// First instruction.
    pub address: usize,
    /// Initial stack pointer.
    pub stack: usize,
}

/// Why a program was not loaded.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub enum LoadError {
    /// The file, or its interpreter.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kernel refused a mapping.
    #[error("its memory cannot be mapped: {}", text(.0))]
    Mapping(Errno),
    /// More than a quarter of the stack, as in Linux.
    #[error(transparent)]
    Arguments(StackError),
}

/// What an errno means, for people.
pub fn text(error: &Errno) -> &'static str {
    error.description().unwrap_or("unknown error")
}

impl From<Errno> for LoadError {
    fn from(error: Errno) -> LoadError {
        LoadError::Mapping(error)
    }
}

/// Ends the runtime because `path` cannot be run.
pub fn refuse(path: &[u8], error: &LoadError) -> ! {
    let code = match error {
        LoadError::File(FileError::Open(Errno::ENOENT | Errno::ENOTDIR)) => EXIT_NOT_FOUND,
        _ => EXIT_NOT_EXECUTABLE,
    };
    let name = core::str::from_utf8(path).unwrap_or("the program");
    log::fail(code, format_args!("{name} cannot be run: {error}"))
}

/// Loads the program at `path`.
pub fn load(path: &[u8], initial: &Initial) -> Result<Entry, LoadError> {
    let scripts = Scripts::resolve(path)?;
    let executable = scripts.executable();
    program::remember(executable.descriptor)?;
    let base = image::choose_base(&executable.image)?;
    image::map(executable, base)?;
    let linker = match executable.linker()? {
        Some(linker) => {
            let base = image::choose_linker_base(&linker.image)?;
            image::map(&linker, base)?;
            Some((linker, base))
        }
        None => None,
    };
    let heap = executable.image.heap_start(base) + ((random() % HEAP_SLACK_BYTES) & !(PAGE - 1));
    space::lock().set_heap(heap);
    let (linker_base, address) = match &linker {
        Some((linker, base)) => (*base, base + linker.image.entry),
        None => (0, base + executable.image.entry),
    };
    let program = stack::Program {
        path,
        program_headers: base + executable.image.program_headers,
        program_header_count: executable.image.program_header_count.into(),
        entry: base + executable.image.entry,
        linker_base,
        vdso: move_vdso(),
        executable_stack: executable.image.executable_stack,
    };
    let stack = stack::build(&program, &scripts, initial)?;
    let _ = call!(close, executable.descriptor);
    if let Some((linker, _)) = &linker {
        let _ = call!(close, linker.descriptor);
    }
    Ok(Entry {
        address: address as usize,
        stack,
    })
}

/// The vdso's header at its new place, if there is one.
fn move_vdso() -> Option<u64> {
    let moved = vdso::relocate(space::VDSO).ok()?;
    let region = Region {
        kind: Kind::HomeOnly,
        ..Region::anonymous(moved.start, moved.end, 5)
    };
    space::lock().layout.insert(region).ok()?;
    engine::has_vdso(moved.hash());
    Some(moved.header)
}
