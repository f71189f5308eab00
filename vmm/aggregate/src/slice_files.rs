//! What a slice has of checkpoints and of copies of disks: files here and at other slices.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;

use weft_coherent_memory::PageFiles;

use super::pages_server::Adopter;
use super::{AbsentRange, DiskCopy, HostFiles, RemoteFile, Slice};

impl Slice {
    /// On a secondary that has no way to its file of a checkpoint: the file at slice 0.
    pub fn remote_file(&self) -> RemoteFile {
        RemoteFile::new(self.remote_access())
    }

    /// On slice 0: what `slice` writes to its [`RemoteFile`] goes here.
    pub fn receive_saved(&self, slice: usize, file: File) {
        let memory_bytes = self.placement.memory_bytes();
        self.saved_files.open(slice, file, memory_bytes);
    }

    /// On slice 0: all that slices on other hosts save has come, or is not wanted.
    pub fn close_saved(&self) {
        self.saved_files.close();
    }

    /// On slice 0: begins a copy of its disk on `slice`, which has a file for that.
    pub fn copy_disk(&self, slice: usize, disk: u8) -> DiskCopy {
        DiskCopy::new(self.remote_access(), slice, disk)
    }

    /// Files that the daemon of this slice's host opened.
    pub fn host_files(&self) -> &HostFiles {
        &self.host_files
    }

    /// These slices read pages of a checkpoint from files here, and this one may.
    pub fn serve_pages(&self, source: Arc<dyn PageFiles>, readers: BTreeSet<usize>) {
        self.pages_server.begin(source, readers);
    }

    /// Slice 0 has told this slice of all its pages of a checkpoint.
    pub fn knows_pages(&self) {
        self.pages_server.end_own();
    }

    /// On slice 0: a slice, which may be this one, manages these pages, and reads them from
    /// others, or from files on its host: those that it does not need at once in this order.
    ///
    /// # Errors
    /// The slice did not take them.
    pub fn tell_absent(&self, slice: usize, ranges: Vec<AbsentRange>) -> Result<(), String> {
        let told = match slice == self.number {
            true => self.adopter().adopt(ranges),
            false => {
                let told = self.remote_access().send_absent(slice, &ranges);
                told.map_err(|error| error.to_string())
            }
        };
        told.map_err(|error| format!("node {slice} did not take its memory: {error}"))
    }

    pub(super) fn adopter(&self) -> Adopter {
        Adopter {
            number: self.number,
            memory: self.memory.clone(),
            pages_server: self.pages_server.clone(),
            unread_pages: self.unread_pages.clone(),
        }
    }
}
