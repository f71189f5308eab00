//! Disks: files that lie here are opened; disks of other slices get a client.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use crate::Slice;
use crate::remote_devices::QueuePlacement;
use weft_virtio::block;
use weft_virtio::block::{Block, BlockOptions, Geometry, QUEUES_MAX};

use super::DeviceSetupError;
use super::{DeviceList, Disk};

/// Files of disks that were opened before the machine was put together, by the number
/// of the disk. The others are opened by their paths.
#[derive(Debug, Default)]
pub struct OpenDisks {
    files: BTreeMap<usize, Arc<File>>,
    /// See [`BlockOptions::locked_elsewhere`].
    locked_elsewhere: bool,
}

impl OpenDisks {
    /// Disks that another process still has.
    pub fn locked_elsewhere() -> Self {
        Self {
            files: BTreeMap::new(),
            locked_elsewhere: true,
        }
    }

    /// This file, opened with [`Disk::open_flags`], is that disk.
    pub fn insert(&mut self, disk: usize, file: File) {
        self.files.insert(disk, Arc::new(file));
    }
}

impl DeviceList<'_> {
    /// Opens the disks of a machine on one node.
    ///
    /// # Errors
    /// The first that cannot be opened.
    pub fn open_disks(&self, opened: &OpenDisks) -> Result<Vec<Block>, DeviceSetupError> {
        let disks = 0..self.disks.len();
        let open = |disk| Ok(Block::open(&options(self, disk, opened))?);
        disks.map(open).collect()
    }

    /// Opens the disks of a slice, and closes them again.
    ///
    /// # Errors
    /// The first that cannot be opened.
    pub fn try_disks(&self, slice: usize, opened: &OpenDisks) -> Result<(), DeviceSetupError> {
        let disks = self.disks.iter().enumerate();
        for (number, _) in disks.filter(|(_, disk)| disk.slice as usize == slice) {
            Block::open_for(&options(self, number, opened), |_| false)?;
        }
        Ok(())
    }

    /// Opens the disks that lie on `slice`, and makes clients of the others.
    ///
    /// # Errors
    /// The first disk that cannot be had.
    pub fn disks_of_slice(
        &self,
        slice: &Arc<Slice>,
        opened: &OpenDisks,
    ) -> Result<Vec<(QueuePlacement, Block)>, DeviceSetupError> {
        let disks = self.disks;
        let placements: Vec<QueuePlacement> = disks
            .iter()
            .map(|disk| {
                let (owner, path) = (disk.slice as usize, disk.data_path);
                QueuePlacement::new(slice.locations(), owner, path, queues(self), 1)
            })
            .collect();
        let mut here = Vec::new();
        for (number, placement) in placements.iter().enumerate() {
            let serves = |queue| placement.may_serve(slice.number(), queue);
            let open = (placement.owner() == slice.number())
                .then(|| Block::open_for(&options(self, number, opened), serves))
                .transpose()?;
            if let Some(block) = &open {
                // It is plain data: it always has a text.
                slice.describe(serde_json::to_vec(block.geometry()).unwrap_or_default());
            }
            here.push(open);
        }
        let is_remote = |placement: &&QueuePlacement| placement.owner() != slice.number();
        let own_groups = |placement: &QueuePlacement| placement.groups_for(slice.number()).count();
        let clients = placements.iter().filter(is_remote).map(own_groups).sum();
        let mut all = Vec::new();
        for (number, (placement, open)) in placements.into_iter().zip(here).enumerate() {
            let device = number as u8;
            let remote = slice.remote_devices();
            remote.add_placement(device, format!("disk {number}"), &placement);
            let block = match open {
                Some(block) => block,
                None => {
                    let geometry = described(slice, placement.owner(), number)?;
                    let clients = remote.block_clients(device, &placement, clients);
                    Block::with_back_ends(
                        geometry,
                        clients.map_err(DeviceSetupError::RemoteDevices)?,
                    )?
                }
            };
            let served = remote.serve_disk(device, &placement, &block);
            served.map_err(DeviceSetupError::RemoteDevices)?;
            all.push((placement, block));
        }
        Ok(all)
    }
}

impl Disk {
    /// Flags of open(2) for its file.
    pub fn open_flags(&self) -> i32 {
        block::open_flags(self.read_only, self.direct)
    }
}

fn described(slice: &Slice, owner: usize, disk: usize) -> Result<Geometry, DeviceSetupError> {
    let wrong = |reason| DeviceSetupError::Described {
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

fn options(list: &DeviceList<'_>, number: usize, opened: &OpenDisks) -> BlockOptions {
    let disk = &list.disks[number];
    BlockOptions {
        file: opened.files.get(&number).cloned(),
        locked_elsewhere: opened.locked_elsewhere,
        read_only: disk.read_only,
        direct: disk.direct,
        queues: queues(list),
        ..BlockOptions::new(&disk.path)
    }
}

/// As many as vCPUs, so that each has its own.
fn queues(list: &DeviceList<'_>) -> u16 {
    list.cpus.min(QUEUES_MAX.into()) as u16
}
