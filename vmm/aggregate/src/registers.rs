//! Registers of devices that are on another slice.
//!
//! A vCPU that touches one waits, outside of guest code, for the answer. On the
//! device's slice a thread of its own does what is asked: a device may wait for
//! its workers, and these for pages, which the thread that reads the link brings.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Duration;

use weft_platform::bus::{Bus, BusDevice};

use super::message::{RegisterAccess, SliceMessage, Space};
use super::peers::Peers;
use super::pending_requests::PendingRequests;

/// Accesses that may wait on a device's slice: each vCPU has one at most.
pub(super) const WAITING_MAX: usize = 256;
/// How often the thread looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(500);

/// All registers of one space that are on another slice.
pub(super) struct RemoteRegisters {
    pub space: Space,
    /// The slice that has them.
    pub slice: usize,
    pub peers: Arc<Peers>,
    pub pending: Arc<PendingRequests<u64>>,
    pub patience: Duration,
}

impl RemoteRegisters {
    fn ask(&self, address: u64, size: usize, value: Option<u64>) -> Option<u64> {
        let access = RegisterAccess {
            address,
            space: self.space,
            size: size as u8,
            value,
        };
        let answer = self.pending.ask(self.slice, self.patience, |ticket| {
            self.peers
                .send(self.slice, &SliceMessage::Access { ticket, access });
        });
        if answer.is_none() {
            self.peers
                .lost(self.slice, "an access to a device's register had no reply");
        }
        answer
    }
}

impl BusDevice for RemoteRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let value = self.ask(offset, data.len(), None).unwrap_or(u64::MAX);
        let length = data.len().min(8);
        data[..length].copy_from_slice(&value.to_le_bytes()[..length]);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut value = [0; 8];
        let length = data.len().min(8);
        value[..length].copy_from_slice(&data[..length]);
        self.ask(offset, data.len(), Some(u64::from_le_bytes(value)));
    }
}

/// An access that another slice asked for.
pub(super) struct RegisterRequest {
    pub from: usize,
    pub ticket: u64,
    pub access: RegisterAccess,
}

/// Does what other slices ask of the devices here.
pub(super) struct RegisterServer {
    pub peers: Arc<Peers>,
    pub mmio: Bus,
    pub ports: Bus,
    pub requests: Receiver<RegisterRequest>,
}

impl RegisterServer {
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

    fn serve(&self, request: &RegisterRequest) {
        let RegisterAccess {
            address,
            space,
            size,
            value,
        } = request.access;
        let bus = match space {
            Space::Memory => &self.mmio,
            Space::Port => &self.ports,
        };
        let mut bytes = value.unwrap_or(0).to_le_bytes();
        let data = &mut bytes[..usize::from(size)];
        match value {
            Some(_) => bus.write(address, data),
            None => bus.read(address, data),
        }
        let message = SliceMessage::Accessed {
            ticket: request.ticket,
            value: u64::from_le_bytes(bytes),
        };
        self.peers.send(request.from, &message);
    }
}

/// Where accesses wait for the [`RegisterServer`].
pub(super) type RegisterRequestSender = SyncSender<RegisterRequest>;
