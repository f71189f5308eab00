//! Files of pages that one host has, of any sets of one chain: for nodes on other hosts, which
//! know from the tables which page to ask for.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{CheckpointError, FormatError, Identity, PagesReader, ReadAt, Run};

/// What says that an open file is the one that is meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileName {
    /// On its host.
    pub path: PathBuf,
    /// In all files of its set.
    pub identity: Identity,
    /// Its number in the set.
    pub number: u32,
    /// Its length.
    pub bytes: u64,
    /// No page has this number or a higher one.
    pub pages_end: u64,
}

/// A file whose length is known: a confined process may not ask for it.
#[derive(Debug)]
struct Known {
    file: File,
    bytes: u64,
}

impl ReadAt for Known {
    fn length(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }

    fn read_exact_at(&self, bytes: &mut [u8], position: u64) -> io::Result<()> {
        ReadAt::read_exact_at(&self.file, bytes, position)
    }
}

/// Files of the last set first.
#[derive(Debug)]
pub struct ServedFiles(Vec<Served>);

#[derive(Debug)]
struct Served {
    path: PathBuf,
    reader: PagesReader<Known>,
    /// Runs by their first page, and their indices in the file.
    runs: Vec<(Run, usize)>,
}

impl ServedFiles {
    /// Checks everything but the bytes of pages.
    ///
    /// # Errors
    /// A file is damaged, or another one.
    pub fn open(
        files: impl IntoIterator<Item = (File, FileName)>,
    ) -> Result<Self, CheckpointError> {
        let served = files.into_iter().map(|(file, name)| {
            let FileName {
                path,
                identity,
                number,
                bytes,
                pages_end,
            } = name;
            let file = Known { file, bytes };
            let reader = PagesReader::open(file, &identity, number, pages_end);
            let reader = reader.map_err(|error| error.of(path.clone()))?;
            let mut runs: Vec<(Run, usize)> = reader.runs().iter().copied().zip(0..).collect();
            runs.sort_unstable_by_key(|(run, _)| run.first);
            Ok(Served { path, reader, runs })
        });
        served.collect::<Result<_, _>>().map(Self)
    }

    /// Reads the run with a page into `buffer`, and checks it; the number of its first page. If
    /// several files have the page, the latest is right: the tables named it for that.
    ///
    /// # Errors
    /// No file has it, or its run is damaged.
    pub fn read(&self, page: u64, buffer: &mut Vec<u8>) -> Result<u64, CheckpointError> {
        let found = self.0.iter().find_map(|served| {
            let (run, index) = served.find(page)?;
            Some((served, run.first, index))
        });
        let Some((served, first, index)) = found else {
            let path = self.0.first().map(|served| served.path.clone());
            let lacks = FormatError::Damaged("it lacks a page that it should have");
            return Err(lacks.of(path.unwrap_or_default()));
        };
        let read = served.reader.read_run(index, buffer);
        read.map_err(|error| error.of(served.path.clone()))?;
        Ok(first)
    }
}

impl Served {
    fn find(&self, page: u64) -> Option<(&Run, usize)> {
        let behind = self.runs.partition_point(|(run, _)| run.first <= page);
        let (run, index) = self.runs.get(behind.checked_sub(1)?)?;
        (page < run.end()).then_some((run, *index))
    }
}
