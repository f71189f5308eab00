//! Where a secondary's vCPUs notify devices: the notification goes to the slice
//! that serves the queue, and the vCPU waits for nobody. (All other registers are
//! asked for; see [`crate::registers`].)

use std::sync::Arc;

use weft_platform::bus::BusDevice;
use weft_virtio::NOTIFY_MULTIPLIER;

use super::RemoteDevices;
use crate::message::device::{Address, DeviceMessage};

/// One device's.
pub(super) struct Doorbells {
    pub device: u8,
    pub remote: Arc<RemoteDevices>,
}

impl BusDevice for Doorbells {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, _: &[u8]) {
        let queue = (offset / NOTIFY_MULTIPLIER) as u16;
        let address = Address::new(self.device, queue);
        match self.remote.server_of(address) {
            slice if slice == self.remote.number => self.remote.kick(address),
            slice => self.remote.send(slice, address, DeviceMessage::Kick),
        }
    }
}
