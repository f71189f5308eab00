//! Fills buffers.

use std::sync::{Arc, Mutex};

use weft_confine::lock;

use super::Source;
use crate::ring::total;
use crate::worker::{Cause, Handler, Progress};
use crate::{DeviceError, Ring};

/// Bytes that one request gets at most; the driver asks again.
const REQUEST_MAX: u64 = 4096;
/// Requests in one call.
const BATCH: usize = 64;

/// The thread's part.
pub struct RngHandler {
    ring: Ring,
    source: Arc<Mutex<Source>>,
}

impl RngHandler {
    /// For the one queue.
    pub fn new(ring: Ring, source: Arc<Mutex<Source>>) -> Self {
        Self { ring, source }
    }

    fn fill(&mut self) -> Result<Progress, DeviceError> {
        let mut bytes = [0; REQUEST_MAX as usize];
        for _ in 0..BATCH {
            let Some(chain) = self.ring.pop()? else {
                return Ok(Progress::Idle);
            };
            if !chain.readable.is_empty() || chain.writable.is_empty() {
                return Err(DeviceError::Chain {
                    index: self.ring.index(),
                    head: chain.head,
                    reason: "all buffers of an entropy request must be writable",
                });
            }
            let wanted = total(&chain.writable).min(REQUEST_MAX) as usize;
            let bytes = &mut bytes[..wanted];
            fill(&mut lock(&self.source), bytes)?;
            let written = self.ring.write(&chain.writable, 0, bytes);
            self.ring.push(&chain, written as u32)?;
        }
        Ok(Progress::More)
    }
}

fn fill(source: &mut Source, bytes: &mut [u8]) -> Result<(), DeviceError> {
    match source {
        // Pieces of 256 bytes are never short (getrandom(2)).
        Source::Host => bytes.chunks_mut(256).try_for_each(host_bytes)?,
        Source::Seeded(state) => {
            for chunk in bytes.chunks_mut(8) {
                let word = split_mix(state).to_le_bytes();
                chunk.copy_from_slice(&word[..chunk.len()]);
            }
        }
    }
    Ok(())
}

fn host_bytes(bytes: &mut [u8]) -> Result<(), DeviceError> {
    // SAFETY: the buffer is ours and as long as we say.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == bytes.len() as isize {
        return Ok(());
    }
    Err(DeviceError::Host {
        what: "the host returned no random bytes",
        source: std::io::Error::last_os_error(),
    })
}

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
/// Generators, figure 16).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

impl Handler for RngHandler {
    fn rings(&self) -> Vec<&Ring> {
        vec![&self.ring]
    }

    fn work(&mut self, _: Cause) -> Result<Progress, DeviceError> {
        self.ring.kicks_off();
        let progress = self.fill();
        self.ring.signal();
        if progress? == Progress::More || self.ring.kicks_on()? {
            return Ok(Progress::More);
        }
        Ok(Progress::Idle)
    }
}
