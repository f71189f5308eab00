//! Faults that needed another node, as a machine's processes recorded them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weft_coherent_memory::{FaultRecord, SliceFaults, SlicePages};
use weft_machine::{Configuration, Handle};

/// Version of the file's layout.
pub const FORMAT: u32 = 1;

/// What was seen of a machine's faults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Version of this layout.
    pub format: u32,
    /// The machine; empty where its process does not know.
    pub name: String,
    /// The kernel's file, beside which names for addresses are looked for.
    pub kernel: PathBuf,
    /// Over how long.
    pub seconds: f64,
    /// The counts of the whole run by page; none where only some seconds were
    /// looked at: then the faults are all there is.
    pub pages: Vec<SlicePages>,
    /// Faults one by one.
    pub faults: Vec<SliceFaults>,
}

impl Trace {
    /// Of a machine that ended, with what it kept.
    pub fn kept(handle: &Handle, configuration: &Configuration, seconds: f64) -> Trace {
        let mut trace = Trace {
            format: FORMAT,
            name: String::new(),
            kernel: configuration.kernel.clone(),
            seconds,
            // A machine that failed may have nothing more to say.
            pages: handle.pages().unwrap_or_default(),
            faults: Vec::new(),
        };
        let slices = configuration.slices.len();
        // As often as there is something: what was kept has an end.
        while let Ok(more) = handle.faults(trace.next(slices, 0).into_iter().map(Some).collect()) {
            if !trace.append(more) {
                break;
            }
        }
        trace
    }

    /// By slice: the number of the next fault.
    pub fn next(&self, slices: usize, first: u64) -> Vec<u64> {
        let mut next = vec![first; slices];
        for slice in &self.faults {
            if let Some(next) = next.get_mut(slice.slice) {
                *next = slice.next;
            }
        }
        next
    }

    /// Adds what was read; whether there was any.
    pub fn append(&mut self, more: Vec<SliceFaults>) -> bool {
        let mut any = false;
        for more in more {
            any |= !more.faults.is_empty();
            match self.faults.iter_mut().find(|own| own.slice == more.slice) {
                None => self.faults.push(more),
                Some(own) => {
                    own.next = more.next;
                    own.missed += more.missed;
                    own.faults.extend(more.faults);
                }
            }
        }
        any
    }

    /// All faults.
    pub fn records(&self) -> impl Iterator<Item = &FaultRecord> {
        self.faults.iter().flat_map(|slice| &slice.faults)
    }

    /// Faults that nobody read in time.
    pub fn missed(&self) -> u64 {
        self.faults.iter().map(|slice| slice.missed).sum()
    }

    /// Faults at pages that are not among those listed.
    pub fn more_faults(&self) -> u64 {
        self.pages.iter().map(|slice| slice.more_faults).sum()
    }

    /// Pages that are not listed.
    pub fn more_pages(&self) -> u64 {
        self.pages.iter().map(|slice| slice.more_pages).sum()
    }
}
