//! Executes the requests of other slices on a disk that is here.
//!
//! Requests are not ordered: two concurrent requests for the same blocks are executed
//! in either order, as on any disk with a queue. A flush makes durable what was
//! acknowledged before it was requested, because that is in the file by then, whichever
//! slice wrote it.

use std::collections::VecDeque;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex};
use std::{io, mem};

use weft_confine::{ThreadKind, lock};
use weft_virtio::block::{Disk, Geometry, Operation, RANGE_MAX, SECTOR, Status};

use crate::message::chunk::{CHUNK_MAX, Chunk};

/// Threads of a disk, and so chunks that are executed at once: of one in the host's
/// page cache, and of one past it, which does many as fast as one.
const THREADS: [usize; 2] = [4, 16];

/// A chunk that another slice sent.
pub struct Job {
    /// Which slice.
    pub from: usize,
    pub queue: u16,
    pub chunk: Chunk,
    /// The bytes to write.
    pub data: Vec<u8>,
}

/// Sends the reply to a job: how it ended, and what was read.
pub type Reply = Box<dyn Fn(&Job, Status, &[u8]) + Send + Sync>;

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    over: bool,
}

/// A disk as other slices use it.
pub struct Server {
    disk: Arc<Disk>,
    geometry: Geometry,
    waiting: Mutex<Waiting>,
    changed: Condvar,
    /// Jobs that may wait.
    most: usize,
    /// For reads of what is cached; one at a time.
    cached: Mutex<Box<[u8]>>,
    reply: Reply,
}

impl Server {
    /// Starts its threads. `most` jobs may wait.
    pub fn start(disk: Arc<Disk>, name: &str, most: usize, reply: Reply) -> io::Result<Arc<Self>> {
        let server = Arc::new(Self {
            geometry: disk.geometry(),
            disk,
            waiting: Mutex::default(),
            changed: Condvar::new(),
            most,
            cached: Mutex::new(vec![0; CHUNK_MAX as usize].into()),
            reply,
        });
        let past_cache = server.disk.buffer_alignment() > 1;
        for thread in 0..THREADS[usize::from(past_cache)] {
            let server = server.clone();
            weft_confine::spawn(
                &format!("weft-{name}-for{thread}"),
                ThreadKind::Block,
                move || server.serve(),
            )?;
        }
        Ok(server)
    }

    /// Does a job at once if it is a read of what the host has in memory, else puts
    /// it into the queue; false when there are too many. Never waits for the disk.
    pub fn ask(&self, job: Job) -> bool {
        if self.read_cached(&job) {
            return true;
        }
        let mut waiting = lock(&self.waiting);
        let room = waiting.jobs.len() < self.most;
        if room {
            waiting.jobs.push_back(job);
            drop(waiting);
            self.changed.notify_one();
        }
        room
    }

    /// Whether a read was answered here and now: a thread's turn costs more than the
    /// copy.
    fn read_cached(&self, job: &Job) -> bool {
        let length = job.chunk.length as usize;
        if job.chunk.operation != Operation::Read || self.check(job).is_err() {
            return false;
        }
        // Two links at once: the other one's thread is faster than waiting.
        let Ok(mut buffer) = self.cached.try_lock() else {
            return false;
        };
        let buffer = &mut buffer[..length];
        let read = self.disk.read_cached(buffer, job.chunk.offset);
        if read {
            (self.reply)(job, Status::Ok, buffer);
        }
        read
    }

    /// The machine is over: threads end, what waits is forgotten.
    pub fn close(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.over = true;
        let forgotten = mem::take(&mut waiting.jobs);
        drop(waiting);
        drop(forgotten);
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Job> {
        let idle = |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.over;
        let waited = self.changed.wait_while(lock(&self.waiting), idle);
        let mut waiting = waited.unwrap_or_else(|poison| poison.into_inner());
        waiting.jobs.pop_front()
    }

    fn serve(&self) {
        let alignment = self.disk.buffer_alignment().max(1) as usize;
        let mut buffer = vec![0; CHUNK_MAX as usize + alignment];
        let skip = buffer.as_ptr().align_offset(alignment);
        let buffer = &mut buffer[skip..skip + CHUNK_MAX as usize];
        while let Some(job) = self.next() {
            let done = self.check(&job).and_then(|()| {
                let chunk = &job.chunk;
                let done = self.execute(&job, buffer);
                let length = chunk.length.into();
                self.disk.ended(chunk.operation, chunk.offset, length);
                done.inspect_err(|error| {
                    self.disk
                        .report(chunk.operation, chunk.offset, length, error);
                })
            });
            let read = job.chunk.operation == Operation::Read && done.is_ok();
            let length = if read { job.chunk.length as usize } else { 0 };
            (self.reply)(&job, Status::of(&done), &buffer[..length]);
        }
    }

    /// Does a job that was checked.
    fn execute(&self, job: &Job, buffer: &mut [u8]) -> io::Result<()> {
        let Chunk {
            operation,
            durable,
            offset,
            length,
            ..
        } = job.chunk;
        match operation {
            Operation::Read => {
                let buffer = &mut buffer[..length as usize];
                return self.disk.file().read_exact_at(buffer, offset);
            }
            Operation::Write if self.disk.buffer_alignment() > 1 => {
                let buffer = &mut buffer[..length as usize];
                buffer.copy_from_slice(&job.data);
                self.disk.file().write_all_at(buffer, offset)?;
            }
            Operation::Write => self.disk.file().write_all_at(&job.data, offset)?,
            Operation::Flush => return self.disk.file().sync_data(),
            Operation::Discard => self.disk.discard(offset, length.into())?,
            Operation::Zero { unmap } => self.disk.zero(offset, length.into(), unmap)?,
        }
        match durable {
            true => self.disk.file().sync_data(),
            false => Ok(()),
        }
    }

    /// Whether the job is within the disk: another slice may send anything.
    fn check(&self, job: &Job) -> io::Result<()> {
        let Chunk {
            operation,
            offset,
            length,
            ..
        } = job.chunk;
        let bytes = u64::from(length);
        let block = u64::from(self.geometry.block_size);
        let most = match operation {
            Operation::Read | Operation::Write => CHUNK_MAX,
            _ => RANGE_MAX * SECTOR as u32,
        };
        let data = match operation {
            Operation::Write => length as usize,
            _ => 0,
        };
        let writes = !matches!(operation, Operation::Read | Operation::Flush);
        let fits = length <= most
            && job.data.len() == data
            && (offset | bytes).is_multiple_of(SECTOR)
            && (most != CHUNK_MAX || (offset | bytes).is_multiple_of(block))
            && self.geometry.holds(offset / SECTOR, bytes / SECTOR)
            && !(writes && self.geometry.read_only);
        match fits {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}
