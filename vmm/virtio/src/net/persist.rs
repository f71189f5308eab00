//! State of a network: what the driver was told, what it asked for, and the frames that wait for
//! it. A frame that is lost costs a program 200 ms at least, until TCP sends it again.

use serde::{Deserialize, Serialize};
use weft_confine::lock;

use super::{FRAME_MAX, HEADER, PAIRS_MAX, STATUS, Shared};
use crate::StateError;

/// Configuration and pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// Device configuration: address, status, pairs, MTU.
    pub configuration: Vec<u8>,
    /// Pairs that the driver uses.
    pub active: u16,
    /// By pair, the frames that have come and are not in the guest's buffers.
    #[serde(default)]
    pub waiting: Vec<Vec<Vec<u8>>>,
}

/// Bytes of frames that go along; those that came last are lost.
const WAITING_MAX: usize = 256 << 10;

pub(super) fn save(shared: &Shared) -> NetState {
    NetState {
        configuration: shared.configuration.bytes(),
        active: *lock(&shared.active),
        waiting: waiting(shared),
    }
}

fn waiting(shared: &Shared) -> Vec<Vec<Vec<u8>>> {
    let mut room = WAITING_MAX;
    let mut fits = |frame: &Vec<u8>| {
        room = room.saturating_sub(frame.len());
        room > 0
    };
    let links = shared.links.iter().map(|link| {
        let frames = link.as_ref().map(|link| lock(link).waiting());
        frames.into_iter().flatten().take_while(&mut fits).collect()
    });
    links.collect()
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
    let fits = |frame: &Vec<u8>| (HEADER..=HEADER + FRAME_MAX).contains(&frame.len());
    for (link, frames) in shared.links.iter().zip(&state.waiting) {
        let frames: Vec<Vec<u8>> = frames.iter().filter(|frame| fits(frame)).cloned().collect();
        if let Some(link) = link.as_ref().filter(|_| !frames.is_empty()) {
            lock(link).put_first(frames);
        }
    }
    Ok(())
}
