//! A saved machine as a set of files in one directory.
//!
//! ```text
//! DIRECTORY/
//!   pages.0 … pages.N    guest memory: each page that is not zero, in one of them
//!   tables.N             of a file of pages that is on another host: all but its pages
//!   machine              everything else, as JSON
//!   manifest             names the others; its rename makes the set complete
//! ```
//!
//! A set can be based on an earlier one, its *base*: pages that are as in the base are named
//! in its files, and their bytes are in a file of the base, or of the base's base. So a set
//! is the last of a *chain* of up to [`CHAIN_MAX`].
//!
//! Invariants:
//!
//! - A directory with a file `manifest` holds a complete set: all other files are on
//!   disk before the manifest gets its name.
//! - A checksum covers every byte of every file, so a changed byte is found.
//! - All files of a set carry its identity, so files of two sets cannot be mixed. A set has
//!   the identity of its base, so another set cannot stand for it.
//! - In the files of one set no page is named twice. A page that no file names is zero.
//! - Decoding is total and bounded: any bytes give a set or a named error, and no
//!   allocation exceeds what the length of a file justifies.
//!
//! | file | holds |
//! | --- | --- |
//! | [`pages`] | the form of a file of pages |
//! | [`manifest`] | the form of the manifest |
//! | [`disk`] | what is remembered of a disk |
//! | [`new_set`] | a directory that is being written: create, commit |
//! | `layer` | the directory of one complete set |
//! | [`set`] | a complete set with its bases: open, verify |
//! | [`extents`] | which file of a chain has the bytes of a page |
//! | [`source`] | guest memory as a set has it, read in any order |
//! | [`served`] | files of pages of a chain that one host has, for others |

pub mod disk;
pub mod extents;
mod layer;
pub mod manifest;
pub mod new_set;
pub mod pages;
pub mod served;
pub mod set;
pub mod source;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use disk::{DiskChange, DiskMark};
pub use extents::Extent;
pub use manifest::{Base, Machine, Manifest, PageFile, Place};
pub use new_set::NewSet;
pub use pages::{PagesReader, PagesWriter, ReadAt, Run, Tables, Written, write_tables};
pub use served::{FileName, ServedFiles};
pub use set::Set;
pub use source::PageSource;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// The format that this crate writes, and the latest that it reads.
pub const FORMAT: u32 = 3;
/// The earliest format that it reads.
pub const FORMAT_FIRST: u32 = 1;
/// Most sets of a chain, the last one included: what a restore opens and reads, and what one
/// lost directory makes useless, must not grow without end.
pub const CHAIN_MAX: usize = 64;
/// Most files of pages of one set: as many as a machine has nodes.
pub const FILES_MAX: usize = 16;

/// Random bytes that all files of a set have in common.
pub type Identity = [u8; 16];

/// Why a checkpoint cannot be written or read.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The directory for a new set is not empty.
    #[error("{0} is not empty: give a directory that does not exist yet")]
    NotEmpty(PathBuf),
    /// No manifest.
    #[error("{0} is incomplete: its save did not finish, so it cannot be restored")]
    Incomplete(PathBuf),
    /// Nothing of a set.
    #[error("{0} does not hold a checkpoint")]
    NoCheckpoint(PathBuf),
    /// Written by a later version.
    #[error("{path} has format {format}, but this Weft reads formats up to {FORMAT}")]
    Later {
        /// The file.
        path: PathBuf,
        /// The number that the file states.
        format: u32,
    },
    /// A file that the manifest names does not exist.
    #[error("{0} is missing")]
    Missing(PathBuf),
    /// The base of a set cannot stand for what it was.
    #[error("{set} needs {base}, which {why}")]
    Base {
        /// The directory that names the base.
        set: PathBuf,
        /// The directory of its base.
        base: PathBuf,
        why: BaseProblem,
    },
    /// The base of a set is there, but its manifest cannot be read.
    #[error("{set} needs {base}")]
    BaseUnread {
        set: PathBuf,
        base: PathBuf,
        source: Box<CheckpointError>,
    },
    /// A set would need too many others.
    #[error(
        "{0} ends a chain of more than {CHAIN_MAX} checkpoints, each based on the one before: make \
         a full save, which needs no other"
    )]
    LongChain(PathBuf),
    /// A manifest is UTF-8.
    #[error("{0} has a name that is not UTF-8, so no checkpoint can be based on it: rename it")]
    Name(PathBuf),
    /// The bytes of pages are on another host.
    #[error("{file} is on {host}, in {directory}: copy it from there to {path}")]
    Elsewhere {
        file: String,
        host: String,
        directory: PathBuf,
        /// Where it can be, too.
        path: PathBuf,
    },
    /// A file differs from what was written.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The part of it.
        what: &'static str,
    },
    /// The kernel's answer.
    #[error("cannot {action} {path}")]
    Io {
        /// A verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        source: io::Error,
    },
}

/// Why a directory is not the base that a set needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BaseProblem {
    #[error("is missing: put it back where it was")]
    Missing,
    #[error("is incomplete: put back the checkpoint that was there")]
    Incomplete,
    #[error("is another checkpoint than when it was saved: put back the one that was there")]
    Another,
    #[error("is of a machine with another amount of memory")]
    OtherMemory,
}

/// Why bytes are not a file of a set; [`CheckpointError`] adds which file.
#[derive(Debug, Error)]
pub enum FormatError {
    /// Written by a later version.
    #[error("format {0} is later than {FORMAT}")]
    Later(u32),
    /// This part differs from what was written.
    #[error("{0}")]
    Damaged(&'static str),
    /// It cannot be read.
    #[error("it cannot be read")]
    Io(#[from] io::Error),
}

impl FormatError {
    /// The same, about the file at `path`.
    pub fn of(self, path: PathBuf) -> CheckpointError {
        match self {
            Self::Later(format) => CheckpointError::Later { path, format },
            Self::Damaged(what) => CheckpointError::Damaged { path, what },
            Self::Io(source) => CheckpointError::Io {
                action: "read",
                path,
                source,
            },
        }
    }
}

/// Adds what was done to the kernel's answer about `path`.
fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io {
        action,
        path,
        source,
    }
}
