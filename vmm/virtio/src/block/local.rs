//! The back end of a disk that is here: io_uring where the host permits it, else one
//! system call after another.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use weft_guest_memory::DeviceMemory;

use super::back_end::{BlockBackend, Completion};
use super::disk::Disk;
use super::plain::{execute, needs_bounce};
use super::request::Request;
use super::uring::Uring;

/// Executes one queue's requests on a disk that is here.
pub enum LocalBlock {
    /// Many at once.
    Uring(Arc<Disk>, Box<Uring>),
    /// One after the other, and why.
    Plain(Arc<Disk>, io::Error),
}

impl LocalBlock {
    /// io_uring when `wanted` and permitted.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new(disk: Arc<Disk>, wanted: bool, size: u16) -> io::Result<Self> {
        if !wanted {
            return Ok(Self::Plain(disk, io::Error::other("not wanted")));
        }
        match Uring::new(disk.file().as_raw_fd(), size) {
            Ok(uring) => Ok(Self::Uring(disk, Box::new(uring))),
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => Err(error),
            Err(error) => Ok(Self::Plain(disk, error)),
        }
    }

    /// Why io_uring is not used, if it is not.
    pub fn why_plain(&self) -> Option<&io::Error> {
        match self {
            Self::Uring(..) => None,
            Self::Plain(_, reason) => Some(reason),
        }
    }
}

impl BlockBackend for LocalBlock {
    fn descriptor(&self) -> Option<RawFd> {
        match self {
            Self::Uring(_, uring) => Some(uring.descriptor()),
            Self::Plain(..) => None,
        }
    }

    fn in_flight(&self) -> usize {
        match self {
            Self::Uring(_, uring) => uring.in_flight(),
            Self::Plain(..) => 0,
        }
    }

    fn has_room(&self) -> bool {
        match self {
            Self::Uring(_, uring) => uring.has_room(),
            Self::Plain(..) => true,
        }
    }

    fn begin(&mut self, memory: &Arc<DeviceMemory>, request: Request) -> Option<Completion> {
        match self {
            Self::Uring(disk, uring)
                if !needs_bounce(memory, disk, &request) && !request.sync_after() =>
            {
                uring.begin(memory, request)
            }
            Self::Uring(disk, _) | Self::Plain(disk, _) => Some(execute(memory, disk, request)),
        }
    }

    fn submit(&mut self) -> io::Result<bool> {
        match self {
            Self::Uring(_, uring) => uring.submit(),
            Self::Plain(..) => Ok(true),
        }
    }

    fn next_completion(&mut self, memory: &DeviceMemory) -> Option<Completion> {
        match self {
            Self::Uring(disk, uring) => uring.next_completion(memory, disk),
            Self::Plain(..) => None,
        }
    }
}
