//! Disks: files that lie here are opened, the ways to those of others made.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use crate::Slice;
use crate::delegation::Scheme;
use weft_virtio::block;
use weft_virtio::block::{Block, BlockOptions, Geometry, QUEUES_MAX};

use super::DeviceError;
use super::{DeviceList, Disk};

/// Files of disks that were opened before the machine was put together, by the number
/// of the disk. The others are opened by their paths.
#[derive(Debug, Default)]
pub struct OpenDisks(BTreeMap<usize, Arc<File>>);

impl OpenDisks {
    /// This file, opened with [`Disk::open_flags`], is that disk.
    pub fn insert(&mut self, disk: usize, file: File) {
        self.0.insert(disk, Arc::new(file));
    }
}

impl DeviceList<'_> {
    /// Opens the disks of a machine on one node.
    ///
    /// # Errors
    /// The first that cannot be opened.
    pub fn open_disks(&self, opened: &OpenDisks) -> Result<Vec<Block>, DeviceError> {
        let disks = 0..self.disks.len();
        let open = |disk| Ok(Block::open(&options(self, disk, opened))?);
        disks.map(open).collect()
    }

    /// Opens the disks of a slice, and closes them again.
    ///
    /// # Errors
    /// The first that cannot be opened.
    pub fn try_disks(&self, slice: usize, opened: &OpenDisks) -> Result<(), DeviceError> {
        let disks = self.disks.iter().enumerate();
        for (number, _) in disks.filter(|(_, disk)| disk.slice as usize == slice) {
            Block::open_for(&options(self, number, opened), |_| false)?;
        }
        Ok(())
    }

    /// Opens the disks that lie on `slice`, and makes the ways to those that do not.
    ///
    /// # Errors
    /// The first disk that cannot be had.
    pub fn disks_of_slice(
        &self,
        slice: &Arc<Slice>,
        opened: &OpenDisks,
    ) -> Result<Vec<(Scheme, Block)>, DeviceError> {
        let disks = self.disks;
        let schemes: Vec<Scheme> = disks
            .iter()
            .map(|disk| {
                let (owner, path) = (disk.slice as usize, disk.data_path);
                Scheme::new(slice.locations(), owner, path, queues(self), 1)
            })
            .collect();
        let mut here = Vec::new();
        for (number, scheme) in schemes.iter().enumerate() {
            let serves = |queue| scheme.server(queue) == slice.number();
            let open = (scheme.owner() == slice.number())
                .then(|| Block::open_for(&options(self, number, opened), serves))
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
                    Block::elsewhere(geometry, ways.map_err(DeviceError::Delegation)?)?
                }
            };
            let served = delegation.serve_disk(device, &scheme, &block);
            served.map_err(DeviceError::Delegation)?;
            all.push((scheme, block));
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

fn described(slice: &Slice, owner: usize, disk: usize) -> Result<Geometry, DeviceError> {
    let wrong = |reason| DeviceError::Described {
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
        file: opened.0.get(&number).cloned(),
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
