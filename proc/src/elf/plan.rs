//! What to map for an image, as the kernel's `elf_load` does.

use super::{Image, Segment};
use crate::layout::{PAGE, PROT_EXEC, PROT_READ, PROT_WRITE};

/// One mapping to make, in whole pages, in the order in which they come: where
/// two share a page, the later one replaces it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// First address, base included; page-aligned.
    pub address: u64,
    /// Bytes; whole pages.
    pub length: u64,
    /// Where in the file the first page is; page-aligned. 0 when anonymous.
    pub file_offset: u64,
    /// Bytes from the file that the segment has; 0 when anonymous. What follows
    /// them in the last page is the file's next bytes, unless zeroes are asked
    /// for.
    pub file_length: u64,
    /// `PROT_*` of [`crate::layout`].
    pub prot: u32,
    /// Bytes at the end of the mapping to be set to zero: the beginning of the
    /// segment's unitialised data.
    pub zero_fill_tail: u64,
}

impl Mapping {
    /// Whether it has no file behind it.
    pub fn is_anonymous(&self) -> bool {
        self.file_length == 0
    }
}

/// The mappings of an image; see [`Image::plan`].
#[derive(Clone, Debug)]
pub struct Mappings<'a> {
    base: u64,
    segments: core::slice::Iter<'a, Segment>,
    /// The whole pages of zeroes behind the mapping that came last.
    zeroes: Option<Mapping>,
}

impl Image {
    /// What to map so that the image runs at `base`, which
    /// [`Image::check_base`] has accepted.
    pub fn plan(&self, base: u64) -> Mappings<'_> {
        Mappings {
            base,
            segments: self.segments().iter(),
            zeroes: None,
        }
    }
}

impl Mappings<'_> {
    /// The file pages of a segment, and the pages of zeroes behind them.
    fn split(&self, segment: &Segment) -> (Option<Mapping>, Option<Mapping>) {
        let in_page = segment.address % PAGE;
        let address = self.base.wrapping_add(segment.address - in_page);
        let file_length = in_page + segment.file_length;
        let mapped = if segment.file_length == 0 {
            0
        } else {
            file_length.next_multiple_of(PAGE)
        };
        let has_zeroes = segment.memory_length > segment.file_length;
        let file = (mapped > 0).then(|| Mapping {
            address,
            length: mapped,
            file_offset: segment.file_offset - in_page,
            file_length,
            prot: segment.prot,
            // The kernel ignores that it cannot write zeroes there, too.
            zero_fill_tail: if has_zeroes && segment.prot & PROT_WRITE != 0 {
                mapped - file_length
            } else {
                0
            },
        });
        let end = (in_page + segment.memory_length).next_multiple_of(PAGE);
        let zeroes = (end > mapped).then(|| Mapping {
            address: address.wrapping_add(mapped),
            length: end - mapped,
            file_offset: 0,
            file_length: 0,
            // `vm_brk_flags`: always readable and writable.
            prot: PROT_READ | PROT_WRITE | segment.prot & PROT_EXEC,
            zero_fill_tail: 0,
        });
        (file, zeroes)
    }
}

impl Iterator for Mappings<'_> {
    type Item = Mapping;

    fn next(&mut self) -> Option<Mapping> {
        if let Some(zeroes) = self.zeroes.take() {
            return Some(zeroes);
        }
        loop {
            let segment = self.segments.next()?;
            match self.split(segment) {
                (Some(file), zeroes) => {
                    self.zeroes = zeroes;
                    return Some(file);
                }
                (None, Some(zeroes)) => return Some(zeroes),
                // A segment without any byte.
                (None, None) => {}
            }
        }
    }
}
