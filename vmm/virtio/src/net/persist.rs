//! State of a network: what the driver was told, and what it asked for. Frames
//! on their way are lost, as networks lose them.

use serde::{Deserialize, Serialize};
use weft_confine::lock;

use super::{PAIRS_MAX, STATUS, Shared};
use crate::StateError;

/// Configuration and pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// Device configuration: address, status, pairs, MTU.
    pub configuration: Vec<u8>,
    /// Pairs that the driver uses.
    pub active: u16,
}

pub(super) fn save(shared: &Shared) -> NetState {
    NetState {
        configuration: shared.configuration.bytes(),
        active: *lock(&shared.active),
    }
}

pub(super) fn restore(shared: &Shared, state: &NetState) -> Result<(), StateError> {
    if state.configuration.len() != shared.configuration.size() {
        return Err(StateError("the network's configuration has another size"));
    }
    if !(1..=PAIRS_MAX).contains(&state.active) || usize::from(state.active) > shared.links.len() {
        return Err(StateError("the network has fewer queue pairs"));
    }
    // The address moves along; whether the link is up is decided here.
    let mut up = [0; 2];
    shared.configuration.read(STATUS as u64, &mut up);
    shared.configuration.set(0, &state.configuration);
    shared.configuration.set(STATUS, &up);
    *lock(&shared.active) = state.active;
    Ok(())
}
