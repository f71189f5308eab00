//! A network that another slice has and serves, as its driver sees it.

use std::ops::RangeInclusive;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use weft_confine::ThreadKind;

use super::{
    CONFIGURATION, FEATURE_CONTROL, FEATURE_MAC, FEATURE_MERGE, FEATURE_MTU, FEATURE_PAIRS,
    FEATURE_STATUS, Net, NetState, OFFLOADS, PAIRS, QUEUE_SIZE,
};
use crate::{ConfigSpace, DeviceError, DeviceState, Handler, Kind, Ring, StateError, VirtioDevice};

/// What a driver is told of a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetDescription {
    /// What it offers.
    pub features: u64,
    /// Device configuration: address, status, pairs, MTU.
    pub configuration: Vec<u8>,
}

impl NetDescription {
    /// Whether a network of one of these numbers of pairs can be so: another slice
    /// says it.
    pub fn is_possible(&self, pairs: RangeInclusive<u16>) -> bool {
        const KNOWN: u64 = FEATURE_MTU
            | FEATURE_MAC
            | FEATURE_MERGE
            | FEATURE_STATUS
            | FEATURE_CONTROL
            | FEATURE_PAIRS
            | OFFLOADS;
        let several = FEATURE_CONTROL | FEATURE_PAIRS;
        let there = match self.configuration.get(PAIRS..PAIRS + 2) {
            Some(&[low, high]) => u16::from_le_bytes([low, high]),
            _ => 0,
        };
        let wanted = if there > 1 { several } else { 0 };
        self.features & !KNOWN == 0
            && self.features & several == wanted
            && self.configuration.len() == CONFIGURATION
            && pairs.contains(&there)
    }
}

/// The front of it: nothing is served here.
pub struct FarNet {
    features: u64,
    configuration: Arc<ConfigSpace>,
}

impl FarNet {
    /// The front of what another slice described.
    pub fn new(description: NetDescription) -> Self {
        Self {
            features: description.features,
            configuration: Arc::new(ConfigSpace::new(description.configuration)),
        }
    }
}

impl VirtioDevice for FarNet {
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
        })
    }

    fn restore(&mut self, _: &DeviceState) -> Result<(), StateError> {
        Err(StateError("another slice serves the network"))
    }
}
