//! Pages of checkpoints between a slice that has files, mostly node 0, and others, which have no
//! way to them but their links.
//!
//! ```text
//!  save:     slice ── Saved: the next bytes of its file ──▶ node 0     (8 at a time)
//!  restore:  slice ── ReadPages: some pages ──────────────▶ node 0     (`super::unread_pages`)
//! ```
//!
//! `Saved` is answered by `Accessed` with an error number, or zero. Disks may take their time: a
//! thread of its own does the work, so nothing else waits for them. It also writes copies of
//! disks (`super::disk_copies`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_coherent_memory::SharedMemory;
use weft_confine::lock;

use super::PRIMARY;
use super::disk_copies;
use super::host_files::HostFiles;
use super::message::chunk::CHUNK_MAX;
use super::message::{CopyStep, SliceMessage};
use super::pages_server::{Adopter, PagesServer, ReadError};
use super::peers::Peers;
use super::registers::RemoteAccess;
use super::unread_pages::{self, AbsentRange};
use super::window::{DISK_WAIT, UNDER_WAY_MAX, Window, outcome};

/// Requests that may wait.
pub(super) const WAITING_MAX: usize = weft_dsm::NODES_MAX * UNDER_WAY_MAX;
/// How often the thread looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(500);
/// Bytes of one request.
const BYTES_MAX: usize = CHUNK_MAX as usize;

/// What another slice sends.
pub(super) enum Content {
    /// On node 0: the next bytes of the slice's file.
    Saved(Vec<u8>),
    /// From node 0: pages that a checkpoint has.
    Absent(Vec<u8>),
    /// Where the files are: the slice wants these of them.
    Wanted(Range<u64>),
    /// The same: the slice has all of them.
    AllRead,
    /// From node 0: a step of the copy of a disk.
    Copied {
        disk: u8,
        step: CopyStep,
        offset: u64,
        bytes: Vec<u8>,
    },
}

/// A request of another slice.
pub(super) struct FileRequest {
    pub from: usize,
    pub ticket: u64,
    pub content: Content,
}

pub(super) type FileRequestSender = SyncSender<FileRequest>;

/// A file of node 0, as a slice on another host writes to it. Some pieces are on their way while
/// the next is made; an error comes with a later one, or with `flush`.
pub struct RemoteFile(Window);

impl RemoteFile {
    pub(super) fn new(way: RemoteAccess) -> Self {
        Self(Window::new(way, PRIMARY))
    }
}

impl Write for RemoteFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(BYTES_MAX)];
        let saved = |ticket| SliceMessage::Saved { ticket, bytes };
        self.0.send(saved)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.finish()
    }
}

impl RemoteAccess {
    /// Tells a slice which pages of a checkpoint it manages, and waits until it has adopted them.
    pub(super) fn send_absent(&self, slice: usize, ranges: &[AbsentRange]) -> io::Result<()> {
        ranges
            .chunks(unread_pages::RANGES_MAX)
            .try_for_each(|some| {
                let ranges = unread_pages::encode(some);
                outcome(self.pending.ask(slice, DISK_WAIT, |ticket| {
                    let ranges = &ranges;
                    self.peers
                        .send(slice, &SliceMessage::Absent { ticket, ranges });
                }))
            })
    }
}

/// The files of slices on other hosts, while they are written.
#[derive(Default)]
pub(super) struct SavedFiles(Mutex<BTreeMap<usize, Saving>>);

struct Saving {
    file: File,
    /// A slice that sends more than guest memory and its tables has gone wrong.
    left_bytes: u64,
}

impl SavedFiles {
    /// What a slice sends from now on goes to this file.
    pub fn open(&self, slice: usize, file: File, memory_bytes: u64) {
        let left_bytes = memory_bytes + memory_bytes / 64 + (1 << 20);
        lock(&self.0).insert(slice, Saving { file, left_bytes });
    }

    pub fn close(&self) {
        lock(&self.0).clear();
    }

    fn add(&self, slice: usize, bytes: &[u8]) -> Result<(), i32> {
        let mut files = lock(&self.0);
        let saving = files.get_mut(&slice).ok_or(libc::EBADF)?;
        let left = saving.left_bytes.checked_sub(bytes.len() as u64);
        saving.left_bytes = left.ok_or(libc::EFBIG)?;
        let written = saving.file.write_all(bytes);
        written.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Does what other slices send.
pub(super) struct FileServer {
    pub peers: Arc<Peers>,
    pub memory: Arc<SharedMemory>,
    pub files: Arc<SavedFiles>,
    pub host_files: Arc<HostFiles>,
    pub pages_server: Arc<PagesServer>,
    pub adopter: Adopter,
    pub requests: Receiver<FileRequest>,
}

impl FileServer {
    /// Until the machine is over.
    pub fn run(self) {
        while !self.peers.is_over() {
            match self.requests.recv_timeout(LOOK) {
                Ok(request) => self.serve(&request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn serve(&self, request: &FileRequest) {
        let done = match &request.content {
            Content::Saved(bytes) => self.files.add(request.from, bytes),
            Content::Absent(ranges) => self.adopt(ranges),
            Content::Wanted(pages) => return self.send_pages(request.from, pages),
            Content::AllRead => return self.pages_server.end(request.from),
            Content::Copied {
                disk,
                step,
                offset,
                bytes,
            } => disk_copies::step(&self.host_files, *disk, *step, *offset, bytes),
        };
        let message = SliceMessage::Accessed {
            ticket: request.ticket,
            value: done.err().unwrap_or(0) as u64,
        };
        self.peers.send(request.from, &message);
    }

    fn adopt(&self, ranges: &[u8]) -> Result<(), i32> {
        let ranges = unread_pages::decode(ranges).ok_or(libc::EINVAL)?;
        self.adopter.adopt(ranges).map_err(|_| libc::EINVAL)
    }

    fn send_pages(&self, to: usize, pages: &Range<u64>) {
        match self.pages_server.send(&self.peers, to, pages) {
            Ok(()) => {}
            Err(ReadError::File(reason)) => self.memory.fail(reason),
            Err(ReadError::Unexpected) => self.peers.lost(to, "it wants pages of no checkpoint"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_writes_to_its_own_file_and_only_so_much() {
        let path = std::env::temp_dir().join(format!("weft-saved-{}", std::process::id()));
        let files = SavedFiles::default();
        assert_eq!(files.add(1, b"x"), Err(libc::EBADF));
        files.open(1, File::create(&path).unwrap(), 0);
        assert_eq!(files.add(1, b"abc"), Ok(()));
        assert_eq!(files.add(2, b"x"), Err(libc::EBADF));
        assert_eq!(files.add(1, b"d"), Ok(()));
        assert_eq!(files.add(1, &vec![0; 1 << 20]), Err(libc::EFBIG));
        files.close();
        assert_eq!(files.add(1, b"x"), Err(libc::EBADF));
        assert_eq!(std::fs::read(&path).unwrap(), b"abcd");
        std::fs::remove_file(&path).unwrap();
    }
}
