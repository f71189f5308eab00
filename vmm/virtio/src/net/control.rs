//! The control queue (5.1.6.5): how many pairs the driver uses.

use weft_confine::lock;

use super::Shared;
use crate::ring::total;
use crate::worker::Progress;
use crate::{DeviceError, Ring};

/// VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET.
const SET_PAIRS: [u8; 2] = [4, 0];
const OK: u8 = 0;
const ERROR: u8 = 1;
/// Commands in one call.
const BATCH: usize = 16;

/// Carries out what waits.
pub fn serve(ring: &mut Ring, shared: &Shared) -> Result<Progress, DeviceError> {
    for _ in 0..BATCH {
        let Some(chain) = ring.pop()? else {
            return Ok(Progress::Idle);
        };
        let mut command = [0; 4];
        let length = ring.read(&chain.readable, 0, &mut command);
        let room = total(&chain.writable);
        if length < SET_PAIRS.len() || room == 0 {
            return Err(DeviceError::Chain {
                index: ring.index(),
                head: chain.head,
                reason: "a control command without a complete header, or without space for its \
                answer",
            });
        }
        let [class, command, low, high] = command;
        let known = [class, command] == SET_PAIRS && length == 4;
        let answer = if known && set_pairs(shared, u16::from_le_bytes([low, high])) {
            OK
        } else {
            ERROR
        };
        ring.write(&chain.writable, room - 1, &[answer]);
        ring.push(&chain, 1)?;
    }
    Ok(Progress::More)
}

fn set_pairs(shared: &Shared, pairs: u16) -> bool {
    let there = pairs > 0 && usize::from(pairs) <= shared.links.len();
    if there {
        *lock(&shared.active) = pairs;
        shared.use_active();
    }
    there
}
