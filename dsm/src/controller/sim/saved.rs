//! What a save has, and what the judge knows of it.

use std::collections::{BTreeMap, VecDeque};

/// The save that is under way, and the last complete one.
#[derive(Debug, Default)]
pub(super) struct Saves {
    pub current: Option<Save>,
    /// Versions by page; the zero version stands for no bytes.
    pub last: Option<Vec<u32>>,
}

#[derive(Debug)]
pub(super) struct Save {
    pub at_cut: Vec<u32>,
    /// What was written so far, and what is as in the last save.
    pub saved: BTreeMap<u64, u32>,
    /// Per mille of turns in which a writer does something. With 0 the disks stand still: the
    /// save ends when a node drops it.
    pub speed: u64,
}

/// A node's part of a save.
#[derive(Debug, Default)]
pub(super) struct Copies {
    pub waiting: VecDeque<(u64, u32)>,
    pub buffers: usize,
}

impl Copies {
    /// A page was copied for the writer. False if there is no buffer for it.
    pub fn put(&mut self, page: u64, version: u32) -> bool {
        self.waiting.push_back((page, version));
        self.waiting.len() <= self.buffers
    }
}
