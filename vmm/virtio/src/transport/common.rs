//! The common configuration structure (4.1.4.3) and what writes to it do.

use std::time::Instant;

use weft_confine::lock;

use super::{Phase, RESET_WAIT, State, Transport};
use crate::ring::QueueState;
use crate::{DeviceError, FEATURE_VERSION_1};

/// Bytes of the structure as drivers know it since 1.0.
pub const COMMON_SIZE: u64 = 0x38;
const FEATURES_OK: u8 = 8;
const DRIVER_OK: u8 = 4;
const NEEDS_RESET: u8 = 64;
/// What a driver may set: acknowledge, driver, driver OK, features OK, failed.
const STATUS_WRITABLE: u8 = 1 | 2 | DRIVER_OK | FEATURES_OK | 128;

/// What the driver has written.
pub struct Registers {
    offered: u64,
    max_sizes: Vec<u16>,
    pub(super) device_feature_select: u32,
    pub(super) driver_feature_select: u32,
    pub(super) driver_features: u64,
    pub(super) status: u8,
    pub(super) queue_select: u16,
    pub(super) queues: Vec<QueueState>,
}

impl Registers {
    /// After a reset.
    pub fn new(offered: u64, max_sizes: &[u16]) -> Self {
        let queue = |size: &u16| QueueState {
            size: *size,
            ..QueueState::default()
        };
        Self {
            offered,
            max_sizes: max_sizes.to_vec(),
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            status: 0,
            queue_select: 0,
            queues: max_sizes.iter().map(queue).collect(),
        }
    }

    /// Everything as at first.
    pub fn reset(&mut self) {
        *self = Self::new(self.offered, &self.max_sizes);
    }

    /// What was agreed on.
    pub fn features(&self) -> u64 {
        self.driver_features & self.offered
    }

    /// Whether the driver's choice of features can be had.
    pub fn features_fit(&self) -> bool {
        self.driver_features & !self.offered == 0 && self.driver_features & FEATURE_VERSION_1 != 0
    }

    /// Whether a driver that agreed on `features` elsewhere, if its `status` says
    /// that it did, finds them here.
    pub fn serves(&self, status: u8, features: u64) -> bool {
        status & FEATURES_OK == 0 || features & !self.offered == 0
    }

    /// Whether the device runs, as far as the driver says.
    pub fn driver_ok(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    /// A queue that is there, and its largest size.
    pub fn queue(&self, index: u16) -> (&QueueState, u16) {
        let index = usize::from(index);
        (&self.queues[index], self.max_sizes[index])
    }

    /// The selected half of features.
    fn half(features: u64, select: u32) -> u32 {
        match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        }
    }

    fn selected(&self) -> Option<&QueueState> {
        self.queues.get(usize::from(self.queue_select))
    }

    /// The selected queue while it may be changed.
    fn changeable(&mut self) -> Option<&mut QueueState> {
        if self.driver_ok() {
            return None;
        }
        let queue = self.queues.get_mut(usize::from(self.queue_select))?;
        (!queue.enabled).then_some(queue)
    }

    fn set_driver_features(&mut self, value: u32) {
        if self.status & FEATURES_OK != 0 {
            return;
        }
        let shift = match self.driver_feature_select {
            0 => 0,
            1 => 32,
            // No features there: accepting some makes FEATURES_OK fail.
            _ => {
                self.driver_features |= u64::from(value != 0) << 63;
                return;
            }
        };
        self.driver_features &= !(0xffff_ffff << shift);
        self.driver_features |= u64::from(value) << shift;
    }
}

/// Replaces the low or high half, or all, of an address.
fn set_address(address: &mut u64, within: u64, data: &[u8]) {
    let mut bytes = address.to_le_bytes();
    for (old, new) in bytes.iter_mut().skip(within as usize).zip(data) {
        *old = *new;
    }
    *address = u64::from_le_bytes(bytes);
}

fn number(data: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    for (byte, value) in bytes.iter_mut().zip(data) {
        *byte = *value;
    }
    u64::from_le_bytes(bytes)
}

impl Transport {
    pub(super) fn read_common(&self, offset: u64, data: &mut [u8]) {
        let mut state = lock(&self.state);
        if offset == 0x14 {
            self.try_reset(&mut state, Instant::now());
        }
        let value = self.common_value(&state, offset, data.len());
        drop(state);
        if offset == 0x14 {
            self.publish_routes();
        }
        for (byte, value) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = value;
        }
    }

    /// Registers are read as what they are (4.1.3.1); anything else is zero.
    fn common_value(&self, state: &State, offset: u64, length: usize) -> u64 {
        let registers = &state.registers;
        let queue = registers.selected();
        let of_queue = |value: fn(&QueueState) -> u64| queue.map_or(0, value);
        let address = |value: u64| {
            let shift = 8 * (offset & 4);
            value >> shift
        };
        match (offset, length) {
            (0x00, 4) => registers.device_feature_select.into(),
            (0x04, 4) => Registers::half(registers.offered, registers.device_feature_select).into(),
            (0x08, 4) => registers.driver_feature_select.into(),
            (0x0c, 4) => {
                let select = registers.driver_feature_select;
                Registers::half(registers.driver_features, select).into()
            }
            (0x10, 2) => self.interrupt.vector(None).into(),
            (0x12, 2) => registers.queues.len() as u64,
            (0x14, 1) => {
                let needs_reset = self.interrupt.needs_reset();
                (registers.status | if needs_reset { NEEDS_RESET } else { 0 }).into()
            }
            (0x15, 1) => self.configuration.generation().into(),
            (0x16, 2) => registers.queue_select.into(),
            (0x18, 2) => of_queue(|queue| queue.size.into()),
            (0x1a, 2) => self.interrupt.vector(Some(registers.queue_select)).into(),
            (0x1c, 2) => of_queue(|queue| queue.enabled.into()),
            (0x1e, 2) if queue.is_some() => registers.queue_select.into(),
            (0x20 | 0x24, 4) | (0x20, 8) => address(of_queue(|queue| queue.descriptors)),
            (0x28 | 0x2c, 4) | (0x28, 8) => address(of_queue(|queue| queue.driver)),
            (0x30 | 0x34, 4) | (0x30, 8) => address(of_queue(|queue| queue.device)),
            _ => 0,
        }
    }

    pub(super) fn write_common(&self, offset: u64, data: &[u8]) {
        let mut state = lock(&self.state);
        let status = offset == 0x14 && data.len() == 1;
        if matches!(state.phase, Phase::Resetting) && !status {
            return;
        }
        let value = number(data);
        let registers = &mut state.registers;
        match (offset, data.len()) {
            (0x00, 4) => registers.device_feature_select = value as u32,
            (0x08, 4) => registers.driver_feature_select = value as u32,
            (0x0c, 4) => registers.set_driver_features(value as u32),
            (0x10, 2) => self.interrupt.set_vector(None, value as u16),
            (0x14, 1) => self.write_status(&mut state, value as u8),
            (0x16, 2) => registers.queue_select = value as u16,
            (0x1a, 2) => {
                let queue = Some(registers.queue_select);
                self.interrupt.set_vector(queue, value as u16);
            }
            _ => write_queue(registers, offset, data),
        }
        drop(state);
        if matches!(offset, 0x14 | 0x1a) {
            self.publish_routes();
        }
    }

    fn write_status(&self, state: &mut State, value: u8) {
        if value == 0 {
            return self.start_reset(state, RESET_WAIT);
        }
        if matches!(state.phase, Phase::Resetting) {
            return;
        }
        let registers = &mut state.registers;
        let before = registers.status;
        registers.status |= value & STATUS_WRITABLE;
        let set = registers.status & !before;
        if set & FEATURES_OK != 0 && !registers.features_fit() {
            // The driver sees that it did not stick (3.1.1, step 5).
            registers.status &= !FEATURES_OK;
        }
        if set & DRIVER_OK != 0 {
            if registers.status & FEATURES_OK == 0 {
                let early = "set DRIVER_OK before the features were negotiated";
                return self.interrupt.fail(&DeviceError::Driver(early));
            }
            self.start_device(state);
        }
    }
}

fn write_queue(registers: &mut Registers, offset: u64, data: &[u8]) {
    let Some(queue) = registers.changeable() else {
        return;
    };
    match (offset, data.len()) {
        (0x18, 2) => queue.size = number(data) as u16,
        (0x1c, 2) => queue.enabled = number(data) == 1,
        (0x20 | 0x24, 4) | (0x20, 8) => set_address(&mut queue.descriptors, offset & 4, data),
        (0x28 | 0x2c, 4) | (0x28, 8) => set_address(&mut queue.driver, offset & 4, data),
        (0x30 | 0x34, 4) | (0x30, 8) => set_address(&mut queue.device, offset & 4, data),
        _ => {}
    }
}
