//! The checkpoint that a machine is made from. The command has read and checked every byte
//! of it; this process opens it again before it is confined.

use std::path::Path;

use anyhow::Context;
use weft_checkpoint::Set;
use weft_machine::{MachineState, Restore, SavedMachine};

/// Opens a checkpoint: what guest memory is read from, and the rest of the machine.
pub fn open(directory: &Path) -> anyhow::Result<(Restore, MachineState)> {
    let set = Set::open(directory)?;
    let saved: SavedMachine = serde_json::from_slice(&set.state()?).with_context(|| {
        let directory = directory.display();
        format!("the machine in {directory} was saved by another version of Weft")
    })?;
    let restore = Restore {
        set,
        updated: saved.updated,
    };
    Ok((restore, saved.state))
}
