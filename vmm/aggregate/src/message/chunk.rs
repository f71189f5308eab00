//! What a remote block client and a disk's server send each other.

use std::borrow::Cow;

use weft_virtio::block::{Operation, Status};

/// Most bytes of data that a chunk may have: less than a frame may carry.
pub const CHUNK_MAX: u32 = 256 << 10;

/// A part of a disk request, which travels by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The request's slot at the requesting slice.
    pub slot: u32,
    /// Where in the request it begins, in bytes.
    pub position: u64,
    pub operation: Operation,
    /// Whether a change must be durable when it is answered.
    pub durable: bool,
    /// Where on the disk, in bytes.
    pub offset: u64,
    /// Bytes on the disk; at most [`CHUNK_MAX`] of a read or write.
    pub length: u32,
}

/// The result of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkReply<'a> {
    pub chunk: Chunk,
    /// How it ended.
    pub status: Status,
    /// What was read.
    pub data: Cow<'a, [u8]>,
}
