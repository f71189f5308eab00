//! Where a console's output goes.

use std::io;
use std::os::fd::RawFd;

/// Takes output. `WouldBlock` means: call again when the descriptor is writable.
pub trait ConsoleOutput: Send {
    /// Takes some of the bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// What to wait on after `WouldBlock`; without it such output is lost.
    fn descriptor(&self) -> Option<RawFd> {
        None
    }
}
