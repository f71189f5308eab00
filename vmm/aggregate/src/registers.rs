//! Registers of devices that are on another slice, and the bytes of a serial port there.
//!
//! A vCPU that touches one waits, outside of guest code, for the answer. On the
//! device's slice a thread of its own does what is asked: a device may wait for
//! its workers, and these for pages, which the thread that reads the link brings.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Duration;

use weft_platform::bus::{Bus, BusDevice};
use weft_platform::role::RolePlace;

use super::message::{RegisterAccess, SliceMessage, Space};
use super::peers::Peers;
use super::pending_requests::PendingRequests;

/// Requests that may wait on a device's slice: each vCPU has one at most, and the console.
pub(super) const WAITING_MAX: usize = 257;
/// How often the thread looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(500);

/// The way to the devices of other slices.
#[derive(Clone)]
pub(super) struct RemoteAccess {
    pub peers: Arc<Peers>,
    pub pending: Arc<PendingRequests<u64>>,
    pub patience: Duration,
}

impl RemoteAccess {
    /// Sends a request to `slice` and waits for the reply.
    pub fn ask<'a>(
        &self,
        slice: usize,
        request: impl FnOnce(u64) -> SliceMessage<'a>,
    ) -> Option<u64> {
        let answer = self.pending.ask(slice, self.patience, |ticket| {
            self.peers.send(slice, &request(ticket));
        });
        if answer.is_none() {
            self.peers.lost(slice, "an access to a device had no reply");
        }
        answer
    }

    /// Registers at `address` of `slice`.
    fn access(&self, slice: usize, access: RegisterAccess) -> Option<u64> {
        self.ask(slice, |ticket| SliceMessage::Access { ticket, access })
    }

    fn read(&self, slice: usize, (space, address): (Space, u64), data: &mut [u8]) {
        let access = RegisterAccess {
            address,
            space,
            size: data.len() as u8,
            value: None,
        };
        let value = self.access(slice, access).unwrap_or(u64::MAX);
        let length = data.len().min(8);
        data[..length].copy_from_slice(&value.to_le_bytes()[..length]);
    }

    fn write(&self, slice: usize, (space, address): (Space, u64), data: &[u8]) {
        let mut value = [0; 8];
        let length = data.len().min(8);
        value[..length].copy_from_slice(&data[..length]);
        let access = RegisterAccess {
            address,
            space,
            size: data.len() as u8,
            value: Some(u64::from_le_bytes(value)),
        };
        self.access(slice, access);
    }
}

/// All registers of one space that are on `slice`.
pub(super) struct RemoteRegisters {
    pub space: Space,
    pub slice: usize,
    pub way: RemoteAccess,
}

impl BusDevice for RemoteRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.way.read(self.slice, (self.space, offset), data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.way.write(self.slice, (self.space, offset), data);
    }
}

/// The registers of a device that each slice has, and that only a role's holder uses.
pub(super) struct RoleRegisters {
    pub place: Arc<RolePlace>,
    pub space: Space,
    /// Of its first register.
    pub start: u64,
    /// The device as it is here.
    pub device: Arc<dyn BusDevice>,
    pub way: RemoteAccess,
}

impl RoleRegisters {
    fn at(&self, offset: u64) -> (Space, u64) {
        (self.space, self.start + offset)
    }
}

impl BusDevice for RoleRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.place.is_here() {
            true => self.device.read(offset, data),
            false => self.way.read(self.place.holder(), self.at(offset), data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match self.place.is_here() {
            true => self.device.write(offset, data),
            false => self.way.write(self.place.holder(), self.at(offset), data),
        }
    }
}

/// The serial port of a slice, and what it is connected to.
pub trait SerialConsole: Send + Sync {
    /// Shows the user what the guest wrote. On slice 0.
    fn show(&self, bytes: &[u8]);
    /// Types into the serial port here; returns how many bytes it took.
    fn type_in(&self, bytes: &[u8]) -> usize;
}

/// What another slice wants of the devices here.
pub(super) enum Wanted {
    Register(RegisterAccess),
    /// Bytes for the serial port.
    Input(Vec<u8>),
    /// Bytes of the serial port.
    Output(Vec<u8>),
}

/// A request of another slice.
pub(super) struct DeviceRequest {
    pub from: usize,
    pub ticket: u64,
    pub wanted: Wanted,
}

/// Does what other slices ask of the devices here.
pub(super) struct DeviceServer {
    pub peers: Arc<Peers>,
    pub mmio: Bus,
    pub ports: Bus,
    pub serial: Arc<dyn SerialConsole>,
    pub requests: Receiver<DeviceRequest>,
}

impl DeviceServer {
    /// Until the machine is over.
    pub fn run(self) {
        while !self.peers.is_over() {
            match self.requests.recv_timeout(LOOK) {
                Ok(request) => self.serve(&request),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn serve(&self, request: &DeviceRequest) {
        let value = match &request.wanted {
            Wanted::Register(access) => self.access(access),
            Wanted::Input(bytes) => self.serial.type_in(bytes) as u64,
            Wanted::Output(bytes) => {
                self.serial.show(bytes);
                0
            }
        };
        let message = SliceMessage::Accessed {
            ticket: request.ticket,
            value,
        };
        self.peers.send(request.from, &message);
    }

    fn access(&self, access: &RegisterAccess) -> u64 {
        let bus = match access.space {
            Space::Memory => &self.mmio,
            Space::Port => &self.ports,
        };
        let mut bytes = access.value.unwrap_or(0).to_le_bytes();
        let data = &mut bytes[..usize::from(access.size)];
        match access.value {
            Some(_) => bus.write(access.address, data),
            None => bus.read(access.address, data),
        }
        u64::from_le_bytes(bytes)
    }
}

/// Where requests wait for the [`DeviceServer`].
pub(super) type DeviceRequestSender = SyncSender<DeviceRequest>;

/// A slice whose serial port is not used, for tests.
#[cfg(test)]
pub(super) struct NoSerial;

#[cfg(test)]
impl SerialConsole for NoSerial {
    fn show(&self, bytes: &[u8]) {
        panic!("{bytes:?}");
    }

    fn type_in(&self, bytes: &[u8]) -> usize {
        panic!("{bytes:?}");
    }
}
