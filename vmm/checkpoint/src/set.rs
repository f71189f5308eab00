//! The directory of a set: created, committed, opened, verified.
//!
//! ```text
//! create ──▶ pages.N, machine written ──▶ all on disk ──▶ manifest renamed ──▶ complete
//!    └───────────────── dropped before that: files removed ◀──┘
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::manifest::MANIFEST_BYTES_MAX;
use crate::{CheckpointError, FormatError, Identity, Machine, Manifest, PageFile, PagesReader};

const MANIFEST: &str = "manifest";
/// Its name until the set is complete.
const MANIFEST_NEW: &str = "manifest.new";
const MACHINE: &str = "machine";
/// Longest file `machine`, in bytes: 255 vCPUs with their state take a few MB.
const MACHINE_BYTES_MAX: u64 = 64 << 20;

fn pages_name(node: usize) -> String {
    format!("pages.{node}")
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io {
        action,
        path,
        source,
    }
}

/// A set that is being written; its files are removed when it is dropped before
/// [`NewSet::commit`].
pub struct NewSet {
    directory: PathBuf,
    identity: Identity,
    /// By node.
    pages: Vec<File>,
    /// The directory did not exist before.
    is_made: bool,
    is_complete: bool,
}

impl NewSet {
    /// Makes the directory, which must not exist or be empty, and its files of pages,
    /// which are open for writing.
    pub fn create(directory: &Path, nodes: usize) -> Result<Self, CheckpointError> {
        let is_made = match DirBuilder::new().mode(0o700).create(directory) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(failed("create", directory)(error)),
        };
        if !is_made {
            let mut entries = fs::read_dir(directory).map_err(failed("read", directory))?;
            if entries.next().is_some() {
                return Err(CheckpointError::NotEmpty(directory.to_owned()));
            }
        }
        let mut identity = Identity::default();
        let random = Path::new("/dev/urandom");
        File::open(random)
            .and_then(|mut file| file.read_exact(&mut identity))
            .map_err(failed("read", random))?;
        let mut set = Self {
            directory: directory.to_owned(),
            identity,
            pages: Vec::new(),
            is_made,
            is_complete: false,
        };
        for node in 0..nodes {
            let file = set.create_file(&pages_name(node))?;
            set.pages.push(file);
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

    /// Makes the set complete: everything is on disk, then the manifest gets its name.
    /// `written`: what each node wrote; a file of another length is refused.
    pub fn commit(
        mut self,
        machine: Machine,
        state: &[u8],
        written: Vec<PageFile>,
        weft: &str,
        saved_at_s: u64,
    ) -> Result<u64, CheckpointError> {
        for (node, (file, page_file)) in self.pages.iter().zip(&written).enumerate() {
            let path = self.directory.join(pages_name(node));
            let metadata = file.metadata().map_err(failed("read", &path))?;
            if metadata.len() != page_file.bytes {
                let what = "it is not as long as its node said";
                return Err(CheckpointError::Damaged { path, what });
            }
            file.sync_all().map_err(failed("write", &path))?;
        }
        self.write_file(MACHINE, state)?;
        let manifest = Manifest {
            identity: self.identity,
            weft: weft.to_owned(),
            saved_at_s,
            pages: written,
            machine_bytes: state.len() as u64,
            machine_checksum: crc32fast::hash(state),
            machine,
        };
        self.write_file(MANIFEST_NEW, &manifest.encode())?;
        let (new, name) = (
            self.directory.join(MANIFEST_NEW),
            self.directory.join(MANIFEST),
        );
        fs::rename(new, &name).map_err(failed("create", &name))?;
        self.is_complete = true;
        for directory in [Some(self.directory.as_path()), self.directory.parent()] {
            sync_directory(directory)?;
        }
        let pages: u64 = manifest.pages.iter().map(|file| file.bytes).sum();
        Ok(pages + manifest.machine_bytes)
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

impl Drop for NewSet {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        let pages = (0..self.pages.len()).map(pages_name);
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

/// A complete set.
#[derive(Debug)]
pub struct Set {
    directory: PathBuf,
    manifest: Manifest,
}

impl Set {
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
                let has_pages = directory.join(pages_name(0)).exists();
                let directory = directory.to_owned();
                return Err(match has_pages {
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

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
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

    /// The file of pages of a node; everything of it but the bytes of its pages is
    /// checked.
    pub fn pages(&self, node: usize) -> Result<PagesReader<File>, CheckpointError> {
        let path = self.pages_path(node);
        let (identity, end) = (&self.manifest.identity, self.manifest.machine.pages_end);
        let reader = PagesReader::open(open_file(&path)?, identity, node as u32, end)
            .map_err(|error| error.of(path.clone()))?;
        match self.manifest.pages.get(node) {
            Some(file) if file.pages == reader.pages() => Ok(reader),
            _ => Err(FormatError::Damaged("its number of pages").of(path)),
        }
    }

    /// Reads every byte of the set: whatever is missing or damaged is found, and no
    /// page is in two files.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.state()?;
        let mut all = Vec::new();
        for node in 0..self.manifest.pages.len() {
            let mut reader = self.pages(node)?;
            all.extend(reader.runs().iter().map(|run| (run.first, run.end())));
            reader
                .read(&(0..u64::MAX), |_, _| Ok::<_, FormatError>(()))
                .map_err(|error| error.of(self.pages_path(node)))?;
        }
        all.sort_unstable();
        let twice = all.windows(2).any(|pair| pair[0].1 > pair[1].0);
        match twice {
            true => Err(FormatError::Damaged("a page is in two files").of(self.directory.clone())),
            false => Ok(()),
        }
    }

    /// Where the file of pages of a node is.
    pub fn pages_path(&self, node: usize) -> PathBuf {
        self.directory.join(pages_name(node))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tests::manifest;
    use crate::{PAGE_BYTES, PagesWriter};

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("weft-checkpoint-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Pages by node.
    fn write(set: &NewSet, pages: &[&[u64]]) -> Vec<PageFile> {
        let mut written = Vec::new();
        for (node, (file, numbers)) in set.pages().iter().zip(pages).enumerate() {
            let mut writer = PagesWriter::new(file, set.identity(), node as u32).unwrap();
            for number in *numbers {
                writer.page(*number, &[1; PAGE_BYTES]).unwrap();
            }
            written.push(writer.finish().unwrap().into());
        }
        written
    }

    fn save(directory: &Path, pages: &[&[u64]]) {
        let set = NewSet::create(directory, pages.len()).unwrap();
        let written = write(&set, pages);
        set.commit(manifest().machine, b"{\"a\": 1}", written, "0.1.0", 1)
            .unwrap();
    }

    fn check(directory: &Path) -> Result<(), String> {
        Set::open(directory)
            .and_then(|set| set.verify())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_set_comes_back() {
        let scratch = Scratch::new("whole");
        let directory = scratch.0.join("one");
        save(&directory, &[&[1, 2, 9], &[3, 2047]]);
        let set = Set::open(&directory).unwrap();
        set.verify().unwrap();
        assert_eq!(set.state().unwrap(), b"{\"a\": 1}");
        assert_eq!(set.pages(0).unwrap().pages(), 3);
        let again = NewSet::create(&directory, 1).err().unwrap().to_string();
        assert!(again.contains("not empty"), "{again}");
        set.verify().unwrap();
    }

    #[test]
    fn damage_in_any_file_is_named() {
        let scratch = Scratch::new("damage");
        let directory = scratch.0.join("one");
        save(&directory, &[&[1, 2, 9], &[3]]);
        for name in ["pages.0", "pages.1", "machine", "manifest"] {
            let path = directory.join(name);
            let good = fs::read(&path).unwrap();
            let every = (good.len() / 64).max(1);
            for at in (0..good.len()).step_by(every).chain([good.len() - 1]) {
                let mut bad = good.clone();
                bad[at] ^= 4;
                fs::write(&path, bad).unwrap();
                let error = check(&directory).unwrap_err();
                assert!(error.contains(name), "byte {at} of {name}: {error}");
            }
            fs::write(&path, &good[..good.len() - 1]).unwrap();
            let error = check(&directory).unwrap_err();
            assert!(error.contains(name), "{name} cut: {error}");
            fs::remove_file(&path).unwrap();
            let error = check(&directory).unwrap_err();
            let expected = if name == "manifest" {
                "incomplete"
            } else {
                "missing"
            };
            assert!(error.contains(expected), "without {name}: {error}");
            fs::write(&path, good).unwrap();
            check(&directory).unwrap();
        }
    }

    #[test]
    fn files_of_two_sets_do_not_mix() {
        let scratch = Scratch::new("mixed");
        let [one, two] = ["one", "two"].map(|name| scratch.0.join(name));
        save(&one, &[&[1], &[2]]);
        save(&two, &[&[1], &[2]]);
        fs::copy(two.join("pages.1"), one.join("pages.1")).unwrap();
        let error = check(&one).unwrap_err();
        assert!(error.contains("another checkpoint"), "{error}");
        save(&scratch.0.join("three"), &[&[1, 2], &[2]]);
        let error = check(&scratch.0.join("three")).unwrap_err();
        assert!(error.contains("two files"), "{error}");
    }

    #[test]
    fn a_set_without_its_commit_is_removed_or_refused() {
        let scratch = Scratch::new("cut");
        let directory = scratch.0.join("one");
        let set = NewSet::create(&directory, 2).unwrap();
        write(&set, &[&[1], &[2]]);
        // What a process that was killed leaves.
        let error = check(&directory).unwrap_err();
        assert!(error.contains("incomplete"), "{error}");
        drop(set);
        assert!(!directory.exists());
        let error = check(&directory).unwrap_err();
        assert!(error.contains("does not hold"), "{error}");
        let set = NewSet::create(&directory, 1).unwrap();
        let mut written = write(&set, &[&[1]]);
        written[0].bytes += 1;
        let committed = set.commit(manifest().machine, b"", written, "0.1.0", 1);
        assert!(committed.is_err() && !directory.exists());
    }
}
