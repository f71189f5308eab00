//! The checkpoint that a machine is made from. The command has read and checked every byte
//! of it; this process opens it again before it is confined.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use weft_checkpoint::{FileName, Set};
use weft_machine::{MachineState, Restore, SavedMachine};

/// A machine to be restored.
pub struct Restored {
    pub state: Box<MachineState>,
    /// Files that the daemons of other hosts have to open: for which node, under which number.
    pub files: Vec<(usize, u32, FileName)>,
}

/// Opens a checkpoint: what guest memory is read from, and the rest of the machine.
/// `hosts`: where the nodes are from node 1 on.
pub fn open(directory: &Path, hosts: &[String]) -> anyhow::Result<(Restore, Restored)> {
    let set = Set::open(directory)?;
    let saved: SavedMachine = serde_json::from_slice(&set.state()?).with_context(|| {
        let directory = directory.display();
        format!("the machine in {directory} was saved by another version of Weft")
    })?;
    let (mut servers, mut files) = (BTreeMap::new(), Vec::new());
    let mut numbers = BTreeMap::<usize, u32>::new();
    for (place, name) in set.pages_source()?.elsewhere() {
        let node = hosts.iter().position(|host| *host == place.host);
        let node = node.map(|index| index + 1).with_context(|| {
            let (path, host) = (name.path.display(), &place.host);
            format!("{path} is on {host}, where the machine has no node")
        })?;
        servers.insert(place.host.clone(), node);
        let number = numbers.entry(node).or_default();
        files.push((node, *number, name.clone()));
        *number += 1;
    }
    let restore = Restore {
        set,
        servers,
        updated: saved.updated,
    };
    let state = Box::new(saved.state);
    Ok((restore, Restored { state, files }))
}
