//! A device, on the primary, whose queues are served by several.

use std::io;
use std::sync::Arc;

use weft_confine::ThreadKind;
use weft_virtio::{
    ConfigSpace, DeviceError, DeviceState, Handler, Kind, Ring, StateError, VirtioDevice,
};

use super::RemoteDevices;
use super::proxy::{QueueProxy, StopCompletion};
use super::queue_placement::QueuePlacement;
use crate::PRIMARY;
use crate::message::device::Address;

/// The device as it is here, and stand-ins for what is not.
pub struct PartitionedDevice {
    device: Box<dyn VirtioDevice>,
    number: u8,
    remote: Arc<RemoteDevices>,
    completions: Vec<Arc<StopCompletion>>,
}

impl PartitionedDevice {
    /// `device` serves those of its `groups` that are served here, as the placement of device
    /// `number` says at the moment when its handlers are made.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        number: u8,
        groups: u16,
        remote: Arc<RemoteDevices>,
    ) -> io::Result<Self> {
        let completion = |group| {
            let completion = Arc::new(StopCompletion::new()?);
            remote.add_completion(Address::new(number, group), completion.clone());
            Ok(completion)
        };
        let completions = (0..groups)
            .map(completion)
            .collect::<io::Result<Vec<_>>>()?;
        Ok(Self {
            device,
            number,
            remote,
            completions,
        })
    }

    /// The proxy for a queue group; the driver uses at least one queue of the group.
    fn proxy(
        &self,
        (placement, group): (&QueuePlacement, u16),
        features: u64,
        rings: &mut [Option<Ring>],
    ) -> Option<Box<dyn Handler>> {
        let slice = placement.server(group);
        if slice == PRIMARY {
            return None;
        }
        let queues = placement.queues(group);
        let queues = usize::from(queues.start)..usize::from(queues.end);
        let rings: Vec<Ring> = rings
            .get_mut(queues)?
            .iter_mut()
            .filter_map(Option::take)
            .collect();
        let group_address = Address::new(self.number, group);
        let completion = self.completions.get(usize::from(group))?.clone();
        (!rings.is_empty()).then(|| {
            Box::new(QueueProxy::new(
                self.remote.clone(),
                completion,
                (group_address, slice),
                features,
                rings,
            )) as Box<dyn Handler>
        })
    }
}

impl VirtioDevice for PartitionedDevice {
    fn kind(&self) -> Kind {
        self.device.kind()
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        self.device.queue_sizes()
    }

    fn workers(&self) -> usize {
        self.device.workers()
    }

    fn thread_kind(&self) -> ThreadKind {
        self.device.thread_kind()
    }

    fn configuration(&self) -> Arc<ConfigSpace> {
        self.device.configuration()
    }

    fn activate(
        &mut self,
        features: u64,
        mut rings: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        let mut handlers: Vec<Box<dyn Handler>> = Vec::new();
        if let Some(placement) = self.remote.placement(self.number) {
            let groups = 0..placement.groups();
            let proxy = |group| self.proxy((&placement, group), features, &mut rings);
            handlers.extend(groups.filter_map(proxy));
        }
        handlers.extend(self.device.activate(features, rings)?);
        Ok(handlers)
    }

    fn reset(&mut self) {
        self.device.reset();
    }

    fn save(&self) -> DeviceState {
        self.device.save()
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        self.device.restore(state)
    }

    fn announce(&mut self) {
        self.device.announce();
    }

    fn release_backing(&mut self) {
        self.device.release_backing();
    }

    fn claim_backing(&mut self) -> Result<(), String> {
        self.device.claim_backing()
    }
}
