//! State of the console.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use weft_confine::lock;

use super::{INPUT_MAX, Shared};

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

pub(super) fn restore(shared: &Shared, state: &ConsoleState) {
    shared.configuration.set(0, &state.configuration);
    let input: VecDeque<u8> = state.input.iter().copied().take(INPUT_MAX).collect();
    *lock(&shared.input) = input;
    lock(&shared.output).skip = state.output_skip;
}
