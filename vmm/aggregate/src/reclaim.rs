//! Memory that the guest does not need goes back to the hosts of all slices. On the primary.

use std::io;

use weft_guest_memory::Reclaim;
use weft_vcpu::PAGE_SIZE;

use super::commands::SliceCommand;
use super::{COMMAND_WAIT, Slice};

impl Reclaim for Slice {
    /// First the manager of each page takes it and drops its content; then the others give
    /// the memory back that they keep for it.
    fn reclaim(&self, address: u64, length: u64) -> io::Result<()> {
        let pages = address.div_ceil(PAGE_SIZE)..(address + length) / PAGE_SIZE;
        let range = pages.clone();
        self.on_all(SliceCommand::Reclaim { pages: range }, || {
            self.memory().reclaim(pages.clone())
        })?;
        let range = pages.clone();
        self.on_all(SliceCommand::ReleaseVacant { pages: range }, || {
            self.memory().release_vacant(pages);
            Ok(())
        })
    }
}

impl Slice {
    /// Has all secondaries carry out a command, while this slice does its own part.
    fn on_all(
        &self,
        command: SliceCommand,
        own: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let begun = self.begin_command(&command).map_err(io::Error::other)?;
        let own = own();
        let finished = self.finish_command(begun, COMMAND_WAIT);
        own.and(finished.map(drop).map_err(io::Error::other))
    }
}
