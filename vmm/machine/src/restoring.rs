//! Guest memory from the files of a checkpoint, run by run, whenever a page is needed.

use std::ops::Range;
use std::sync::Mutex;

use weft_checkpoint::{CheckpointError, Extent, PAGE_BYTES, PageSource, Set};
use weft_coherent_memory::AbsentPages;
use weft_confine::lock;

/// The pages of a checkpoint that a slice manages.
pub(super) struct SavedMemory {
    source: PageSource,
    own: Range<u64>,
    /// Buffers of runs that nobody uses at the moment: one for each thread that ever read at the
    /// same time.
    buffers: Mutex<Vec<Vec<u8>>>,
}

/// Stops a walk.
enum Stop {
    Enough,
    Failed(CheckpointError),
}

impl From<CheckpointError> for Stop {
    fn from(error: CheckpointError) -> Self {
        Self::Failed(error)
    }
}

impl SavedMemory {
    /// Opens the files, and checks everything but the bytes of pages.
    pub fn open(set: &Set, own: Range<u64>) -> Result<Self, CheckpointError> {
        Ok(Self {
            source: set.pages_source()?,
            own,
            buffers: Mutex::default(),
        })
    }

    /// Ranges of pages that are not zero, in ascending order.
    pub fn pages(&self) -> impl Iterator<Item = Range<u64>> {
        let extents = self.source.extents().iter();
        let own =
            |extent: &Extent| extent.first.max(self.own.start)..extent.end().min(self.own.end);
        extents.map(own).filter(|pages| !pages.is_empty())
    }
}

impl SavedMemory {
    /// Those of these pages that are not zero, in the order of the files. Each range is in one
    /// run.
    pub fn pages_within(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        let extents = self.source.within(pages);
        let within = |extent: &Extent| extent.first.max(pages.start)..extent.end().min(pages.end);
        extents.iter().map(|extent| within(extent)).collect()
    }
}

impl Stop {
    fn outcome(self) -> Result<(), String> {
        match self {
            Self::Enough => Ok(()),
            Self::Failed(error) => Err(named(&error)),
        }
    }
}

/// An error with its sources, which name the file.
fn named(error: &CheckpointError) -> String {
    let reason = super::sources::with_sources(error);
    format!("cannot read guest memory from the checkpoint: {reason}")
}

impl AbsentPages for SavedMemory {
    fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String> {
        let index = self.source.find(page);
        let index = index.ok_or_else(|| format!("page {page:#x} is in no file"))?;
        let first = self.source.extents()[index].first;
        let mut buffer = lock(&self.buffers).pop().unwrap_or_default();
        let read = self.source.read(index, &mut buffer);
        let read = read.map(|bytes| take(first, bytes));
        let read = read.map_err(|error| named(&error));
        lock(&self.buffers).push(buffer);
        read
    }

    fn read_all(&self, take: &mut dyn FnMut(u64, &[u8]) -> bool) -> Result<(), String> {
        let read = self.source.read_all(&self.own, |first, bytes| {
            debug_assert_eq!(bytes.len() % PAGE_BYTES, 0);
            match take(first, bytes) {
                true => Ok(()),
                false => Err(Stop::Enough),
            }
        });
        read.or_else(Stop::outcome)
    }
}
