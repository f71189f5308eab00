//! What a driver asks of a disk (5.2.6).

use std::io;

use super::SECTOR;
use super::geometry::Geometry;
use crate::ring::{Chain, Segment, part, total};
use crate::{DeviceError, Ring};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
/// Bytes of struct virtio_blk_req before the data.
const HEADER: u64 = 16;
/// Bytes of struct virtio_blk_discard_write_zeroes.
const RANGE: u64 = 16;
/// Flag of a zeroing: the sectors may be forgotten.
const MAY_UNMAP: u32 = 1;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    Ok = 0,
    /// Not done.
    IoError = 1,
    /// Not known, or not like this.
    Unsupported = 2,
}

impl Status {
    /// What a driver is told of an outcome.
    pub fn of(outcome: &io::Result<()>) -> Self {
        match outcome {
            Ok(()) => Self::Ok,
            Err(_) => Self::IoError,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fills the data from the disk.
    Read,
    /// Puts the data onto the disk.
    Write,
    /// Makes what was written durable.
    Flush,
    /// Forgets a range.
    Discard,
    /// Zeroes a range.
    Zero {
        /// By forgetting it, if possible.
        unmap: bool,
    },
}

/// A request for the back end.
#[derive(Clone, Debug)]
pub struct Request {
    /// Given back at the end.
    pub chain: Chain,
    pub operation: Operation,
    /// Where on the disk, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
    /// Where in RAM; empty unless read or write.
    pub data: Vec<Segment>,
    /// Whether a change must be durable when it is answered.
    pub durable: bool,
}

impl Request {
    /// Flags of a write, as pwritev2(2) has them.
    pub fn write_flags(&self) -> i32 {
        if self.durable { libc::RWF_DSYNC } else { 0 }
    }

    /// Whether bytes go from or to the guest.
    pub fn moves_data(&self) -> bool {
        matches!(self.operation, Operation::Read | Operation::Write)
    }

    /// Whether the disk must be synchronized after the call that carries it out:
    /// a write has a flag for that.
    pub fn sync_after(&self) -> bool {
        self.durable && matches!(self.operation, Operation::Discard | Operation::Zero { .. })
    }
}

/// A request, or its answer already.
pub enum Parsed {
    /// For the back end.
    Work(Request),
    /// Answered; this many bytes were written beside the status.
    Answered(Chain, Status, u64),
}

/// Understands a chain. A chain in which header or status is missing, or data
/// has the wrong direction, is a fault; a request for what is not there fails.
pub fn parse(ring: &Ring, disk: &Geometry, chain: Chain) -> Result<Parsed, DeviceError> {
    let error = |chain: &Chain, reason| DeviceError::Chain {
        index: ring.index(),
        head: chain.head,
        reason,
    };
    let mut header = [0; HEADER as usize];
    if ring.read(&chain.readable, 0, &mut header) != header.len() {
        return Err(error(&chain, "a disk request without a complete header"));
    }
    let answer_room = total(&chain.writable);
    if answer_room == 0 {
        return Err(error(&chain, "a disk request without space for its status"));
    }
    let [kind, _, sector @ ..] = words(&header);
    let sector = u64::from(sector[0]) | u64::from(sector[1]) << 32;
    let data_in = total(&chain.readable) - HEADER;
    let data_out = answer_room - 1;
    match kind {
        IN | GET_ID if data_in > 0 => Err(error(&chain, "a read whose data is not writable")),
        OUT | DISCARD | WRITE_ZEROES if data_out > 0 => {
            Err(error(&chain, "a write whose data is not readable"))
        }
        IN => Ok(transfer(disk, chain, Operation::Read, sector, data_out)),
        OUT => Ok(transfer(disk, chain, Operation::Write, sector, data_in)),
        FLUSH => Ok(Parsed::Work(Request {
            chain,
            operation: Operation::Flush,
            offset: 0,
            length: 0,
            data: Vec::new(),
            durable: false,
        })),
        GET_ID => {
            let written = ring.write(&part(&chain.writable, 0, data_out), 0, &disk.serial);
            Ok(Parsed::Answered(chain, Status::Ok, written as u64))
        }
        DISCARD | WRITE_ZEROES => Ok(range(ring, disk, chain, kind)),
        _ => Ok(Parsed::Answered(chain, Status::Unsupported, 0)),
    }
}

/// Writes the status into the last byte, and gives the chain back.
pub fn answer(
    ring: &mut Ring,
    chain: &Chain,
    status: Status,
    written: u64,
) -> Result<(), DeviceError> {
    let last = total(&chain.writable).saturating_sub(1);
    ring.write(&chain.writable, last, &[status as u8]);
    // A driver gets at most 4 GiB of buffers into a chain.
    ring.push(chain, u32::try_from(written + 1).unwrap_or(u32::MAX))
}

fn words(bytes: &[u8; 16]) -> [u32; 4] {
    std::array::from_fn(|word| {
        u32::from_le_bytes(std::array::from_fn(|byte| bytes[4 * word + byte]))
    })
}

fn transfer(
    disk: &Geometry,
    chain: Chain,
    operation: Operation,
    sector: u64,
    length: u64,
) -> Parsed {
    let fits = length > 0
        && length.is_multiple_of(u64::from(disk.block_size))
        && disk.holds(sector, length / SECTOR)
        && (sector * SECTOR).is_multiple_of(u64::from(disk.block_size));
    if !fits || operation == Operation::Write && disk.read_only {
        return Parsed::Answered(chain, Status::IoError, 0);
    }
    let data = match operation {
        Operation::Write => part(&chain.readable, HEADER, length),
        _ => part(&chain.writable, 0, length),
    };
    Parsed::Work(Request {
        chain,
        operation,
        offset: sector * SECTOR,
        length,
        data,
        durable: false,
    })
}

/// A discard or a zeroing, of one range.
fn range(ring: &Ring, disk: &Geometry, chain: Chain, kind: u32) -> Parsed {
    let mut range = [0; RANGE as usize];
    let whole = total(&chain.readable) == HEADER + RANGE;
    if !whole || ring.read(&chain.readable, HEADER, &mut range) != range.len() {
        return Parsed::Answered(chain, Status::Unsupported, 0);
    }
    let [low, high, sectors, flags] = words(&range);
    let sector = u64::from(low) | u64::from(high) << 32;
    let operation = match (kind, flags) {
        (DISCARD, 0) => Operation::Discard,
        (WRITE_ZEROES, 0 | MAY_UNMAP) => Operation::Zero {
            unmap: flags == MAY_UNMAP,
        },
        _ => return Parsed::Answered(chain, Status::Unsupported, 0),
    };
    let fits = sectors <= super::RANGE_MAX && disk.holds(sector, sectors.into());
    if !fits || disk.read_only {
        return Parsed::Answered(chain, Status::IoError, 0);
    }
    if sectors == 0 {
        return Parsed::Answered(chain, Status::Ok, 0);
    }
    Parsed::Work(Request {
        chain,
        operation,
        offset: sector * SECTOR,
        length: u64::from(sectors) * SECTOR,
        data: Vec::new(),
        durable: false,
    })
}
