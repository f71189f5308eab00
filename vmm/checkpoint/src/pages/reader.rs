//! Reads a file of pages, in any order and from any number of threads.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::{
    ENTRY_BYTES, FOOTER_BYTES, Footer, HEADER_BYTES, Run, Span, Written, check_header,
    decode_ranges, decode_runs, named_twice,
};
use crate::{FormatError, Identity, PAGE_BYTES};

/// Bytes that are read at a position, so that threads share them without a lock.
pub trait ReadAt {
    /// Number of bytes.
    fn length(&self) -> io::Result<u64>;

    /// Fills `bytes` with those from `position` on.
    fn read_exact_at(&self, bytes: &mut [u8], position: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, bytes: &mut [u8], position: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, bytes, position)
    }
}

impl ReadAt for &[u8] {
    fn length(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, bytes: &mut [u8], position: u64) -> io::Result<()> {
        let start = usize::try_from(position).ok();
        let rest = start.and_then(|start| self.get(start..));
        let some = rest.and_then(|rest| rest.get(..bytes.len()));
        bytes.copy_from_slice(some.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Reads a file of pages.
#[derive(Debug)]
pub struct PagesReader<R> {
    input: R,
    runs: Vec<Run>,
    unchanged: Vec<Range<u64>>,
    written: Written,
}

impl<R: ReadAt> PagesReader<R> {
    /// Checks everything but the pages' bytes. `pages_end`: no page has this number or
    /// a higher one.
    pub fn open(
        input: R,
        identity: &Identity,
        node: u32,
        pages_end: u64,
    ) -> Result<Self, FormatError> {
        let length = input.length()?;
        if length < (HEADER_BYTES + FOOTER_BYTES) as u64 {
            return Err(FormatError::Damaged("it is too short"));
        }
        let mut header = [0; HEADER_BYTES];
        input.read_exact_at(&mut header, 0)?;
        check_header(&header, identity, node)?;
        let footer_at = length - FOOTER_BYTES as u64;
        let mut footer = [0; FOOTER_BYTES];
        input.read_exact_at(&mut footer, footer_at)?;
        let footer = Footer::decode(&footer)?;
        if footer.identity != *identity {
            return Err(FormatError::Damaged("it belongs to another checkpoint"));
        }
        let written = footer.written(pages_end);
        let written = written.ok_or(FormatError::Damaged("its end names impossible numbers"))?;
        if written.bytes != length {
            return Err(FormatError::Damaged("its length"));
        }
        let tables_at = HEADER_BYTES as u64 + written.pages * PAGE_BYTES as u64;
        let mut tables = vec![0; (footer_at - tables_at) as usize];
        input.read_exact_at(&mut tables, tables_at)?;
        if crc32fast::hash(&tables) != footer.tables_checksum {
            return Err(FormatError::Damaged("its table"));
        }
        let (entries, _) = tables.as_chunks::<ENTRY_BYTES>();
        let (runs, ranges) = entries.split_at(footer.runs as usize);
        let reader = Self {
            input,
            runs: decode_runs(runs, pages_end)?,
            unchanged: decode_ranges(ranges, pages_end)?,
            written,
        };
        reader.check_tables()?;
        Ok(reader)
    }

    /// What the tables name is what the footer counts, each page once.
    fn check_tables(&self) -> Result<(), FormatError> {
        let mut spans: Vec<Span> = self.spans().collect();
        if named_twice(&mut spans).is_some() {
            return Err(FormatError::Damaged("its table names a page twice"));
        }
        // Each page is below the end and counted once, so the sums do not overflow.
        let count = |is_unchanged| -> u64 {
            let some = spans
                .iter()
                .filter(|span| span.is_unchanged == is_unchanged);
            some.map(|span| span.end - span.first).sum()
        };
        match (count(false), count(true)) == (self.written.pages, self.written.unchanged) {
            true => Ok(()),
            false => Err(FormatError::Damaged("its table names other pages")),
        }
    }

    /// What the file holds, in the order in which it was written.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Pages that are as in the base set, in the order in which they were named.
    pub fn unchanged(&self) -> &[Range<u64>] {
        &self.unchanged
    }

    /// How much that is.
    pub fn written(&self) -> Written {
        self.written
    }

    /// All that the tables name.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        let runs = self.runs.iter().map(|run| Span {
            first: run.first,
            end: run.end(),
            is_unchanged: false,
        });
        let unchanged = self.unchanged.iter().map(|range| Span {
            first: range.start,
            end: range.end,
            is_unchanged: true,
        });
        runs.chain(unchanged)
    }

    /// Makes `bytes` those of a run, and checks them.
    ///
    /// # Panics
    /// Without a run of this index.
    pub fn read_run(&self, index: usize, bytes: &mut Vec<u8>) -> Result<(), FormatError> {
        let run = &self.runs[index];
        bytes.resize(run.count as usize * PAGE_BYTES, 0);
        self.input.read_exact_at(bytes, run.position)?;
        match crc32fast::hash(bytes) == run.checksum {
            true => Ok(()),
            false => Err(FormatError::Damaged("the bytes of a page")),
        }
    }
}
