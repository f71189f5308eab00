//! The directory of a new set.
//!
//! ```text
//! create ──▶ pages.N, tables.N, machine written ──▶ all on disk ──▶ manifest renamed ──▶ complete
//!    └───────────────── dropped before that: files removed ◀──┘
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::layer::{MACHINE, MANIFEST, MANIFEST_NEW, pages_name, tables_name};
use crate::{
    Base, BaseProblem, CHAIN_MAX, CheckpointError, Identity, Machine, Manifest, PageFile,
    PagesReader, Set, Tables, failed,
};

/// A set that is being written; its files are removed when it is dropped before
/// [`NewSet::commit`].
pub struct NewSet {
    directory: PathBuf,
    identity: Identity,
    /// By node.
    pages: Vec<File>,
    /// What each is called.
    names: Vec<String>,
    base: Option<NewBase>,
    /// The directory did not exist before.
    is_made: bool,
    is_complete: bool,
}

impl NewSet {
    /// Makes the directory, which must not exist or be empty, and its files of pages,
    /// which are open for writing. `base`: the set that has the pages that are unchanged.
    pub fn create(
        directory: &Path,
        nodes: usize,
        base: Option<&Set>,
    ) -> Result<Self, CheckpointError> {
        Self::create_named(directory, (0..nodes).map(pages_name).collect(), base)
    }

    /// The same where nodes on other hosts may write their pages to a directory there, which may
    /// be this one: such a node's file here gets the tables.
    pub fn create_for_hosts(
        directory: &Path,
        nodes: usize,
        base: Option<&Set>,
    ) -> Result<Self, CheckpointError> {
        let others = (1..nodes).map(tables_name);
        let names = std::iter::once(pages_name(0)).chain(others).collect();
        Self::create_named(directory, names, base)
    }

    fn create_named(
        directory: &Path,
        names: Vec<String>,
        base: Option<&Set>,
    ) -> Result<Self, CheckpointError> {
        if base.is_some_and(|base| base.chain_length() >= CHAIN_MAX) {
            return Err(CheckpointError::LongChain(directory.to_owned()));
        }
        let is_made = make_directory(directory)?;
        let mut set = Self {
            directory: directory.to_owned(),
            identity: Identity::default(),
            pages: Vec::new(),
            names: Vec::new(),
            base: None,
            is_made,
            is_complete: false,
        };
        set.base = base.map(|base| NewBase::of(directory, base)).transpose()?;
        let random = Path::new("/dev/urandom");
        File::open(random)
            .and_then(|mut file| file.read_exact(&mut set.identity))
            .map_err(failed("read", random))?;
        for name in names {
            let file = set.create_file(&name)?;
            set.pages.push(file);
            set.names.push(name);
        }
        Ok(set)
    }

    /// In all files of the set.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// The files of pages, by node.
    pub fn pages(&self) -> &[File] {
        &self.pages
    }

    /// Bytes of pages that were written so far.
    pub fn bytes_written(&self) -> u64 {
        let length = |file: &File| file.metadata().map_or(0, |metadata| metadata.len());
        self.pages.iter().map(length).sum()
    }

    /// Makes the set complete: [`NewSet::prepare`], then [`ReadySet::complete`].
    pub fn commit(
        self,
        machine: Machine,
        state: &[u8],
        written: Vec<PageFile>,
        weft: &str,
        saved_at_s: u64,
    ) -> Result<u64, CheckpointError> {
        self.prepare(machine, state, written, weft, saved_at_s)?
            .complete()
    }

    /// Has everything on disk but the name of the manifest. `written`: what each node wrote; a
    /// file of another length is refused, and files that no node needed are removed.
    pub fn prepare(
        mut self,
        machine: Machine,
        state: &[u8],
        mut written: Vec<PageFile>,
        weft: &str,
        saved_at_s: u64,
    ) -> Result<ReadySet, CheckpointError> {
        self.check_base(&machine, &written)?;
        self.check_count(&written)?;
        self.find_shared(&machine, &mut written)?;
        self.sync_pages(&machine, &written)?;
        for name in &self.names[written.len()..] {
            let path = self.directory.join(name);
            fs::remove_file(&path).map_err(failed("remove", &path))?;
        }
        self.write_file(MACHINE, state)?;
        let manifest = Manifest {
            identity: self.identity,
            weft: weft.to_owned(),
            saved_at_s,
            pages: written,
            base: self.base.take().map(|base| base.link),
            machine_bytes: state.len() as u64,
            machine_checksum: crc32fast::hash(state),
            machine,
        };
        let path = self.directory.join(MANIFEST);
        let bytes = manifest.encode().map_err(io::Error::from);
        let bytes = bytes.map_err(failed("describe the set in", &path))?;
        self.write_file(MANIFEST_NEW, &bytes)?;
        // The flush of a file need not make its name last.
        sync_directory(Some(&self.directory))?;
        let pages: u64 = manifest.pages.iter().map(|file| file.bytes).sum();
        Ok(ReadySet {
            bytes: pages + manifest.machine_bytes,
            set: self,
        })
    }

    /// The base has as much memory, and no page is unchanged without one.
    fn check_base(&self, machine: &Machine, written: &[PageFile]) -> Result<(), CheckpointError> {
        match &self.base {
            Some(base) if base.memory != machine.memory() => Err(CheckpointError::Base {
                set: self.directory.clone(),
                base: base.directory.clone(),
                why: BaseProblem::OtherMemory,
            }),
            None if written.iter().any(|file| file.unchanged > 0) => {
                Err(CheckpointError::Damaged {
                    path: self.directory.clone(),
                    what: "it has unchanged pages without a base",
                })
            }
            _ => Ok(()),
        }
    }

    fn check_count(&self, written: &[PageFile]) -> Result<(), CheckpointError> {
        match written.len() > self.pages.len() {
            true => Err(CheckpointError::Damaged {
                path: self.directory.clone(),
                what: "more nodes wrote than it has files",
            }),
            false => Ok(()),
        }
    }

    /// A file that another host wrote into this directory, because hosts share it, is one of it.
    fn find_shared(
        &mut self,
        machine: &Machine,
        written: &mut [PageFile],
    ) -> Result<(), CheckpointError> {
        for (node, page_file) in written.iter_mut().enumerate() {
            let path = self.directory.join(pages_name(node));
            if page_file.place.is_none() || !path.exists() {
                continue;
            }
            let file = File::open(&path).map_err(failed("open", &path))?;
            let found = file.try_clone().map_err(failed("open", &path))?;
            let found = PagesReader::open(found, &self.identity, node as u32, machine.pages_end);
            let found = found.map_err(|error| error.of(path.clone()))?;
            if !page_file.is(found.written()) {
                let what = "another host wrote another file there";
                return Err(CheckpointError::Damaged { path, what });
            }
            page_file.place = None;
            let tables = self.directory.join(&self.names[node]);
            fs::remove_file(&tables).map_err(failed("remove", &tables))?;
            self.names[node] = pages_name(node);
            self.pages[node] = file;
        }
        Ok(())
    }

    /// The files of pages are on disk, each as long as its node said. A file of tables that
    /// has the pages gets its name.
    fn sync_pages(
        &mut self,
        machine: &Machine,
        written: &[PageFile],
    ) -> Result<(), CheckpointError> {
        for (node, page_file) in written.iter().enumerate() {
            let path = self.directory.join(&self.names[node]);
            let file = &self.pages[node];
            if page_file.place.is_some() {
                file.sync_all().map_err(failed("write", &path))?;
                let tables = File::open(&path).map_err(failed("open", &path))?;
                let (identity, end) = (&self.identity, machine.pages_end);
                let read = Tables::open(tables)
                    .and_then(|tables| PagesReader::open(tables, identity, node as u32, end));
                let read = read.map_err(|error| error.of(path.clone()))?;
                if !page_file.is(read.written()) {
                    let what = "these are not the tables of what its node wrote";
                    return Err(CheckpointError::Damaged { path, what });
                }
                continue;
            }
            let metadata = file.metadata().map_err(failed("read", &path))?;
            if metadata.len() != page_file.bytes {
                let what = "it is not as long as its node said";
                return Err(CheckpointError::Damaged { path, what });
            }
            file.sync_all().map_err(failed("write", &path))?;
            let named = self.directory.join(pages_name(node));
            if named != path {
                fs::rename(&path, &named).map_err(failed("create", &named))?;
                self.names[node] = pages_name(node);
            }
        }
        Ok(())
    }

    fn create_file(&self, name: &str) -> Result<File, CheckpointError> {
        let path = self.directory.join(name);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(&path).map_err(failed("create", &path))
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let mut file = self.create_file(name)?;
        file.write_all(bytes)
            .and_then(|()| file.sync_all())
            .map_err(failed("write", &self.directory.join(name)))
    }
}

/// A set that lacks only the name of its manifest.
pub struct ReadySet {
    set: NewSet,
    /// Of all files.
    bytes: u64,
}

impl ReadySet {
    /// The manifest gets its name; how many bytes the set has.
    pub fn complete(mut self) -> Result<u64, CheckpointError> {
        let directory = &self.set.directory;
        let path = directory.join(MANIFEST);
        let new = directory.join(MANIFEST_NEW);
        fs::rename(new, &path).map_err(failed("create", &path))?;
        self.set.is_complete = true;
        for directory in [Some(directory.as_path()), directory.parent()] {
            sync_directory(directory)?;
        }
        Ok(self.bytes)
    }
}

impl Drop for NewSet {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        let pages = (0..self.pages.len()).flat_map(|node| [pages_name(node), tables_name(node)]);
        let others = [MACHINE, MANIFEST_NEW].map(str::to_owned);
        for name in pages.chain(others) {
            // What cannot be removed has no manifest, and is refused for that.
            let _ = fs::remove_file(self.directory.join(name));
        }
        if self.is_made {
            let _ = fs::remove_dir(&self.directory);
        }
    }
}

/// Makes names in the directory last; an empty path is the current one.
fn sync_directory(path: Option<&Path>) -> Result<(), CheckpointError> {
    let path = match path {
        Some(path) if !path.as_os_str().is_empty() => path,
        _ => Path::new("."),
    };
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(failed("write", path))
}

/// Whether the directory did not exist; otherwise it is empty.
fn make_directory(directory: &Path) -> Result<bool, CheckpointError> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed("create", directory)(error)),
    }
    let mut entries = fs::read_dir(directory).map_err(failed("read", directory))?;
    match entries.next() {
        Some(_) => Err(CheckpointError::NotEmpty(directory.to_owned())),
        None => Ok(false),
    }
}

/// What a new set must know of its base.
struct NewBase {
    link: Base,
    directory: PathBuf,
    memory: (u64, u64),
}

impl NewBase {
    fn of(directory: &Path, base: &Set) -> Result<Self, CheckpointError> {
        let real = |path: &Path| fs::canonicalize(path).map_err(failed("find", path));
        let identity = base.manifest().identity;
        let link = Base::between(&real(directory)?, &real(base.directory())?, identity);
        if link.directory.to_str().is_none() {
            return Err(CheckpointError::Name(link.directory));
        }
        Ok(Self {
            link,
            directory: base.directory().to_owned(),
            memory: base.manifest().machine.memory(),
        })
    }
}
