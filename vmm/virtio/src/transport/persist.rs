//! State of a paused device: registers, queues, PCI function, and the device's own.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_confine::lock;
use weft_platform::part::{Part, PartError, Persist, Version};
use weft_platform::pci::EndpointState;

use super::{Phase, Transport};
use crate::ring::QueueState;
use crate::{DeviceState, StateError, VirtioError};

/// How long I/O in flight may take when the machine pauses.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// A queue and where its interrupt goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedQueue {
    queue: QueueState,
    vector: u16,
}

/// Everything about a device that a driver can see. Its version is also that of the
/// state of each device type, which is a part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
    version: Version<1>,
    endpoint: EndpointState,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    status: u8,
    needs_reset: bool,
    isr: u8,
    queue_select: u16,
    configuration_vector: u16,
    queues: Vec<SavedQueue>,
    device: DeviceState,
}

impl Transport {
    /// The state of a paused device; nothing while it runs.
    pub fn save(&self) -> Option<TransportState> {
        let state = lock(&self.state);
        let Phase::Paused(handlers) = &state.phase else {
            return None;
        };
        let registers = &state.registers;
        let mut queues: Vec<_> = (0..)
            .zip(&registers.queues)
            .map(|(index, queue)| SavedQueue {
                queue: *queue,
                vector: self.interrupt.vector(Some(index)),
            })
            .collect();
        for ring in handlers.iter().flat_map(|handler| handler.rings()) {
            if let Some(saved) = queues.get_mut(usize::from(ring.index())) {
                saved.queue = ring.state();
            }
        }
        Some(TransportState {
            version: Version,
            endpoint: self.endpoint.save(),
            device_feature_select: registers.device_feature_select,
            driver_feature_select: registers.driver_feature_select,
            driver_features: registers.driver_features,
            status: registers.status,
            needs_reset: self.interrupt.needs_reset(),
            isr: self.interrupt.isr(),
            queue_select: registers.queue_select,
            configuration_vector: self.interrupt.vector(None),
            queues,
            device: state.device.save(),
        })
    }

    /// Becomes `saved`, paused. The device must be fresh, or paused.
    pub fn restore(&self, saved: &TransportState) -> Result<(), VirtioError> {
        let mut state = lock(&self.state);
        let wrong = |source| VirtioError::State {
            device: self.name.clone(),
            source,
        };
        if matches!(state.phase, Phase::Running | Phase::Resetting | Phase::Gone) {
            return Err(wrong(StateError("it is running, or gone")));
        }
        if saved.queues.len() != state.registers.queues.len() {
            return Err(wrong(StateError("another number of queues")));
        }
        if !state.registers.serves(saved.status, saved.driver_features) {
            let lacks = "its driver uses features that this device lacks";
            return Err(wrong(StateError(lacks)));
        }
        state.phase = Phase::Paused(Vec::new());
        self.endpoint.restore(&saved.endpoint)?;
        state.device.restore(&saved.device).map_err(wrong)?;
        let registers = &mut state.registers;
        registers.reset();
        registers.device_feature_select = saved.device_feature_select;
        registers.driver_feature_select = saved.driver_feature_select;
        registers.driver_features = saved.driver_features;
        registers.status = saved.status;
        registers.queue_select = saved.queue_select;
        for ((index, queue), saved) in (0..).zip(&mut registers.queues).zip(&saved.queues) {
            *queue = saved.queue;
            self.interrupt.set_vector(Some(index), saved.vector);
        }
        self.interrupt.set_vector(None, saved.configuration_vector);
        self.interrupt.restore(saved.isr, saved.needs_reset);
        if registers.driver_ok() {
            match self.make_handlers(&mut state) {
                Ok(handlers) => state.phase = Phase::Paused(handlers),
                // It had stopped because of these queues.
                Err(_) if saved.needs_reset => {}
                Err(source) => {
                    let device = self.name.clone();
                    return Err(VirtioError::Queues { device, source });
                }
            }
        }
        Ok(())
    }
}

impl Part for Transport {
    fn pause(&self) -> Result<(), PartError> {
        Transport::pause(self, PAUSE_MAX).map_err(|error| PartError::Busy(error.to_string()))
    }

    fn resume(&self) -> Result<(), PartError> {
        Transport::resume(self);
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counters = Transport::counters(self);
        let mut list = vec![
            ("kicks", counters.kicks),
            ("requests", counters.requests),
            ("interrupts", counters.interrupts),
            ("faults", counters.faults),
        ];
        list.extend(lock(&self.state).device.counters());
        list
    }
}

impl Persist for Transport {
    type State = TransportState;

    fn save(&self) -> Result<TransportState, PartError> {
        let state = Transport::save(self);
        state.ok_or_else(|| PartError::Busy(format!("{}: not paused", self.name)))
    }

    fn restore(&self, state: &TransportState) -> Result<(), PartError> {
        Transport::restore(self, state).map_err(|error| PartError::Misfit(whole_message(&error)))
    }
}

/// An error's words with those of its sources.
fn whole_message(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", whole_message(source)),
        None => error.to_string(),
    }
}
