//! Node 0's disks are copied to the host where the machine's home goes, if that was asked for.
//!
//! ```text
//!  begin ─▶ rounds over what the copies lack ─▶ sync ─▶ the machine stands: the rest, sync, close
//!              └────────── failed, cancelled: the host removes them ◀──┘
//! ```
//!
//! A round costs what the guest has written since the last one. A guest that writes as fast as
//! parts are copied keeps its disks, and the home stays.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_aggregate::{DiskCopy, Slice};
use weft_virtio::block::{Disk, PART};

use super::membership::{Activity, Job, NewDisk, NodeProcesses};

/// Parts that may be left when the machine stands: 8 MiB, about 20 ms.
const LEFT_MAX: u64 = 128;
/// Parts after which a copy is put on the disk, so that no sync takes long: 128 MiB.
const SYNC_EVERY: u64 = 2048;
/// Rounds that may leave no less than any before.
const STANDSTILL: Duration = Duration::from_secs(10);
/// What direct I/O may demand of a buffer.
const ALIGNMENT: usize = 4096;

/// How often somebody is told that a copy goes on.
const SAY: Duration = Duration::from_secs(1);

/// Is told how many parts are left; an error ends the copy.
type AfterEach<'a> = dyn FnMut(u64) -> Result<(), String> + 'a;

/// A disk of node 0, and the way to its copy.
struct OneDisk {
    number: u8,
    disk: Arc<Disk>,
    bytes: u64,
    copy: DiskCopy,
}

/// See the module. Dropped, nothing is noted any more for the copies.
#[derive(Default)]
pub(super) struct DiskCopies {
    disks: Vec<OneDisk>,
    buffer: Vec<u8>,
}

impl DiskCopies {
    /// Has the host of `node` make a file for each disk of this node.
    ///
    /// # Errors
    /// The first that it does not make.
    pub fn begin(
        slice: &Slice,
        processes: &dyn NodeProcesses,
        node: usize,
    ) -> Result<Self, String> {
        let mut copies = Self {
            disks: Vec::new(),
            buffer: vec![0; PART as usize + ALIGNMENT],
        };
        for (number, disk) in slice.remote_devices().disks_here() {
            let bytes = disk.bytes();
            let wanted = NewDisk {
                number,
                path: disk.path().to_owned(),
                bytes,
            };
            if let Err(reason) = processes.make_disk(node, &wanted) {
                copies.give_up();
                return Err(reason);
            }
            disk.changed().begin(bytes);
            copies.disks.push(OneDisk {
                number,
                disk,
                bytes,
                copy: slice.copy_disk(node, number),
            });
        }
        Ok(copies)
    }

    /// Copies while the machine runs, until little is left, and says every second that this
    /// `goes_on`.
    ///
    /// # Errors
    /// A part cannot be read or written, the guest writes too fast, or it was cancelled.
    pub fn converge(&mut self, job: &Job, goes_on: &dyn Fn()) -> Result<(), String> {
        if self.disks.is_empty() {
            return Ok(());
        }
        job.enter(Activity::CopyingDisks);
        let mut least = (Instant::now(), u64::MAX);
        let mut said = Instant::now();
        let mut after_each = |left: u64| {
            if job.is_cancelled() {
                return Err("it was cancelled".to_owned());
            }
            if said.elapsed() > SAY {
                said = Instant::now();
                goes_on();
                show(job, left);
            }
            Ok(())
        };
        loop {
            self.round(&mut after_each)?;
            let left = self.left();
            if left <= LEFT_MAX {
                return Ok(());
            }
            if left < least.1 {
                least = (Instant::now(), left);
            } else if least.0.elapsed() > STANDSTILL {
                return Err(format!(
                    "its guest writes to its disks as fast as they are copied: {} KiB are left",
                    left * (PART >> 10)
                ));
            }
        }
    }

    /// Copies what is left while the machine stands, and lets the next process have the copies.
    ///
    /// # Errors
    /// A part cannot be read or written.
    pub fn finish(&mut self) -> Result<(), String> {
        self.round(&mut |_| Ok(()))?;
        self.close()
    }

    /// They are not needed.
    pub fn give_up(mut self) {
        // The host removes the files whether this works or not.
        let _ = self.close();
    }

    fn left(&self) -> u64 {
        let disks = self.disks.iter();
        disks.map(|disk| disk.disk.changed().count()).sum()
    }

    /// Copies what the copies lack and puts it on their disk, and tells how many parts are left,
    /// after each.
    fn round(&mut self, after_each: &mut AfterEach<'_>) -> Result<(), String> {
        let (mut left, mut sent) = (self.left(), 0_u64);
        for disk in &mut self.disks {
            let mut from = 0;
            while let Some(part) = disk.disk.changed().take(from) {
                from = part + 1;
                let copied = copy(disk, part, &mut self.buffer);
                copied.map_err(|error| disk.failed(&error))?;
                left = left.saturating_sub(1);
                sent += 1;
                if sent.is_multiple_of(SYNC_EVERY) {
                    disk.sync()?;
                }
                after_each(left)?;
            }
            disk.sync()?;
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), String> {
        for disk in &mut self.disks {
            let closed = disk.copy.close();
            closed.map_err(|error| disk.failed(&error))?;
        }
        Ok(())
    }
}

impl Drop for DiskCopies {
    fn drop(&mut self) {
        for disk in &self.disks {
            disk.disk.changed().end();
        }
    }
}

impl OneDisk {
    fn sync(&mut self) -> Result<(), String> {
        let synced = self.copy.sync();
        synced.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> String {
        format!("disk {} cannot be copied: {error}", self.number)
    }
}

/// Sends one part of a disk.
fn copy(disk: &mut OneDisk, part: u64, buffer: &mut [u8]) -> io::Result<()> {
    let skip = buffer.as_ptr().align_offset(ALIGNMENT);
    let offset = part * PART;
    let length = PART.min(disk.bytes - offset) as usize;
    let bytes = &mut buffer[skip..skip + length];
    disk.disk.file().read_exact_at(bytes, offset)?;
    disk.copy.write(offset, bytes)
}

fn show(job: &Job, left: u64) {
    job.show(|view| {
        view.bytes_left = left * PART;
        view.bytes_sent = 0;
        view.seconds_left = None;
    });
}
