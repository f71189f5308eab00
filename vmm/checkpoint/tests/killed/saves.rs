//! What is saved, and how.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, raise};
use weft_checkpoint::{CheckpointError, Machine, NewSet, PAGE_BYTES, PageFile, PagesWriter, Set};

/// The directory of the last complete set.
pub const LAST: &str = "last";
/// The directory of the set that is being written.
pub const NEW: &str = "new";

const PAGES_END: u64 = 2048;
/// Pages of each node; those of the last one are in two runs.
const NODE_PAGES: u64 = 110;
const NODES: usize = 3;
/// One more than there are nodes, so that one is removed.
const FILES: usize = NODES + 1;

/// The pages that are not zero, each with what its bytes are made from.
pub type Memory = BTreeMap<u64, u8>;

/// A way to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Full,
    /// Based on the last complete set.
    Since,
    /// Into a directory that exists and is empty.
    Empty,
    /// Where an incomplete set lies, which is removed first.
    Again,
    /// It fails before its commit, and removes its files.
    GivenUp,
}

impl Kind {
    pub const ALL: [Self; 5] = [
        Self::Full,
        Self::Since,
        Self::Empty,
        Self::Again,
        Self::GivenUp,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Since => "since",
            Self::Empty => "empty",
            Self::Again => "again",
            Self::GivenUp => "given-up",
        }
    }

    /// Whether its set becomes complete.
    pub fn commits(self) -> bool {
        self != Self::GivenUp
    }

    /// What the set holds.
    pub fn memory(self) -> Memory {
        match self {
            Self::Since => memory_since(),
            _ => (0..300)
                .filter(|page| page % 50 > 4)
                .map(|page| (page, 3))
                .collect(),
        }
    }
}

/// What the last complete set holds.
pub fn memory_of_last() -> Memory {
    (0..320).map(|page| (page, 1)).collect()
}

/// Some pages have other bytes than in the last set, some are new, some are zero now.
fn memory_since() -> Memory {
    let mut memory = memory_of_last();
    memory.extend((0..325).filter(|page| page % 9 < 2).map(|page| (page, 2)));
    memory.retain(|page, _| !(100..110).contains(page));
    memory
}

/// splitmix64: every eight bytes differ from all others.
pub fn bytes_of(page: u64, version: u8) -> Vec<u8> {
    let words = (0..PAGE_BYTES as u64 / 8).flat_map(|word| {
        let seed = u64::from(version) << 32 | page << 12 | word;
        let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31).to_le_bytes()
    });
    words.collect()
}

/// The file `machine`.
pub fn state_of(name: &str) -> Vec<u8> {
    format!("{{\"set\": \"{name}\"}}").repeat(100).into_bytes()
}

/// Writes the last complete set.
pub fn write_last(directory: &Path) {
    let set = NewSet::create(&directory.join(LAST), FILES, None).unwrap();
    let written = write_pages(&set, &memory_of_last(), None).unwrap();
    commit(set, LAST, written).unwrap();
}

/// Makes what is there before the save.
pub fn prepare(kind: Kind, directory: &Path) {
    let new = directory.join(NEW);
    if new.exists() {
        fs::remove_dir_all(&new).unwrap();
    }
    match kind {
        Kind::Empty => fs::create_dir(&new).unwrap(),
        Kind::Again => {
            let set = NewSet::create(&new, FILES, None).unwrap();
            write_pages(&set, &kind.memory(), None).unwrap();
            // As if the process was killed.
            std::mem::forget(set);
        }
        Kind::Full | Kind::Since | Kind::GivenUp => {}
    }
}

/// The process that is killed. It stops itself before the save, and waits for its tracer.
pub fn save(kind: Kind, directory: &Path) {
    let new = directory.join(NEW);
    let memory = kind.memory();
    raise(Signal::SIGSTOP).unwrap();
    let base = (kind == Kind::Since).then(|| Set::open(&directory.join(LAST)).unwrap());
    let mut set = NewSet::create(&new, FILES, base.as_ref());
    if kind == Kind::Again {
        assert!(matches!(set, Err(CheckpointError::NotEmpty(_))));
        fs::remove_dir_all(&new).unwrap();
        set = NewSet::create(&new, FILES, None);
    }
    let set = set.unwrap();
    let before = base.map(|_| memory_of_last());
    let written = write_pages(&set, &memory, before.as_ref()).unwrap();
    match kind.commits() {
        true => commit(set, NEW, written).unwrap(),
        false => drop(set),
    }
}

/// Each node writes its pages. `before`: the memory of the base.
fn write_pages(
    set: &NewSet,
    memory: &Memory,
    before: Option<&Memory>,
) -> std::io::Result<Vec<PageFile>> {
    let mut written = Vec::new();
    for (node, file) in set.pages()[..NODES].iter().enumerate() {
        let first = node as u64 * NODE_PAGES;
        let mut writer = PagesWriter::new(file, set.identity(), node as u32)?;
        for (page, version) in memory.range(first..first + NODE_PAGES) {
            match before.is_some_and(|before| before.get(page) == Some(version)) {
                true => writer.unchanged(*page..page + 1),
                false => writer.page(*page, &bytes_of(*page, *version))?,
            }
        }
        written.push(writer.finish()?.into());
    }
    Ok(written)
}

fn commit(set: NewSet, name: &str, written: Vec<PageFile>) -> Result<(), CheckpointError> {
    let machine = Machine {
        name: "web".into(),
        cpus: 2,
        memory_bytes: PAGES_END * PAGE_BYTES as u64,
        pages_end: PAGES_END,
        back_end: "soft".into(),
        features: Vec::new(),
        disks: Vec::new(),
    };
    set.commit(machine, &state_of(name), written, "0.1.0", 1)?;
    Ok(())
}
