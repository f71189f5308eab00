//! Copies of node 0's disks on another host, which the slice there writes while the machine runs.
//!
//! ```text
//!  node 0 ── Copied: a part, zeroes, sync, close ──▶ slice      (8 at a time)
//! ```
//!
//! Each is answered by `Accessed` with an error number, or zero, in the order in which they were
//! sent. The slice's daemon made and locked the file, and gave the slice its descriptor; the lock
//! ends when the slice closes it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use weft_virtio::block::PART;

use super::host_files::{HostFile, HostFiles};
use super::message::{CopyStep, SliceMessage};
use super::registers::RemoteAccess;
use super::window::Window;

/// A copy of one disk, as node 0 makes it. Some parts are on their way while the next is read;
/// an error comes with a later call, or with `finish`.
pub struct DiskCopy {
    window: Window,
    disk: u8,
}

impl DiskCopy {
    pub(super) fn new(way: RemoteAccess, slice: usize, disk: u8) -> Self {
        Self {
            window: Window::new(way, slice),
            disk,
        }
    }

    /// Sends the part at `offset`.
    ///
    /// # Errors
    /// What an earlier step ended with, or the slice is lost.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match bytes.iter().all(|byte| *byte == 0) {
            true => self.step(CopyStep::Zero, offset, &[]),
            false => self.step(CopyStep::Write, offset, bytes),
        }
    }

    /// Waits until all of it is on the other host's disk.
    ///
    /// # Errors
    /// What a step ended with, or the slice is lost.
    pub fn sync(&mut self) -> io::Result<()> {
        self.step(CopyStep::Sync, 0, &[])?;
        self.window.finish()
    }

    /// The copy is complete: waits until the next process can lock it.
    ///
    /// # Errors
    /// As [`DiskCopy::sync`].
    pub fn close(&mut self) -> io::Result<()> {
        self.step(CopyStep::Close, 0, &[])?;
        self.window.finish()
    }

    fn step(&mut self, step: CopyStep, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let disk = self.disk;
        self.window.send(|ticket| SliceMessage::Copied {
            ticket,
            disk,
            step,
            offset,
            bytes,
        })
    }
}

/// Does a step of the copy of a disk to the file that came for it. The error is a number of
/// errno(3).
pub(super) fn step(
    files: &HostFiles,
    disk: u8,
    step: CopyStep,
    offset: u64,
    bytes: &[u8],
) -> Result<(), i32> {
    let what = HostFile::Disk(disk);
    let file = files.get(what).ok_or(libc::EBADF)?;
    let done = match step {
        CopyStep::Write => write(&file, offset, bytes),
        CopyStep::Zero => zero(&file, offset),
        CopyStep::Sync => file.sync_data(),
        CopyStep::Close => {
            drop(file);
            files.take(what).map(drop).map_err(io::Error::other)
        }
    };
    done.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

/// A write does not make the file longer: another slice may send anything.
fn write(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let end = offset.checked_add(bytes.len() as u64);
    match end.is_some_and(|end| end <= SIZE_MAX) {
        true => file.write_all_at(bytes, offset),
        false => Err(io::Error::from_raw_os_error(libc::EFBIG)),
    }
}

/// Largest position in a file.
const SIZE_MAX: u64 = i64::MAX as u64;

/// What was written there before is zeroes again. The file was made empty, with its size, so
/// most of these are no work.
fn zero(file: &File, offset: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (start, length) = (offset.min(SIZE_MAX) as i64, PART as i64);
    // SAFETY: no memory of ours is involved; the descriptor is open.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, start, length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_zeroes_and_the_end_of_a_copy() {
        let path = std::env::temp_dir().join(format!("weft-copy-{}", std::process::id()));
        let file = File::create_new(&path).unwrap();
        file.set_len(2 * PART).unwrap();
        let files = HostFiles::default();
        let step = |kind, offset, bytes: &[u8]| step(&files, 3, kind, offset, bytes);
        assert_eq!(step(CopyStep::Write, 0, b"x"), Err(libc::EBADF));
        files.put(HostFile::Disk(3), file);
        assert_eq!(step(CopyStep::Write, PART - 1, b"ab"), Ok(()));
        assert_eq!(step(CopyStep::Zero, 0, b""), Ok(()));
        assert_eq!(step(CopyStep::Write, u64::MAX, b"ab"), Err(libc::EFBIG));
        assert_eq!(step(CopyStep::Sync, 0, b""), Ok(()));
        assert_eq!(step(CopyStep::Close, 0, b""), Ok(()));
        assert_eq!(step(CopyStep::Sync, 0, b""), Err(libc::EBADF));
        let mut wanted = vec![0; 2 * PART as usize];
        wanted[PART as usize] = b'b';
        assert_eq!(std::fs::read(&path).unwrap(), wanted);
        std::fs::remove_file(&path).unwrap();
    }
}
