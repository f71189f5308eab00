//! A complete set and the sets that it is based on.

use std::path::Path;

use crate::layer::Layer;
use crate::{CHAIN_MAX, CheckpointError, Extent, Manifest, PageSource};

/// A complete set whose bases are there: each is the one that the next later set names, and
/// has as much memory. At most [`CHAIN_MAX`] sets.
#[derive(Debug)]
pub struct Set {
    last: Layer,
    /// The latest first.
    bases: Vec<Layer>,
}

impl Set {
    /// Reads the manifests of the whole chain.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let mut set = Self {
            last: Layer::open(directory)?,
            bases: Vec::new(),
        };
        while let Some(base) = set.bases.last().unwrap_or(&set.last).open_base()? {
            if set.chain_length() == CHAIN_MAX {
                return Err(CheckpointError::LongChain(directory.to_owned()));
            }
            set.bases.push(base);
        }
        Ok(set)
    }

    pub fn directory(&self) -> &Path {
        &self.last.directory
    }

    pub fn manifest(&self) -> &Manifest {
        &self.last.manifest
    }

    /// The directories of all sets that this one needs, itself first, then the latest base.
    pub fn directories(&self) -> impl Iterator<Item = &Path> {
        self.chain().map(|layer| layer.directory.as_path())
    }

    /// How many sets that are.
    pub fn chain_length(&self) -> usize {
        1 + self.bases.len()
    }

    /// The latest first.
    fn chain(&self) -> impl Iterator<Item = &Layer> {
        std::iter::once(&self.last).chain(&self.bases)
    }

    /// The bytes of the file `machine`, checked.
    pub fn state(&self) -> Result<Vec<u8>, CheckpointError> {
        self.last.state()
    }

    /// Guest memory, with the files that have a part of it. Everything of all files of pages
    /// but the bytes of pages is checked.
    pub fn pages_source(&self) -> Result<PageSource, CheckpointError> {
        PageSource::open(self.manifest().machine.pages_end, self.chain())
    }

    /// Which file has the bytes of which pages, see [`PageSource::extents`].
    pub fn extents(&self) -> Result<Vec<Extent>, CheckpointError> {
        Ok(self.pages_source()?.into_extents())
    }

    /// Checks everything but the bytes of pages.
    pub fn check_tables(&self) -> Result<(), CheckpointError> {
        self.state()?;
        self.chain()
            .try_for_each(|layer| layer.open_files().map(drop))
    }

    /// Reads every byte that a restore can need: this set and the files of pages of its bases.
    /// Whatever is missing or damaged is found, also a page that one set names twice.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.state()?;
        self.chain().try_for_each(Layer::verify_pages)
    }
}
