//! State of the balloon.

use serde::{Deserialize, Serialize};

use super::{CONFIGURATION_SIZE, Shared};
use crate::StateError;

/// What both sides wrote. Which pages are in the balloon, the driver knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// Device configuration.
    pub configuration: Vec<u8>,
}

pub(super) fn save(shared: &Shared) -> BalloonState {
    BalloonState {
        configuration: shared.configuration.bytes(),
    }
}

pub(super) fn restore(shared: &Shared, state: &BalloonState) -> Result<(), StateError> {
    if state.configuration.len() != CONFIGURATION_SIZE {
        return Err(StateError("the balloon's configuration has another size"));
    }
    shared.configuration.set(0, &state.configuration);
    Ok(())
}
