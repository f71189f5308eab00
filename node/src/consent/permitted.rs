//! A disk that a lender permits, opened so that no link leads elsewhere.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};

/// A disk that may be opened, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permitted {
    pub(super) path: PathBuf,
    /// Beneath a directory: a regular file that has no other name.
    pub(super) beneath: bool,
}

impl Permitted {
    /// Opens it, with flags of open(2) that say for what.
    ///
    /// # Errors
    /// What the kernel says: ELOOP for a path with a symbolic link. A file beneath a
    /// directory that is no regular file, or that has other names, too.
    pub fn open(&self, flags: i32) -> io::Result<File> {
        let how = OpenHow::new()
            .flags(OFlag::from_bits_retain(flags) | OFlag::O_CLOEXEC | OFlag::O_NOCTTY)
            .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let file = File::from(openat2(AT_FDCWD, &self.path, how)?);
        if self.beneath {
            let status = file.metadata()?;
            if !status.is_file() {
                return Err(io::Error::other(
                    "a directory allows only regular files: list a device by its own path",
                ));
            }
            if status.nlink() != 1 {
                return Err(io::Error::other(
                    "it has another hard link, which may be outside the allowed directories",
                ));
            }
        }
        Ok(file)
    }
}
