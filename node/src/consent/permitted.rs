//! A disk that a lender permits, opened so that no link leads elsewhere.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, FcntlArg, OFlag, OpenHow, ResolveFlag, fcntl, openat2};
use nix::sys::stat::{Mode, mkdirat};

/// A disk that may be opened, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permitted {
    pub(super) path: PathBuf,
    /// Beneath a directory: a regular file that has no other name.
    pub(super) beneath: bool,
}

/// A file that was made here; removed when dropped, unless it is kept.
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    /// It was made, too, for the file.
    directory: Option<PathBuf>,
    is_kept: bool,
}

impl NewFile {
    /// The same with a directory that was made for it.
    pub fn in_directory(mut self, directory: Option<PathBuf>) -> Self {
        self.directory = directory;
        self
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It stays.
    pub fn keep(mut self) {
        self.is_kept = true;
    }

    /// It stays, and its name is on disk, when this is dropped: also after the system has failed.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn keep_until_removed(&mut self) -> io::Result<()> {
        let parents = self.path.ancestors().skip(1).take(2);
        parents
            .map(File::open)
            .try_for_each(|directory| directory?.sync_all())?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // Its directory may have gone, or have other files; nobody is left to hear of it.
        let _ = fs::remove_file(&self.path);
        if let Some(directory) = &self.directory {
            let _ = fs::remove_dir(directory);
        }
    }
}

impl Permitted {
    /// Makes the directory of a file beneath a directory, for `owner` only, if it is missing;
    /// where that is, if it was.
    ///
    /// # Errors
    /// What the kernel says: ELOOP for a path with a symbolic link.
    pub fn make_directory(&self, owner: Option<u32>) -> io::Result<Option<PathBuf>> {
        let directory = self.path.parent().filter(|_| self.beneath);
        let parts = directory.and_then(|path| Some((path, path.parent()?, path.file_name()?)));
        let Some((directory, parent, name)) = parts else {
            return Ok(None);
        };
        let open = |path: &Path| {
            let how = OpenHow::new()
                .flags(OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
                .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
            openat2(AT_FDCWD, path, how).map(File::from)
        };
        match mkdirat(&open(parent)?, name, Mode::S_IRWXU) {
            Ok(()) => {}
            Err(Errno::EEXIST) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        if let Some(owner) = owner {
            fchown(open(directory)?, Some(owner), Some(owner))?;
        }
        Ok(Some(directory.to_owned()))
    }

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
        let made = NewFile {
            path: self.path.clone(),
            directory: None,
            is_kept: false,
        };
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
