//! State of the console.

use serde::{Deserialize, Serialize};
use weft_confine::lock;

use super::{INPUT_MAX, Shared};
use crate::StateError;

/// Size, and bytes on their way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleState {
    /// Device configuration.
    pub configuration: Vec<u8>,
    /// Input that the driver has not taken.
    pub input: Vec<u8>,
    /// Bytes of the first waiting output request that went out already.
    pub output_skip: u64,
}

pub(super) fn save(shared: &Shared) -> ConsoleState {
    ConsoleState {
        configuration: shared.configuration.bytes(),
        input: lock(&shared.input).iter().copied().collect(),
        output_skip: lock(&shared.output).skip,
    }
}

pub(super) fn restore(shared: &Shared, state: &ConsoleState) -> Result<(), StateError> {
    if state.configuration.len() != shared.configuration.size() {
        return Err(StateError("the console's configuration has another size"));
    }
    if state.input.len() > INPUT_MAX {
        return Err(StateError(
            "the console has more unread input than it can hold",
        ));
    }
    shared.configuration.set(0, &state.configuration);
    *lock(&shared.input) = state.input.iter().copied().collect();
    lock(&shared.output).skip = state.output_skip;
    Ok(())
}
