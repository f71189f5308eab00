//! Guest memory from the files of a checkpoint, run by run, whenever a page is needed.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::sync::Mutex;

use weft_aggregate::{AbsentRange, PRIMARY};
use weft_checkpoint::{
    CheckpointError, Extent, FileName, PAGE_BYTES, PageSource, ServedFiles, Set,
};
use weft_coherent_memory::{AbsentPages, PageFiles};
use weft_confine::lock;

/// The pages of a checkpoint that a slice manages.
pub(super) struct SavedMemory {
    source: PageSource,
    own: Range<u64>,
    /// By its name, the slice on a host that has files of the set.
    servers: BTreeMap<String, usize>,
    buffers: Buffers,
}

/// Buffers of runs that nobody uses at the moment: one for each thread that ever read at the same
/// time.
#[derive(Default)]
struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    fn with<T>(&self, work: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut buffer = lock(&self.0).pop().unwrap_or_default();
        let done = work(&mut buffer);
        lock(&self.0).push(buffer);
        done
    }
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
    pub fn open(
        set: &Set,
        servers: BTreeMap<String, usize>,
        own: Range<u64>,
    ) -> Result<Self, CheckpointError> {
        Ok(Self {
            source: set.pages_source()?,
            own,
            servers,
            buffers: Buffers::default(),
        })
    }

    /// Ranges of pages that are not zero, in ascending order; without those on other hosts.
    pub fn pages(&self) -> impl Iterator<Item = Range<u64>> {
        let extents = self.source.extents().iter();
        let extents = extents.filter(|extent| self.source.place(extent).is_none());
        let own =
            |extent: &Extent| extent.first.max(self.own.start)..extent.end().min(self.own.end);
        extents.map(own).filter(|pages| !pages.is_empty())
    }
}

impl SavedMemory {
    /// Those of these pages that are not zero, in the order of the files. Each range is in one
    /// run.
    ///
    /// # Errors
    /// No slice is on the host that has a file.
    pub fn pages_within(&self, pages: &Range<u64>) -> Result<Vec<AbsentRange>, String> {
        let within = |extent: &Extent| {
            let server = match self.source.place(extent) {
                None => PRIMARY,
                Some(place) => self.server(&place.host)?,
            };
            let pages = extent.first.max(pages.start)..extent.end().min(pages.end);
            Ok(AbsentRange { pages, server })
        };
        let extents = self.source.within(pages);
        extents.into_iter().map(within).collect()
    }

    /// Whether other hosts have files of it.
    pub fn is_apart(&self) -> bool {
        self.source.elsewhere().next().is_some()
    }

    /// The files on the hosts of other slices, each slice's as [`ServedFiles`] needs them.
    ///
    /// # Errors
    /// As [`SavedMemory::pages_within`].
    pub fn on_hosts(&self) -> Result<BTreeMap<usize, Vec<FileName>>, String> {
        let mut files = BTreeMap::<usize, Vec<FileName>>::new();
        for (place, name) in self.source.elsewhere() {
            let server = self.server(&place.host)?;
            files.entry(server).or_default().push(name.clone());
        }
        Ok(files)
    }

    fn server(&self, host: &str) -> Result<usize, String> {
        let server = self.servers.get(host).copied();
        server.ok_or_else(|| format!("no node of the machine is on {host}, which has its pages"))
    }
}

/// Files of a checkpoint on the host of a slice.
pub(super) struct HostPages {
    files: ServedFiles,
    buffers: Buffers,
}

impl HostPages {
    /// # Errors
    /// A file is damaged, or another one.
    pub fn open(files: Vec<(File, FileName)>) -> Result<Self, String> {
        Ok(Self {
            files: ServedFiles::open(files).map_err(|error| named(&error))?,
            buffers: Buffers::default(),
        })
    }
}

impl PageFiles for HostPages {
    fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String> {
        self.buffers.with(|buffer| {
            let first = self.files.read(page, buffer);
            take(first.map_err(|error| named(&error))?, buffer);
            Ok(())
        })
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

impl PageFiles for SavedMemory {
    fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String> {
        let index = self.source.find(page);
        let index = index.ok_or_else(|| format!("page {page:#x} is in no file"))?;
        let first = self.source.extents()[index].first;
        self.buffers.with(|buffer| {
            let read = self.source.read(index, buffer);
            take(first, read.map_err(|error| named(&error))?);
            Ok(())
        })
    }
}

impl AbsentPages for SavedMemory {
    fn read_all(&self, take: &mut dyn FnMut(u64, &[u8]) -> bool) -> Result<(), String> {
        let read = self.source.read_all_here(&self.own, |first, bytes| {
            debug_assert_eq!(bytes.len() % PAGE_BYTES, 0);
            match take(first, bytes) {
                true => Ok(()),
                false => Err(Stop::Enough),
            }
        });
        read.or_else(Stop::outcome)
    }
}
