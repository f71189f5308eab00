//! The form of a file of pages. It is written from its first byte to its last, so a
//! process that may only write to an open descriptor can write it.
//!
//! | part | bytes | holds |
//! | --- | --- | --- |
//! | header | 4096 | magic, format, node, page size, identity; its checksum |
//! | pages | 4096 each | pages in ascending order, without those that are zero |
//! | table | 16 for each run | first page, number of pages, checksum of their bytes |
//! | footer | 64 | magic, number of runs and of pages, identity, checksum of the table; its checksum |
//!
//! A run is up to [`RUN_PAGES`] consecutive pages. Numbers are little-endian, checksums
//! are CRC-32 (ISO-HDLC), unused bytes are zero.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;

use crate::{FORMAT, FormatError, Identity, PAGE_BYTES};

/// Most pages of a run: one write, and what a damaged byte makes unreadable.
pub const RUN_PAGES: usize = 256;

const HEADER_MAGIC: &[u8; 8] = b"WEFTPAGE";
const FOOTER_MAGIC: &[u8; 8] = b"WEFTPEND";
const HEADER_BYTES: usize = PAGE_BYTES;
const RUN_BYTES: usize = 16;
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
    /// Length of the file.
    pub bytes: u64,
}

/// Writes a file of pages.
pub struct PagesWriter<W> {
    output: W,
    identity: Identity,
    /// Bytes of the run that is not written yet.
    run: Vec<u8>,
    /// Number of its first page.
    first: u64,
    table: Vec<Run>,
    pages: u64,
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
        })
    }

    /// Adds a page; its number must be above that of the page before. A page of zeros
    /// takes no room.
    ///
    /// # Panics
    /// With pages in another order, or of another size.
    pub fn page(&mut self, number: u64, bytes: &[u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), PAGE_BYTES);
        if is_zero(bytes) {
            return Ok(());
        }
        let next = self.first + (self.run.len() / PAGE_BYTES) as u64;
        let is_first = self.run.is_empty();
        assert!(is_first && self.table.is_empty() || number >= next);
        if !is_first && (number != next || self.run.len() == RUN_PAGES * PAGE_BYTES) {
            self.write_run()?;
        }
        if self.run.is_empty() {
            self.first = number;
        }
        self.run.extend_from_slice(bytes);
        Ok(())
    }

    /// Ends the file.
    pub fn finish(mut self) -> io::Result<Written> {
        if !self.run.is_empty() {
            self.write_run()?;
        }
        let mut table = Vec::with_capacity(self.table.len() * RUN_BYTES + FOOTER_BYTES);
        for run in &self.table {
            table.extend_from_slice(&run.first.to_le_bytes());
            table.extend_from_slice(&run.count.to_le_bytes());
            table.extend_from_slice(&run.checksum.to_le_bytes());
        }
        let footer = Footer {
            runs: self.table.len() as u64,
            pages: self.pages,
            identity: self.identity,
            table_checksum: crc32fast::hash(&table),
        };
        table.extend_from_slice(&footer.encode());
        self.output.write_all(&table)?;
        self.output.flush()?;
        let bytes = HEADER_BYTES as u64 + self.pages * PAGE_BYTES as u64 + table.len() as u64;
        Ok(Written {
            pages: self.pages,
            bytes,
        })
    }

    fn write_run(&mut self) -> io::Result<()> {
        self.output.write_all(&self.run)?;
        let count = (self.run.len() / PAGE_BYTES) as u32;
        self.table.push(Run {
            first: self.first,
            count,
            checksum: crc32fast::hash(&self.run),
        });
        self.pages += u64::from(count);
        self.first += u64::from(count);
        self.run.clear();
        Ok(())
    }
}

/// Reads a file of pages.
#[derive(Debug)]
pub struct PagesReader<R> {
    input: R,
    runs: Vec<Run>,
    pages: u64,
    /// Of the run that was read last.
    bytes: Vec<u8>,
}

impl<R: Read + Seek> PagesReader<R> {
    /// Checks everything but the pages' bytes. `pages_end`: no page has this number or
    /// a higher one.
    pub fn open(
        mut input: R,
        identity: &Identity,
        node: u32,
        pages_end: u64,
    ) -> Result<Self, FormatError> {
        let length = input.seek(SeekFrom::End(0))?;
        let least = (HEADER_BYTES + FOOTER_BYTES) as u64;
        if length < least {
            return Err(FormatError::Damaged("it is too short"));
        }
        input.rewind()?;
        let mut header = vec![0; HEADER_BYTES];
        input.read_exact(&mut header)?;
        check_header(&header, identity, node)?;
        input.seek(SeekFrom::End(-(FOOTER_BYTES as i64)))?;
        let mut footer = [0; FOOTER_BYTES];
        input.read_exact(&mut footer)?;
        let footer = Footer::decode(&footer)?;
        if footer.identity != *identity {
            return Err(FormatError::Damaged("it belongs to another checkpoint"));
        }
        let parts = footer.pages.checked_mul(PAGE_BYTES as u64);
        let table_bytes = footer.runs.checked_mul(RUN_BYTES as u64);
        let whole = parts
            .zip(table_bytes)
            .and_then(|(pages, table)| pages.checked_add(table)?.checked_add(least));
        let (Some(table_bytes), true) = (table_bytes, whole == Some(length)) else {
            return Err(FormatError::Damaged("its length"));
        };
        input.seek(SeekFrom::End(-(FOOTER_BYTES as i64 + table_bytes as i64)))?;
        let mut table = vec![0; table_bytes as usize];
        input.read_exact(&mut table)?;
        if crc32fast::hash(&table) != footer.table_checksum {
            return Err(FormatError::Damaged("its table"));
        }
        let runs = runs(&table, footer.pages, pages_end)?;
        Ok(Self {
            input,
            runs,
            pages: footer.pages,
            bytes: Vec::new(),
        })
    }

    /// What the file holds, in ascending order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Number of pages in the file.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Reads the pages with numbers in `wanted`, in ascending order, and checks the bytes of
    /// each run that it reads. `take` gets the number of the first page and the bytes of
    /// several.
    pub fn read<E: From<FormatError>>(
        &mut self,
        wanted: &Range<u64>,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut offset = HEADER_BYTES as u64;
        let mut position = None;
        for run in &self.runs {
            let length = run.count as usize * PAGE_BYTES;
            let start = offset;
            offset += length as u64;
            if run.end() <= wanted.start || run.first >= wanted.end {
                continue;
            }
            if position != Some(start) {
                let sought = self.input.seek(SeekFrom::Start(start));
                sought.map_err(FormatError::from)?;
            }
            self.bytes.resize(length, 0);
            let read = self.input.read_exact(&mut self.bytes);
            read.map_err(FormatError::from)?;
            position = Some(offset);
            if crc32fast::hash(&self.bytes) != run.checksum {
                return Err(FormatError::Damaged("the bytes of a page").into());
            }
            let (first, end) = (run.first.max(wanted.start), run.end().min(wanted.end));
            let place = |page: u64| (page - run.first) as usize * PAGE_BYTES;
            take(first, &self.bytes[place(first)..place(end)])?;
        }
        Ok(())
    }
}

fn is_zero(page: &[u8]) -> bool {
    let (words, rest) = page.as_chunks();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
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

fn check_header(header: &[u8], identity: &Identity, node: u32) -> Result<(), FormatError> {
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
    if header[..8] != *HEADER_MAGIC {
        return Err(FormatError::Damaged("it is not a file of pages"));
    }
    if crc32fast::hash(&header[..HEADER_BYTES - CHECKSUM_BYTES])
        != word(HEADER_BYTES - CHECKSUM_BYTES)
    {
        return Err(FormatError::Damaged("its header"));
    }
    if word(8) > FORMAT {
        return Err(FormatError::Later(word(8)));
    }
    if header[20..36] != *identity {
        return Err(FormatError::Damaged("it belongs to another checkpoint"));
    }
    if word(12) != node || word(16) != PAGE_BYTES as u32 {
        return Err(FormatError::Damaged("it belongs to another node"));
    }
    Ok(())
}

/// The runs of a table whose checksum is right.
fn runs(table: &[u8], pages: u64, pages_end: u64) -> Result<Vec<Run>, FormatError> {
    let mut runs = Vec::with_capacity(table.len() / RUN_BYTES);
    let (mut next, mut sum) = (0, 0);
    for entry in table.chunks_exact(RUN_BYTES) {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| entry[at + byte]));
        let run = Run {
            first: u64::from(word(0)) | u64::from(word(4)) << 32,
            count: word(8),
            checksum: word(12),
        };
        let size_fits = (1..=RUN_PAGES as u32).contains(&run.count);
        let is_inside = run.first >= next && run.first < pages_end;
        if !size_fits || !is_inside || run.end() > pages_end {
            return Err(FormatError::Damaged("its table names impossible pages"));
        }
        next = run.end();
        sum += u64::from(run.count);
        runs.push(run);
    }
    match sum == pages {
        true => Ok(runs),
        false => Err(FormatError::Damaged("its table names other pages")),
    }
}

struct Footer {
    runs: u64,
    pages: u64,
    identity: Identity,
    table_checksum: u32,
}

impl Footer {
    fn encode(&self) -> Vec<u8> {
        let mut footer = Vec::with_capacity(FOOTER_BYTES);
        footer.extend_from_slice(FOOTER_MAGIC);
        footer.extend_from_slice(&self.runs.to_le_bytes());
        footer.extend_from_slice(&self.pages.to_le_bytes());
        footer.extend_from_slice(&self.identity);
        footer.extend_from_slice(&self.table_checksum.to_le_bytes());
        footer.resize(FOOTER_BYTES - CHECKSUM_BYTES, 0);
        let checksum = crc32fast::hash(&footer);
        footer.extend_from_slice(&checksum.to_le_bytes());
        footer
    }

    fn decode(bytes: &[u8; FOOTER_BYTES]) -> Result<Self, FormatError> {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let checksum = crc32fast::hash(&bytes[..FOOTER_BYTES - CHECKSUM_BYTES]);
        if bytes[..8] != *FOOTER_MAGIC || checksum != word(FOOTER_BYTES - CHECKSUM_BYTES) {
            return Err(FormatError::Damaged("its end"));
        }
        let mut identity = Identity::default();
        identity.copy_from_slice(&bytes[24..40]);
        Ok(Self {
            runs: long(8),
            pages: long(16),
            identity,
            table_checksum: word(40),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    const IDENTITY: Identity = *b"0123456789abcdef";
    const END: u64 = 2000;

    fn page(number: u64) -> Vec<u8> {
        (0..PAGE_BYTES as u64)
            .map(|at| (number * 31 + at * 7 + 1) as u8)
            .collect()
    }

    fn file(numbers: &[u64]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = PagesWriter::new(&mut bytes, IDENTITY, 3).unwrap();
        for number in numbers {
            writer.page(*number, &page(*number)).unwrap();
        }
        let written = writer.finish().unwrap();
        assert_eq!(written.pages, numbers.len() as u64);
        assert_eq!(written.bytes, bytes.len() as u64);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Vec<u64>, FormatError> {
        let mut reader = PagesReader::open(Cursor::new(bytes), &IDENTITY, 3, END)?;
        let mut found = Vec::new();
        reader.read(&(0..END), |first, bytes| {
            for (number, bytes) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
                assert!(bytes == page(number), "page {number}");
                found.push(number);
            }
            Ok::<_, FormatError>(())
        })?;
        Ok(found)
    }

    #[test]
    fn pages_come_back() {
        for numbers in [
            vec![],
            vec![0],
            vec![END - 1],
            vec![0, 1, 2, 7, 8, 100],
            (5..5 + 3 * RUN_PAGES as u64 + 1).collect(),
        ] {
            assert_eq!(read(&file(&numbers)).unwrap(), numbers);
        }
    }

    #[test]
    fn a_part_comes_back() {
        let bytes = file(&(0..600).chain(700..710).collect::<Vec<_>>());
        let mut reader = PagesReader::open(Cursor::new(bytes), &IDENTITY, 3, END).unwrap();
        for wanted in [
            0..END,
            0..0,
            255..257,
            300..301,
            650..705,
            709..END,
            710..END,
        ] {
            let mut found = Vec::new();
            let read = reader.read(&wanted, |first, bytes| {
                found.extend(first..first + (bytes.len() / PAGE_BYTES) as u64);
                assert!(bytes[..PAGE_BYTES] == page(first));
                Ok::<_, FormatError>(())
            });
            read.unwrap();
            let expected = (0..600)
                .chain(700..710)
                .filter(|page| wanted.contains(page));
            assert_eq!(found, expected.collect::<Vec<_>>(), "{wanted:?}");
        }
    }

    #[test]
    fn zero_pages_take_no_room() {
        let mut bytes = Vec::new();
        let mut writer = PagesWriter::new(&mut bytes, IDENTITY, 3).unwrap();
        for number in 0..100 {
            writer.page(number, &[0; PAGE_BYTES]).unwrap();
        }
        writer.page(100, &page(100)).unwrap();
        assert_eq!(writer.finish().unwrap().pages, 1);
        assert_eq!(read(&bytes).unwrap(), [100]);
        let mut last = [0; PAGE_BYTES];
        last[PAGE_BYTES - 1] = 1;
        assert!(!is_zero(&last));
    }

    #[test]
    fn every_changed_byte_is_found() {
        let good = file(&[1, 2, 3, 9]);
        for at in 0..good.len() {
            for bit in [1, 0x80] {
                let mut bad = good.clone();
                bad[at] ^= bit;
                assert!(read(&bad).is_err(), "byte {at}");
            }
        }
    }

    #[test]
    fn every_cut_is_found() {
        let good = file(&[1, 2, 3, 9]);
        for length in 0..good.len() {
            assert!(read(&good[..length]).is_err(), "{length} bytes");
        }
        let longer = [good.as_slice(), &[0]].concat();
        assert!(read(&longer).is_err());
    }

    #[test]
    fn files_of_other_sets_nodes_and_formats_are_refused() {
        let good = file(&[1]);
        let open = |bytes: &[u8], identity: &Identity, node, end| {
            let opened = PagesReader::open(Cursor::new(bytes), identity, node, end);
            opened.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(open(&good, &IDENTITY, 3, END), Ok(()));
        let error = open(&good, &[0; 16], 3, END).unwrap_err();
        assert!(error.contains("another checkpoint"), "{error}");
        let error = open(&good, &IDENTITY, 2, END).unwrap_err();
        assert!(error.contains("another node"), "{error}");
        let error = open(&good, &IDENTITY, 3, 1).unwrap_err();
        assert!(error.contains("impossible pages"), "{error}");
        let mut later = good.clone();
        later[8] = FORMAT as u8 + 1;
        let checksum = crc32fast::hash(&later[..HEADER_BYTES - CHECKSUM_BYTES]);
        later[HEADER_BYTES - CHECKSUM_BYTES..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        let error = open(&later, &IDENTITY, 3, END).unwrap_err();
        assert!(error.contains("later"), "{error}");
    }
}
