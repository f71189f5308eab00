//! Entropy (5.4): one queue of buffers to fill.

mod handler;
mod persist;

use std::sync::{Arc, Mutex};

use weft_confine::lock;

pub use persist::RngState;

use super::worker::Handler;
use super::{ConfigSpace, DeviceError, DeviceState, Kind, Ring, StateError, VirtioDevice};
use handler::RngHandler;

const QUEUE_SIZE: u16 = 64;

/// Where the bytes come from.
pub(crate) enum Source {
    /// The host's getrandom(2).
    Host,
    /// A sequence that a seed determines, for runs that repeat: not for secrets.
    Seeded(u64),
}

/// The entropy device.
pub struct Rng {
    source: Arc<Mutex<Source>>,
    configuration: Arc<ConfigSpace>,
}

impl Rng {
    /// Bytes of the host, or those that `seed` determines.
    pub fn new(seed: Option<u64>) -> Self {
        let source = seed.map_or(Source::Host, Source::Seeded);
        Self {
            source: Arc::new(Mutex::new(source)),
            configuration: Arc::default(),
        }
    }
}

impl VirtioDevice for Rng {
    fn kind(&self) -> Kind {
        Kind {
            id: 4,
            class: 0xff_00_00,
            name: "rng",
        }
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn workers(&self) -> usize {
        1
    }

    fn configuration(&self) -> Arc<ConfigSpace> {
        self.configuration.clone()
    }

    fn activate(
        &mut self,
        _: u64,
        rings: Vec<Option<Ring>>,
    ) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        let source = self.source.clone();
        let handler = |ring| Box::new(RngHandler::new(ring, source.clone())) as Box<dyn Handler>;
        Ok(rings.into_iter().flatten().map(handler).collect())
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng(persist::save(&lock(&self.source)))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        let DeviceState::Rng(state) = state else {
            return Err(StateError("it is not the state of an entropy device"));
        };
        *lock(&self.source) = persist::restore(state);
        Ok(())
    }
}
