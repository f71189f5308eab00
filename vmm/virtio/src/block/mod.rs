//! Block (5.2): a raw file or block device, as many queues as wanted, each with
//! a thread and an io_uring of its own.
//!
//! A queue's handler has its requests executed by a [`BlockBackend`]: a `LocalBlock`
//! where the file is open in this process, or any other.
//!
//! | file | holds |
//! | --- | --- |
//! | `geometry` | what the driver is told |
//! | `request` | what the driver asks |
//! | `handler` | one queue |
//! | `back_end` | what executes its requests: the trait |
//! | `local`, `uring`, `plain` | back ends of a file that is open here |
//! | `disk` | the file |
//! | `trouble` | what its user is told of requests that failed |
//!
//! Writes are in the host's page cache (or, with `direct`, on the disk) when the
//! guest hears of them, and durable when a flush ends: killing the process loses
//! nothing of what was written, pulling the plug nothing of what was flushed. For
//! a driver that cannot flush, every write is durable when it hears of it.

mod back_end;
mod changed;
mod disk;
mod geometry;
mod handler;
mod local;
mod plain;
mod request;
mod trouble;
mod uring;

use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use thiserror::Error;
use weft_confine::ThreadKind;

pub use back_end::{BlockBackend, Completion};
pub use changed::{ChangedParts, PART};
pub use disk::{Disk, open_flags};
pub use geometry::Geometry;
pub use request::{Operation, Request, Status};

use super::worker::Handler;
use super::{ConfigSpace, DeviceError, DeviceState, Kind, Ring, StateError, VirtioDevice};
use handler::{BlockHandler, SharedBackend};
use local::LocalBlock;

/// Bytes of a sector: the unit of every position (5.2.4).
pub const SECTOR: u64 = 512;
/// Entries of each queue, and so requests under way.
pub const QUEUE_SIZE: u16 = 256;
/// Queues at most; a guest uses one per vCPU.
pub const QUEUES_MAX: u16 = 16;
/// Buffers of data in a request: all of a queue but header and status.
const SEGMENTS_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Sectors that one discard or zeroing may cover: 32 MiB, what the host's
/// kernel can still write as zeroes itself without stalling a queue.
pub const RANGE_MAX: u32 = 64 << 10;

/// VIRTIO_BLK_F_* (5.2.3).
const FEATURE_SEGMENTS: u64 = 1 << 2;
const FEATURE_READ_ONLY: u64 = 1 << 5;
const FEATURE_BLOCK_SIZE: u64 = 1 << 6;
const FEATURE_FLUSH: u64 = 1 << 9;
const FEATURE_TOPOLOGY: u64 = 1 << 10;
const FEATURE_QUEUES: u64 = 1 << 12;
const FEATURE_DISCARD: u64 = 1 << 13;
const FEATURE_WRITE_ZEROES: u64 = 1 << 14;

/// What the device shows.
#[derive(Clone, Debug)]
pub struct BlockOptions {
    /// A raw file or a block device.
    pub path: PathBuf,
    /// The same where it is open already, with [`open_flags`].
    pub file: Option<Arc<File>>,
    /// The guest cannot write, and others may read the file at the same time.
    pub read_only: bool,
    /// Goes around the host's page cache.
    pub direct: bool,
    /// Queues, 1 to [`QUEUES_MAX`]: as many as vCPUs.
    pub queues: u16,
    /// Serial number, 20 bytes at most; made from the path when empty.
    pub serial: String,
    /// Uses io_uring when the host permits it.
    pub io_uring: bool,
    /// Another process has the lock, and releases it before
    /// [`VirtioDevice::claim_backing`].
    pub locked_elsewhere: bool,
}

impl BlockOptions {
    /// Writable, cached, one queue.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            file: None,
            read_only: false,
            direct: false,
            queues: 1,
            serial: String::new(),
            io_uring: true,
            locked_elsewhere: false,
        }
    }
}

/// Why there is no disk.
#[derive(Debug, Error)]
pub enum BlockError {
    /// Not there, or not permitted.
    #[error("cannot open disk {path}")]
    Open {
        /// The disk.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A folder, a pipe, a terminal.
    #[error("disk {0} is neither a file nor a block device")]
    Kind(PathBuf),
    /// Too small.
    #[error("disk {0} is smaller than one sector of 512 bytes")]
    Empty(PathBuf),
    /// Somebody else has it.
    #[error(
        "disk {0} is in use by another process: end that process, or open the disk \
    read-only in both"
    )]
    InUse(PathBuf),
    /// It is not the disk that another process has.
    #[error(
        "disk {0} is not locked by the process that has the machine now: it is another file, or \
    its file system does not show the locks of other hosts"
    )]
    NotShared(PathBuf),
    /// The file system has no locks.
    #[error("cannot lock disk {path}")]
    Lock {
        /// The disk.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Out of range.
    #[error("a disk has 1 to {QUEUES_MAX} queues, not {0}")]
    Queues(u16),
    /// Out of range.
    #[error("serial number {0:?} is longer than 20 bytes")]
    Serial(String),
    /// No descriptors left, or the like.
    #[error("cannot set up the I/O of disk {path}")]
    Engine {
        /// The disk.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// The block device.
pub struct Block {
    geometry: Arc<Geometry>,
    /// The file, if it is here.
    disk: Option<Arc<Disk>>,
    /// One for each queue that is served here.
    back_ends: Vec<Option<SharedBackend>>,
    configuration: Arc<ConfigSpace>,
}

impl Block {
    /// Opens and locks the disk.
    pub fn open(options: &BlockOptions) -> Result<Self, BlockError> {
        Self::open_for(options, |_| true)
    }

    /// The same, but of the queues only those that `serves` selects are served here.
    ///
    /// # Errors
    /// The disk cannot be opened, or an option is out of range.
    pub fn open_for(
        options: &BlockOptions,
        serves: impl Fn(u16) -> bool,
    ) -> Result<Self, BlockError> {
        check_queues(options.queues)?;
        let disk = Arc::new(Disk::open(options)?);
        let back_end = |queue| {
            let back_end = serves(queue)
                .then(|| LocalBlock::new(disk.clone(), options.io_uring, QUEUE_SIZE))
                .transpose();
            back_end.map_err(|source| BlockError::Engine {
                path: options.path.clone(),
                source,
            })
        };
        let back_ends = (0..options.queues)
            .map(back_end)
            .collect::<Result<Vec<_>, _>>()?;
        let plain = back_ends.iter().flatten().find_map(LocalBlock::why_plain);
        if let (true, Some(reason)) = (options.io_uring, plain) {
            let path = options.path.display();
            eprintln!(
                "weft: disk {path}: no io_uring here ({reason}); using plain reads and writes"
            );
        }
        let geometry = disk.geometry();
        Ok(Self::new(geometry, Some(disk), back_ends))
    }

    /// A disk of which only back ends are here. `back_ends` has one entry for each queue,
    /// empty for those that are not served here.
    ///
    /// # Errors
    /// The number of queues is out of range.
    pub fn with_back_ends<B: BlockBackend + 'static>(
        geometry: Geometry,
        back_ends: Vec<Option<B>>,
    ) -> Result<Self, BlockError> {
        check_queues(u16::try_from(back_ends.len()).unwrap_or(u16::MAX))?;
        Ok(Self::new(geometry, None, back_ends))
    }

    fn new<B: BlockBackend + 'static>(
        geometry: Geometry,
        disk: Option<Arc<Disk>>,
        back_ends: Vec<Option<B>>,
    ) -> Self {
        let shared = |back_end| Arc::new(Mutex::new(back_end)) as SharedBackend;
        let queues = back_ends.len() as u16;
        let back_ends = back_ends.into_iter();
        Self {
            configuration: Arc::new(ConfigSpace::new(configuration(&geometry, queues))),
            back_ends: back_ends.map(|back_end| back_end.map(shared)).collect(),
            geometry: Arc::new(geometry),
            disk,
        }
    }

    /// What the driver is told.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The file, if it is open here.
    pub fn disk(&self) -> Option<&Arc<Disk>> {
        self.disk.as_ref()
    }
}

fn check_queues(queues: u16) -> Result<(), BlockError> {
    match queues {
        1..=QUEUES_MAX => Ok(()),
        _ => Err(BlockError::Queues(queues)),
    }
}

/// struct virtio_blk_config (5.2.4).
fn configuration(disk: &Geometry, queues: u16) -> Vec<u8> {
    let mut bytes = vec![0; 60];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    let blocks = (disk.block_size / SECTOR as u32).max(1);
    put(0, &disk.sectors.to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &disk.block_size.to_le_bytes());
    // Topology: physical blocks of 4096 bytes.
    put(24, &[(8 / blocks).max(1).ilog2() as u8, 0]);
    put(26, &1_u16.to_le_bytes());
    put(32, &[1]);
    put(34, &queues.to_le_bytes());
    put(36, &RANGE_MAX.to_le_bytes());
    put(40, &1_u32.to_le_bytes());
    put(44, &blocks.to_le_bytes());
    put(48, &RANGE_MAX.to_le_bytes());
    put(52, &1_u32.to_le_bytes());
    put(56, &[1]);
    bytes
}

impl VirtioDevice for Block {
    fn kind(&self) -> Kind {
        Kind {
            id: 2,
            class: 0x01_80_00,
            name: "block",
        }
    }

    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Block
    }

    fn features(&self) -> u64 {
        let mut features = FEATURE_SEGMENTS | FEATURE_BLOCK_SIZE | FEATURE_TOPOLOGY | FEATURE_FLUSH;
        if self.geometry.read_only {
            features |= FEATURE_READ_ONLY;
        } else {
            features |= FEATURE_DISCARD | FEATURE_WRITE_ZEROES;
        }
        if self.back_ends.len() > 1 {
            features |= FEATURE_QUEUES;
        }
        features
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.back_ends.len()]
    }

    fn workers(&self) -> usize {
        self.back_ends.len()
    }

    fn configuration(&self) -> Arc<ConfigSpace> {
        self.configuration.clone()
    }

    fn activate(
        &mut self,
        features: u64,
        rings: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        // 5.2.6.2
        let write_through = features & FEATURE_FLUSH == 0;
        let queues = rings.into_iter().zip(&self.back_ends);
        Ok(queues
            .filter_map(|(ring, back_end)| {
                let (geometry, back_end) = (self.geometry.clone(), back_end.clone()?);
                let handler = BlockHandler::new(ring?, geometry, back_end, write_through);
                Some(Box::new(handler) as Box<dyn Handler>)
            })
            .collect())
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block((*self.geometry).clone())
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        let DeviceState::Block(state) = state else {
            return Err(StateError("it is not the state of a disk"));
        };
        self.geometry.serves(state)
    }

    fn release_backing(&mut self) {
        if let Some(disk) = &self.disk {
            disk.unlock();
        }
    }

    fn claim_backing(&mut self) -> Result<(), String> {
        let claimed = self.disk.as_ref().map(|disk| disk.lock());
        claimed.unwrap_or(Ok(())).map_err(|error| error.to_string())
    }
}
