//! Where a console's output goes.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Takes output. `WouldBlock` means: call again when the descriptor is writable.
pub trait ConsoleOutput: Send {
    /// Takes some of the bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// What to wait on after `WouldBlock`; without it such output is lost.
    fn descriptor(&self) -> Option<RawFd> {
        None
    }
}

/// A terminal, a pipe, a socket or a file.
pub struct FileOutput {
    file: File,
    waitable: bool,
}

impl FileOutput {
    /// Writes there. If the descriptor blocks, so does the device's thread.
    pub fn new(file: File) -> io::Result<Self> {
        // A regular file or /dev/null is always ready, and cannot be waited on.
        let probe = Epoll::new()?.ctl(
            ControlOperation::Add,
            file.as_raw_fd(),
            EpollEvent::new(EventSet::OUT, 0),
        );
        let waitable = match probe {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => false,
            Err(error) => return Err(error),
        };
        Ok(Self { file, waitable })
    }
}

impl ConsoleOutput for FileOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.waitable.then(|| self.file.as_raw_fd())
    }
}
