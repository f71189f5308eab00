//! What a driver is told of a network.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{
    CONFIGURATION, FEATURE_CONTROL, FEATURE_MAC, FEATURE_MERGE, FEATURE_MTU, FEATURE_PAIRS,
    FEATURE_STATUS, LINK_UP, Mac, NetError, OFFLOADS, PAIRS,
};

/// What a driver is told of a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetDescription {
    /// What it offers.
    pub features: u64,
    /// Device configuration: address, status, pairs, MTU.
    pub configuration: Vec<u8>,
}

impl NetDescription {
    /// Whether a network of one of these numbers of pairs can be so: another process may
    /// say it.
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

/// What the driver of a network of this many pairs is told.
pub(super) fn describe(
    pairs: u16,
    mac: Mac,
    mtu: Option<u16>,
    offloads: u64,
) -> Result<NetDescription, NetError> {
    let mut features = FEATURE_MAC | FEATURE_STATUS | FEATURE_MERGE | offloads & OFFLOADS;
    if let Some(mtu) = mtu {
        if mtu < 68 {
            return Err(NetError::Mtu(mtu));
        }
        features |= FEATURE_MTU;
    }
    if pairs > 1 {
        features |= FEATURE_CONTROL | FEATURE_PAIRS;
    }
    let mut configuration = mac.0.to_vec();
    for word in [LINK_UP, pairs, mtu.unwrap_or(0)] {
        configuration.extend(word.to_le_bytes());
    }
    Ok(NetDescription {
        features,
        configuration,
    })
}
