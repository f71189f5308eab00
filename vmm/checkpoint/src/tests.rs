//! Sets in directories of their own.

#![expect(
    clippy::single_range_in_vec_init,
    reason = "these are lists of ranges, some with one"
)]

mod chain;
mod damage;
mod hosts;
mod model;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::manifest::tests::manifest;
use crate::{CheckpointError, Machine, NewSet, PAGE_BYTES, PageFile, PagesWriter, Set};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let name = format!("weft-checkpoint-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        // Errors name directories as the kernel knows them.
        Self(fs::canonicalize(path).unwrap())
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a node writes.
#[derive(Clone, Default)]
struct Node {
    /// Numbers of pages, each with the byte that it is full of.
    pages: Vec<(u64, u8)>,
    unchanged: Vec<Range<u64>>,
}

/// Pages full of ones.
fn ones(numbers: &[u64]) -> Node {
    Node {
        pages: numbers.iter().map(|number| (*number, 1)).collect(),
        unchanged: Vec::new(),
    }
}

/// Pages full of twos, and unchanged pages.
fn twos(numbers: &[u64], unchanged: &[Range<u64>]) -> Node {
    Node {
        pages: numbers.iter().map(|number| (*number, 2)).collect(),
        unchanged: unchanged.to_vec(),
    }
}

fn write(set: &NewSet, nodes: &[Node]) -> Vec<PageFile> {
    let mut written = Vec::new();
    for (number, (file, node)) in set.pages().iter().zip(nodes).enumerate() {
        let mut writer = PagesWriter::new(file, set.identity(), number as u32).unwrap();
        for (page, byte) in &node.pages {
            writer.page(*page, &[*byte; PAGE_BYTES]).unwrap();
        }
        for range in &node.unchanged {
            writer.unchanged(range.clone());
        }
        written.push(writer.finish().unwrap().into());
    }
    written
}

fn machine() -> Machine {
    manifest().machine
}

fn save_machine(
    directory: &Path,
    base: Option<&Path>,
    machine: Machine,
    nodes: &[Node],
) -> Result<(), CheckpointError> {
    let base = base.map(|base| Set::open(base).unwrap());
    let set = NewSet::create(directory, nodes.len(), base.as_ref())?;
    let written = write(&set, nodes);
    let state = format!("{{\"set\": {directory:?}}}");
    set.commit(machine, state.as_bytes(), written, "0.1.0", 1)?;
    Ok(())
}

fn save(directory: &Path, base: Option<&Path>, nodes: &[Node]) {
    save_machine(directory, base, machine(), nodes).unwrap();
}

fn check(directory: &Path) -> Result<(), String> {
    Set::open(directory)
        .and_then(|set| set.verify())
        .map_err(|error| error.to_string())
}

/// The pages that are not zero, each with the byte that it is full of.
fn memory(directory: &Path) -> Vec<(u64, u8)> {
    let source = Set::open(directory).unwrap().pages_source().unwrap();
    let mut found = Vec::new();
    let read = source.read_all(&(0..u64::MAX), |first, bytes| {
        for (number, page) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
            assert!(page.iter().all(|byte| *byte == page[0]), "page {number}");
            found.push((number, page[0]));
        }
        Ok::<_, CheckpointError>(())
    });
    read.unwrap();
    found.sort_unstable();
    found
}

#[test]
fn a_set_comes_back() {
    let scratch = Scratch::new("whole");
    let directory = scratch.join("one");
    save(&directory, None, &[ones(&[9, 1, 2]), ones(&[2047, 3])]);
    let set = Set::open(&directory).unwrap();
    set.verify().unwrap();
    set.check_tables().unwrap();
    assert_eq!(
        set.state().unwrap(),
        format!("{{\"set\": {directory:?}}}").as_bytes()
    );
    assert_eq!(memory(&directory), [1, 2, 3, 9, 2047].map(|page| (page, 1)));
    let again = NewSet::create(&directory, 1, None)
        .err()
        .unwrap()
        .to_string();
    assert!(again.contains("not empty"), "{again}");
    set.verify().unwrap();
}

#[test]
fn a_set_without_its_commit_is_removed_or_refused() {
    let scratch = Scratch::new("cut");
    let directory = scratch.join("one");
    let set = NewSet::create(&directory, 2, None).unwrap();
    write(&set, &[ones(&[1]), ones(&[2])]);
    // What a process that was killed leaves.
    let error = check(&directory).unwrap_err();
    assert!(error.contains("incomplete"), "{error}");
    drop(set);
    assert!(!directory.exists());
    let error = check(&directory).unwrap_err();
    assert!(error.contains("does not hold"), "{error}");
    let set = NewSet::create(&directory, 1, None).unwrap();
    let mut written = write(&set, &[ones(&[1])]);
    written[0].bytes += 1;
    let committed = set.commit(machine(), b"", written, "0.1.0", 1);
    assert!(committed.is_err() && !directory.exists());
}
