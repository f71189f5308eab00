//! A disk that a lender permits, opened so that no link leads elsewhere.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::PathBuf;

use nix::fcntl::{AT_FDCWD, FcntlArg, OFlag, OpenHow, ResolveFlag, fcntl, openat2};
use nix::sys::stat::Mode;

/// A disk that may be opened, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permitted {
    pub(super) path: PathBuf,
    /// Beneath a directory: a regular file that has no other name.
    pub(super) beneath: bool,
}

/// A file that was made here; removed when dropped, unless it is kept.
#[derive(Debug)]
pub struct NewFile(Option<PathBuf>);

impl NewFile {
    /// It stays.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Its directory may have gone; nobody is left to hear of it.
            let _ = fs::remove_file(path);
        }
    }
}

impl Permitted {
    /// Makes it, empty, of this size and locked, for `owner` only.
    ///
    /// # Errors
    /// What the kernel says: EEXIST for one that is there, ELOOP for a path with a symbolic link.
    pub fn create(&self, bytes: u64, owner: Option<u32>) -> io::Result<(File, NewFile)> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let how = OpenHow::new()
            .flags(flags)
            .mode(Mode::S_IRUSR | Mode::S_IWUSR)
            .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let file = File::from(openat2(AT_FDCWD, &self.path, how)?);
        let made = NewFile(Some(self.path.clone()));
        file.set_len(bytes)?;
        if let Some(owner) = owner {
            fchown(&file, Some(owner), Some(owner))?;
        }
        let whole = libc::flock {
            l_type: libc::F_WRLCK as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        fcntl(&file, FcntlArg::F_OFD_SETLK(&whole))?;
        Ok((file, made))
    }

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
