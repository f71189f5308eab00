//! The files of a program: what runs it, and whether it can run here.

use weft_proc::elf::{self, ElfError, Image};
use weft_proc::script::{self, ScriptError};

use crate::descriptors;
use crate::own_calls::{self, Errno, call};

/// Bytes of a file's head that are looked at.
const HEAD_BYTES: usize = 8192;
/// Longest path, NUL included.
const PATH_BYTES_MAX: usize = 4096;
/// Most arguments that scripts can put before the given ones.
const PREFIX_MAX: usize = 2 * script::DEPTH_MAX + 1;

/// Why a file cannot be executed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be opened or read.
    #[error("{}", super::text(.0))]
    Open(Errno),
    /// It is a directory, a device, …
    #[error("it is not a regular file")]
    NotRegular,
    /// It may not be executed.
    #[error("permission denied")]
    NotPermitted,
    /// It is not a program for this machine.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// Its `#!` line is unusable.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// Scripts run by scripts run by scripts.
    #[error("too many levels of script interpreters")]
    TooDeep,
    /// The dynamic linker that it names is unusable.
    #[error("its dynamic linker cannot be opened: {}", super::text(.0))]
    Linker(Errno),
    /// The dynamic linker is not one.
    #[error("its dynamic linker is unusable: {0}")]
    LinkerElf(ElfError),
}

impl FileError {
    /// What `execve` returns for it.
    pub fn errno(&self) -> Errno {
        match self {
            FileError::Open(error) => *error,
            FileError::NotRegular | FileError::NotPermitted => Errno::EACCES,
            FileError::Elf(_) | FileError::Script(_) => Errno::ENOEXEC,
            FileError::TooDeep => Errno::ELOOP,
            FileError::Linker(error) => *error,
            FileError::LinkerElf(_) => Errno::ELIBBAD,
        }
    }
}

/// What `stat` says of a file, as far as it matters.
pub struct Status {
    /// Type and permissions.
    pub mode: u32,
    /// Length, bytes.
    pub length: u64,
}

impl Status {
    /// Asks about an open file.
    pub fn of(descriptor: i32) -> Result<Status, Errno> {
        let mut words = [0u64; 18];
        call!(fstat, descriptor, words.as_mut_ptr())?;
        Ok(Status {
            mode: words[3] as u32,
            length: words[6],
        })
    }
    fn is_regular(&self) -> bool {
        self.mode & 0o170_000 == 0o100_000
    }
    /// Whether executing it changes the user or the group.
    pub fn changes_identity(&self) -> bool {
        self.mode & 0o4000 != 0 || self.mode & 0o2010 == 0o2010
    }
}

/// Opens a file to execute.
pub fn open(path: &[u8]) -> Result<(i32, Status), FileError> {
    const O_CLOEXEC: usize = 0o2_000_000;
    const AT_FDCWD: isize = -100;
    const X_OK: usize = 1;
    const AT_EACCESS: usize = 0x200;
    let mut buffer = [0u8; PATH_BYTES_MAX];
    if path.len() >= PATH_BYTES_MAX {
        return Err(FileError::Open(Errno::ENAMETOOLONG));
    }
    buffer[..path.len()].copy_from_slice(path);
    let name = buffer.as_ptr();
    let descriptor = descriptors::open(name, O_CLOEXEC).map_err(FileError::Open)?;
    let checked = Status::of(descriptor)
        .map_err(FileError::Open)
        .and_then(|status| {
            if !status.is_regular() {
                return Err(FileError::NotRegular);
            }
            match call!(faccessat2, AT_FDCWD, name, X_OK, AT_EACCESS) {
                Err(Errno::EACCES) => Err(FileError::NotPermitted),
                _ => Ok(status),
            }
        })
        .and_then(|status| match would_execute(name) {
            Err(Errno::ETXTBSY) => Err(FileError::Open(Errno::ETXTBSY)),
            Err(Errno::EACCES) => Err(FileError::NotPermitted),
            _ => Ok(status),
        });
    match checked {
        Ok(status) => Ok((descriptor, status)),
        Err(error) => {
            let _ = call!(close, descriptor);
            Err(error)
        }
    }
}

/// What the kernel says about executing a file before it looks at the arguments,
/// which are bad: so nothing is executed. EFAULT when it has nothing against it,
/// and always before Linux 6.8.
fn would_execute(name: *const u8) -> Result<usize, Errno> {
    const NOWHERE: usize = usize::MAX;
    call!(execve, name, NOWHERE, NOWHERE)
}

/// An open ELF file.
pub struct Executable {
    /// Where it is open.
    pub descriptor: i32,
    /// Its headers.
    pub image: Image,
}

impl Executable {
    fn parse(descriptor: i32, length: u64, head: &[u8]) -> Result<Executable, FileError> {
        let image = Image::parse(head, length)?;
        Ok(Executable { descriptor, image })
    }
    /// The dynamic linker that the program names, opened and checked.
    pub fn linker(&self) -> Result<Option<Executable>, FileError> {
        let Some(range) = self.image.interpreter else {
            return Ok(None);
        };
        let mut buffer = [0u8; PATH_BYTES_MAX];
        let bytes = &mut buffer[..(range.length as usize).min(PATH_BYTES_MAX)];
        own_calls::read_at(self.descriptor, bytes, range.offset).map_err(FileError::Open)?;
        let path = elf::interpreter_path(bytes)?;
        let (descriptor, status) = open(path).map_err(|error| match error {
            FileError::Open(error) => FileError::Linker(error),
            other => FileError::Linker(other.errno()),
        })?;
        let mut head = [0u8; HEAD_BYTES];
        let read = own_calls::read_at(descriptor, &mut head, 0).map_err(FileError::Linker)?;
        let image = Image::parse(&head[..read], status.length).map_err(FileError::LinkerElf)?;
        Ok(Some(Executable { descriptor, image }))
    }
}

/// A path that a script names.
#[derive(Clone, Copy)]
struct Text {
    bytes: [u8; script::HEAD],
    length: usize,
}

impl Text {
    const EMPTY: Text = Text {
        bytes: [0; script::HEAD],
        length: 0,
    };
    fn new(bytes: &[u8]) -> Text {
        let mut text = Text::EMPTY;
        text.length = bytes.len().min(script::HEAD);
        text.bytes[..text.length].copy_from_slice(&bytes[..text.length]);
        text
    }
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// A program file after all `#!` lines, and the arguments those add.
pub struct Scripts<'a> {
    path: &'a [u8],
    executable: Executable,
    /// Interpreters and their arguments, the last interpreter at the end.
    added: [Text; PREFIX_MAX],
    count: usize,
    /// Whether a file on the way runs with another identity.
    pub changes_identity: bool,
}

impl<'a> Scripts<'a> {
    /// Opens `path` and follows `#!` lines to an ELF file.
    pub fn resolve(path: &'a [u8]) -> Result<Scripts<'a>, FileError> {
        let mut added = [Text::EMPTY; PREFIX_MAX];
        let mut count = 0;
        let mut head = [0u8; HEAD_BYTES];
        let mut changes_identity = false;
        for _ in 0..=script::DEPTH_MAX {
            let current = match count {
                0 => path,
                _ => added[count - 1].as_bytes(),
            };
            let (descriptor, status) = open(current)?;
            changes_identity |= status.changes_identity();
            let read = own_calls::read_at(descriptor, &mut head, 0).map_err(FileError::Open);
            let found = read.and_then(|read| match script::parse(&head[..read]) {
                None => Executable::parse(descriptor, status.length, &head[..read]).map(Some),
                Some(script) => {
                    let script = script?;
                    if count + 2 > PREFIX_MAX {
                        return Err(FileError::TooDeep);
                    }
                    if let Some(argument) = script.argument {
                        added[count] = Text::new(argument);
                        count += 1;
                    }
                    added[count] = Text::new(script.interpreter);
                    count += 1;
                    Ok(None)
                }
            });
            match found {
                Ok(Some(executable)) => {
                    return Ok(Scripts {
                        path,
                        executable,
                        added,
                        count,
                        changes_identity,
                    });
                }
                Ok(None) => drop(call!(close, descriptor)),
                Err(error) => {
                    let _ = call!(close, descriptor);
                    return Err(error);
                }
            }
        }
        Err(FileError::TooDeep)
    }
    /// The ELF file.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }
    /// Closes it, for a caller that only wanted to know.
    pub fn close(self) {
        let _ = call!(close, self.executable.descriptor);
    }
    /// The arguments that replace the first given one; none when `path` itself
    /// is the ELF file. Last interpreter first, then its argument, …, then the
    /// path.
    pub fn prefix(&self) -> impl Iterator<Item = &[u8]> + Clone {
        let path = (self.count > 0).then_some(self.path);
        self.added[..self.count]
            .iter()
            .rev()
            .map(Text::as_bytes)
            .chain(path)
    }
    /// Whether a script was involved.
    pub fn has_prefix(&self) -> bool {
        self.count > 0
    }
}
