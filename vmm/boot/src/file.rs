//! The files that a guest starts from: open, and read where they are needed. What
//! a guest gets goes from the file to its memory; nothing else keeps a copy.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use weft_guest_memory::Ram;

use super::error::BootError;
use super::format::Role;

/// Bytes that are looked through at one time.
const PIECE: u64 = 256 << 10;

/// Where its bytes are.
#[derive(Debug)]
enum Bytes {
    File(File),
    Memory(Vec<u8>),
}

/// A kernel or an initrd, and what to call it.
#[derive(Debug)]
pub struct ImageFile {
    role: Role,
    name: String,
    size: u64,
    bytes: Bytes,
}

impl ImageFile {
    /// Opens a kernel or an initrd. It is read by [`super::load`].
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
        Ok(Self {
            role,
            name,
            size,
            bytes: Bytes::File(file),
        })
    }

    /// One that is in memory already.
    pub fn from_bytes(role: Role, name: &str, bytes: Vec<u8>) -> Self {
        Self {
            role,
            name: name.to_owned(),
            size: bytes.len() as u64,
            bytes: Bytes::Memory(bytes),
        }
    }

    /// Its path, or anything.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes that it had when it was opened.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Refuses a file that has become another since it was opened: what was found
    /// out about it may not hold.
    pub fn check_size(&self) -> Result<(), BootError> {
        let Bytes::File(file) = &self.bytes else {
            return Ok(());
        };
        let now = file.metadata().map_err(|error| self.unreadable(error))?;
        if now.len() != self.size {
            return Err(self.changed(now.len()));
        }
        Ok(())
    }

    /// A part of it, which must lie within.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>, BootError> {
        let mut bytes = vec![0; range.end.saturating_sub(range.start) as usize];
        match &self.bytes {
            Bytes::File(file) => file
                .read_exact_at(&mut bytes, range.start)
                .map_err(|error| self.unreadable(error))?,
            Bytes::Memory(all) => bytes.copy_from_slice(self.slice(all, &range)?),
        }
        Ok(bytes)
    }

    /// Puts a part of it into guest memory.
    pub fn place(&self, ram: &Ram, range: Range<u64>, address: u64) -> Result<(), BootError> {
        match &self.bytes {
            Bytes::File(file) => ram
                .fill(address, file, range)
                .map_err(|error| self.unreadable(error)),
            Bytes::Memory(all) => super::layout::put(ram, address, self.slice(all, &range)?),
        }
    }

    /// Whether a part of it holds `text`, which is short.
    pub fn contains(&self, range: Range<u64>, text: &[u8]) -> Result<bool, BootError> {
        let mut start = range.start;
        while start < range.end {
            let piece = self.read(start..range.end.min(start + PIECE))?;
            if memchr::memmem::find(&piece, text).is_some() {
                return Ok(true);
            }
            // It may lie across the border of two pieces.
            start += match piece.len() as u64 {
                PIECE => PIECE - text.len() as u64,
                last => last,
            };
        }
        Ok(false)
    }

    fn slice<'a>(&self, all: &'a [u8], range: &Range<u64>) -> Result<&'a [u8], BootError> {
        all.get(range.start as usize..range.end as usize)
            .ok_or_else(|| self.changed(all.len() as u64))
    }

    fn changed(&self, now: u64) -> BootError {
        BootError::Changed {
            role: self.role,
            name: self.name.clone(),
            before: self.size,
            now,
        }
    }

    /// A file that ends before it should has changed.
    fn unreadable(&self, source: io::Error) -> BootError {
        match (&self.bytes, source.kind()) {
            (Bytes::File(file), io::ErrorKind::UnexpectedEof) => {
                self.changed(file.metadata().map_or(0, |metadata| metadata.len()))
            }
            _ => BootError::Read {
                role: self.role,
                path: self.name.clone().into(),
                source,
            },
        }
    }
}
