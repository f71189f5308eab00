//! The form of a file of pages. It is written from its first byte to its last, so a
//! process that may only write to an open descriptor can write it.
//!
//! | part | bytes | holds |
//! | --- | --- | --- |
//! | header | 4096 | magic, format, node, page size, identity; its checksum |
//! | pages | 4096 each | runs in the order in which they were written, without pages that are zero |
//! | runs | 16 for each | first page, number of pages, checksum of their bytes |
//! | ranges | 16 for each | first page, number of pages that are as in the base set |
//! | footer | 64 | magic, numbers of runs and of their pages, identity, checksum of both tables, numbers of ranges and of their pages; its checksum |
//!
//! A run is up to [`RUN_PAGES`] consecutive pages. Numbers are little-endian, checksums
//! are CRC-32 (ISO-HDLC), unused bytes are zero. Format 1 had no ranges, and zeros where the
//! footer has their numbers, so its files are read as those of later ones.
//!
//! Invariants, which [`PagesReader::open`] checks before a page is read:
//!
//! - The length of the file is the sum of its parts.
//! - Each run and each range is below the end of memory.
//! - No page is twice in the runs and ranges.
//! - A page in neither is zero.

mod reader;
mod tables;
mod writer;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use reader::{PagesReader, ReadAt};
pub use tables::{Tables, write_tables};
pub use writer::PagesWriter;

use crate::{FORMAT, FORMAT_FIRST, FormatError, Identity, PAGE_BYTES};

/// No memory ends above this page: addresses are 64-bit numbers.
pub const PAGES_END_MAX: u64 = u64::MAX / PAGE_BYTES as u64;
/// Most pages of a run: one write, and what a damaged byte makes unreadable.
pub const RUN_PAGES: usize = 256;

const HEADER_MAGIC: &[u8; 8] = b"WEFTPAGE";
const FOOTER_MAGIC: &[u8; 8] = b"WEFTPEND";
const HEADER_BYTES: usize = PAGE_BYTES;
/// Bytes of an entry of either table.
const ENTRY_BYTES: usize = 16;
const FOOTER_BYTES: usize = 64;
/// Bytes of a checksum, which ends the header and the footer.
const CHECKSUM_BYTES: usize = 4;

/// Consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the first page.
    pub first: u64,
    /// How many, 1 to [`RUN_PAGES`].
    pub count: u32,
    checksum: u32,
    /// Where its bytes begin in the file.
    position: u64,
}

impl Run {
    /// The number of the page after the last.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// What a finished file of pages holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Written {
    /// Pages that are not zero.
    pub pages: u64,
    /// Pages that are as in the base set.
    #[serde(default)]
    pub unchanged: u64,
    /// Length of the file.
    pub bytes: u64,
}

/// Consecutive pages that a table names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    pub first: u64,
    pub end: u64,
    /// As in the base set; otherwise the bytes are in a file.
    pub is_unchanged: bool,
}

/// Two spans that name the same page, if such a page exists. Sorts them.
pub(crate) fn named_twice(spans: &mut [Span]) -> Option<[Span; 2]> {
    spans.sort_unstable();
    let pairs = spans.array_windows::<2>();
    pairs.copied().find(|[one, next]| one.end > next.first)
}

fn header(identity: Identity, node: u32) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(HEADER_MAGIC);
    header.extend_from_slice(&FORMAT.to_le_bytes());
    header.extend_from_slice(&node.to_le_bytes());
    header.extend_from_slice(&(PAGE_BYTES as u32).to_le_bytes());
    header.extend_from_slice(&identity);
    header.resize(HEADER_BYTES - CHECKSUM_BYTES, 0);
    let checksum = crc32fast::hash(&header);
    header.extend_from_slice(&checksum.to_le_bytes());
    header
}

fn check_header(
    header: &[u8; HEADER_BYTES],
    identity: &Identity,
    node: u32,
) -> Result<(), FormatError> {
    if header[..8] != *HEADER_MAGIC {
        return Err(FormatError::Damaged("it is not a file of pages"));
    }
    let checksum = crc32fast::hash(&header[..HEADER_BYTES - CHECKSUM_BYTES]);
    if checksum != word(header, HEADER_BYTES - CHECKSUM_BYTES) {
        return Err(FormatError::Damaged("its header"));
    }
    match word(header, 8) {
        FORMAT_FIRST..=FORMAT => {}
        later if later > FORMAT => return Err(FormatError::Later(later)),
        _ => return Err(FormatError::Damaged("its header")),
    }
    if header[20..36] != *identity {
        return Err(FormatError::Damaged("it belongs to another checkpoint"));
    }
    if word(header, 12) != node || word(header, 16) != PAGE_BYTES as u32 {
        return Err(FormatError::Damaged("it belongs to another node"));
    }
    Ok(())
}

struct Footer {
    runs: u64,
    pages: u64,
    identity: Identity,
    /// Of the runs and the ranges.
    tables_checksum: u32,
    ranges: u64,
    unchanged: u64,
}

impl Footer {
    fn encode(&self) -> Vec<u8> {
        let mut footer = Vec::with_capacity(FOOTER_BYTES);
        footer.extend_from_slice(FOOTER_MAGIC);
        footer.extend_from_slice(&self.runs.to_le_bytes());
        footer.extend_from_slice(&self.pages.to_le_bytes());
        footer.extend_from_slice(&self.identity);
        footer.extend_from_slice(&self.tables_checksum.to_le_bytes());
        footer.extend_from_slice(&self.ranges.to_le_bytes());
        footer.extend_from_slice(&self.unchanged.to_le_bytes());
        let checksum = crc32fast::hash(&footer);
        footer.extend_from_slice(&checksum.to_le_bytes());
        footer
    }

    fn decode(bytes: &[u8; FOOTER_BYTES]) -> Result<Self, FormatError> {
        let checksum = crc32fast::hash(&bytes[..FOOTER_BYTES - CHECKSUM_BYTES]);
        let is_whole = checksum == word(bytes, FOOTER_BYTES - CHECKSUM_BYTES);
        if bytes[..8] != *FOOTER_MAGIC || !is_whole {
            return Err(FormatError::Damaged("its end"));
        }
        let mut identity = Identity::default();
        identity.copy_from_slice(&bytes[24..40]);
        Ok(Self {
            runs: long(bytes, 8),
            pages: long(bytes, 16),
            identity,
            tables_checksum: word(bytes, 40),
            ranges: long(bytes, 44),
            unchanged: long(bytes, 52),
        })
    }

    /// What the file holds, by these numbers; `None` if no file of pages below `pages_end`
    /// has them.
    fn written(&self, pages_end: u64) -> Option<Written> {
        let all = self.pages.checked_add(self.unchanged)?;
        // The index of a run is a `u32`.
        let runs_fit = self.runs <= self.pages && u32::try_from(self.runs).is_ok();
        if all > pages_end || !runs_fit || self.ranges > self.unchanged {
            return None;
        }
        let entries = self.runs.checked_add(self.ranges)?;
        let tables = entries.checked_mul(ENTRY_BYTES as u64)?;
        let pages = self.pages.checked_mul(PAGE_BYTES as u64)?;
        let others = (HEADER_BYTES + FOOTER_BYTES) as u64;
        Some(Written {
            pages: self.pages,
            unchanged: self.unchanged,
            bytes: pages.checked_add(tables)?.checked_add(others)?,
        })
    }
}

/// The runs of a table whose checksum is right, in its order.
fn decode_runs(table: &[[u8; ENTRY_BYTES]], pages_end: u64) -> Result<Vec<Run>, FormatError> {
    let mut position = HEADER_BYTES as u64;
    let runs = table.iter().map(|entry| {
        let run = Run {
            first: long(entry, 0),
            count: word(entry, 8),
            checksum: word(entry, 12),
            position,
        };
        position += u64::from(run.count) * PAGE_BYTES as u64;
        let is_possible =
            run.count <= RUN_PAGES as u32 && is_inside(run.first, u64::from(run.count), pages_end);
        match is_possible {
            true => Ok(run),
            false => Err(FormatError::Damaged("its table names impossible pages")),
        }
    });
    runs.collect()
}

/// The ranges of a table whose checksum is right, in its order.
fn decode_ranges(
    table: &[[u8; ENTRY_BYTES]],
    pages_end: u64,
) -> Result<Vec<Range<u64>>, FormatError> {
    let ranges = table.iter().map(|entry| {
        let (first, count) = (long(entry, 0), long(entry, 8));
        match is_inside(first, count, pages_end) {
            true => Ok(first..first + count),
            false => Err(FormatError::Damaged("its table names impossible pages")),
        }
    });
    ranges.collect()
}

/// Some pages, all of them below the end.
fn is_inside(first: u64, count: u64, pages_end: u64) -> bool {
    count > 0 && first < pages_end && count <= pages_end - first
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}
