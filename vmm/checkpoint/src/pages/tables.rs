//! The tables of a file of pages that is on another host: what stands before its pages and
//! behind them. Whoever has these can check and search the file, but not read it.

use std::io::{self, Write};

use super::{FOOTER_BYTES, Footer, HEADER_BYTES, PAGES_END_MAX, ReadAt};
use crate::{FormatError, PAGE_BYTES};

/// Looks like the whole file; its pages cannot be read.
#[derive(Debug)]
pub struct Tables<R> {
    input: R,
    /// Bytes of pages, which are missing.
    missing: u64,
}

impl<R: ReadAt> Tables<R> {
    /// # Errors
    /// These are no tables of a file of pages.
    pub fn open(input: R) -> Result<Self, FormatError> {
        let length = input.length()?;
        let (pages, whole) = ends(&input, length)?;
        let missing = pages * PAGE_BYTES as u64;
        match length + missing == whole {
            true => Ok(Self { input, missing }),
            false => Err(FormatError::Damaged("its length")),
        }
    }
}

impl<R: ReadAt> ReadAt for Tables<R> {
    fn length(&self) -> io::Result<u64> {
        Ok(self.input.length()? + self.missing)
    }

    fn read_exact_at(&self, bytes: &mut [u8], position: u64) -> io::Result<()> {
        let header = HEADER_BYTES as u64;
        let behind = position.checked_sub(self.missing);
        let at = match behind.filter(|at| *at >= header) {
            Some(at) => at,
            None if position.saturating_add(bytes.len() as u64) <= header => position,
            None => return Err(io::Error::other("its pages are on another host")),
        };
        self.input.read_exact_at(bytes, at)
    }
}

/// Copies the tables of a finished file of this length.
///
/// # Errors
/// It cannot be read, is no such file, or the tables cannot be written.
pub fn write_tables(file: &impl ReadAt, length: u64, output: &mut impl Write) -> io::Result<()> {
    let invalid = |error: FormatError| io::Error::new(io::ErrorKind::InvalidData, error);
    let (pages, whole) = ends(file, length).map_err(invalid)?;
    if whole != length {
        return Err(invalid(FormatError::Damaged("its length")));
    }
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0)?;
    output.write_all(&header)?;
    let tables_at = HEADER_BYTES as u64 + pages * PAGE_BYTES as u64;
    let mut tables = vec![0; (length - tables_at) as usize];
    file.read_exact_at(&mut tables, tables_at)?;
    output.write_all(&tables)?;
    output.flush()
}

/// What the last bytes say: the number of pages, and the length of the whole file.
fn ends(input: &impl ReadAt, length: u64) -> Result<(u64, u64), FormatError> {
    let footer_at = length.checked_sub(FOOTER_BYTES as u64);
    let footer_at = footer_at.filter(|at| *at >= HEADER_BYTES as u64);
    let footer_at = footer_at.ok_or(FormatError::Damaged("it is too short"))?;
    let mut footer = [0; FOOTER_BYTES];
    input.read_exact_at(&mut footer, footer_at)?;
    let written = Footer::decode(&footer)?.written(PAGES_END_MAX);
    let written = written.ok_or(FormatError::Damaged("its end names impossible numbers"))?;
    Ok((written.pages, written.bytes))
}
