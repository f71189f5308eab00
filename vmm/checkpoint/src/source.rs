//! Guest memory as a set has it, in any order and from any number of threads.
//!
//! After it is made, a source opens nothing. It reads at positions (`pread64`) and allocates no
//! more than one run, so a confined process can use it.

use std::ops::Range;

use crate::extents::{Extent, Search};
use crate::layer::{Layer, PagesFile};
use crate::{CheckpointError, FileName, PAGE_BYTES, Place};

/// The pages of a set that are not zero, wherever in its chain their bytes are.
#[derive(Debug)]
pub struct PageSource {
    /// Those that have a part of it; the others are closed.
    files: Vec<PagesFile>,
    extents: Vec<Extent>,
}

impl PageSource {
    /// Of a chain, the last set first.
    pub(crate) fn open<'a>(
        pages_end: u64,
        chain: impl Iterator<Item = &'a Layer>,
    ) -> Result<Self, CheckpointError> {
        let mut search = Search::new(pages_end);
        let mut files = Vec::new();
        for layer in chain {
            let mut unchanged = Vec::new();
            for file in layer.open_files()? {
                unchanged.extend_from_slice(file.reader.unchanged());
                if search.take(file.reader.runs(), files.len()) {
                    files.push(file);
                }
            }
            search.descend(unchanged);
        }
        Ok(Self {
            files,
            extents: search.finish(),
        })
    }

    /// All pages that are not zero, in ascending order, each once. An extent's file is an index
    /// into the files that have any of them: those of the last set first, by node.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    pub(crate) fn into_extents(self) -> Vec<Extent> {
        self.extents
    }

    /// The index of the extent that has a page; `None` if the page is zero.
    pub fn find(&self, page: u64) -> Option<usize> {
        let index = self.extents.partition_point(|extent| extent.end() <= page);
        let extent = self.extents.get(index)?;
        (extent.first <= page).then_some(index)
    }

    /// Reads the run that has the extent of this index into `buffer`, and checks it: the bytes
    /// of the extent's pages.
    ///
    /// # Panics
    /// Without an extent of this index.
    pub fn read<'a>(
        &self,
        index: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], CheckpointError> {
        let extent = self.extents[index];
        self.files[extent.file].read_run(extent.run as usize, buffer)?;
        Ok(part(buffer, &extent, extent.first..extent.end()))
    }

    /// Reads the pages with numbers in `wanted`: each run that has any of them once, in the
    /// order of the files. `take` gets the number of the first page and the bytes of several.
    pub fn read_all<E: From<CheckpointError>>(
        &self,
        wanted: &Range<u64>,
        take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.read_extents(&self.within(wanted), wanted, take)
    }

    /// The same without what is on other hosts.
    pub fn read_all_here<E: From<CheckpointError>>(
        &self,
        wanted: &Range<u64>,
        take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut extents = self.within(wanted);
        extents.retain(|extent| self.place(extent).is_none());
        self.read_extents(&extents, wanted, take)
    }

    /// The other host that has an extent.
    pub fn place(&self, extent: &Extent) -> Option<&Place> {
        let elsewhere = self.files[extent.file].elsewhere.as_ref();
        elsewhere.map(|(place, _)| place)
    }

    /// The files on other hosts, those of the last set first.
    pub fn elsewhere(&self) -> impl Iterator<Item = &(Place, FileName)> {
        self.files.iter().filter_map(|file| file.elsewhere.as_ref())
    }

    fn read_extents<E: From<CheckpointError>>(
        &self,
        extents: &[&Extent],
        wanted: &Range<u64>,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = Vec::new();
        for of_run in extents.chunk_by(|one, next| (one.file, one.run) == (next.file, next.run)) {
            if let Some(extent) = of_run.first() {
                self.files[extent.file].read_run(extent.run as usize, &mut buffer)?;
            }
            for extent in of_run {
                let pages = extent.first.max(wanted.start)..extent.end().min(wanted.end);
                take(pages.start, part(&buffer, extent, pages))?;
            }
        }
        Ok(())
    }

    /// The extents that have any of these pages, in the order of the files.
    pub fn within(&self, wanted: &Range<u64>) -> Vec<&Extent> {
        let rest = self
            .extents
            .partition_point(|extent| extent.end() <= wanted.start);
        let rest = &self.extents[rest..];
        let count = rest.partition_point(|extent| extent.first < wanted.end);
        let mut extents: Vec<&Extent> = match wanted.is_empty() {
            true => Vec::new(),
            false => rest[..count].iter().collect(),
        };
        extents.sort_unstable_by_key(|extent| (extent.file, extent.run, extent.offset));
        extents
    }
}

/// The bytes of some pages of an extent in those of its run.
fn part<'a>(run: &'a [u8], extent: &Extent, pages: Range<u64>) -> &'a [u8] {
    let place = |page: u64| (u64::from(extent.offset) + page - extent.first) as usize * PAGE_BYTES;
    &run[place(pages.start)..place(pages.end)]
}
