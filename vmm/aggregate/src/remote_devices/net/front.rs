//! A network that another slice has and serves alone, as its driver sees it.

use std::sync::Arc;

use weft_confine::ThreadKind;
use weft_virtio::net::{Net, NetDescription, NetState, QUEUE_SIZE};
use weft_virtio::{
    ConfigSpace, DeviceError, DeviceState, Handler, Kind, Ring, StateError, VirtioDevice,
};

/// The registers of such a network: no queue is served here.
pub struct NetworkFront {
    features: u64,
    configuration: Arc<ConfigSpace>,
}

impl NetworkFront {
    /// The front of what another slice described.
    pub fn new(description: NetDescription) -> Self {
        Self {
            features: description.features,
            configuration: Arc::new(ConfigSpace::new(description.configuration)),
        }
    }
}

impl VirtioDevice for NetworkFront {
    fn kind(&self) -> Kind {
        Net::KIND
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 2]
    }

    fn workers(&self) -> usize {
        1
    }

    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Network
    }

    fn configuration(&self) -> Arc<ConfigSpace> {
        self.configuration.clone()
    }

    fn activate(
        &mut self,
        _: u64,
        _: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        Ok(Vec::new())
    }

    fn save(&self) -> DeviceState {
        DeviceState::Net(NetState {
            configuration: self.configuration.bytes(),
            active: 1,
            waiting: Vec::new(),
        })
    }

    fn restore(&mut self, _: &DeviceState) -> Result<(), StateError> {
        Err(StateError("another slice serves the network"))
    }
}
