//! Writes a file of pages.

use std::io::{self, Write};
use std::ops::Range;

use super::{ENTRY_BYTES, FOOTER_BYTES, Footer, HEADER_BYTES, RUN_PAGES, Written, header};
use crate::{Identity, PAGE_BYTES};

/// Writes a file of pages. The caller must not name a page twice: this is not checked here,
/// but such a file cannot be read.
pub struct PagesWriter<W> {
    output: W,
    identity: Identity,
    /// Bytes of the run that is not written yet.
    run: Vec<u8>,
    /// Number of its first page.
    first: u64,
    /// The runs that are written, as in the file.
    table: Vec<u8>,
    pages: u64,
    /// Pages as in the base set, in the order in which they were named.
    ranges: Vec<Range<u64>>,
}

impl<W: Write> PagesWriter<W> {
    /// Begins the file of `node`.
    pub fn new(mut output: W, identity: Identity, node: u32) -> io::Result<Self> {
        output.write_all(&header(identity, node))?;
        Ok(Self {
            output,
            identity,
            run: Vec::with_capacity(RUN_PAGES * PAGE_BYTES),
            first: 0,
            table: Vec::new(),
            pages: 0,
            ranges: Vec::new(),
        })
    }

    /// Adds a page, in any order; consecutive ones take the least room. A page of zeros takes
    /// none, also if the base set has other bytes for it.
    ///
    /// # Panics
    /// With a page of another size.
    pub fn page(&mut self, number: u64, bytes: &[u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), PAGE_BYTES);
        if is_zero(bytes) {
            return Ok(());
        }
        let count = self.run.len() / PAGE_BYTES;
        let continues = count < RUN_PAGES && number.checked_sub(self.first) == Some(count as u64);
        if count > 0 && !continues {
            self.write_run()?;
        }
        if self.run.is_empty() {
            self.first = number;
        }
        self.run.extend_from_slice(bytes);
        Ok(())
    }

    /// These pages are as in the base set.
    pub fn unchanged(&mut self, pages: Range<u64>) {
        match self.ranges.last_mut() {
            _ if pages.is_empty() => {}
            Some(last) if last.end == pages.start => last.end = pages.end,
            _ => self.ranges.push(pages),
        }
    }

    /// Ends the file.
    pub fn finish(mut self) -> io::Result<Written> {
        if !self.run.is_empty() {
            self.write_run()?;
        }
        let runs = (self.table.len() / ENTRY_BYTES) as u64;
        let mut end = self.table;
        end.reserve_exact(self.ranges.len() * ENTRY_BYTES + FOOTER_BYTES);
        let mut unchanged = 0;
        for range in &self.ranges {
            let count = range.end - range.start;
            end.extend_from_slice(&range.start.to_le_bytes());
            end.extend_from_slice(&count.to_le_bytes());
            unchanged += count;
        }
        let footer = Footer {
            runs,
            pages: self.pages,
            identity: self.identity,
            tables_checksum: crc32fast::hash(&end),
            ranges: self.ranges.len() as u64,
            unchanged,
        };
        end.extend_from_slice(&footer.encode());
        self.output.write_all(&end)?;
        self.output.flush()?;
        Ok(Written {
            pages: self.pages,
            unchanged,
            bytes: HEADER_BYTES as u64 + self.pages * PAGE_BYTES as u64 + end.len() as u64,
        })
    }

    fn write_run(&mut self) -> io::Result<()> {
        self.output.write_all(&self.run)?;
        let count = (self.run.len() / PAGE_BYTES) as u32;
        self.table.extend_from_slice(&self.first.to_le_bytes());
        self.table.extend_from_slice(&count.to_le_bytes());
        let checksum = crc32fast::hash(&self.run);
        self.table.extend_from_slice(&checksum.to_le_bytes());
        self.pages += u64::from(count);
        self.run.clear();
        Ok(())
    }
}

pub(super) fn is_zero(page: &[u8]) -> bool {
    let (words, rest) = page.as_chunks();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}
