//! The files that a guest starts from.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::BootError;

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The kernel.
    Kernel,
    /// The first file system, or a module.
    Initrd,
}

impl Role {
    /// Larger files are refused before they are read: no kernel is, and an
    /// initrd must fit below 4 GiB.
    fn bytes_max(self) -> u64 {
        match self {
            Self::Kernel => 1 << 30,
            Self::Initrd => 3 << 30,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::Initrd => "initrd",
        })
    }
}

/// A file's contents, and what to call it.
#[derive(Clone, Debug)]
pub struct ImageFile {
    /// Its path, or anything.
    pub name: String,
    /// All of it.
    pub bytes: Vec<u8>,
}

impl ImageFile {
    /// Reads a kernel or an initrd.
    pub fn open(role: Role, path: &Path) -> Result<Self, BootError> {
        let unreadable = |source| BootError::Read {
            role,
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(BootError::NotAFile {
                role,
                path: path.to_path_buf(),
            });
        }
        let name = path.display().to_string();
        let limit = role.bytes_max();
        let size = metadata.len();
        if !(1..=limit).contains(&size) {
            return Err(BootError::FileSize {
                role,
                name,
                bytes: size,
                limit,
            });
        }
        let mut bytes = Vec::with_capacity(size as usize);
        // It may change while it is read: never more than it had.
        file.take(size)
            .read_to_end(&mut bytes)
            .map_err(unreadable)?;
        Ok(Self { name, bytes })
    }
}
