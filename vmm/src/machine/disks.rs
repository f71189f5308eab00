//! The disks of a configuration, as one slice sees them: files that lie here are
//! opened and described to the others, those of others are heard of.

use std::sync::Arc;

use super::MachineError;
use super::configuration::{Configuration, Disk};
use crate::slice::Slice;
use crate::slice::delegation::Scheme;
use crate::virtio::block::{Block, BlockOptions, Geometry, QUEUES_MAX};

/// Opens the disks of a machine on one node.
pub(super) fn open(configuration: &Configuration) -> Result<Vec<Block>, MachineError> {
    let disks = configuration.disks.iter();
    let open = |disk| Ok(Block::open(&options(configuration, disk))?);
    disks.map(open).collect()
}

impl Configuration {
    /// Opens the disks of a slice, as it will when the machine is put together: what
    /// cannot be opened is said before anything runs.
    ///
    /// # Errors
    /// The first that cannot.
    pub fn try_disks(&self, slice: usize) -> Result<(), MachineError> {
        let disks = self.disks.iter();
        for disk in disks.filter(|disk| disk.slice as usize == slice) {
            Block::open_for(&options(self, disk), |_| false)?;
        }
        Ok(())
    }
}

/// Opens what lies on `slice`, and makes the ways to what does not. Each slice
/// tells first and listens then, so that none waits for one that waits for it.
pub(crate) fn open_for(
    configuration: &Configuration,
    slice: &Arc<Slice>,
) -> Result<Vec<(Scheme, Block)>, MachineError> {
    let disks = &configuration.disks;
    let schemes: Vec<Scheme> = disks
        .iter()
        .map(|disk| {
            let (owner, path) = (disk.slice as usize, disk.data_path);
            Scheme::new(slice.locations(), owner, path, queues(configuration), 1)
        })
        .collect();
    let mut here = Vec::new();
    for (disk, scheme) in disks.iter().zip(&schemes) {
        let serves = |queue| scheme.server(queue) == slice.number();
        let open = (scheme.owner() == slice.number())
            .then(|| Block::open_for(&options(configuration, disk), serves))
            .transpose()?;
        if let Some(block) = &open {
            // It is plain data: it always has a text.
            slice.describe(serde_json::to_vec(block.geometry()).unwrap_or_default());
        }
        here.push(open);
    }
    let carried = |scheme: &&Scheme| scheme.owner() != slice.number();
    let own_units = |scheme: &Scheme| scheme.units_of(slice.number()).count();
    let carriers = schemes.iter().filter(carried).map(own_units).sum();
    let mut all = Vec::new();
    for (number, (scheme, open)) in schemes.into_iter().zip(here).enumerate() {
        let device = number as u8;
        let delegation = slice.delegation();
        delegation.add_scheme(device, &scheme);
        let block = match open {
            Some(block) => block,
            None => {
                let geometry = described(slice, scheme.owner(), number)?;
                let ways = delegation.carriers(device, &scheme, carriers);
                Block::elsewhere(geometry, ways.map_err(MachineError::Delegation)?)?
            }
        };
        let served = delegation.serve_disk(device, &scheme, &block);
        served.map_err(MachineError::Delegation)?;
        all.push((scheme, block));
    }
    Ok(all)
}

fn described(slice: &Slice, owner: usize, disk: usize) -> Result<Geometry, MachineError> {
    let wrong = |reason| MachineError::Described {
        slice: owner,
        device: "disk",
        number: disk,
        reason,
    };
    let json = slice.next_description(owner).map_err(wrong)?;
    let geometry: Geometry =
        serde_json::from_slice(&json).map_err(|error| wrong(error.to_string()))?;
    match geometry.is_possible() {
        true => Ok(geometry),
        false => Err(wrong(format!("{geometry:?}"))),
    }
}

fn options(configuration: &Configuration, disk: &Disk) -> BlockOptions {
    BlockOptions {
        read_only: disk.read_only,
        direct: disk.direct,
        queues: queues(configuration),
        ..BlockOptions::new(&disk.path)
    }
}

/// As many as vCPUs, so that each has its own.
fn queues(configuration: &Configuration) -> u16 {
    configuration.cpus.min(QUEUES_MAX.into()) as u16
}
