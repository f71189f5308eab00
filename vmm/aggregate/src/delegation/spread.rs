//! A device, on the primary, whose queues are served by several.

use std::io;
use std::sync::Arc;

use weft_confine::ThreadKind;
use weft_virtio::{ConfigSpace, DeviceState, Fault, Handler, Kind, Ring, StateError, VirtioDevice};

use super::Delegation;
use super::delegate::{Delegate, Desk};
use super::scheme::Scheme;
use crate::PRIMARY;
use crate::message::device::Address;

/// The device as it is here, and stand-ins for what is not.
pub struct Spread {
    device: Box<dyn VirtioDevice>,
    number: u8,
    scheme: Scheme,
    delegation: Arc<Delegation>,
    desks: Vec<Arc<Desk>>,
}

impl Spread {
    /// `device` serves those units that are served here.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        number: u8,
        scheme: Scheme,
        delegation: Arc<Delegation>,
    ) -> io::Result<Self> {
        let desk = |unit| {
            let desk = Arc::new(Desk::new()?);
            delegation.add_desk(Address::new(number, unit), desk.clone());
            Ok(desk)
        };
        let desks = (0..scheme.units())
            .map(desk)
            .collect::<io::Result<Vec<_>>>()?;
        Ok(Self {
            device,
            number,
            scheme,
            delegation,
            desks,
        })
    }

    /// The stand-in for a unit, of which the driver uses at least one queue.
    fn delegate(
        &self,
        unit: u16,
        features: u64,
        rings: &mut [Option<Ring>],
    ) -> Option<Box<dyn Handler>> {
        let slice = self.scheme.server(unit);
        if slice == PRIMARY {
            return None;
        }
        let queues = self.scheme.queues(unit);
        let queues = usize::from(queues.start)..usize::from(queues.end);
        let rings: Vec<Ring> = rings
            .get_mut(queues)?
            .iter_mut()
            .filter_map(Option::take)
            .collect();
        let unit_address = Address::new(self.number, unit);
        let desk = self.desks.get(usize::from(unit))?.clone();
        (!rings.is_empty()).then(|| {
            Box::new(Delegate::new(
                self.delegation.clone(),
                desk,
                (unit_address, slice),
                features,
                rings,
            )) as Box<dyn Handler>
        })
    }
}

impl VirtioDevice for Spread {
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
    ) -> Result<Vec<Box<dyn Handler>>, Fault> {
        let units = 0..self.scheme.units();
        let mut handlers: Vec<_> = units
            .filter_map(|unit| self.delegate(unit, features, &mut rings))
            .collect();
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
}
