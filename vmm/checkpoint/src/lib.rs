//! A saved machine as a set of files in one directory.
//!
//! ```text
//! DIRECTORY/
//!   pages.0 … pages.N    guest memory: each page that is not zero, in one of them
//!   machine              everything else, as JSON
//!   manifest             names the others; its rename makes the set complete
//! ```
//!
//! Invariants:
//!
//! - A directory with a file `manifest` holds a complete set: all other files are on
//!   disk before the manifest gets its name.
//! - A checksum covers every byte of every file, so a changed byte is found.
//! - All files of a set carry its identity, so files of two sets cannot be mixed.
//! - Decoding is total and bounded: any bytes give a set or a named error, and no
//!   allocation exceeds what the length of a file justifies.
//!
//! | file | holds |
//! | --- | --- |
//! | [`pages`] | the form of a file of pages |
//! | [`manifest`] | the form of the manifest |
//! | [`disk`] | what is remembered of a disk |
//! | [`set`] | the directory: create, commit, open, verify |

pub mod disk;
pub mod manifest;
pub mod pages;
pub mod set;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub use disk::{DiskChange, DiskMark};
pub use manifest::{Machine, Manifest, PageFile};
pub use pages::{PagesReader, PagesWriter, Run, Written};
pub use set::{NewSet, Set};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// The format that this crate writes, and the latest that it reads.
pub const FORMAT: u32 = 1;
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
