//! The directory of one complete set, without its bases.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::manifest::MANIFEST_BYTES_MAX;
use crate::pages::{Span, named_twice};
use crate::{
    Base, BaseProblem, CheckpointError, FILES_MAX, FileName, FormatError, Manifest, PagesReader,
    Place, ReadAt, Tables, failed,
};

pub(crate) const MANIFEST: &str = "manifest";
/// Its name until the set is complete.
pub(crate) const MANIFEST_NEW: &str = "manifest.new";
pub(crate) const MACHINE: &str = "machine";
/// Longest file `machine`, in bytes: 255 vCPUs with their state take a few MB.
const MACHINE_BYTES_MAX: u64 = 64 << 20;

pub(crate) fn pages_name(node: usize) -> String {
    format!("pages.{node}")
}

pub(crate) fn tables_name(node: usize) -> String {
    format!("tables.{node}")
}

/// Whether a directory has any file of a set, whichever of them a save that was killed wrote or
/// removed first.
fn has_part(directory: &Path) -> bool {
    let pages = (0..FILES_MAX).flat_map(|node| [pages_name(node), tables_name(node)]);
    let others = [MACHINE, MANIFEST_NEW].map(str::to_owned);
    let mut names = pages.chain(others);
    names.any(|name| directory.join(name).exists())
}

/// A file of pages whose tables are checked.
#[derive(Debug)]
pub(crate) struct PagesFile {
    pub path: PathBuf,
    pub reader: PagesReader<Content>,
    /// Where its pages are, if not here.
    pub elsewhere: Option<(Place, FileName)>,
}

/// What of a file of pages is here.
#[derive(Debug)]
pub(crate) enum Content {
    Whole(File),
    Tables(Tables<File>),
}

impl ReadAt for Content {
    fn length(&self) -> io::Result<u64> {
        match self {
            Self::Whole(file) => file.length(),
            Self::Tables(tables) => tables.length(),
        }
    }

    fn read_exact_at(&self, bytes: &mut [u8], position: u64) -> io::Result<()> {
        match self {
            Self::Whole(file) => file.read_exact_at(bytes, position),
            Self::Tables(tables) => tables.read_exact_at(bytes, position),
        }
    }
}

impl PagesFile {
    /// Makes `bytes` those of a run, and checks them.
    pub fn read_run(&self, run: usize, bytes: &mut Vec<u8>) -> Result<(), CheckpointError> {
        if let Some((place, name)) = &self.elsewhere {
            return Err(CheckpointError::Elsewhere {
                file: pages_name(name.number as usize),
                host: place.host.clone(),
                directory: place.directory.clone(),
                path: self.path.clone(),
            });
        }
        let read = self.reader.read_run(run, bytes);
        read.map_err(|error| error.of(self.path.clone()))
    }
}

/// A set whose manifest is read.
#[derive(Debug)]
pub(crate) struct Layer {
    pub directory: PathBuf,
    pub manifest: Manifest,
}

impl Layer {
    /// Reads the manifest.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let path = directory.join(MANIFEST);
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(file) => {
                let most = MANIFEST_BYTES_MAX as u64 + 1;
                let read = file.take(most).read_to_end(&mut bytes);
                read.map_err(failed("read", &path))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let has_part = has_part(directory);
                let directory = directory.to_owned();
                return Err(match has_part {
                    true => CheckpointError::Incomplete(directory),
                    false => CheckpointError::NoCheckpoint(directory),
                });
            }
            Err(error) => return Err(failed("read", &path)(error)),
        }
        let manifest = Manifest::decode(&bytes).map_err(|error| error.of(path))?;
        Ok(Self {
            directory: directory.to_owned(),
            manifest,
        })
    }

    /// The set that this one is based on, if it is based on one.
    pub fn open_base(&self) -> Result<Option<Self>, CheckpointError> {
        let Some(link) = &self.manifest.base else {
            return Ok(None);
        };
        let real = fs::canonicalize(&self.directory);
        let real = real.map_err(failed("find", &self.directory))?;
        let directory = link.directory(&real);
        match Self::open(&directory) {
            Ok(base) => match self.problem_of(link, &base) {
                Some(why) => Err(self.base_refused(directory, why)),
                None => Ok(Some(base)),
            },
            Err(CheckpointError::NoCheckpoint(_)) => {
                Err(self.base_refused(directory, BaseProblem::Missing))
            }
            Err(CheckpointError::Incomplete(_)) => {
                Err(self.base_refused(directory, BaseProblem::Incomplete))
            }
            Err(source) => Err(CheckpointError::BaseUnread {
                set: self.directory.clone(),
                base: directory,
                source: Box::new(source),
            }),
        }
    }

    fn problem_of(&self, link: &Base, base: &Self) -> Option<BaseProblem> {
        if base.manifest.identity != link.identity {
            return Some(BaseProblem::Another);
        }
        let is_same = base.manifest.machine.memory() == self.manifest.machine.memory();
        (!is_same).then_some(BaseProblem::OtherMemory)
    }

    fn base_refused(&self, base: PathBuf, why: BaseProblem) -> CheckpointError {
        CheckpointError::Base {
            set: self.directory.clone(),
            base,
            why,
        }
    }

    /// The bytes of the file `machine`, checked.
    pub fn state(&self) -> Result<Vec<u8>, CheckpointError> {
        let path = self.directory.join(MACHINE);
        let damaged = |what| CheckpointError::Damaged {
            path: path.clone(),
            what,
        };
        if self.manifest.machine_bytes > MACHINE_BYTES_MAX {
            return Err(damaged("it is too long"));
        }
        let mut bytes = Vec::new();
        let read = open_file(&path)?
            .take(self.manifest.machine_bytes + 1)
            .read_to_end(&mut bytes);
        read.map_err(failed("read", &path))?;
        if bytes.len() as u64 != self.manifest.machine_bytes {
            return Err(damaged("its length"));
        }
        match crc32fast::hash(&bytes) == self.manifest.machine_checksum {
            true => Ok(bytes),
            false => Err(damaged("its checksum differs")),
        }
    }

    /// The files of pages, by node. Everything of them but the bytes of their pages is
    /// checked, and that they do not name a page twice.
    pub fn open_files(&self) -> Result<Vec<PagesFile>, CheckpointError> {
        let nodes = 0..self.manifest.pages.len();
        let files: Vec<_> = nodes
            .map(|node| self.open_file(node))
            .collect::<Result<_, _>>()?;
        let spans = files.iter().flat_map(|file| file.reader.spans());
        let Some(two) = named_twice(&mut spans.collect::<Vec<Span>>()) else {
            return Ok(files);
        };
        let what = match two.map(|span| span.is_unchanged) {
            [false, false] => "a page is in two files",
            [true, true] => "a page is unchanged in two files",
            _ => "a page is in a file and unchanged",
        };
        Err(FormatError::Damaged(what).of(self.directory.clone()))
    }

    fn open_file(&self, node: usize) -> Result<PagesFile, CheckpointError> {
        let path = self.directory.join(pages_name(node));
        let (identity, end) = (&self.manifest.identity, self.manifest.machine.pages_end);
        let file = self.manifest.pages.get(node);
        let place = file.and_then(|file| Some((file.place.clone()?, file.bytes)));
        let (content, elsewhere) = match (open_file(&path), place) {
            (Err(CheckpointError::Missing(_)), Some((place, bytes))) => {
                let tables = self.open_tables(node)?;
                let name = FileName {
                    path: place.directory.join(pages_name(node)),
                    identity: *identity,
                    number: node as u32,
                    bytes,
                    pages_end: end,
                };
                (Content::Tables(tables), Some((place, name)))
            }
            (opened, _) => (Content::Whole(opened?), None),
        };
        // What is wrong is in the file that was read.
        let read = match elsewhere {
            None => path.clone(),
            Some(_) => self.directory.join(tables_name(node)),
        };
        let reader = PagesReader::open(content, identity, node as u32, end)
            .map_err(|error| error.of(read.clone()))?;
        match file {
            Some(file) if file.is(reader.written()) => Ok(PagesFile {
                path,
                reader,
                elsewhere,
            }),
            _ => Err(FormatError::Damaged("its number of pages").of(read)),
        }
    }

    fn open_tables(&self, node: usize) -> Result<Tables<File>, CheckpointError> {
        let path = self.directory.join(tables_name(node));
        Tables::open(open_file(&path)?).map_err(|error| error.of(path))
    }

    /// Reads the bytes of all pages.
    pub fn verify_pages(&self) -> Result<(), CheckpointError> {
        let mut bytes = Vec::new();
        for file in self.open_files()? {
            for run in 0..file.reader.runs().len() {
                file.read_run(run, &mut bytes)?;
            }
        }
        Ok(())
    }
}

fn open_file(path: &Path) -> Result<File, CheckpointError> {
    match File::open(path) {
        Ok(file) => Ok(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(CheckpointError::Missing(path.to_owned()))
        }
        Err(error) => Err(failed("open", path)(error)),
    }
}
