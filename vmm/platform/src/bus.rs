//! The address spaces of devices: memory-mapped registers, and ports.
//!
//! Ranges never overlap. A device is called with the offset into its range, on the thread of
//! the vCPU that accesses it, and must not wait for the guest.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock, RwLock};

use thiserror::Error;

/// The registers of a device. Accesses are 1, 2, 4 or 8 bytes.
pub trait BusDevice: Send + Sync {
    /// Fills `data` from the register at `offset`.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes `data` to the register at `offset`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// A range is empty, or overlaps that of another device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("address range {:#x} to {:#x} is empty or already in use", .0.start, .0.end)]
pub struct Overlap(pub Range<u64>);

/// By first address: one more than the last address, and the device.
type Devices = BTreeMap<u64, (u64, Arc<dyn BusDevice>)>;

/// An address space of devices: ports, or memory-mapped registers.
#[derive(Clone, Default)]
pub struct Bus {
    /// Guards only the map: released before a device is called.
    devices: Arc<RwLock<Devices>>,
    /// The fallback device: called with the whole address where no device is.
    fallback: Arc<OnceLock<Arc<dyn BusDevice>>>,
}

impl Bus {
    /// Inserts a device, whose registers are at `range`.
    pub fn insert(&self, range: Range<u64>, device: Arc<dyn BusDevice>) -> Result<(), Overlap> {
        let mut devices = self
            .devices
            .write()
            .unwrap_or_else(|poison| poison.into_inner());
        let taken = devices
            .range(..range.end)
            .next_back()
            .is_some_and(|(_, (end, _))| *end > range.start);
        if taken || range.is_empty() {
            return Err(Overlap(range));
        }
        devices.insert(range.start, (range.end, device));
        Ok(())
    }

    /// Removes the device whose range starts at `start`.
    pub fn remove(&self, start: u64) -> Option<Arc<dyn BusDevice>> {
        let mut devices = self
            .devices
            .write()
            .unwrap_or_else(|poison| poison.into_inner());
        devices.remove(&start).map(|(_, device)| device)
    }

    /// Sets the fallback device, which is called with the address as offset wherever no
    /// device is: it reaches the devices of other slices. Once.
    pub fn set_fallback(&self, fallback: Arc<dyn BusDevice>) {
        // Only the first fallback device counts.
        let _ = self.fallback.set(fallback);
    }

    /// Reads from the device at `address`; ones without a device.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match (self.find(address, data.len()), self.fallback.get()) {
            (Some((offset, device)), _) => device.read(offset, data),
            (None, Some(fallback)) => fallback.read(address, data),
            (None, None) => data.fill(0xff),
        }
    }

    /// Writes to the device at `address`; ignored without a device.
    pub fn write(&self, address: u64, data: &[u8]) {
        match (self.find(address, data.len()), self.fallback.get()) {
            (Some((offset, device)), _) => device.write(offset, data),
            (None, Some(fallback)) => fallback.write(address, data),
            (None, None) => {}
        }
    }

    fn find(&self, address: u64, length: usize) -> Option<(u64, Arc<dyn BusDevice>)> {
        let devices = self
            .devices
            .read()
            .unwrap_or_else(|poison| poison.into_inner());
        let (start, (end, device)) = devices.range(..=address).next_back()?;
        let last = address.checked_add(length as u64)?;
        (last <= *end).then(|| (address - start, device.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Constant(u8);

    impl BusDevice for Constant {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(self.0 + offset as u8);
        }
        fn write(&self, _: u64, _: &[u8]) {}
    }

    #[test]
    fn the_device_of_the_range_answers_with_its_offset() {
        let bus = Bus::default();
        bus.insert(0x100..0x108, Arc::new(Constant(1))).unwrap();
        bus.insert(0x108..0x110, Arc::new(Constant(50))).unwrap();
        assert_eq!(
            bus.insert(0x10f..0x120, Arc::new(Constant(0))),
            Err(Overlap(0x10f..0x120))
        );
        assert_eq!(
            bus.insert(0xff..0x101, Arc::new(Constant(0))),
            Err(Overlap(0xff..0x101))
        );
        let mut data = [0; 2];
        bus.read(0x10a, &mut data);
        assert_eq!(data, [52, 52]);
        // half outside: no device.
        bus.read(0x10f, &mut data);
        assert_eq!(data, [0xff, 0xff]);
        assert!(bus.remove(0x100).is_some());
        bus.read(0x100, &mut data);
        assert_eq!(data, [0xff, 0xff]);
    }
}
